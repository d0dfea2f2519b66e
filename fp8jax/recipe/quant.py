"""How one tensor is quantized: format, tile, scale, clip, rounding, transform."""

import dataclasses
import enum
from typing import Any

from fp8jax.formats import Format, by_name

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
  # amax / max rounded DOWN to a power of two: the code of Quartet (arXiv:2505.14669 §4), whose
  # amax is a multiple of the standard deviation.
  POW2_DOWN = "pow2_down"
  # 4/3 of FLOOR for E2M1, so that what lies below 8 units comes to lie below 6 and nothing
  # saturates: Quartet's backward pass.
  FLOOR_4_3 = "floor_4_3"
  # The smallest of 2^-8, 2^-4, 1, 2^4 that amax / max does not exceed, at most 2^4: the exponent
  # biases of Gaudi 2's matrix unit (arXiv:2503.09975). Back-off: Largest(times=2 or 4), or margin.
  GAUDI2 = "gaudi2"
  ONE = "one"  # 1 for every tensor; larger numbers saturate. Unit scaling (arXiv:2303.11257)
  NONE = "none"  # 16 and 32 bits have the range to do without


class Rounding(enum.Enum):
  """How an element meets its format's grid."""

  NEAREST = "nearest"  # ties to even
  STOCHASTIC = "stochastic"  # up or down with the probability that makes the mean exact
  # To the nearest; the bias of a rotated block is then taken out of its tiles' E4M3 scales, which
  # are rounded stochastically: MS-EDEN of Quartet II (arXiv:2601.22813).
  EDEN = "eden"
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
  """The scale comes from a calibration and stays; of zeros alone it is 1 until a step sees others.

  Attributes:
    margin: as of Delayed.
  """

  margin: int = 0

  def __post_init__(self):
    _check_margin("Static", self.margin)


Source = Current | Delayed | Static


CURRENT = Current()


# --- which magnitude of a tile becomes the format's largest number -------------------------------


@dataclasses.dataclass(frozen=True)
class Largest:
  """The largest of the tile, times a factor: above 1 it leaves room, below 1 it saturates.

  Attributes:
    times: the factor. 17/16 is what stochastic rounding under two-level scales needs to be without
      bias (arXiv:2601.22813); 2 and 4 are Gaudi's back-off of 1/2 and 1/4 (arXiv:2503.09975).
  """

  times: float = 1.0


@dataclasses.dataclass(frozen=True)
class Rms:
  """A multiple of the tile's root mean square (QuEST, arXiv:2505.14669 §4).

  Attributes:
    times: 2.92247856 leaves the least squared error of E2M1 on a normal distribution.
    is_centred: the standard deviation instead, from which the mean is taken first.
  """

  times: float
  is_centred: bool = False


@dataclasses.dataclass(frozen=True)
class Quantile:
  """The magnitude that so large a share of the tile does not exceed.

  Attributes:
    share: above 0, at most 1: the element number floor(share * (n - 1)) of n in order.
  """

  share: float


@dataclasses.dataclass(frozen=True)
class Clamp:
  """Clamps a row, a column or a tensor to its signed quantiles 1 - share and share, as FP4 training
  does (arXiv:2501.17116 §3.2). `Gemm.compensates` multiplies what was clamped away.

  Attributes:
    share: above 1/2, at most 1: the elements number floor((1 - share) * n) and floor(share * n).
  """

  share: float


@dataclasses.dataclass(frozen=True)
class LeastError:
  """The largest times that of several factors which leaves the tile's least squared error.

  Attributes:
    times: the factors in order of preference: of equal errors the earlier one wins. (1, 1.5) with
      two-level scales is "four over six": the largest becomes 6 or 4 (arXiv:2512.02010).
  """

  times: tuple[float, ...]


Clip = Largest | Rms | Quantile | Clamp | LeastError
AMAX = Largest()


def _check_clip(clip: Clip, tile: tuple[int, int]):
  if isinstance(clip, Largest | Rms | LeastError):
    times = clip.times if isinstance(clip.times, tuple) else (clip.times,)
    if not times or not all(2.0**-32 <= t <= 2.0**32 for t in times):
      raise ValueError(f"clip={clip}: times must be positive, from 2^-32 to 2^32, one at least")
  if isinstance(clip, Quantile | Clamp):
    low = 0.5 if isinstance(clip, Clamp) else 0.0
    if not low < clip.share <= 1:
      raise ValueError(f"clip={clip}: share must be above {low:g} and at most 1")
  if isinstance(clip, Clamp) and tile not in ((1, WHOLE), (WHOLE, 1), (WHOLE, WHOLE)):
    raise ValueError(f"clip={clip} has quantiles of a row, a column or a tensor: not tile={tile}")


# Orders of Hadamard matrices that, times powers of two, a rotation may have.
HADAMARD_ORDERS = (1, 12, 20, 28)


@dataclasses.dataclass(frozen=True)
class Hadamard:
  """Random Hadamard transform, before quantising (arXiv:2509.25149 §4.2).

  Along the contraction both operands of a product are rotated alike, so that it does not change.

  Attributes:
    size: of the blocks that are rotated: a power of two, or 12, 20 or 28 times one.
    signs: "fixed", the same vector for ever; "none", the matrix as it is; "fresh", drawn in every
      call, for all blocks and both operands alike.
  """

  size: int = 16
  signs: str = "fixed"

  def __post_init__(self):
    powers = [self.size // n for n in HADAMARD_ORDERS if self.size % n == 0]
    if self.size < 2 or not any(p & (p - 1) == 0 for p in powers):
      raise ValueError(
        f"Hadamard.size={self.size} must be a power of two, at least 2, or 12, 20 or 28 times one"
      )
    if self.signs not in ("fixed", "none", "fresh"):
      raise ValueError(f"Hadamard.signs={self.signs!r} must be 'fixed', 'none' or 'fresh'")


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

_KINDS: dict[str, Any] = {
  t.__name__.lower(): t
  for t in (
    Current, Delayed, Static, Hadamard, SquareRoot, DynamicRangeExpansion, Largest, Rms, Quantile,
    Clamp, LeastError,
  )
}  # fmt: skip


def described(value) -> dict[str, Any] | None:
  """{"kind": its class, its fields}, JSON-able; `of_description` inverts it."""
  return value and {"kind": type(value).__name__.lower(), **dataclasses.asdict(value)}


def of_description(description: dict[str, Any] | None, others=()) -> Any:
  """The value; `others` are classes that are not of this file."""
  if not description:
    return None
  fields = {k: tuple(v) if isinstance(v, list) else v for k, v in description.items()}
  kinds = _KINDS | {t.__name__.lower(): t for t in others}
  return kinds[fields.pop("kind")](**fields)


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
    clip: the magnitude that the scale makes the format's largest; others saturate.
    source: which amax the scale is chosen from.
    rounding: how elements are rounded.
    transform: applied before quantising; the product undoes a Hadamard, reading the others.
    keeps_nonzero: what is not 0 becomes the smallest magnitude of its tile rather than 0. A second
      moment of 0 under a first one that is not makes Adam divide by eps alone.
    is_joint: of a weight with two levels, whether the first is of all weights that multiply one
      input, as in servers, which fuse these (ops/joint.py).
  """

  format: Format
  tile: tuple[int, int] = (WHOLE, WHOLE)
  scale: Scale = Scale.F32
  source: Source = CURRENT
  rounding: Rounding = Rounding.NEAREST
  transform: Transform | None = None
  keeps_nonzero: bool = False
  clip: Clip = AMAX
  is_joint: bool = False

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
    has_levels = self.scale is Scale.E4M3_OVER_F32 and isinstance(self.source, Static)
    if self.source != CURRENT and self.tile != (WHOLE, WHOLE) and not has_levels:
      raise ValueError(
        f"source={self.source} remembers one amax per tensor, so tile must be "
        f"({WHOLE}, {WHOLE}); got {self.tile}. Use source=CURRENT for finer tiles"
      )
    if self.is_joint and (self.scale is not Scale.E4M3_OVER_F32 or self.source != CURRENT):
      raise ValueError(
        f"is_joint with scale={self.scale.value!r}, {self.source}: it is the first of two levels "
        "that is joint; set scale='e4m3_over_f32' and source=CURRENT, or is_joint=False"
      )
    of_one = (Scale.F32, Scale.POW2, Scale.GAUDI2)
    if self.source != CURRENT and self.scale not in of_one and not has_levels:
      raise ValueError(f"{self.source} needs scale f32, pow2 or gaudi2, got {self.scale.value}")
    _check_clip(self.clip, self.tile)
    self._check_scale_of_clip()

  def _check_scale_of_clip(self):
    if self.clip != AMAX and (
      self.source != CURRENT
      or self.scale in (Scale.ONE, Scale.NONE)
      or isinstance(self.transform, SquareRoot | DynamicRangeExpansion)
    ):
      raise ValueError(
        f"clip={self.clip} needs a scale from this tensor: set source=CURRENT and a scale other "
        f"than {self.scale.value!r}, and leave out transforms of stored tensors"
      )
    if self.scale is Scale.ONE and (self.tile != (WHOLE, WHOLE) or self.source != CURRENT):
      raise ValueError(f"scale='one' is that of the whole tensor: set tile=({WHOLE}, {WHOLE})")
    if self.scale is Scale.FLOOR_4_3 and self.format.max * 2.0**-self.format.max_exponent != 1.5:
      raise ValueError(f"scale='floor_4_3' is E2M1's, not {self.format}'s; set scale='floor'")
    size = self.rotation.size if self.rotation else 1
    if self.rounding is Rounding.EDEN and not (
      self.scale is Scale.E4M3_OVER_F32 and self.tile[0] == 1 and self.rotation
      and not isinstance(self.clip, LeastError)
      and self.tile[1] != WHOLE and size % self.tile[1] == 0
    ):  # fmt: skip
      raise ValueError(
        f"rounding='eden' corrects the E4M3 scales of a rotated block: set scale='e4m3_over_f32', "
        f"a Hadamard whose size is a multiple of the tile, and rows of tiles; got {self}"
      )

  @property
  def is_random(self) -> bool:
    """Whether it needs a random key: of its rounding, or of fresh signs."""
    return self.rounds_randomly or (self.rotation is not None and self.rotation.signs == "fresh")

  @property
  def rotation(self) -> Hadamard | None:
    """The transform, if it is one."""
    return self.transform if isinstance(self.transform, Hadamard) else None

  @property
  def rounds_randomly(self) -> bool:
    return self.rounding in (Rounding.STOCHASTIC, Rounding.EDEN)

  def to_dict(self) -> dict[str, Any]:
    """A JSON-able description; `from_dict` inverts it exactly."""
    return {
      "format": self.format.name, "tile": list(self.tile), "scale": self.scale.value,
      "source": described(self.source), "rounding": self.rounding.value,
      "transform": described(self.transform), "keeps_nonzero": self.keeps_nonzero,
      "clip": described(self.clip), **({"is_joint": True} if self.is_joint else {}),
    }  # fmt: skip

  @classmethod
  def from_dict(cls, q: dict[str, Any]) -> "Quant":
    """Descriptions of before have no clip, which was the largest, and no is_joint."""
    return cls(
      by_name(q["format"]), tuple(q["tile"]), Scale(q["scale"]), of_description(q["source"]),
      Rounding(q["rounding"]), of_description(q["transform"]), q["keeps_nonzero"],
      of_description(q.get("clip")) or AMAX, q.get("is_joint", False),
    )  # fmt: skip

  def __repr__(self):
    rows, contraction = ("*" if t == WHOLE else str(t) for t in self.tile)
    extra = "" if self.source == CURRENT else f" {type(self.source).__name__.lower()}"
    extra += "" if self.rounding is Rounding.NEAREST else f" {self.rounding.value}"
    extra += "" if self.clip == AMAX else f" {self.clip}".lower()
    if self.rotation:
      signs = {"fixed": "", "none": " unsigned", "fresh": " fresh"}[self.rotation.signs]
      extra += f" hadamard{self.rotation.size}{signs}"
    extra += " square root" if isinstance(self.transform, SquareRoot) else ""
    extra += " expanded" if isinstance(self.transform, DynamicRangeExpansion) else ""
    extra += " nonzero" * self.keeps_nonzero + " joint" * self.is_joint
    return f"{self.format.name} {rows}x{contraction} {self.scale.value}{extra}"
