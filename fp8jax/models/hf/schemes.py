"""How a quantized matrix is stored in a Hugging Face folder: a Scheme, a container and its tensors.

Of a linear layer X of shape [out, in], value = code * scale in every container, and a scale is that
of a tile of [out, in]:

  container             codes of X                        scales of X
  fp8                   weight, E4M3                      weight_scale_inv, float32 or E8M0
  float-quantized       weight, E4M3                      weight_scale, float32
  int-quantized         weight, int8                      weight_scale, float32
  pack-quantized        weight_packed, int32 of INT4      weight_scale, float32; weight_shape
                        or INT8, plus 2^(bits - 1)
  mxfp8-quantized       weight, E4M3                      weight_scale, uint8 of E8M0
  mxfp4-pack-quantized  weight_packed, uint8 of 2 E2M1    weight_scale, uint8 of E8M0
  nvfp4-pack-quantized  weight_packed, uint8 of 2 E2M1    weight_scale, E4M3 / weight_global_scale
  modelopt              weight, uint8 of 2 E2M1           weight_scale, E4M3 * weight_scale_2

The first of packed elements has the lowest bits. Static scales of inputs are input_scale, in
nvfp4-pack-quantized the reciprocal, input_global_scale.

Sources: README_WEIGHTS.md of DeepSeek-V3; transformers 5.24 FineGrainedFP8Config;
compressed-tensors 0.20, the containers with a hyphen; NVIDIA ModelOpt's unified checkpoints.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from fp8jax.errors import UserError
from fp8jax.formats import E2M1, E4M3, E4M3_240
from fp8jax.quantization.scaled_matrix import num_tiles
from fp8jax.recipe.quant import CURRENT, WHOLE, Quant, Scale, Static

FINE_GRAINED, COMPRESSED, MODELOPT = "fp8", "compressed-tensors", "modelopt"
# Of --job=export.
FORMATS = ("hf-bf16", "hf-fp8-block", "compressed-tensors", "modelopt", "peft")
STRATEGIES = ("channel", "block", "tensor")
SCALE_FMTS = ("float32", "ue8m0")
# The only block that the servers' kernels have.
BLOCK = (128, 128)
HEAD = "lm_head"
# Codes of safetensors and their dtypes: of scales that are numbers, and of everything.
SCALE_DTYPES = {
  "F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}  # fmt: skip
DTYPES = SCALE_DTYPES | {
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8),
  "I32": np.dtype(np.int32), "I64": np.dtype(np.int64),
}  # fmt: skip
# Those that hold codes of matrices, whatever their scheme.
CODES = ("F8_E4M3", "I8", "U8", "I32")


@dataclasses.dataclass(frozen=True)
class Container:
  """Names and dtype codes of the tensors that hold a matrix.

  Attributes:
    codes, scale, tensor_scale, input_scale: (the last part of a tensor's name, its dtype code).
    inverse: whether tensor_scale and input_scale are reciprocals.
    scalar: shape of tensor_scale and input_scale.
  """

  codes: tuple[str, str]
  scale: tuple[str, str] = ("weight_scale", "F32")
  tensor_scale: str = ""
  input_scale: str = "input_scale"
  inverse: bool = False
  scalar: tuple[int, ...] = (1,)


CONTAINERS = {
  FINE_GRAINED: Container(("weight", "F8_E4M3"), ("weight_scale_inv", "F32")),
  "float-quantized": Container(("weight", "F8_E4M3")),
  "int-quantized": Container(("weight", "I8")),
  "pack-quantized": Container(("weight_packed", "I32")),
  "mxfp8-quantized": Container(("weight", "F8_E4M3"), ("weight_scale", "U8")),
  "mxfp4-pack-quantized": Container(("weight_packed", "U8"), ("weight_scale", "U8")),
  "nvfp4-pack-quantized": Container(
    ("weight_packed", "U8"), ("weight_scale", "F8_E4M3"), "weight_global_scale",
    "input_global_scale", inverse=True,
  ),
  MODELOPT: Container(
    ("weight", "U8"), ("weight_scale", "F8_E4M3"), "weight_scale_2", scalar=()
  ),
}  # fmt: skip
NVFP4 = Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32, is_joint=True)
NVFP4_INPUTS = Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32, Static())
_TWO_LEVELS = ("nvfp4-pack-quantized", MODELOPT)
POWERS = (Scale.POW2, Scale.FLOOR, Scale.EVEN, Scale.POW2_DOWN, Scale.GAUDI2)


@dataclasses.dataclass(frozen=True)
class Codes:
  """A matrix as a container holds it: value = data * scale of the element's tile.

  Attributes:
    data: [out, in], dtype of the scheme's format.
    scale: float32 [tiles of out, tiles of in].
    tensor_scale: of two levels, the float32 factor that all scales have; else None.
  """

  data: np.ndarray
  scale: np.ndarray
  tensor_scale: float | None = None


@dataclasses.dataclass(frozen=True)
class Scheme:
  """How a matrix [out, in] is stored, and how a server multiplies it.

  Attributes:
    container: of CONTAINERS.
    weight: how the matrix is quantized; its rows are out, its contraction in.
    inputs: how a server quantizes activations; None: it does not.
  """

  container: str
  weight: Quant
  inputs: Quant | None = None

  @property
  def layout(self) -> Container:
    return CONTAINERS[self.container]

  @property
  def method(self) -> str:
    """quant_method of config.json."""
    return self.container if self.container in (FINE_GRAINED, MODELOPT) else COMPRESSED

  def codes_name(self, weight: str) -> str:
    """Of the tensor with the codes of "X.weight"."""
    return weight.removesuffix("weight") + self.layout.codes[0]

  @property
  def tile(self) -> tuple[int, int]:
    """Elements [out, in] that share a stored scale."""
    return (1, 16) if self.container in _TWO_LEVELS else self.weight.tile

  @property
  def label(self) -> str:
    """In reports: "channel", "int4 1x128 f32"."""
    tiles = {(WHOLE, WHOLE): "tensor", (1, WHOLE): "channel", BLOCK: "block"}
    is_fp8 = self.container in (FINE_GRAINED, "float-quantized")
    return tiles.get(self.weight.tile, "") * is_fp8 or str(self.weight)

  @property
  def scale_fmt(self) -> str:
    """Of SCALE_FMTS; servers then scale activations so too."""
    return "ue8m0" if self.weight.scale is Scale.POW2 else "float32"

  @property
  def static_inputs(self) -> bool:
    """Whether a scale of activations is stored; else servers scale every token or tile."""
    return self.inputs is not None and self.inputs.source != CURRENT

  def holds(self, quant: Quant) -> bool:
    """Whether matrices quantized so are stored as they are."""
    mine, narrow = self.weight, {E4M3_240: E4M3}
    same = narrow.get(quant.format, quant.format) == narrow.get(mine.format, mine.format)
    if not same or quant.transform or quant.rounds_randomly:
      return False
    if self.container in _TWO_LEVELS:
      return quant.scale is Scale.E4M3_OVER_F32 and quant.tile[1] == 16 and quant.tile[0] != WHOLE
    is_power = self.layout.scale[1] == "U8" or self.scale_fmt == "ue8m0"
    return quant.tile == mine.tile and quant.scale in (*POWERS, *(() if is_power else (Scale.F32,)))

  def fits(self, shape: tuple[int, ...]) -> bool:
    """Whether no tile and no packed word of a matrix is partial: transformers infers the tile from
    the two shapes, and kernels read whole words."""
    tiles = all(t == WHOLE or n % t == 0 for n, t in zip(shape, self.tile))
    return tiles and shape[1] % self.per_word == 0

  @property
  def per_word(self) -> int:
    """Codes of a row in an element of the stored tensor."""
    bits = {"I32": 32, "U8": 8}.get(self.layout.codes[1])
    return bits // self.weight.format.bits if bits else 1

  def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    grid = tuple(map(num_tiles, shape, self.tile))
    return (1,) if self.tile == (WHOLE, WHOLE) else grid

  def tensors(
    self, name: str, shape: tuple[int, ...], has_inputs: bool
  ) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """(name, dtype code, shape) of what `packed` gives.

    Args:
      name: of the weight, "X.weight".
    """
    stem, layout = name.removesuffix("weight"), self.layout
    parts = [
      (layout.codes[0], layout.codes[1], (shape[0], shape[1] // self.per_word)),
      (*layout.scale, self.scale_shape(shape)),
    ]
    if layout.tensor_scale:
      parts.append((layout.tensor_scale, "F32", layout.scalar))
    if self.container == "pack-quantized":
      parts.append(("weight_shape", "I64", (2,)))
    if has_inputs:
      parts.append((layout.input_scale, "F32", layout.scalar))
    return tuple((stem + last, code, size) for last, code, size in parts)

  def packed(self, codes: Codes, input_scale: float | None) -> list[np.ndarray]:
    """The tensors of a matrix, see `tensors`. Raises ValueError: see first_level."""
    layout, data, scale = self.layout, codes.data, np.asarray(codes.scale, np.float32)
    shape = data.shape
    if layout.codes[1] in ("U8", "I32"):
      data = _packed_nibbles(data) if layout.codes[1] == "U8" else _packed_words(
        data, self.weight.format.bits
      )  # fmt: skip
    scale = scale.reshape(tuple(map(num_tiles, shape, self.weight.tile)))
    if layout.scale[1] == "U8":
      scale = scale.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    if codes.tensor_scale is not None and layout.tensor_scale:
      scale = first_level(scale, np.float32(codes.tensor_scale))
      scale = np.repeat(scale, self.weight.tile[0], 0)[: shape[0]]
    scale = scale.reshape(self.scale_shape(shape)).astype(DTYPES[layout.scale[1]])
    made = [data.astype(DTYPES[layout.codes[1]]), scale]
    if layout.tensor_scale:
      made.append(self._scalar(codes.tensor_scale))
    if self.container == "pack-quantized":
      made.append(np.array(shape, np.int64))
    if input_scale is not None:
      made.append(self._scalar(input_scale))
    return [np.ascontiguousarray(x).reshape(x.shape) for x in made]

  def _scalar(self, scale) -> np.ndarray:
    scale = np.float32(scale)
    return np.full(self.layout.scalar, reciprocal(scale) if self.layout.inverse else scale)

  def unpacked(self, read: Callable[[str], np.ndarray], name: str, where: str = "") -> Codes:
    """The matrix `name` of a folder, of whose tensors `read` gives each by name.

    Raises:
      UserError: the scales do not cover it, or see check_scales.
    """
    layout, stem = self.layout, name.removesuffix("weight")
    data, scale = read(stem + layout.codes[0]), read(stem + layout.scale[0])
    if layout.codes[1] == "I32":
      data = _unpacked_words(data, self.weight.format.bits, read(stem + "weight_shape"))
    elif layout.codes[1] == "U8":
      data = _unpacked_nibbles(data)
    if layout.scale[1] == "U8":
      scale = scale.view(ml_dtypes.float8_e8m0fnu)
    grid = tuple(map(num_tiles, data.shape, self.tile))
    if scale.size != math.prod(grid):
      raise UserError(
        f"{where}{stem}{layout.scale[0]} has shape {scale.shape}, expected "
        f"{self.scale_shape(data.shape)}; fetch the file again"
      )
    scale, tensor_scale = (
      scale.astype(np.float32).reshape(grid),
      self.tensor_scale(read, name, where),
    )
    if tensor_scale is not None:
      scale = scale * np.float32(tensor_scale)
    check_scales(scale, f"{where}{stem}{layout.scale[0]}")
    return Codes(data, scale, tensor_scale)

  def input_name(self, weight: str) -> str:
    """Of the tensor with the scale of activations."""
    return weight.removesuffix("weight") + self.layout.input_scale

  def input_scale(self, read: Callable[[str], np.ndarray], weight: str) -> float:
    """The scale of activations that a folder has."""
    return float(self._multiplier(read, self.input_name(weight), ""))

  def tensor_scale(self, read: Callable[[str], np.ndarray], weight: str, where="") -> float | None:
    """The factor of all scales of a weight in a folder; None where there is one level."""
    name = weight.removesuffix("weight") + self.layout.tensor_scale
    return float(self._multiplier(read, name, where)) if self.layout.tensor_scale else None

  def _multiplier(self, read, name: str, where: str) -> np.float32:
    value = np.float32(read(name).reshape(()))
    with np.errstate(all="ignore"):
      value = np.float32(1) / value if self.layout.inverse else value
    check_scales(value.reshape(1), where + name)
    return value

  def problems(self, name: str, stored: Mapping[str, tuple[tuple[int, ...], str]], shape):
    """Faults of a matrix of this shape in a folder, in words, from the headers alone."""
    wrong, (codes, scale, *_) = [], self.tensors(name, shape, False)
    if codes[0] not in stored:
      return [f"missing tensor {codes[0]}"]
    for tensor, code, want in self.tensors(name, shape, False):
      if tensor not in stored:
        what = "scales" if "scale" in tensor else "shape"
        wrong.append(f"{codes[0]} is {codes[1]} and its {what} {tensor} are missing")
        continue
      have, has_code = stored[tensor]
      same = {want}
      if tensor == scale[0]:
        same |= {(), (1, 1)} if self.tile == (WHOLE, WHOLE) else set()
        same |= {want[:1]} if self.tile == (1, WHOLE) else set()
      elif code == "F32":
        same |= {(), (1,)}
      allowed = tuple(SCALE_DTYPES) if code == "F32" else (code,)
      if have not in same:
        wrong.append(f"{tensor} has shape {have}, expected {want} for {name} {tuple(shape)}")
      if has_code not in allowed:
        wrong.append(f"{tensor} has dtype {has_code}, expected one of {', '.join(allowed)}")
    return wrong


def fp8(
  method: str, strategy: str = "block", scale_fmt: str = "float32",
  block: tuple[int, int] = BLOCK, static_inputs: bool = False,
) -> Scheme:  # fmt: skip
  """The scheme of E4M3 by one of STRATEGIES."""
  tile = {"block": block, "channel": (1, WHOLE), "tensor": (WHOLE, WHOLE)}[strategy]
  scale = Scale.POW2 if scale_fmt == "ue8m0" else Scale.F32
  inputs = Quant(E4M3, (1, block[1]) if strategy == "block" else (1, WHOLE), scale)
  if static_inputs:
    inputs = Quant(E4M3, source=Static())
  container = FINE_GRAINED if method == FINE_GRAINED else "float-quantized"
  return Scheme(container, Quant(E4M3, tile, scale), inputs)


# --- codes in words ------------------------------------------------------------------------------


def _packed_words(codes: np.ndarray, bits: int) -> np.ndarray:
  """int32 [out, in * bits / 32] of integers plus 2^(bits - 1)."""
  per = 32 // bits
  offset = (codes.astype(np.int32) + 2 ** (bits - 1)).astype(np.uint32)
  words = offset.reshape(len(codes), -1, per) << (np.arange(per, dtype=np.uint32) * bits)
  return np.bitwise_or.reduce(words, -1).view(np.int32)


def _unpacked_words(words: np.ndarray, bits: int, shape: np.ndarray) -> np.ndarray:
  """int8 [out, in]."""
  shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
  fields = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
  codes = fields.astype(np.int32) - 2 ** (bits - 1)
  return codes.reshape(len(words), -1)[:, : int(shape[1])].astype(np.int8)


def _packed_nibbles(codes: np.ndarray) -> np.ndarray:
  fields = codes.astype(E2M1.dtype).view(np.uint8) & 0xF
  return fields[:, ::2] | (fields[:, 1::2] << 4)


def _unpacked_nibbles(packed: np.ndarray) -> np.ndarray:
  """float4_e2m1fn [out, in]."""
  fields = np.stack([packed & 0xF, packed >> 4], -1).reshape(len(packed), -1)
  return fields.astype(np.uint8).view(E2M1.dtype)


# --- scales --------------------------------------------------------------------------------------


def reciprocal(scale: np.float32) -> np.float32:
  """The float32 nearest to 1 / scale whose own float32 reciprocal is `scale`, if there is one."""
  first = np.float32(1) / scale
  near = (first, np.nextafter(first, np.float32(0)), np.nextafter(first, np.float32(np.inf)))
  return next((x for x in near if np.float32(1) / x == scale), first)


def first_level(scale: np.ndarray, tensor_scale: np.float32) -> np.ndarray:
  """float32 of the E4M3 numbers whose products with tensor_scale the scales are."""
  first = (scale / tensor_scale).astype(E4M3.dtype).astype(np.float32)
  if not np.array_equal(first * tensor_scale, scale):
    raise ValueError(f"scales are no multiples of the tensor's {tensor_scale} by E4M3 numbers")
  return first


def dequantize(codes: Codes, tile: tuple[int, int]) -> np.ndarray:
  """float32 [out, in]: code * scale, each product rounded once."""
  scale = codes.scale
  for axis, (extent, t) in enumerate(zip(codes.data.shape, tile)):
    if t not in (1, WHOLE):
      scale = np.take(np.repeat(scale, t, axis), range(extent), axis)
  return codes.data.astype(np.float32) * scale


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
