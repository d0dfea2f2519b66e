"""Adapters in peft itself: a golden folder that it wrote, and its reading of one that fp8jax wrote.

Not a test: it needs torch, transformers and peft, which fp8jax never imports.

  python3.11 tests/golden/check_peft.py write
      (pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2: writes tests/golden/peft,
      adapters of the random model tests/golden/hf/qwen2 with their logits)
  PYTHONPATH=. .venv/bin/python tests/golden/check_peft.py export FOLDER
      (fp8jax's environment: other adapters of that model as fp8jax exports them, and our logits)
  python3.11 tests/golden/check_peft.py compare FOLDER
      (peft reads them; the largest difference of logits goes to tests/golden/peft/compared.json)
"""

import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
BASE, FOLDER = HERE / "hf" / "qwen2", HERE / "peft"
# In peft's order; ranks and sizes that no layer shares.
MODULES, RANK, ALPHA = ("down_proj", "q_proj", "v_proj"), 3, 7


def _peft_logits(model):
  import torch

  tokens = torch.from_numpy(np.load(BASE / "logits.npz")["tokens"]).long()
  with torch.no_grad():
    return model(tokens).logits.float().numpy()


def _base():
  import torch
  import transformers

  return transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()


def _versions():
  import importlib.metadata

  return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")}


def write():
  import peft
  import torch

  torch.manual_seed(0)
  config = peft.LoraConfig(
    r=RANK, lora_alpha=ALPHA, target_modules=list(MODULES), task_type="CAUSAL_LM",
    init_lora_weights=False, lora_dropout=0.1,
  )  # fmt: skip
  model = peft.get_peft_model(_base(), config).eval()
  model.save_pretrained(FOLDER)
  (FOLDER / "README.md").unlink()
  path = FOLDER / "adapter_config.json"
  stated = json.loads(path.read_text())
  stated["target_modules"].sort()  # a set, in a new order every time
  path.write_text(json.dumps(stated | {"base_model_name_or_path": "qwen2"}, indent=2) + "\n")
  np.savez(FOLDER / "logits.npz", logits=_peft_logits(model))


def export(folder):
  """Adapters of every layer, of another rank, through --job=export."""
  sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

  import dataclasses

  import jax

  from fp8jax import params
  from fp8jax.export import write as write_lib
  from fp8jax.models import lora, transformer
  from fp8jax.models.config import ComputeConfig, Lora
  from fp8jax.models.hf import config as hf_config
  from fp8jax.models.hf import weights as hf_weights
  from fp8jax.ops import site_tree

  cfg = hf_config.read_config(str(BASE))
  cfg = dataclasses.replace(cfg, lora=Lora(5, 2.5, ("attn/.*", "mlp/.*"), "bf16"))
  tree, _ = hf_weights.load_params(str(BASE), cfg)
  rng, flat = np.random.default_rng(1), params.flatten(tree)
  for path, p in params.flatten(transformer.params(cfg)).items():
    if lora.is_adapter(path):
      flat[path] = jax.numpy.float32(rng.normal(0, 0.2, params.shape(p, cfg.dims)))
  tree = params.unflatten(flat)
  write_lib.save(folder, write_lib.adapters(tree, cfg, str(BASE)))
  tokens = np.load(BASE / "logits.npz")["tokens"]
  rules = (*lora.RULES, (".*", "bf16"))
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, rules)
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  batch = {"tokens_BL": np.int32(tokens), "positions_BL": np.int32(positions)}
  run = jax.jit(lambda p, b: transformer.logits(p, sites, b, cfg, ComputeConfig()))
  np.savez(pathlib.Path(folder) / "ours.npz", logits=np.asarray(run(tree, batch)))


def compare(folder):
  import peft

  model = peft.PeftModel.from_pretrained(_base(), folder).eval()
  ours = np.load(pathlib.Path(folder) / "ours.npz")["logits"]
  theirs, alone = _peft_logits(model), _peft_logits(_base())
  difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
  found = {
    "versions": _versions(), "logits": list(theirs.shape), "relative_difference": difference,
    "relative_effect_of_the_adapters": float(np.abs(theirs - alone).max() / np.abs(alone).max()),
  }  # fmt: skip
  (FOLDER / "compared.json").write_text(json.dumps(found, indent=2) + "\n")
  print(found)
  if difference > 1e-5:
    sys.exit("more than 1e-5 apart")


if __name__ == "__main__":
  {"write": write, "export": export, "compare": compare}[sys.argv[1]](*sys.argv[2:])
