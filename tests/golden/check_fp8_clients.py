"""FP8 folders in real clients: their dequantized weights and logits beside fp8jax's.

Not a test: it needs torch, transformers and compressed-tensors, which fp8jax never imports, so it
runs in two halves. Its findings are tests/golden/fp8_clients.json.

  PYTHONPATH=. .venv/bin/python tests/golden/check_fp8_clients.py write FOLDER assets/smollm2-135m
      (fp8jax's environment: exports of a small random model and of SmolLM2, weights and logits)
  python3.11 tests/golden/check_fp8_clients.py compare FOLDER tests/golden/fp8_clients.json
      (pip install torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
      compressed-tensors==0.20.0)
"""

import json
import pathlib
import sys

import numpy as np

LENGTH = 64
SMALL = {
  "block": ("hf-fp8-block", {"scale_fmt": "float32"}),
  "block_ue8m0": ("hf-fp8-block", {"scale_fmt": "ue8m0"}),
  "compressed_block": ("compressed-tensors", {"strategy": "block"}),
  "compressed_channel": ("compressed-tensors", {"strategy": "channel"}),
  "compressed_tensor": ("compressed-tensors", {"strategy": "tensor"}),
  "compressed_tensor_static": ("compressed-tensors", {"strategy": "tensor", "static_inputs": True}),
}


# --- fp8jax's half -------------------------------------------------------------------------------


def write(folder, smollm2):
  import jax

  from fp8jax import params
  from fp8jax.models import presets, transformer
  from fp8jax.models.config import ModelConfig
  from fp8jax.models.hf import weights as hf_weights

  cfg = ModelConfig(
    architecture="qwen2", vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=64, max_positions=256, qkv_bias=True, init_std=0.05,
  )  # fmt: skip
  weights = params.init(jax.random.key(0), transformer.params(cfg), cfg.dims)
  weights["layers"]["attn"]["q_bias"] = 0.1 * jax.random.normal(jax.random.key(1), (2, 4, 64))
  tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (1, LENGTH))
  for name, (form, how) in SMALL.items():
    _write_one(pathlib.Path(folder) / name, weights, cfg, form, how, tokens)
  weights, _ = hf_weights.load_params(smollm2, presets.SMOLLM2_135M)
  text = pathlib.Path(__file__).parents[2] / "README.md"
  tokens = _tokens(smollm2, text.read_text())
  _write_one(
    pathlib.Path(folder) / "smollm2_compressed_channel", weights, presets.SMOLLM2_135M,
    "compressed-tensors", {"strategy": "channel"}, tokens,
  )  # fmt: skip


def _tokens(folder, text):
  from fp8jax.data.tokenize import Tokenizer

  return Tokenizer(folder).encode(text)[None, :LENGTH]


def _write_one(target, weights, cfg, form, how, tokens):
  from fp8jax.export import fp8 as fp8_export
  from fp8jax.export import write as write_lib
  from fp8jax.models import transformer
  from fp8jax.models.hf import fp8_formats, names
  from fp8jax.models.hf import weights as hf_weights
  from fp8jax.ops import site_tree

  entries = names.entries(cfg)
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, ((".*", "bf16"),))
  strategy, static = how.get("strategy", "block"), how.get("static_inputs", False)
  fp8 = fp8_formats.Fp8Format(fp8_export.METHODS[form], strategy, static_inputs=static)
  fmt = how.get("scale_fmt", "auto")
  spec = fp8_export.choose(entries, cfg.dims, site_tree.recipes_of(sites), fp8, scale_fmt=fmt)
  inputs = {(fp8_export.site_of(e), "x"): 8.0 for e in entries if e.layer is not None}
  spec = fp8_export.with_amaxes(spec, entries, {}, inputs)
  write_lib.save(str(target), write_lib.model(weights, cfg, "bfloat16", fp8=spec))
  folder = hf_weights.Folder(str(target))
  matrices = {name: folder.read_float(name) for name in spec.matrices}
  back, _ = hf_weights.load_params(str(target), cfg)
  both = {"source": weights, "back": back}
  logits = {name: _logits(w, sites, tokens, cfg) for name, w in both.items()}
  np.savez(target / "ours.npz", tokens=tokens, **logits)
  np.savez(target / "matrices.npz", **matrices)
  share = f"{spec.share:.1%}"
  print(f"{target.name}: {len(matrices)} matrices, {share} of the parameters in FP8", flush=True)


def _logits(weights, sites, tokens, cfg):
  import jax
  import jax.numpy as jnp

  from fp8jax.models import transformer
  from fp8jax.models.config import ComputeConfig

  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  batch = {"tokens_BL": jnp.asarray(tokens, jnp.int32), "positions_BL": positions}
  run = jax.jit(lambda p, b: transformer.logits(p, sites, b, cfg, ComputeConfig()))
  return np.asarray(run(weights, batch))[0]


# --- the clients' half ---------------------------------------------------------------------------


def compare(folder, path):
  import importlib.metadata

  names = ("torch", "transformers", "accelerate", "compressed-tensors")
  versions = {name: importlib.metadata.version(name) for name in names}
  rows = []
  for target in sorted(p.parent for p in pathlib.Path(folder).glob("*/ours.npz")):
    rows.append(_compare_one(target))
    print(json.dumps(rows[-1]), flush=True)
  found = json.dumps({"versions": versions, "folders": rows}, indent=2)
  pathlib.Path(path).write_text(found + "\n")
  wrong = [row["folder"] for row in rows if row["unequal_weights"]]
  if wrong:
    sys.exit(f"dequantized weights differ: {', '.join(wrong)}")


def _compare_one(target):
  import torch
  from transformers import AutoModelForCausalLM

  stated = json.loads((target / "config.json").read_text())["quantization_config"]
  is_fine_grained = stated["quant_method"] == "fp8"
  how = {} if is_fine_grained else {"dtype": torch.float32}
  model = AutoModelForCausalLM.from_pretrained(target, **how).eval()
  ours, unequal, modules = np.load(target / "matrices.npz"), 0, dict(model.named_modules())
  for name in ours.files:
    want = torch.from_numpy(ours[name])
    module = modules[name.removesuffix(".weight")]
    if is_fine_grained:  # on a CPU transformers dequantizes to bfloat16
      want = want.to(module.weight.dtype)
    unequal += int((_dequantized(module) != want).sum())
  model = model.float() if is_fine_grained else model
  data = np.load(target / "ours.npz")
  with torch.no_grad():
    logits = model(torch.from_numpy(data["tokens"]).long()).logits[0].double()
  row = {
    "folder": target.name, "quantization": stated["quant_method"],
    "matrices": len(ours.files), "unequal_weights": unequal,
  }  # fmt: skip
  for reference in ("back", "source"):
    p, q = (torch.log_softmax(x, -1) for x in (torch.from_numpy(data[reference]).double(), logits))
    row[f"kl_from_{reference}"] = float((p.exp() * (p - q)).sum(-1).mean())
    row[f"top1_of_{reference}"] = float((p.argmax(-1) == q.argmax(-1)).double().mean())
  row["largest_logit_difference_from_back"] = float(
    (torch.from_numpy(data["back"]).double() - logits).abs().max()
  )
  return row


def _dequantized(module):
  """The weight as the client multiplies it."""
  import torch

  if module.weight.dtype != torch.float8_e4m3fn:
    return module.weight
  from compressed_tensors.quantization.lifecycle.forward import dequantize

  return dequantize(module.weight, module.weight_scale, args=module.quantization_scheme.weights,
                    dtype=torch.float32)  # fmt: skip


if __name__ == "__main__":
  {"write": write, "compare": compare}[sys.argv[1]](*sys.argv[2:])
