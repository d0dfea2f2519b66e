"""FP8 weights in Hugging Face folders: the block format of DeepSeek-V3, and compressed-tensors.

Of a linear layer X, `X.weight` [out, in] is float8_e4m3fn beside a tensor of scales, and in either
format weight = code * scale, "inv" in a name notwithstanding. `quantization_config` in config.json
says how:

  quant_method         strategy  scales of X            their shape
  fp8                  block     X.weight_scale_inv     [ceil(out / 128), ceil(in / 128)]
  compressed-tensors   block     X.weight_scale         the same
                       channel   X.weight_scale         [out, 1]
                       tensor    X.weight_scale         [1]

Sources: README_WEIGHTS.md of DeepSeek-V3; transformers 5.23 FineGrainedFP8Config;
compressed-tensors 0.20 (format "float-quantized").
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from fp8jax.errors import UserError
from fp8jax.formats import E4M3
from fp8jax.recipe.quant import WHOLE, Quant, Scale

FINE_GRAINED, COMPRESSED = "fp8", "compressed-tensors"
# Of --job=export.
FORMATS = ("hf-bf16", "hf-fp8-block", "compressed-tensors", "peft")
STRATEGIES = ("channel", "block", "tensor")
SCALE_FMTS = ("float32", "ue8m0")
# The only block that the servers' kernels have.
BLOCK = (128, 128)
# Codes of safetensors that scales come in, and their dtypes.
SCALE_DTYPES = {
  "F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}  # fmt: skip
WEIGHT_DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
WEIGHT_CODE = "F8_E4M3"
DTYPES = SCALE_DTYPES | {WEIGHT_CODE: WEIGHT_DTYPE}
HEAD = "lm_head"


@dataclasses.dataclass(frozen=True)
class Fp8Format:
  """How the FP8 matrices of a folder are stored.

  Attributes:
    method: FINE_GRAINED or COMPRESSED, quant_method of config.json.
    strategy: the elements that share a scale, one of STRATEGIES.
    scale_fmt: "float32", or "ue8m0" for powers of two. Servers then scale activations so too.
    block: tile of strategy "block", [out, in].
    static_inputs: whether X.input_scale scales activations; else servers scale every token.
  """

  method: str
  strategy: str = "block"
  scale_fmt: str = "float32"
  block: tuple[int, int] = BLOCK
  static_inputs: bool = False

  @property
  def suffix(self) -> str:
    return "weight_scale_inv" if self.method == FINE_GRAINED else "weight_scale"

  @property
  def tile(self) -> tuple[int, int]:
    """Elements of a matrix [out, in] that share a scale."""
    return {"block": self.block, "channel": (1, WHOLE), "tensor": (WHOLE, WHOLE)}[self.strategy]

  @property
  def quant(self) -> Quant:
    """How weights are quantized for it that training did not quantize."""
    return Quant(E4M3, self.tile, Scale.POW2 if self.scale_fmt == "ue8m0" else Scale.F32)

  def holds(self, quant: Quant) -> bool:
    """Whether matrices quantized so are stored as they are."""
    plain = dataclasses.replace(quant, scale=Scale.F32, source=self.quant.source)
    return plain == dataclasses.replace(self.quant, scale=Scale.F32) and (
      quant.scale in (Scale.POW2, Scale.FLOOR, Scale.EVEN)
      or (quant.scale is Scale.F32 and self.scale_fmt == "float32")
    )

  def fits(self, shape: tuple[int, ...]) -> bool:
    """Whether no tile of a matrix is partial: transformers infers the tile from the two shapes."""
    return self.strategy != "block" or all(n % b == 0 for n, b in zip(shape, self.block))

  def scale_name(self, weight: str) -> str:
    return weight.removesuffix("weight") + self.suffix

  def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    rows, cols = shape
    block = tuple(-(-n // b) for n, b in zip(shape, self.block))
    return {"block": block, "channel": (rows, 1), "tensor": (1,)}[self.strategy]

  def to_config(self, unquantized: list[str]) -> dict[str, Any]:
    """quantization_config of config.json.

    Args:
      unquantized: names of the linear modules that are not FP8, e.g. "model.layers.0.mlp.up_proj".
    """
    if self.method == FINE_GRAINED:
      # transformers and vLLM each read one of the two names of the skipped modules.
      pow2 = {"scale_fmt": "ue8m0"} if self.scale_fmt == "ue8m0" else {}
      return {
        "quant_method": FINE_GRAINED, "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": list(self.block), **pow2,
        "modules_to_not_convert": [HEAD, *unquantized], "ignored_layers": [HEAD, *unquantized],
      }  # fmt: skip
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = common | {"strategy": self.strategy, "dynamic": False}
    inputs = common | {"strategy": "token", "dynamic": True}
    if self.static_inputs:
      inputs = common | {"strategy": "tensor", "dynamic": False}
    elif self.strategy == "block":
      weights["block_structure"] = list(self.block)
      inputs = common | {"strategy": "group", "group_size": self.block[1], "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
      "quant_method": COMPRESSED, "format": "float-quantized", "quantization_status": "compressed",
      "config_groups": {"group_0": group}, "ignore": [HEAD, *unquantized], "kv_cache_scheme": None,
    }  # fmt: skip


# --- reading -------------------------------------------------------------------------------------


def of_config(c: Mapping[str, Any], where: str) -> Fp8Format | None:
  """The format that a parsed config.json states; None without quantization_config.

  Raises:
    UserError: a format that is not read; names the key.
  """
  stated = c.get("quantization_config")
  if stated is None:
    return None
  method = stated.get("quant_method") if isinstance(stated, Mapping) else None
  readers = {FINE_GRAINED: _fine_grained, COMPRESSED: _compressed}
  if not isinstance(method, str) or method not in readers:
    raise UserError(
      f"{where}: quantization_config={stated!r} is not supported; known quant_methods: "
      f"{', '.join(readers)}"
    )
  return readers[method](stated, f"{where}: quantization_config")


def _fine_grained(stated: Mapping[str, Any], where: str) -> Fp8Format:
  _expect(stated, {"fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)}, where)
  block = _block(stated.get("weight_block_size"), f"{where}: weight_block_size")
  scale_fmt = stated.get("scale_fmt") or "float32"
  if scale_fmt not in (*SCALE_FMTS, "float"):
    raise UserError(f"{where}: scale_fmt={scale_fmt!r}, expected one of {', '.join(SCALE_FMTS)}")
  fmt = "ue8m0" if scale_fmt == "ue8m0" else "float32"
  return Fp8Format(FINE_GRAINED, "block", fmt, block)


def _compressed(stated: Mapping[str, Any], where: str) -> Fp8Format:
  _expect(stated, {"format": ("float-quantized",)}, where)
  groups = stated.get("config_groups")
  if not isinstance(groups, Mapping) or len(groups) != 1:
    raise UserError(f"{where}: config_groups={groups!r}, expected one group of Linear layers")
  (group,) = groups.values()
  weights = group.get("weights") if isinstance(group, Mapping) else None
  if not isinstance(weights, Mapping):
    raise UserError(f"{where}: config_groups lacks weights; fetch the file again")
  allowed = {
    "num_bits": (8,), "type": ("float",), "symmetric": (True, None), "strategy": STRATEGIES
  }  # fmt: skip
  _expect(weights, allowed, f"{where}: weights")
  strategy, block = weights["strategy"], BLOCK
  if strategy == "block":
    block = _block(weights.get("block_structure"), f"{where}: block_structure")
  inputs = group.get("input_activations")
  is_static = isinstance(inputs, Mapping) and inputs.get("dynamic") is False
  return Fp8Format(COMPRESSED, strategy, block=block, static_inputs=is_static)


def _expect(stated: Mapping[str, Any], allowed: Mapping[str, tuple], where: str):
  for key, values in allowed.items():
    if stated.get(key) not in values:
      known = ", ".join(repr(v) for v in values if v is not None)
      raise UserError(f"{where}: {key}={stated.get(key)!r} is not supported, expected {known}")


def _block(value, where: str) -> tuple[int, int]:
  is_pair = isinstance(value, (list, tuple)) and len(value) == 2
  if not is_pair or not all(type(n) is int and 0 < n <= 1 << 20 for n in value):
    raise UserError(f"{where}={value!r}, expected two positive integers such as [128, 128]")
  return value[0], value[1]


def problems(
  name: str, stored: Mapping[str, tuple[tuple[int, ...], str]], fp8: Fp8Format | None
) -> list[str]:
  """The problems of an FP8 matrix and its scales, from the headers alone, in words.

  Args:
    name: of the weight.
    found: {tensor: (shape, dtype code)} of the folder.
    fp8: the folder's format.
  """
  shape, _ = stored[name]
  if fp8 is None:
    return [f"{name} is {WEIGHT_CODE}, and config.json has no quantization_config: fetch it again"]
  scale = fp8.scale_name(name)
  if scale not in stored:
    return [f"{name} is {WEIGHT_CODE} and its scales {scale} are missing"]
  have, code = stored[scale]
  want = fp8.scale_shape(shape)
  same = {want} | ({(), (1, 1)} if fp8.strategy == "tensor" else set())
  same |= {want[:1]} if fp8.strategy == "channel" else set()
  wrong = []
  if have not in same:
    wrong.append(f"{scale} has shape {have}, expected {want} for {name} {shape}")
  if code not in SCALE_DTYPES:
    wrong.append(f"{scale} has dtype {code}, expected one of {', '.join(SCALE_DTYPES)}")
  return wrong


def dequantize(codes: np.ndarray, scale: np.ndarray, fp8: Fp8Format, name: str) -> np.ndarray:
  """float32 [out, in] of FP8 codes and their scales: code * scale, each product rounded once.

  Raises:
    UserError: see `check_scales`.
  """
  scale = scale.astype(np.float32).reshape(fp8.scale_shape(codes.shape))
  check_scales(scale, fp8.scale_name(name))
  if fp8.strategy == "block":
    for axis, (extent, block) in enumerate(zip(codes.shape, fp8.block)):
      scale = np.repeat(scale, block, axis)
      scale = np.take(scale, range(extent), axis) if scale.shape[axis] > extent else scale
  elif fp8.strategy == "tensor":
    scale = scale.reshape(1, 1)
  return codes.astype(np.float32) * scale


def check_scales(scale: np.ndarray, name: str):
  """Refuses scales that no weights have, such as those of a server that never loaded them.

  The smallest is E8M0's, of a block of zeros; at the largest a weight can be 4.5e8.
  """
  bad = scale[~((scale >= 2.0**-127) & (scale <= 1e6))]
  if bad.size:
    raise UserError(
      f"{name} has {bad.size} of {scale.size} scales that are not from 2^-127 to 1e6, e.g. "
      f"{bad[0]:.3g}; fetch the file again"
    )


def nbytes(code: str, shape: tuple[int, ...]) -> int:
  """Bytes of a tensor of a safetensors file, by its dtype code."""
  return math.prod(shape) * DTYPES[code].itemsize
