"""How one tensor is quantized: format, tile, scale, rounding, transform."""

import dataclasses
import enum

from fp8jax.formats import Format

# A tile extent that covers the whole axis, whatever its length.
WHOLE = 0


class Scale(enum.Enum):
  """How the scale of a tile is chosen and stored."""

  F32 = "f32"  # amax / max, one float32 rounding
  POW2 = "pow2"  # the same rounded UP to a power of two, so that nothing overflows
  # OCP MX v1.0 §6.3: 2^(exponent of amax - exponent of the format's maximum). The largest elements
  # of a tile may saturate.
  FLOOR = "floor"
  # FLOOR after rounding amax to the format's mantissa bits: torchao's EVEN. Saturates less often.
  EVEN = "even"
  # NVFP4 (arXiv:2509.25149, appendix B): an E4M3 scale per tile, over one float32 for the tensor.
  E4M3_OVER_F32 = "e4m3_over_f32"
  NONE = "none"  # 16 and 32 bits have the range to do without


class Rounding(enum.Enum):
  """How an element meets its format's grid."""

  NEAREST = "nearest"  # ties to even
  STOCHASTIC = "stochastic"  # up or down with the probability that makes the mean exact
  TOWARD_ZERO = "toward_zero"  # cut off, which biases: how arXiv:2405.18710 masks mantissa bits


def _check_margin(kind: str, margin: int):
  if abs(margin) > 64:
    raise ValueError(f"{kind}.margin={margin} must be from -64 to 64: a power of two")


@dataclasses.dataclass(frozen=True)
class Current:
  """The scale comes from the tensor itself."""


@dataclasses.dataclass(frozen=True)
class Delayed:
  """The scale comes from past steps: Transformer Engine's DelayedScaling (arXiv:2209.05433 §5).

  Attributes:
    steps: length of the history.
    reduce: "max" over the history, or "latest".
    margin: the scale leaves a factor 2^margin unused above the amax.
  """

  steps: int = 1024
  reduce: str = "max"
  margin: int = 0

  def __post_init__(self):
    if not 1 <= self.steps <= 2**16:
      raise ValueError(
        f"Delayed.steps={self.steps} must be from 1 to {2**16}: the length of the amax history "
        "that every tensor has"
      )
    _check_margin("Delayed", self.margin)
    if self.reduce not in ("max", "latest"):
      raise ValueError(f"Delayed.reduce={self.reduce!r} must be 'max' or 'latest'")


@dataclasses.dataclass(frozen=True)
class Static:
  """The scale comes from a calibration and stays.

  Attributes:
    margin: as of Delayed.
  """

  margin: int = 0

  def __post_init__(self):
    _check_margin("Static", self.margin)


Source = Current | Delayed | Static


CURRENT = Current()


@dataclasses.dataclass(frozen=True)
class Hadamard:
  """Random Hadamard transform along the contraction, before quantising (arXiv:2509.25149 §4.2).

  Both operands of a product are rotated alike, so that it does not change.

  Attributes:
    size: of the blocks that are rotated, a power of two.
  """

  size: int = 16

  def __post_init__(self):
    if self.size < 2 or self.size & (self.size - 1):
      raise ValueError(f"Hadamard.size={self.size} must be a power of two, at least 2")


@dataclasses.dataclass(frozen=True)
class SquareRoot:
  """Stores the square root: what must not be negative then spans half as many binades."""


@dataclasses.dataclass(frozen=True)
class DynamicRangeExpansion:
  """Dynamic range expansion (COAT, arXiv:2410.19313 §4): stores |x|^k of every group.

  k, a multiple of 1/16, stretches the group's own range over `target`.

  Attributes:
    target: ratio of the largest to the smallest stored magnitude. COAT's code has 448^2 / 2, which
      leaves the smallest at 2.3 steps of E4M3; its paper 448 * 2^9.
  """

  target: float = 448.0**2 / 2


Transform = Hadamard | SquareRoot | DynamicRangeExpansion


@dataclasses.dataclass(frozen=True)
class Quant:
  """How one tensor is quantized: a GEMM operand, or an array stored between steps or passes.

  A GEMM operand is seen as a matrix of rows x contraction; for anything else see
  quantization/quantized_tensor.py.

  Attributes:
    format: of the quantized data.
    tile: extents that share one scale, (rows, contraction); WHOLE means the full axis. A last tile
      may be partial.
    scale: how a tile's scale is chosen and stored.
    source: which amax the scale is chosen from.
    rounding: how elements are rounded.
    transform: applied before quantising; the product undoes a Hadamard, reading the others.
    keeps_nonzero: what is not 0 becomes the smallest magnitude of its tile rather than 0. A second
      moment of 0 under a first one that is not makes Adam divide by eps alone.
  """

  format: Format
  tile: tuple[int, int] = (WHOLE, WHOLE)
  scale: Scale = Scale.F32
  source: Source = CURRENT
  rounding: Rounding = Rounding.NEAREST
  transform: Transform | None = None
  keeps_nonzero: bool = False

  def __post_init__(self):
    if not isinstance(self.format, Format):
      raise TypeError(f"format={self.format!r}, expected a Format such as fp8jax.E4M3")
    if len(self.tile) != 2 or any(not isinstance(t, int) or t < 0 for t in self.tile):
      raise ValueError(
        f"tile={self.tile!r} must be two extents (rows, contraction), each >= 1 or WHOLE={WHOLE}"
      )
    if not self.format.is_element:
      raise ValueError(f"format={self.format} holds scales, not elements; take e4m3, e5m2, ...")
    if self.scale is Scale.NONE and (self.format.is_low_bit or self.tile != (WHOLE, WHOLE)):
      raise ValueError(
        f"scale='none' with format={self.format}, tile={self.tile}: 8 bits need a scale, and "
        f"without one there are no tiles; set scale='f32', or tile=({WHOLE}, {WHOLE}) and 16 bits"
      )
    if isinstance(self.transform, DynamicRangeExpansion) and (
      not self.format.is_low_bit or self.scale is not Scale.F32
    ):
      raise ValueError(
        f"transform={self.transform} with format={self.format}, scale={self.scale.value!r}: what "
        "is expanded fills 8 bits under a float32 amax; set scale='f32' and an FP8 format"
      )
    if self.format.is_per_tile and WHOLE in self.tile:
      raise ValueError(
        f"tile={self.tile} with format={self.format}, whose numbers follow from a tile's own range:"
        " give extents that lie within a device, such as tile=(1, 128)"
      )
    if self.source != CURRENT and self.tile != (WHOLE, WHOLE):
      raise ValueError(
        f"source={self.source} remembers one amax per tensor, so tile must be "
        f"({WHOLE}, {WHOLE}); got {self.tile}. Use source=CURRENT for finer tiles"
      )
    if self.source != CURRENT and self.scale not in (Scale.F32, Scale.POW2):
      raise ValueError(
        f"source={self.source} needs scale 'f32' or 'pow2', got {self.scale.value!r}"
      )

  def __repr__(self):
    rows, contraction = ("*" if t == WHOLE else str(t) for t in self.tile)
    extra = "" if self.source == CURRENT else f" {type(self.source).__name__.lower()}"
    extra += "" if self.rounding is Rounding.NEAREST else f" {self.rounding.value}"
    extra += f" hadamard{self.transform.size}" if isinstance(self.transform, Hadamard) else ""
    extra += " square root" if isinstance(self.transform, SquareRoot) else ""
    extra += " expanded" if isinstance(self.transform, DynamicRangeExpansion) else ""
    extra += " nonzero" if self.keeps_nonzero else ""
    return f"{self.format.name} {rows}x{contraction} {self.scale.value}{extra}"
