"""D = A . B' with exact sums, rounded to float32 once: the same in any order and beside any rows.

Sums that the recipe leaves to the matrix unit, over all of K or N of it, are made in integers;
promoted ones are added in float32. A product of two FP8 numbers has 8 bits and lies between 2^-33
and 2^33. It is cut into three digits of 22 bits, int32 each, which are added and carried after 32
products.
Correctly rounded to nearest-even while |sum of data| < 2^35: always for E4M3 and K < 2^17.
"""

import jax
import jax.numpy as jnp

from fp8jax.formats import E5M2
from fp8jax.kernels.gemm import emulated_sm90, reference
from fp8jax.quantization import scaled_matrix
from fp8jax.recipe.gemm import Accumulate, Accumulation

_BITS = 22  # of a digit
_HIGH, _MIDDLE, _LOW = 2.0**11, 2.0**-11, 2.0**-33  # what a digit counts


def supports(problem) -> str | None:
  """None for FP8 by FP8, but two E5M2, whose products fill the highest digit."""
  gemm = problem.gemm
  wide = [q.format for q in (gemm.lhs, gemm.rhs) if q.format not in emulated_sm90.FORMATS]
  if wide or gemm.lhs.format == gemm.rhs.format == E5M2:
    return f"exact sums are of e4m3 by e4m3 or e5m2, not {gemm.lhs.format} by {gemm.rhs.format}"
  return None


num_dots = emulated_sm90.num_dots


def scaled_matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, accumulate: Accumulate, out_dtype
):
  """[M, N]; see the module."""
  step = a.shape[1] if isinstance(accumulate, Accumulation) else accumulate
  return reference.promoted(a, b, step, _exact, out_dtype, max_unroll=1)


def _exact(lhs, rhs):
  zeros = (jnp.zeros((lhs.shape[0], rhs.shape[0]), jnp.int32),) * 3
  return emulated_sm90.sum_groups(lhs, rhs, zeros, _add, _rounded)


def _add(digits, lhs, rhs):
  x, y = lhs.astype(jnp.float32), rhs.astype(jnp.float32)

  def plus(i, digits):
    rest, added = x[i][:, None] * y[i], []
    for digit, unit in zip(digits, (_HIGH, _MIDDLE, _LOW)):
      part = (rest * (1 / unit)).astype(jnp.int32)  # toward zero
      rest = rest - part.astype(jnp.float32) * unit
      added.append(digit + part)
    return tuple(added)

  return _carried(*jax.lax.fori_loop(0, emulated_sm90.GROUP, plus, digits))


def _carried(high, middle, low):
  """The same sum; all digits but the highest from 0 to 2^22 - 1."""
  mask = (1 << _BITS) - 1
  middle = middle + (low >> _BITS)
  return high + (middle >> _BITS), middle & mask, low & mask


def _rounded(digits):
  """float32 of the sum. Each of the two additions has exact operands, and so rounds once."""
  is_negative = digits[0] < 0
  high, middle, low = _carried(*(jnp.where(is_negative, -d, d) for d in digits))
  few = ((high << _BITS) + middle).astype(jnp.float32) * _MIDDLE + low.astype(jnp.float32) * _LOW
  # The last bit is one of the middle digit or above it: of the low one it matters whether it is 0.
  half = jnp.where(low > 0, 0.5, 0.0)
  many = high.astype(jnp.float32) * _HIGH + (middle.astype(jnp.float32) + half) * _MIDDLE
  magnitude = jnp.where(high < 4, few, many)
  return jnp.where(is_negative, -magnitude, magnitude)
