"""Rounding of float32 to an 8- or 16-bit format: to the nearest, or stochastically.

Source: OCP OFP8 v1.0, saturating conversion. Stochastic rounding for FP8 training: Wang et al. 2018
(arXiv:1812.08011); where it is needed: NVFP4's gradients (arXiv:2509.25149 §4.4).
Assumes: x is float32. The grid is found by its exponent bits, so that every step here is exact:
`log2` and `exp2` are not, and `lax.reduce_precision` rounds to IEEE formats without subnormals,
which turns 256 to 448 into NaN for E4M3. float32 subnormals count as 0, which some backends make of
them anyway.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.formats import Format


def saturate(x, format: Format):
  """x within ±format.max, infinities too. NaN stays NaN, or +0 where the format has none."""
  clipped = jnp.clip(x, -format.max, format.max)
  return jnp.where(jnp.isnan(x), jnp.nan if format.has_nan else 0.0, clipped)


def step(x, format: Format):
  """(s, 1 / s), float32 powers of two: x lies between two neighbouring multiples of s.

  Args:
    x: float32 within ±format.max. At a power of two, s is the distance to the next larger. s is
      at least 2^-126: BF16's own steps below 2^-119 are float32 subnormals.
  """
  exponent = (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF
  least = max(127 + format.min_exponent, 1 + format.mantissa_bits)
  biased = jnp.maximum(exponent, least) - format.mantissa_bits
  powers = (biased << 23, (254 - biased) << 23)
  return tuple(jax.lax.bitcast_convert_type(p, jnp.float32) for p in powers)


def nearest(x, format: Format):
  """float32 on the format's grid, ties to even, saturating: what `saturate` and a cast give.

  A cast there and back says the same, but XLA:GPU may drop such a pair of converts.
  """
  x = saturate(x, format)
  unit, inverse = step(x, format)
  return jax.lax.round(x * inverse, jax.lax.RoundingMethod.TO_NEAREST_EVEN) * unit


def stochastic(x, format: Format, key, dtype=None):
  """x in format.dtype or `dtype`, one of its two neighbours on the grid, with mean x; saturating.

  Up with probability (x - below) / (above - below), rounded down to a multiple of 2^-32: the mean
  is exact for x of a normal magnitude, and within 2^-32 of a step of x otherwise. Below 2^-119
  the neighbours are multiples of 2^-126, of BF16 too, whose grid is finer there.

  Args:
    x: float32, any shape. A number on the grid, and one beyond it, has one neighbour.
    key: a jax.random key. The result is a function of it, the shape and x.

  Raises:
    ValueError: without a key.
  """
  if key is None:
    raise ValueError("stochastic rounding needs a key: give quantize(..., key=jax.random.key(...))")
  bounded = saturate(x, format)
  magnitude = jnp.where(jnp.isnan(x), 0.0, jnp.abs(bounded))
  unit, inverse = step(magnitude, format)
  steps = magnitude * inverse
  below = jnp.floor(steps)
  chance = ((steps - below) * np.float32(2.0**32)).astype(jnp.uint32)
  is_up = jax.random.bits(key, x.shape, jnp.uint32) < chance
  rounded = jnp.copysign((below + is_up) * unit, bounded)
  return jnp.where(jnp.isnan(bounded), bounded, rounded).astype(dtype or format.dtype)
