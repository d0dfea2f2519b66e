"""Number formats as values: a name, a grid of numbers, and the dtype that stores them.

Source: Micikevicius et al. 2022 (arXiv:2209.05433) §3 and OCP OFP8 v1.0 for E4M3 and E5M2; OCP
Microscaling Formats v1.0 for E2M1, E2M3, E3M2 and E8M0; IEEE 754 for E3M4, F16 and F32; further
down, beside each, the others. `by_name` makes any ExMy.
Assumes: `float8_e4m3fn` has no infinity and a maximum of 448.

No dtype has the numbers of most formats. A wider one then stores them, and arithmetic rounds to
them (quantization/rounding.py): they are exact, and emulated. NaN stays NaN in a format that has
one and is +0 in any other; infinities saturate in all; a zero keeps its sign, but for integers.
"""

import dataclasses
import math
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fp8jax import calls
from fp8jax.errors import UserError
from fp8jax.grids import Float, Grid, Integer, Log, LogTile, Scales, Steps


@dataclasses.dataclass(frozen=True)
class Format:
  """One number format.

  Attributes:
    name: how the literature, logs and serialised recipes call it.
    dtype: the JAX/NumPy dtype that stores it, which may be wider.
    grid: its numbers.
  """

  name: str
  dtype: np.dtype
  grid: Grid

  def __post_init__(self):
    if self.dtype.name.startswith("float6"):
      raise ValueError(
        f"format {self.name!r}: XLA:CPU compiles nothing with {self.dtype}; take a wider dtype "
        "that holds its numbers, such as float8_e4m3fn"
      )

  @property
  def has_inf(self) -> bool:
    """Whether some code means infinity."""
    return self.grid.has_inf

  @property
  def has_nan(self) -> bool:
    """Whether some code means NaN."""
    return self.grid.has_nan

  @property
  def max(self) -> float:
    """Largest finite magnitude."""
    return self.grid.max

  @property
  def smallest(self) -> float:
    """Smallest positive magnitude: subnormal where the format has subnormals."""
    return self.grid.smallest

  @property
  def rounds_to_max(self) -> float:
    """The largest magnitude that rounds to `max` were the range unlimited."""
    return self.grid.rounds_to_max

  @property
  def bits(self) -> int:
    """Of a number of the grid, whatever stores it."""
    return self.grid.bits

  @property
  def mantissa_bits(self) -> int:
    """Stored ones: without the leading 1 of normal numbers."""
    return self.grid.mantissa_bits

  @property
  def max_exponent(self) -> int:
    """Exponent of the largest finite number, floor(log2(max)): the OCP MX emax."""
    return math.frexp(self.max)[1] - 1

  @property
  def min_exponent(self) -> int:
    """Exponent of the smallest normal number."""
    return self.grid.min_exponent

  @property
  def is_element(self) -> bool:
    """Whether it holds elements; E8M0 holds scales."""
    return not isinstance(self.grid, Scales)

  @property
  def is_per_tile(self) -> bool:
    """Whether a tile's own range decides on its numbers."""
    return isinstance(self.grid, LogTile)

  @property
  def is_stepped(self) -> bool:
    """Whether its numbers are equal steps apart within an octave; logarithmic ones are not."""
    return isinstance(self.grid, Steps)

  @property
  def is_low_bit(self) -> bool:
    """Whether elements need a scale: they have 8 bits, or a range that begins at 1."""
    return self.is_element and (self.bits <= 8 or isinstance(self.grid, Log | LogTile))

  @property
  def is_operand(self) -> bool:
    """Whether GEMM operands are quantized to it: not to a dtype of 16 or 32 bits, which is None."""
    return self.is_element and not (self.bits >= 16 and self.is_native)

  @property
  def is_native(self) -> bool:
    """Whether a cast to the dtype rounds to the grid: the dtype has these numbers and no others."""
    if not jnp.issubdtype(self.dtype, jnp.floating):
      return False
    of_dtype = ml_dtypes.finfo(self.dtype)
    limits = (of_dtype.nmant, of_dtype.smallest_subnormal, of_dtype.max)
    return tuple(map(float, limits)) == (self.mantissa_bits, self.smallest, self.max)

  def __repr__(self):
    return self.name


def _stored(name: str, grid: Grid) -> Format:
  """The format in the narrowest dtype that has its numbers and that XLA compiles everywhere."""
  if not isinstance(grid, Float):
    return Format(name, jnp.dtype(jnp.int8 if isinstance(grid, Integer) else jnp.float32), grid)
  for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float16, jnp.float32):
    of = ml_dtypes.finfo(dtype)
    is_fine = of.nmant >= grid.mantissa_bits and float(of.smallest_subnormal) <= grid.smallest
    if is_fine and float(of.max) >= grid.max:
      return Format(name, jnp.dtype(dtype), grid)
  raise AssertionError(f"{name}: float32 has every Float's numbers")


E4M3 = Format("e4m3", jnp.dtype(jnp.float8_e4m3fn), Float(4, 3, 7, 448.0, has_inf=False))
E5M2 = Format("e5m2", jnp.dtype(jnp.float8_e5m2), Float(5, 2, 15, 57344.0))
# IEEE-like, maximum 15.5; E3M4_30 has another.
E3M4 = Format("e3m4", jnp.dtype(jnp.float8_e3m4), Float(3, 4, 3, 15.5))
E2M1 = Format("e2m1", jnp.dtype(jnp.float4_e2m1fn), Float(2, 1, 1, 6.0, False, False))
E8M0 = Format("e8m0", jnp.dtype(jnp.float8_e8m0fnu), Scales())
BF16 = Format("bf16", jnp.dtype(jnp.bfloat16), Float(8, 7, 127, 255 * 2.0**120))
F16 = Format("f16", jnp.dtype(jnp.float16), Float(5, 10, 15, 65504.0))
F32 = Format("f32", jnp.dtype(jnp.float32), Float(8, 23, 127, (2 - 2.0**-23) * 2.0**127))

# The IEEE-like E4M3 of Gaudi 2 (arXiv:2409.12517) and of Unit Scaling (arXiv:2303.11257).
E4M3_240 = _stored("e4m3_240", Float(4, 3, 7, 240.0))
# Intel's FP8-Emulation-Toolkit (arXiv:2309.14592): one NaN per sign, and numbers beside it.
E3M4_30 = _stored("e3m4_30", Float(3, 4, 3, 30.0, has_inf=False))
E2M3 = _stored("e2m3", Float(2, 3, 1, 7.5, False, False))
E3M2 = _stored("e3m2", Float(3, 2, 3, 28.0, False, False))
# Activations that DeepSeek-V3 (arXiv:2412.19437 §3.3.3) stores, IEEE-like.
E5M6 = _stored("e5m6", Float.full(5, 6, 15, True, True))
# BF16 with fewer bits (arXiv:2405.18710, which truncates: Rounding.TOWARD_ZERO). E7M7 has half of
# BF16's exponents, around 1.
E8M3, E8M4, E8M5, E8M6 = (
  _stored(f"e8m{m}", Float.full(8, m, 127, True, True)) for m in (3, 4, 5, 6)
)
E7M7 = _stored("e7m7", Float.full(7, 7, 63, True, True))
INT2, INT3, INT4, INT5, INT6, INT7, INT8 = (_stored(f"int{n}", Integer(n)) for n in range(2, 9))
LNS8 = _stored("lns8", Log(8))
LOGFMT8 = _stored("logfmt8", LogTile(8))

FORMATS = {
  f.name: f
  for f in (
    E4M3, E5M2, E3M4, E2M1, E8M0, E4M3_240, E3M4_30, E2M3, E3M2, E5M6, E8M3, E8M4, E8M5, E8M6, E7M7,
    INT2, INT3, INT4, INT5, INT6, INT7, INT8, LNS8, LOGFMT8, BF16, F16, F32,
  )
}  # fmt: skip


def by_name(name: str) -> Format:
  """A named format, or one of a family: its own `name` gives it back.

  eXmY has the options bias, max, inf and nan. Those left out are the named format's where eXmY is
  one (e4m3 has no inf), else IEEE 754's; max follows from the others. lnsN has gamma, 8; intN and
  logfmtN have none. Grids that a named format has give that format: "e8m7" is BF16.

  Args:
    name: e.g. "e4m3", "e4m4", "e4m3(max=240)", "e3m3(inf=False, nan=False)", "int4",
      "lns8(gamma=4)", "logfmt10".

  Raises:
    UserError: another name or option, or one that makes no format.
  """
  if name in FORMATS:
    return FORMATS[name]
  family, options = calls.parse(name)
  if not (parts := re.fullmatch(r"(e)([2-8])m(\d\d?)|(int|lns|logfmt)(\d\d?)", family)):
    raise UserError(
      f"format {name!r} is none of {', '.join(FORMATS)}, nor of the families eXmY(bias, max, inf, "
      "nan), intN, lnsN(gamma), logfmtN"
    )
  try:
    if parts[1]:
      grid, named = _float(int(parts[2]), int(parts[3]), family, **options)
    else:
      made = {"int": Integer, "lns": Log, "logfmt": LogTile}[parts[4]]
      grid = made(int(parts[5]), **options)
      named = {"gamma": grid.gamma} if isinstance(grid, Log) and grid.gamma != 8 else {}
  except (TypeError, ValueError) as e:
    said = str(e).partition("() ")[2] if isinstance(e, TypeError) else str(e)
    raise UserError(f"format {name!r}: {said}") from e
  same = [f for f in FORMATS.values() if f.grid == grid]
  return same[0] if same else _stored(calls.write(family, named) if named else family, grid)


def _float(exponent: int, mantissa: int, family: str, **options):
  """(grid, the options that tell it from the family's own)."""
  own = FORMATS[family].grid if family in FORMATS else None
  if not isinstance(own, Float):
    own = Float.full(exponent, mantissa, 2 ** (exponent - 1) - 1, True, True)
  known = {"bias": own.bias, "inf": own.has_inf, "nan": own.has_nan}
  for key, value in options.items():
    kind = {"bias": int, "max": int | float, "inf": bool, "nan": bool}.get(key)
    if not kind or not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
      raise ValueError(
        f"{key}={value!r}; it takes bias, a whole number, max, a number, inf and nan, True or False"
      )
  chosen = known | {k: v for k, v in options.items() if k != "max"}
  full = grid = Float.full(exponent, mantissa, **chosen)
  if (most := float(options.get("max", full.max))) != full.max:
    if not 0 < most < full.max:
      raise ValueError(f"max={most:g} is beyond {full.max:g}, the largest that its codes reach")
    grid = dataclasses.replace(full, max=most)
    known["max"], chosen["max"] = 0, int(most) if most.is_integer() else most
  return grid, {k: v for k, v in chosen.items() if v != known[k]}
