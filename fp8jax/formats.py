"""Number formats as values: a name, a grid of numbers, and the dtype that stores them.

Source: Micikevicius et al. 2022 (arXiv:2209.05433) §3 and OCP OFP8 v1.0 for E4M3 and E5M2; OCP
Microscaling Formats v1.0 for E2M1 and E8M0; IEEE 754 for E3M4, F16 and F32.
Assumes: `float8_e4m3fn` has no infinity and a maximum of 448 (the IEEE-like E4M3 that some
libraries emulate stops at 240 and is not this one).
"""

import dataclasses
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Float:
  """A grid of sign, exponent and mantissa, with subnormal numbers.

  Attributes:
    exponent_bits, mantissa_bits: stored ones: without the leading 1 of normal numbers.
    bias: a normal number is 2^(field - bias) * (1 + fraction).
    max: the largest finite magnitude.
    has_inf, has_nan: whether some code means infinity, NaN.
  """

  exponent_bits: int
  mantissa_bits: int
  bias: int
  max: float
  has_inf: bool = True
  has_nan: bool = True

  @property
  def bits(self) -> int:
    return 1 + self.exponent_bits + self.mantissa_bits

  @property
  def min_exponent(self) -> int:
    return 1 - self.bias


@dataclasses.dataclass(frozen=True)
class Integer:
  """The integers within ±(2^(bits - 1) - 1), as symmetric quantization takes them.

  They are a float grid whose smallest normal number lies in the top octave: all steps are 1.

  Attributes:
    bits: the sign among them.
  """

  bits: int
  has_inf: bool = dataclasses.field(default=False, init=False)
  has_nan: bool = dataclasses.field(default=False, init=False)

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
class Scales:
  """The powers of two from 2^-127 to 2^127, the scale of an OCP MX block: no sign and no zero."""

  bits: int = 8
  mantissa_bits: int = 0
  min_exponent: int = -127
  max: float = 2.0**127
  has_inf: bool = False
  has_nan: bool = True


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
  grid: Float | Integer | Scales

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
    return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

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
  def is_low_bit(self) -> bool:
    """Whether GEMM operands are stored in it under scales; E8M0 holds scales, not elements."""
    return self.bits <= 8 and self.mantissa_bits > 0

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


E4M3 = Format("e4m3", jnp.dtype(jnp.float8_e4m3fn), Float(4, 3, 7, 448.0, has_inf=False))
E5M2 = Format("e5m2", jnp.dtype(jnp.float8_e5m2), Float(5, 2, 15, 57344.0))
# IEEE-like, maximum 15.5. The E3M4 of Intel's FP8-Emulation-Toolkit (arXiv:2309.14592) gives the
# top exponent to numbers, so that its maximum is 30: another format, which no dtype stores.
E3M4 = Format("e3m4", jnp.dtype(jnp.float8_e3m4), Float(3, 4, 3, 15.5))
E2M1 = Format("e2m1", jnp.dtype(jnp.float4_e2m1fn), Float(2, 1, 1, 6.0, False, False))
E8M0 = Format("e8m0", jnp.dtype(jnp.float8_e8m0fnu), Scales())
BF16 = Format("bf16", jnp.dtype(jnp.bfloat16), Float(8, 7, 127, 255 * 2.0**120))
F16 = Format("f16", jnp.dtype(jnp.float16), Float(5, 10, 15, 65504.0))
F32 = Format("f32", jnp.dtype(jnp.float32), Float(8, 23, 127, (2 - 2.0**-23) * 2.0**127))

FORMATS = {f.name: f for f in (E4M3, E5M2, E3M4, E2M1, E8M0, BF16, F16, F32)}
