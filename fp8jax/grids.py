"""Grids: the numbers of a format, apart from its name and from what stores them.

Each has bits, max, smallest, mantissa_bits, min_exponent, rounds_to_max, has_inf and has_nan, which
formats.Format describes. quantization/rounding.py rounds to them.
"""

import dataclasses
import functools
import math
from typing import Any

import numpy as np


class Steps:
  """A grid of equal steps within an octave: 2^(exponent - mantissa_bits)."""

  @property
  def smallest(self: Any) -> float:
    return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

  @property
  def rounds_to_max(self: Any) -> float:
    return self.max + math.ldexp(0.5, math.frexp(self.max)[1] - 1 - self.mantissa_bits)


@dataclasses.dataclass(frozen=True)
class Float(Steps):
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
class Integer(Steps):
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
class Scales(Steps):
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
