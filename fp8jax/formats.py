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
import functools
import math
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fp8jax import calls
from fp8jax.errors import UserError


class _Steps:
  """A grid of equal steps within an octave: 2^(exponent - mantissa_bits)."""

  @property
  def smallest(self) -> float:
    return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

  @property
  def rounds_to_max(self) -> float:
    return self.max + math.ldexp(0.5, math.frexp(self.max)[1] - 1 - self.mantissa_bits)


@dataclasses.dataclass(frozen=True)
class Float(_Steps):
  """A grid of sign, exponent and mantissa, with subnormal numbers.

  Attributes:
    exponent_bits, mantissa_bits: stored ones: without the leading 1 of normal numbers.
    bias: a normal number is 2^(field - bias) * (1 + fraction).
    max: the largest finite magnitude.
    has_inf, has_nan: whether some code means infinity, NaN. Both take the top exponent, as in IEEE
      754; one alone takes the top code, as in E4M3.

  Raises:
    ValueError: a number of it is beyond float32, or `max` is none of its numbers.
  """

  exponent_bits: int
  mantissa_bits: int
  bias: int
  max: float
  has_inf: bool = True
  has_nan: bool = True

  def __post_init__(self):
    name = f"e{self.exponent_bits}m{self.mantissa_bits}"
    if not (2 <= self.exponent_bits <= 8 and 1 <= self.mantissa_bits <= 23):
      raise ValueError(f"{name} must have 2 to 8 exponent bits and 1 to 23 mantissa bits")
    if self.min_exponent < -126 or self.max >= 2.0**128:
      raise ValueError(
        f"{name} with bias={self.bias} has numbers from 2^{self.min_exponent} to {self.max:g}, "
        "beyond float32's 2^-126 to 2^128; take another bias, or inf=True and nan=True, which "
        "reserve the top exponent"
      )
    is_coarse = (math.frexp(self.max)[0] * 2 ** (1 + self.mantissa_bits)).is_integer()
    if self.max < 2.0**self.min_exponent or not is_coarse:
      raise ValueError(
        f"max={self.max!r} is no normal number of {name} with bias={self.bias}: it needs at most "
        f"{self.mantissa_bits} mantissa bits, at or above 2^{self.min_exponent}"
      )

  @classmethod
  def full(cls, exponent_bits: int, mantissa_bits: int, bias: int, inf: bool, nan: bool):
    """The grid with the largest `max` for which bias and specials leave a code."""
    _check_range("bias", bias, -127, 127)
    top, codes = 2**exponent_bits - 1 - bias, 1 + (inf ^ nan)
    most = math.ldexp(2 - codes * 2.0**-mantissa_bits, top - (inf and nan))
    return cls(exponent_bits, mantissa_bits, bias, most, inf, nan)

  @property
  def bits(self) -> int:
    return 1 + self.exponent_bits + self.mantissa_bits

  @property
  def min_exponent(self) -> int:
    return 1 - self.bias


@dataclasses.dataclass(frozen=True)
class Integer(_Steps):
  """The integers within ±(2^(bits - 1) - 1), as symmetric quantization takes them.

  They are a float grid whose smallest normal number lies in the top octave: all steps are 1.

  Attributes:
    bits: the sign among them, 2 to 8.
  """

  bits: int
  has_inf: bool = dataclasses.field(default=False, init=False)
  has_nan: bool = dataclasses.field(default=False, init=False)

  def __post_init__(self):
    _check_range("bits of an integer", self.bits, 2, 8)

  @property
  def max(self) -> float:
    return 2.0 ** (self.bits - 1) - 1

  @property
  def mantissa_bits(self) -> int:
    return self.bits - 2

  @property
  def min_exponent(self) -> int:
    return self.bits - 2


@dataclasses.dataclass(frozen=True)
class Scales(_Steps):
  """The powers of two from 2^-127 to 2^127, the scale of an OCP MX block: no sign and no zero."""

  bits: int = 8
  mantissa_bits: int = 0
  min_exponent: int = -127
  max: float = 2.0**127
  has_inf: bool = False
  has_nan: bool = True


def _check_range(what: str, value: int, low: int, high: int):
  if type(value) is not int or not low <= value <= high:
    raise ValueError(f"{what} must be a whole number from {low} to {high}, not {value!r}")


@dataclasses.dataclass(frozen=True)
class Log:
  """A logarithmic number system (LNS-Madam, arXiv:2106.13914): ±2^(k/gamma), and 0.

  k goes from 0 to 2^(bits - 1) - 1; a magnitude is the float32 nearest to 2^(k/gamma). The nearest
  is so in log space: k = round(gamma * log2 |x|), clamped, so that what lies between 0 and 1
  becomes 1. The paper's code words have no zero; here 0 stays 0, as masks and padding need it.

  Attributes:
    bits: the sign among them, 3 to 16.
    gamma: numbers per octave.
  """

  bits: int
  gamma: int = 8
  min_exponent: int = dataclasses.field(default=0, init=False)
  smallest: float = dataclasses.field(default=1.0, init=False)
  has_inf: bool = dataclasses.field(default=False, init=False)
  has_nan: bool = dataclasses.field(default=False, init=False)

  def __post_init__(self):
    _check_range("bits of a logarithmic format", self.bits, 3, 16)
    _check_range("gamma", self.gamma, 1, 4096)
    if (octaves := (2 ** (self.bits - 1) - 1) / self.gamma) >= 127:
      raise ValueError(
        f"{self.bits} bits with gamma={self.gamma} span {octaves:.0f} octaves, beyond float32's "
        f"127; take gamma={2 ** (self.bits - 8)} or more"
      )

  @property
  def mantissa_bits(self) -> int:
    """log2 of the numbers per octave, rounded down."""
    return self.gamma.bit_length() - 1

  @property
  def max(self) -> float:
    return float(np.float32(2.0 ** ((2 ** (self.bits - 1) - 1) / self.gamma)))

  @property
  def rounds_to_max(self) -> float:
    return self.max * 2.0 ** (0.5 / self.gamma)

  @functools.cached_property
  def octave(self) -> tuple[np.ndarray, np.ndarray]:
    """float32 (numbers from 1 to 2 [gamma + 1], where the nearest is the next one [gamma]).

    A float32 is never halfway, since 2^((k + 1/2) / gamma) is irrational: one is at or above the
    second array's number exactly where it lies beyond.
    """
    numbers = (2.0 ** (np.arange(self.gamma + 1) / self.gamma)).astype(np.float32)
    halfway = 2.0 ** ((np.arange(self.gamma) + 0.5) / self.gamma)
    limits = halfway.astype(np.float32)
    return numbers, np.where(limits < halfway, np.nextafter(limits, np.float32(2)), limits)


@dataclasses.dataclass(frozen=True)
class LogTile:
  """LogFMT (arXiv:2505.09343 §3.2): every tile's numbers are spaced evenly in log between its own.

  Of a tile the smallest and the largest magnitude are numbers, and 2^(bits - 1) - 3 between them;
  another code is 0. The smallest is taken at least 2^-32 of the largest. The nearest is so in
  linear space. The paper leaves open how the ends are stored: here the largest is exact, up to 1,
  and spacings are multiples of 2^-20 octave, so that the smallest is met to 2^-19.

  Attributes:
    bits: the sign among them, 4 to 10.
  """

  bits: int
  max: float = dataclasses.field(default=1.0, init=False)
  smallest: float = dataclasses.field(default=2.0**-32, init=False)
  min_exponent: int = dataclasses.field(default=-32, init=False)
  rounds_to_max: float = dataclasses.field(default=1 + 2.0**-20, init=False)
  has_inf: bool = dataclasses.field(default=False, init=False)
  has_nan: bool = dataclasses.field(default=False, init=False)

  def __post_init__(self):
    _check_range("bits of LogFMT", self.bits, 4, 10)

  @property
  def mantissa_bits(self) -> int:
    """log2 of the numbers per octave of a tile that spans all 32, rounded down."""
    return max(self.bits - 6, 0)


Grid = Float | Integer | Scales | Log | LogTile


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
  def smallest_normal(self) -> float:
    """Smallest positive magnitude with all mantissa bits."""
    return math.ldexp(1.0, self.min_exponent)

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
    return isinstance(self.grid, _Steps)

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
  if not (found := re.fullmatch(r"(e)([2-8])m(\d\d?)|(int|lns|logfmt)(\d\d?)", family)):
    raise UserError(
      f"format {name!r} is none of {', '.join(FORMATS)}, nor of the families eXmY(bias, max, inf, "
      "nan), intN, lnsN(gamma), logfmtN"
    )
  try:
    if found[1]:
      grid, named = _float(int(found[2]), int(found[3]), family, **options)
    else:
      made = {"int": Integer, "lns": Log, "logfmt": LogTile}[found[4]]
      grid = made(int(found[5]), **options)
      named = {"gamma": grid.gamma} if isinstance(grid, Log) and grid.gamma != 8 else {}
  except (TypeError, ValueError) as e:
    said = str(e).partition("() ")[2] if isinstance(e, TypeError) else str(e)
    raise UserError(f"format {name!r}: {said}") from e
  same = [f for f in FORMATS.values() if f.grid == grid]
  return same[0] if same else _stored(calls.write(family, named) if named else family, grid)


def _float(exponent: int, mantissa: int, family: str, **options):
  """(grid, the options that tell it from the family's own)."""
  own = FORMATS[family].grid if family in FORMATS else None
  own = own or Float.full(exponent, mantissa, 2 ** (exponent - 1) - 1, True, True)
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
