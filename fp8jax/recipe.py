"""What precision is, as values: Quant (one tensor), Gemm (one product), Recipe (one linear layer).

Nothing here computes. A recipe is a frozen dataclass that jit treats as a constant, so the program
is specialised per recipe and never asks about precision while it runs. Named recipes are in
recipes.py. A `None` operand means "the compute dtype": bfloat16 on accelerators.
"""

import dataclasses
import enum
from typing import Any

from fp8jax.formats import FORMATS, Format

# A tile extent that covers the whole axis, whatever its length.
WHOLE = 0


class Scale(enum.Enum):
  """How the scale of a tile is stored."""

  F32 = "f32"  # amax / max, one float32 rounding
  POW2 = "pow2"  # the same rounded UP to a power of two, so that nothing overflows


@dataclasses.dataclass(frozen=True)
class Quant:
  """How one GEMM operand is made narrow, seen as a matrix of rows x contraction.

  Attributes:
    format: the narrow format of the data.
    tile: extents that share one scale, (rows, contraction); WHOLE means the full axis. A last tile
      may be partial.
    scale: how a tile's scale is stored.
  """

  format: Format
  tile: tuple[int, int] = (WHOLE, WHOLE)
  scale: Scale = Scale.F32

  def __post_init__(self):
    if len(self.tile) != 2 or any(not isinstance(t, int) or t < 0 for t in self.tile):
      raise ValueError(
        f"tile={self.tile!r} must be two extents (rows, contraction), each >= 1 or WHOLE={WHOLE}"
      )

  def __repr__(self):
    rows, contraction = ("*" if t == WHOLE else str(t) for t in self.tile)
    return f"{self.format.name} {rows}x{contraction} {self.scale.value}"


@dataclasses.dataclass(frozen=True)
class Gemm:
  """One product D[M, N] = A[M, K] . B[N, K].

  Attributes:
    lhs: the Quant of A, or None for the compute dtype.
    rhs: the Quant of B, or None for the compute dtype.
    accumulate: move partial sums to float32 registers every this many K; None leaves accumulation
      to the matrix unit (about 14 bits for FP8 on Hopper, DeepSeek-V3 §3.3.2).
  """

  lhs: Quant | None = None
  rhs: Quant | None = None
  accumulate: int | None = None

  def __post_init__(self):
    if (self.lhs is None) != (self.rhs is None):
      raise ValueError(
        f"lhs={self.lhs} and rhs={self.rhs}: both operands of a GEMM are narrow or neither is; "
        "no matrix unit multiplies FP8 by BF16. Set both, or both to None."
      )
    for name, quant in (("lhs", self.lhs), ("rhs", self.rhs)):
      if quant is None or quant.tile[1] == WHOLE:
        continue
      if self.accumulate is None or quant.tile[1] % self.accumulate:
        raise ValueError(
          f"{name}.tile={quant.tile} changes scale along K, so accumulate must be set and divide "
          f"{quant.tile[1]}; got accumulate={self.accumulate}"
        )

  @property
  def is_narrow(self) -> bool:
    return self.lhs is not None


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The three GEMMs of a linear layer: y = x.w, dx = g.w', dw = x'.g.

  Operands, as rows x contraction: fwd (x: tokens x in, w: out x in), dgrad (g: tokens x out,
  w: in x out), wgrad (x: in x tokens, g: out x tokens).
  """

  name: str
  fwd: Gemm = Gemm()
  dgrad: Gemm = Gemm()
  wgrad: Gemm = Gemm()

  def __repr__(self):
    return self.name

  def to_dict(self) -> dict[str, Any]:
    """A JSON-able description; `from_dict` inverts it exactly."""

    def quant(q):
      if q is None:
        return None
      return {"format": q.format.name, "tile": list(q.tile), "scale": q.scale.value}

    def gemm(g):
      return {"lhs": quant(g.lhs), "rhs": quant(g.rhs), "accumulate": g.accumulate}

    return {"name": self.name, **{k: gemm(getattr(self, k)) for k in ("fwd", "dgrad", "wgrad")}}

  @classmethod
  def from_dict(cls, description: dict[str, Any]) -> "Recipe":
    def quant(q):
      if q is None:
        return None
      return Quant(FORMATS[q["format"]], tuple(q["tile"]), Scale(q["scale"]))

    def gemm(g):
      return Gemm(quant(g["lhs"]), quant(g["rhs"]), g["accumulate"])

    return cls(description["name"], *(gemm(description[k]) for k in ("fwd", "dgrad", "wgrad")))
