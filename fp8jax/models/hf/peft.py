"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

`base_model.model.X.lora_A.weight` is A [r, in] and `lora_B.weight` B [out, r] of a linear layer X,
which computes x W^T + lora_alpha / r x A^T B^T. Source: peft 0.21 (LoraConfig, save_pretrained).
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from fp8jax import axes, errors, params
from fp8jax.errors import UserError
from fp8jax.models import lora
from fp8jax.models.config import Lora, ModelConfig
from fp8jax.models.hf import names
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.models.hf import weights as hf_weights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Keys that change nothing of what is computed without dropout.
_HARMLESS = frozenset((
  "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
  "inference_mode", "r", "target_modules", "lora_alpha", "lora_dropout", "init_lora_weights",
  "megatron_core", "qalora_group_size", "bias",
))  # fmt: skip
# Weights of these starts are differences from another base than the one that is named.
_PLAIN_STARTS = (True, False, None, "gaussian")


def lora_of(folder: str, cfg: ModelConfig, base: str) -> Lora:
  """The adapters that a folder describes, of this model without any.

  Args:
    base: storage of the frozen layers, Lora.base.

  Raises:
    UserError: no such folder, or an option that this project does not compute; names it.
  """
  where = os.path.join(os.path.expanduser(folder), CONFIG)
  c = errors.read_json(where, "name a folder that peft's save_pretrained wrote")
  if c.get("peft_type") != "LORA" or c.get("bias", "none") != "none":
    raise UserError(f"{where}: {_shown(c, 'peft_type', 'bias')}; expected 'LORA' and 'none'")
  odd = [key for key, value in c.items() if value and key not in _HARMLESS]
  odd += ["init_lora_weights"] if c.get("init_lora_weights") not in _PLAIN_STARTS else []
  if odd:
    raise UserError(
      f"{where}: {_shown(c, *odd)} is not supported; expected plain LoRA: merge it in peft "
      "(merge_and_unload) and start from the merged model"
    )
  errors.check_number(f"{where}: r", c.get("r"), 1, 1 << 16, "fetch it again", whole=True)
  errors.check_number(f"{where}: lora_alpha", c.get("lora_alpha"), 1e-9, 1e9, "fetch it again")
  have, plain = _folder(folder).files, lora.without(cfg)
  linears = [e for e in names.entries(plain) if e.layer is not None and e.inputs is not None]
  some = [e.path for e in linears if f"{names.adapter_stem(e)}lora_A.weight" in have]
  targets = tuple(path.removeprefix("layers/") for path in dict.fromkeys(some))
  made = Lora(c["r"], float(c["lora_alpha"]), targets, base)
  want = {e.name for e in names.adapter_entries(dataclasses.replace(plain, lora=made))}
  if wrong := [*sorted(have.keys() - want), *sorted(want - have.keys())]:
    what = "surplus" if wrong[0] in have else "missing"
    raise UserError(
      f"{folder!r}: {what} tensor {wrong[0]} (of {len(wrong)}); adapters are of linear layers, the "
      "same in every layer of the model"
    )
  return made


def note(folder: str) -> str:
  """A sentence on dropout of adapters, which training here has not; "" without any."""
  if not folder:
    return ""
  c = errors.read_json(os.path.join(os.path.expanduser(folder), CONFIG), "fetch it again")
  if not c.get("lora_dropout"):
    return ""
  return (
    f"note: init.adapters={folder!r} has {_shown(c, 'lora_dropout')}; adapters are trained without "
    "dropout here"
  )


def _shown(c: Mapping[str, Any], *keys: str) -> str:
  return ", ".join(f"{key}={c.get(key)!r}" for key in keys)


def _folder(folder: str) -> hf_tensors.Folder:
  folder = os.path.expanduser(folder)
  if not os.path.isfile(path := os.path.join(folder, WEIGHTS)):
    raise UserError(f"{path} does not exist; save the adapters as safetensors")
  return hf_tensors.Folder(folder, WEIGHTS)


def added(tree, folder: str, cfg: ModelConfig, layout: axes.Layout = axes.LOCAL):
  """A tree of parameters with the adapters of a folder, which cfg.lora describes; "" for none.

  Raises:
    UserError: a tensor has another shape, or is not finite.
  """
  if not folder or cfg.lora is None:
    return tree
  there, entries = _folder(folder), names.adapter_entries(cfg)
  if wrong := hf_weights.mismatches(there, entries, cfg.dims):
    raise UserError(f"{folder!r}: {wrong[0]} (of {len(wrong)}); fetch the file again")
  read = hf_weights.read_entries(there, entries, cfg, layout)
  return hf_weights.unflatten(params.flatten(tree) | read, cfg)
