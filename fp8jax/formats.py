"""Number formats as values.

Source: Micikevicius et al. 2022 (arXiv:2209.05433) §3 and OCP OFP8 v1.0 for E4M3 and E5M2; OCP
Microscaling Formats v1.0 for E2M1 and E8M0; IEEE 754 for E3M4, F16 and F32.
Assumes: limits come from ml_dtypes, which JAX itself uses; `float8_e4m3fn` has no infinity and a
maximum of 448 (the IEEE-like E4M3 that some libraries emulate stops at 240 and is not this one).
"""

import dataclasses
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
  """One floating-point format.

  Attributes:
    name: how the literature, logs and serialised recipes call it.
    dtype: the JAX/NumPy dtype that stores it.
    has_inf: whether some code means infinity.
    has_nan: whether some code means NaN.
  """

  name: str
  dtype: np.dtype
  has_inf: bool = True
  has_nan: bool = True

  @property
  def max(self) -> float:
    """Largest finite magnitude."""
    return float(ml_dtypes.finfo(self.dtype).max)

  @property
  def smallest(self) -> float:
    """Smallest positive magnitude: subnormal where the format has subnormals."""
    return float(ml_dtypes.finfo(self.dtype).smallest_subnormal)

  @property
  def smallest_normal(self) -> float:
    """Smallest positive magnitude with all mantissa bits."""
    return float(ml_dtypes.finfo(self.dtype).smallest_normal)

  @property
  def bits(self) -> int:
    return ml_dtypes.finfo(self.dtype).bits

  @property
  def mantissa_bits(self) -> int:
    """Stored ones: without the leading 1 of normal numbers."""
    return ml_dtypes.finfo(self.dtype).nmant

  @property
  def max_exponent(self) -> int:
    """Exponent of the largest finite number, floor(log2(max)): the OCP MX emax."""
    return math.frexp(self.max)[1] - 1

  @property
  def min_exponent(self) -> int:
    """Exponent of the smallest normal number."""
    return math.frexp(self.smallest_normal)[1] - 1

  @property
  def is_low_bit(self) -> bool:
    """Whether GEMM operands are stored in it under scales; E8M0 holds scales, not elements."""
    return self.bits <= 8 and self.mantissa_bits > 0

  def __repr__(self):
    return self.name


E4M3 = Format("e4m3", jnp.dtype(jnp.float8_e4m3fn), has_inf=False)
E5M2 = Format("e5m2", jnp.dtype(jnp.float8_e5m2))
# IEEE-like, maximum 15.5. The E3M4 of Intel's FP8-Emulation-Toolkit (arXiv:2309.14592) gives the
# top exponent to numbers, so that its maximum is 30: another format, which no dtype stores.
E3M4 = Format("e3m4", jnp.dtype(jnp.float8_e3m4))
E2M1 = Format("e2m1", jnp.dtype(jnp.float4_e2m1fn), has_inf=False, has_nan=False)
# A power of two, 2^-127 to 2^127: the scale of an OCP MX block. No sign and no zero.
E8M0 = Format("e8m0", jnp.dtype(jnp.float8_e8m0fnu), has_inf=False)
BF16 = Format("bf16", jnp.dtype(jnp.bfloat16))
F16 = Format("f16", jnp.dtype(jnp.float16))
F32 = Format("f32", jnp.dtype(jnp.float32))

FORMATS = {f.name: f for f in (E4M3, E5M2, E3M4, E2M1, E8M0, BF16, F16, F32)}
