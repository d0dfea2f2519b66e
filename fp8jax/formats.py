"""Number formats as values.

Source: Micikevicius et al. 2022 (arXiv:2209.05433) §3 for E4M3 and E5M2.
Assumes: limits come from ml_dtypes, which JAX itself uses; `float8_e4m3fn` has no infinity and a
maximum of 448 (the IEEE-like E4M3 that some libraries emulate stops at 240 and is not this one).
"""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
  """One narrow floating-point format.

  Attributes:
    name: how the literature, logs and serialised recipes call it.
    dtype: the JAX/NumPy dtype that stores it.
  """

  name: str
  dtype: np.dtype

  @property
  def max(self) -> float:
    """Largest finite magnitude."""
    return float(ml_dtypes.finfo(self.dtype).max)

  @property
  def smallest(self) -> float:
    """Smallest positive (subnormal) magnitude."""
    return float(ml_dtypes.finfo(self.dtype).smallest_subnormal)

  @property
  def bits(self) -> int:
    return ml_dtypes.finfo(self.dtype).bits

  def __repr__(self):
    return self.name


E4M3 = Format("e4m3", jnp.dtype(jnp.float8_e4m3fn))
E5M2 = Format("e5m2", jnp.dtype(jnp.float8_e5m2))

FORMATS = {f.name: f for f in (E4M3, E5M2)}
