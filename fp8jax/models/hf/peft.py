"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

`base_model.model.X.lora_A.weight` is A [r, in] and `lora_B.weight` B [out, r] of a linear layer X,
which computes x W^T + lora_alpha / r x A^T B^T. Source: peft 0.21 (LoraConfig, save_pretrained).
"""

import functools
import math
import os
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from fp8jax import axes, errors, params
from fp8jax.errors import UserError
from fp8jax.models import lora, transformer
from fp8jax.models.config import Lora, ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import export_folder, names, shards
from fp8jax.models.hf.weights import on_host

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAMES = dict(zip(lora.SUFFIXES, ("lora_A.weight", "lora_B.weight"), strict=True))
# Keys that change nothing of what is computed without dropout.
_HARMLESS = frozenset((
  "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
  "inference_mode", "r", "target_modules", "lora_alpha", "lora_dropout", "init_lora_weights",
  "megatron_core", "qalora_group_size", "bias",
))  # fmt: skip
# Weights of these starts are differences from another base than the one that is named.
_PLAIN_STARTS = (True, False, None, "gaussian")


def _places(cfg: ModelConfig) -> dict[str, tuple[str, int]]:
  """{"base_model.model.X.": (path of ours, layer)} of every linear layer of layers."""
  return {
    f"base_model.model.{e.name.removesuffix('weight')}": (e.path, e.layer)
    for e in names.entries(cfg)
    if e.layer is not None and e.inputs is not None
  }


def save(target: str, tree, cfg: ModelConfig, base_model: str, extra: Collection[str] = ()):
  """Writes the adapters of a parameter tree, in float32; every process must call this.

  Args:
    target: folder, see export_folder.claim.
    tree: parameters of the model with cfg.lora.
    base_model: folder or id of the frozen model; "" for none.
    extra: names of files that the caller writes beside these.
  """
  if cfg.lora is None:
    raise UserError("a model without adapters has none to write; set model.lora.rank")
  flat, pieces, modules = params.flatten(tree), [], set()
  for module, (path, layer) in _places(cfg).items():
    for suffix, theirs in _NAMES.items():
      if path + suffix in flat:
        value = flat[path + suffix][layer]
        shape = _shape(theirs, value.size, cfg.lora.rank)
        make = functools.partial(_theirs, value, shape)
        pieces.append(shards.Piece(((module + theirs, "F32", shape),), make))
        modules.add(module.split(".")[-2])
  alpha = cfg.lora.alpha
  if jax.process_index() == 0:
    export_folder.claim(target, [CONFIG, WEIGHTS, *extra])
    hf_config.write_json(target, CONFIG, {
      "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model or None,
      "r": cfg.lora.rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
      "target_modules": sorted(modules), "bias": "none", "lora_dropout": 0.0,
      "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "modules_to_save": None,
      "init_lora_weights": True, "inference_mode": True,
    })  # fmt: skip
  shards.write(os.path.join(target, WEIGHTS), pieces)


def _shape(theirs: str, size: int, rank: int) -> tuple[int, int]:
  return (rank, size // rank) if theirs == "lora_A.weight" else (size // rank, rank)


def _theirs(value, shape: tuple[int, int]) -> list[np.ndarray]:
  return [np.ascontiguousarray(on_host(value).astype(np.float32).reshape(shape[::-1]).T)]


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
  places, have = _places(lora.without(cfg)), _tensors(folder)
  paths = dict.fromkeys(p for m, (p, _) in places.items() if m + "lora_A.weight" in have)
  want = {m + t for m, (p, _) in places.items() if p in paths for t in _NAMES.values()}
  if wrong := [*sorted(have.keys() - want), *sorted(want - have.keys())]:
    what = "surplus" if wrong[0] in have else "missing"
    raise UserError(
      f"{folder!r}: {what} tensor {wrong[0]} (of {len(wrong)}); adapters are of linear layers, the "
      "same in every layer of the model"
    )
  targets = tuple(path.removeprefix("layers/") for path in paths)
  return Lora(c["r"], float(c["lora_alpha"]), targets, base)


def _shown(c: Mapping[str, Any], *keys: str) -> str:
  return ", ".join(f"{key}={c.get(key)!r}" for key in keys)


def _tensors(folder: str) -> dict[str, np.ndarray]:
  import safetensors.numpy  # extra `hf`

  path = os.path.join(os.path.expanduser(folder), WEIGHTS)
  if not os.path.isfile(path):
    raise UserError(f"{path} does not exist; save the adapters as safetensors")
  try:
    return safetensors.numpy.load_file(path)
  except safetensors.SafetensorError as e:
    raise UserError(f"{path} is no whole safetensors file ({e}); fetch it again") from e


def added(tree, folder: str, cfg: ModelConfig, layout: axes.Layout = axes.LOCAL):
  """A tree of parameters with the adapters of a folder, which cfg.lora describes; "" for none.

  Raises:
    UserError: a tensor has another shape, or is not finite.
  """
  if not folder or cfg.lora is None:
    return tree
  have, flat = _tensors(folder), params.flatten(tree)
  declared = params.flatten(transformer.params(cfg))
  by_path: dict[str, list[str]] = {}
  for module, (path, _) in _places(cfg).items():  # layer by layer
    by_path.setdefault(path, []).append(module)
  for path, modules in by_path.items():
    for suffix, theirs in _NAMES.items():
      if (param := declared.get(path + suffix)) is None:
        continue
      whole = params.shape(param, cfg.dims)
      want = _shape(theirs, math.prod(whole[1:]), cfg.lora.rank)
      layers = [np.asarray(have[module + theirs], np.float32) for module in modules]
      for module, value in zip(modules, layers, strict=True):
        if value.shape != want or not np.isfinite(value).all():
          raise UserError(
            f"{folder!r}: {module}{theirs} has shape {value.shape}, expected {want} and finite"
          )
      value = np.stack([v.T for v in layers]).reshape(whole)
      at = layout.weight_sharding(param.letters)
      put = functools.partial(np.ndarray.__getitem__, value)
      flat[path + suffix] = (
        jax.device_put(value) if at is None else jax.make_array_from_callback(whole, at, put)
      )
  order = [path for path in declared if path in flat]
  return params.unflatten({path: flat[path] for path in order})
