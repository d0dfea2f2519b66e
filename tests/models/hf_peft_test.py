"""Adapters in PEFT's format: peft's own are read and written, refusals by name."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from fp8jax.errors import UserError
from fp8jax.export import write
from fp8jax.models import lora, transformer
from fp8jax.models.config import ComputeConfig, Lora
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import peft
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site_tree

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
BASE, FOLDER = GOLDEN / "hf" / "qwen2", GOLDEN / "peft"
# Of tests/golden/check_peft.py.
WANTED = Lora(3, 7.0, ("attn/q", "attn/v", "mlp/down"), "bf16")


def _model():
  cfg = hf_config.read_config(str(BASE))
  return dataclasses.replace(cfg, lora=peft.lora_of(str(FOLDER), cfg, "bf16"))


def test_logits_with_adapters_of_peft_equal_its_own():
  cfg = _model()
  assert cfg.lora == WANTED
  tree, _ = hf_weights.load_params(str(BASE), cfg)
  tree = peft.added(tree, str(FOLDER), cfg)
  tokens = np.load(BASE / "logits.npz")["tokens"]
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  batch = {"tokens_BL": np.int32(tokens), "positions_BL": np.int32(positions)}
  rules = (*lora.RULES, (".*", "bf16"))
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, rules)
  run = jax.jit(lambda p, b: transformer.logits(p, sites, b, cfg, ComputeConfig()))
  want, alone = (np.load(f / "logits.npz")["logits"] for f in (FOLDER, BASE))
  assert np.abs(run(tree, batch) - want).max() < 1e-5 * np.abs(want).max()
  assert np.abs(alone - want).max() > 0.5 * np.abs(want).max()


def test_adapters_are_written_as_peft_writes_them(tmp_path):
  cfg = _model()
  tree, _ = hf_weights.load_params(str(BASE), cfg)
  write.save(str(tmp_path), write.adapters(peft.added(tree, str(FOLDER), cfg), cfg, "qwen2"))
  ours, theirs = (safetensors.numpy.load_file(f / peft.WEIGHTS) for f in (tmp_path, FOLDER))
  assert ours.keys() == theirs.keys() and len(ours) == 2 * 2 * 3
  for name, value in theirs.items():
    np.testing.assert_array_equal(ours[name], value, err_msg=name)
  said = json.loads((tmp_path / peft.CONFIG).read_text())
  of_peft = json.loads((FOLDER / peft.CONFIG).read_text())
  different = {k for k in said if said[k] != of_peft[k]}
  assert different == {"lora_dropout", "init_lora_weights"}  # of the golden's training


def test_peft_reads_adapters_that_were_written_here():
  """What tests/golden/check_peft.py measured in peft itself, of every linear layer, rank 5."""
  found = json.loads((FOLDER / "compared.json").read_text())
  assert found["relative_difference"] < 1e-5 and found["relative_effect_of_the_adapters"] > 0.5
  assert found["versions"]["peft"].startswith("0.21.")


def _tensor(change):
  def run(folder):
    tensors = safetensors.numpy.load_file(folder / peft.WEIGHTS)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / peft.WEIGHTS)

  return run


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
  "change, message",
  [
    ({"use_dora": True}, "use_dora=True is not supported; expected plain LoRA"),
    ({"use_rslora": True}, "use_rslora=True is not supported"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
    ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 4}}, "alpha_pattern=.*rank_patt"),
    ({"layers_to_transform": [0]}, "layers_to_transform"),
    ({"option_of_tomorrow": "on"}, "option_of_tomorrow='on' is not supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
    ({"peft_type": "IA3"}, "peft_type='IA3', bias='none'; expected 'LORA' and 'none'"),
    ({"bias": "all"}, "bias='all'; expected"),
    ({"r": 0}, "adapter_config.json: r is 0"),
    ({"lora_alpha": "7"}, "lora_alpha is '7'"),
    (_tensor(lambda t: t.pop(NAME)), f"missing tensor {NAME}"),
    (_tensor(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[NAME]})),
     "surplus tensor base_model.model.lm_head.lora_A.weight"),
    (_tensor(lambda t: t.update({NAME: t[NAME][:2]})), r"has shape \(2, 32\), expected \(3, 32\)"),
    (_tensor(lambda t: t.update({NAME: t[NAME] * np.nan})), "has 96 of 96 values that are NaN"),
    (lambda folder: (folder / peft.WEIGHTS).unlink(), "does not exist; save the adapters as safe"),
    (lambda folder: (folder / peft.WEIGHTS).write_bytes(b"{}"), "is no whole safetensors file"),
    (lambda folder: (folder / peft.CONFIG).unlink(), "adapter_config.json does not exist; name"),
  ],
)  # fmt: skip
def test_adapters_that_would_be_read_wrongly_are_refused_by_name(tmp_path, change, message):
  folder = tmp_path / "adapters"
  shutil.copytree(FOLDER, folder)
  if callable(change):
    change(folder)
  else:
    stated = json.loads((folder / peft.CONFIG).read_text())
    (folder / peft.CONFIG).write_text(json.dumps(stated | change))
  cfg = hf_config.read_config(str(BASE))
  with pytest.raises((UserError, FileNotFoundError), match=message):
    cfg = dataclasses.replace(cfg, lora=peft.lora_of(str(folder), cfg, "bf16"))
    tree, _ = hf_weights.load_params(str(BASE), cfg)
    peft.added(tree, str(folder), cfg)


@pytest.mark.parametrize("alpha", [1e-3, 0.5, 1, 1e9, 0.0, -1.0, 1e10])
def test_alpha_is_any_positive_number_that_can_be_meant(tmp_path, alpha):
  shutil.copytree(FOLDER, tmp_path / "adapters")
  path = tmp_path / "adapters" / peft.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": alpha}))
  cfg = hf_config.read_config(str(BASE))
  if 0 < alpha <= 1e9:
    assert peft.lora_of(str(path.parent), cfg, "bf16") == dataclasses.replace(WANTED, alpha=alpha)
  else:
    with pytest.raises(UserError, match="lora_alpha"):
      peft.lora_of(str(path.parent), cfg, "bf16")
