"""Calibrated scales of keys and values in a folder (kv_cache_scheme): value = code * scale.

Names are those that vLLM 0.32 reads (weight_utils.py: maybe_remap_kv_scale_name).
"""

import numpy as np

from fp8jax.errors import UserError
from fp8jax.models.config import ModelConfig
from fp8jax.models.hf import schemes
from fp8jax.models.hf.weights import Folder

# By quant_method, of keys or values ("k", "v").
_PLACES = {schemes.MODELOPT: "self_attn.{0}_proj.{0}_scale"}


def name(layer: int, kv: str, method: str) -> str:
  return f"model.layers.{layer}." + _PLACES.get(method, "self_attn.{0}_scale").format(kv)


def read(folder: str, cfg: ModelConfig) -> np.ndarray:
  """float32 [layers, 2], of keys and of values.

  Raises:
    UserError: the folder has none, or damaged ones; names the tensor.
  """
  if not folder:
    raise UserError(f"these weights are of no folder with scales of keys and values: {_FIX}")
  files = Folder(folder)
  method = files.quantization.method if files.quantization else ""
  wanted = [name(layer, kv, method) for layer in range(cfg.num_layers) for kv in "kv"]
  if missing := [one for one in wanted if one not in files.files]:
    raise UserError(f"{folder!r} has no {missing[0]}, a scale of keys and values: {_FIX}")
  scales = np.array([np.float32(files.read(one).reshape(())) for one in wanted])
  for one, scale in zip(wanted, scales, strict=True):
    schemes.check_scales(scale.reshape(1), f"{folder!r}: {one}")
  return scales.reshape(-1, 2)


_FIX = "export the model with export.kv_cache='e4m3', or set generate.cache_format='e4m3'"
