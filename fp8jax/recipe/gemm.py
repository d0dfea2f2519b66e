"""Precision as values: Gemm (one product) and Recipe (one linear layer); Quant is in quant.py.

Nothing here computes. A recipe is a frozen dataclass that jit treats as a constant, so the program
is specialised per recipe and never asks about precision while it runs. Named recipes are in
library.py. A `None` operand means "the compute dtype": bfloat16 on accelerators.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from fp8jax.recipe import estimators
from fp8jax.recipe.estimators import Estimator, SlopeAlone
from fp8jax.recipe.quant import (
  CURRENT,
  WHOLE,
  Clamp,
  Delayed,
  DynamicRangeExpansion,
  Hadamard,
  Quant,
  Scale,
  SquareRoot,
  described,
  of_description,
)


class Accumulation(enum.Enum):
  """How the matrix unit adds up FP8 products, where the recipe leaves all of K to it.

  Hopper's FP8 tensor core adds with about 14 bits (DeepSeek-V3, arXiv:2412.19437, §3.3.2). cuBLASLt
  either leaves K to it or adds its partial sums in float32. Other hardware may ignore the choice,
  and a CPU adds in float32 either way.
  """

  # Transformer Engine: use_split_accumulator=False; torchao: use_fast_accum=True; XLA: operands of
  # Precision.DEFAULT.
  FAST = "fast"
  # use_split_accumulator=True; use_fast_accum=False; Precision.HIGHEST.
  PRECISE = "precise"


# Of a product: left to the matrix unit, or added in float32 every so many K.
Accumulate = Accumulation | int


@dataclasses.dataclass(frozen=True)
class Gain:
  """A constant factor of a product: fan_in^a * fan_out^b * tokens^c of its linear layer.

  Unit scaling (arXiv:2303.11257 §3) and µnit scaling (arXiv:2502.05967) have factors instead of
  scales. A factor of a gradient that is not the forward product's gives another gradient than the
  loss has, by a constant: so they mean it.

  Attributes:
    fan_in, fan_out, tokens: the exponents a, b, c; sizes of the whole tensors, not of shards.
      Tokens are those of a step, of all its microbatches (axes.Layout.microbatches).
  """

  fan_in: float = 0.0
  fan_out: float = 0.0
  tokens: float = 0.0

  def __post_init__(self):
    if not all(-2 <= e <= 2 for e in (self.fan_in, self.fan_out, self.tokens)):
      raise ValueError(f"{self}: exponents must be from -2 to 2")


@dataclasses.dataclass(frozen=True)
class Gemm:
  """One product D[M, N] = A[M, K] . B[N, K].

  Attributes:
    lhs: the Quant of A, or None for the compute dtype.
    rhs: the Quant of B, or None for the compute dtype. Alone it is "weight-only" quantization: B is
      dequantized to the compute dtype, in which A is multiplied by it.
    accumulate: FAST or PRECISE, see Accumulation, or an integer: partial sums are added in float32
      every so many K. The compute dtype is always PRECISE.
    rotate_rows: of (lhs, rhs), blocks of rows that are rotated before quantization; the product is
      rotated back (HALO, arXiv:2501.02625: the "left" transform of a gradient over its tokens).
    compensates: adds lhs - clamped lhs times the unquantized rhs, where lhs has a Clamp (outlier
      compensation, arXiv:2501.17116 §3.2).
    gain: factor of the product, also in the compute dtype.
  """

  lhs: Quant | None = None
  rhs: Quant | None = None
  accumulate: Accumulate = Accumulation.PRECISE
  rotate_rows: tuple[Hadamard | None, Hadamard | None] = (None, None)
  compensates: bool = False
  gain: Gain | None = None

  def __post_init__(self):
    _check_accumulate(self.accumulate, self.multiplies_codes)
    if self.compensates and not (self.lhs and isinstance(self.lhs.clip, Clamp)):
      raise ValueError(f"compensates=True adds what lhs.clip=Clamp(...) took away; lhs={self.lhs}")
    if self.compensates and (any(self.rotate_rows) or (self.lhs and self.lhs.rotation)):
      raise ValueError(
        "compensates=True adds what was clamped of lhs as it is: leave rotations out"
      )
    if any(self.rotate_rows) and not self.multiplies_codes:
      raise ValueError(
        "rotate_rows of a product in the compute dtype changes nothing: leave it out"
      )
    if self.lhs is not None and self.rhs is None:
      raise ValueError(
        f"lhs={self.lhs} and rhs=None: no matrix unit multiplies FP8 by BF16. Set both, or both to "
        "None, or rhs alone for a weight that is dequantized before the product"
      )
    if self.lhs is None and self.rhs is not None and self.rhs.transform:
      raise ValueError(
        f"rhs.transform={self.rhs.transform} and lhs=None: a product of a rotated operand "
        "and one that is not is another; leave it out"
      )
    if self.lhs and self.rhs and self.lhs.transform != self.rhs.transform:
      raise ValueError(
        f"lhs.transform={self.lhs.transform} and rhs.transform={self.rhs.transform} must be equal: "
        "the product of two operands rotated differently is another product"
      )
    for name, quant in ((n, q) for n, q in (("lhs", self.lhs), ("rhs", self.rhs)) if q):
      if (quant.source != CURRENT or quant.is_joint) and self.rotates(name):
        raise ValueError(
          f"{name}={quant}: an amax that {quant.source} remembers, or that is joint, is of the "
          "tensor, and rotated numbers have another; set source=CURRENT and is_joint=False, or "
          "leave the rotation out"
        )
      if not quant.format.is_operand:
        raise ValueError(
          f"{name}.format={quant.format} is no element format of a GEMM operand; to multiply in "
          "the compute dtype give None instead of a Quant"
        )
      if isinstance(quant.transform, SquareRoot | DynamicRangeExpansion) or quant.keeps_nonzero:
        raise ValueError(
          f"{name}={quant}: a product of square roots or powers is not the product. These are for "
          "stored tensors, such as an optimizer's moments; leave transform and keeps_nonzero out"
        )
      if quant.scale is Scale.NONE:
        raise ValueError(f"{name}={quant}: an operand without a range of its own has scale='one'")
      if quant.format.max > 2.0**58 and quant.scale is not Scale.ONE:  # 2^12 products reach 2^128
        raise ValueError(f"{name}={quant}: sums reach 2^128; set scale='one' and tile=(0, 0)")
      if quant.tile[1] == WHOLE or not self.multiplies_codes:
        continue
      if isinstance(self.accumulate, Accumulation) or quant.tile[1] % self.accumulate:
        raise ValueError(
          f"{name}.tile={quant.tile} changes scale along K, so accumulate must be a divisor of "
          f"{quant.tile[1]}; got accumulate={accumulate_name(self.accumulate)}"
        )

  def rotates(self, side: str) -> bool:
    """Whether an operand, "lhs" or "rhs", is rotated before it meets its grid."""
    quant = getattr(self, side)
    return bool(self.rotate_rows[side == "rhs"] or (quant and quant.rotation))

  @property
  def is_quantized(self) -> bool:
    """Whether any operand is."""
    return self.rhs is not None

  @property
  def multiplies_codes(self) -> bool:
    """Whether both operands are quantized, so that a matrix unit may multiply their codes."""
    return self.lhs is not None


def _check_accumulate(accumulate: Accumulate, multiplies_codes: bool):
  is_count = type(accumulate) is int and 0 < accumulate < 2**31
  if not isinstance(accumulate, Accumulation) and not is_count:
    raise ValueError(
      f"accumulate={accumulate!r} must be Accumulation.FAST, Accumulation.PRECISE, or how many "
      "products along K are added before their sum moves to float32, at least 1 and below 2^31"
    )
  if accumulate is not Accumulation.PRECISE and not multiplies_codes:
    raise ValueError(
      f"accumulate={accumulate_name(accumulate)} is for FP8 operands, and lhs is None: the compute "
      "dtype accumulates in float32. Leave accumulate out, or give lhs and rhs a Quant"
    )


def accumulate_name(accumulate: Accumulate) -> str:
  """As configurations and tables have it: "fast", "precise", "128"."""
  return accumulate.value if isinstance(accumulate, Accumulation) else str(accumulate)


def accumulate_by_name(name: str) -> Accumulate:
  """The inverse of `accumulate_name`.

  Raises:
    ValueError: the name is neither "fast" nor "precise" nor an integer.
  """
  return int(name) if name.isdecimal() else Accumulation(name)


PASSES = ("fwd", "dgrad", "wgrad")


class Backward(enum.Enum):
  """The tensors that operands W of dgrad and X of wgrad are made from."""

  UNQUANTIZED = "unquantized"  # the tensors themselves
  # Those that the forward product multiplied, in its rotated space: the gradients are then exactly
  # those of a product of these, but for their own rounding.
  DEQUANTIZED = "dequantized"


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The three GEMMs of a linear layer: y = x.w, dx = g.w', dw = x'.g.

  Operands, as rows x contraction: fwd (x: tokens x in, w: out x in), dgrad (g: tokens x out,
  w: in x out), wgrad (x: in x tokens, g: out x tokens).

  Attributes:
    name: in logs and configs.
    backward: what the backward products make W and X of.
    estimate_w, estimate_x: how dw and dx pass the rounding of the forward operands; None passes
      them as they are (straight through).
  """

  name: str
  fwd: Gemm = Gemm()
  dgrad: Gemm = Gemm()
  wgrad: Gemm = Gemm()
  backward: Backward = Backward.UNQUANTIZED
  estimate_w: Estimator | None = None
  estimate_x: Estimator | None = None

  def __post_init__(self):
    is_plain = self.backward is Backward.UNQUANTIZED and not (self.estimate_w or self.estimate_x)
    is_alone = self.backward is Backward.UNQUANTIZED and isinstance(self.estimate_w, SlopeAlone)
    if not (is_plain or is_alone or self.fwd.is_quantized):
      raise ValueError(
        f"recipe {self.name!r}: backward={self.backward.value!r} and estimators are about the "
        "forward operands' rounding, and fwd is in the compute dtype; leave them out"
      )
    if not is_plain and any(self.fwd.rotate_rows):
      raise ValueError(
        f"recipe {self.name!r}: fwd.rotate_rows={self.fwd.rotate_rows} mixes rows before they are "
        "rounded, and backward and estimators go by single elements of x and w; leave either out"
      )
    for tensor, estimator in (("lhs", self.estimate_x), ("rhs", self.estimate_w)):
      estimators.check(self.name, tensor, estimator, getattr(self.fwd, tensor))
    for p in PASSES[1:]:
      gemm = getattr(self, p)
      if gemm.is_quantized and not gemm.multiplies_codes:
        raise ValueError(
          f"recipe {self.name!r}: {p} quantizes rhs alone, which only fwd may; set both or none"
        )
    for tensor, uses in self.uses().items():
      sources = {u.source for u in uses}
      if len(sources) > 1:
        raise ValueError(
          f"recipe {self.name!r}: {tensor} has sources {sorted(map(str, sources))} in different "
          "products; a tensor has one history, so give all its uses the same source"
        )

  def __repr__(self):
    return self.name

  def uses(self) -> dict[str, list[Quant]]:
    """{"x", "w", "g": the Quants of that tensor}, without repetition."""
    f, d, w = self.fwd, self.dgrad, self.wgrad
    pairs = {"x": (f.lhs, w.lhs), "w": (f.rhs, d.rhs), "g": (d.lhs, w.rhs)}
    return {t: list(dict.fromkeys(q for q in quants if q)) for t, quants in pairs.items()}

  @property
  def is_quantized(self) -> bool:
    """Whether any of the three products is."""
    return any(getattr(self, p).is_quantized for p in PASSES)

  @property
  def history(self) -> int:
    """Amaxes that a site remembers: the longest history; 1 if every scale is current or static."""
    quants = [q for uses in self.uses().values() for q in uses]
    return max((q.source.steps for q in quants if isinstance(q.source, Delayed)), default=1)

  @property
  def is_stateful(self) -> bool:
    """Whether scales depend on anything but the operands."""
    return any(q.source != CURRENT for uses in self.uses().values() for q in uses)

  @property
  def is_random(self) -> bool:
    """Whether it rounds stochastically, so that a site needs a key."""
    rows = [r for p in PASSES for r in getattr(self, p).rotate_rows if r]
    return any(q.is_random for uses in self.uses().values() for q in uses) or any(
      r.signs == "fresh" for r in rows
    )

  def with_current_scales(self, tensors: str = "xwg") -> "Recipe":
    """The same formats and tiles with scales of these tensors from the operands themselves."""

    return self.map_quants(
      lambda q, tensor: dataclasses.replace(q, source=CURRENT) if tensor in tensors else q
    )

  def with_delays(self, name: str, changes: dict[str, Any]) -> "Recipe":
    """A recipe of this name with other fields of its Delayed sources, and margins of its Static."""

    def one(q, tensor):
      del tensor
      names = [f.name for f in dataclasses.fields(q.source)]
      of_source = {k: v for k, v in changes.items() if k in names}
      return dataclasses.replace(q, source=dataclasses.replace(q.source, **of_source))

    return dataclasses.replace(self.map_quants(one), name=name)

  def with_accumulate(self, name: str, accumulate: Sequence[Accumulate]) -> "Recipe":
    """This recipe under another name and with another accumulation of its FP8 products.

    Args:
      accumulate: of fwd, dgrad and wgrad; what a product in the compute dtype would get is ignored.
    """
    gemms = {
      p: dataclasses.replace(getattr(self, p), accumulate=how)
      for p, how in zip(PASSES, accumulate, strict=True)
      if getattr(self, p).multiplies_codes
    }
    return dataclasses.replace(self, name=name, **gemms)

  def map_quants(self, change) -> "Recipe":
    """The recipe with change(Quant, "x", "w" or "g") of every Quant."""

    def quant(q, tensor):
      return change(q, tensor) if q else q

    def gemm(g, lhs, rhs):
      return dataclasses.replace(g, lhs=quant(g.lhs, lhs), rhs=quant(g.rhs, rhs))

    fwd, dgrad = gemm(self.fwd, "x", "w"), gemm(self.dgrad, "g", "w")
    return dataclasses.replace(self, fwd=fwd, dgrad=dgrad, wgrad=gemm(self.wgrad, "x", "g"))

  def to_dict(self) -> dict[str, Any]:
    """A JSON-able description; `from_dict` inverts it exactly."""

    def gemm(g):
      how = g.accumulate
      return {
        "lhs": g.lhs and g.lhs.to_dict(),
        "rhs": g.rhs and g.rhs.to_dict(),
        "accumulate": how.value if isinstance(how, Accumulation) else how,
        "rotate_rows": [described(r) for r in g.rotate_rows],
        "compensates": g.compensates,
        "gain": g.gain and dataclasses.asdict(g.gain),
      }

    gemms = {p: gemm(getattr(self, p)) for p in PASSES}
    return {
      "name": self.name,
      **gemms,
      "backward": self.backward.value,
      "estimate_w": described(self.estimate_w),
      "estimate_x": described(self.estimate_x),
    }

  @classmethod
  def from_dict(cls, description: dict[str, Any]) -> "Recipe":
    """Descriptions of before lack the later fields: they had their defaults."""
    d = description

    def gemm(g):
      lhs, rhs = (q and Quant.from_dict(q) for q in (g["lhs"], g["rhs"]))
      how = g["accumulate"]
      if how is None:  # of versions in which XLA chose: FAST, and PRECISE for the compute dtype
        how = Accumulation.FAST if lhs else Accumulation.PRECISE
      how = Accumulation(how) if isinstance(how, str) else how
      rows = tuple(of_description(r) for r in g.get("rotate_rows", (None, None)))
      gain = g.get("gain") and Gain(**g["gain"])
      return Gemm(lhs, rhs, how, rows, g.get("compensates", False), gain)

    how = {e: of_description(d.get(e), estimators.ESTIMATORS) for e in ("estimate_w", "estimate_x")}
    gemms = {p: gemm(d[p]) for p in PASSES}
    return cls(d["name"], backward=Backward(d.get("backward", "unquantized")), **gemms, **how)
