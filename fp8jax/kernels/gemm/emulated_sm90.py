"""D = A . B' with the sums of Hopper's FP8 tensor core, to the bit, in plain JAX on any device.

One instruction adds 32 products along K to the accumulator. All 33 terms are aligned to the largest
exponent among them and truncated toward zero to 13 fraction bits; their sum is exact and truncated
to 13 fraction bits again, 14 with the leading one. The exponent of a product is the sum of its
factors', so that its significand is below 4; a subnormal factor has its format's least exponent.
(DeepSeek-V3, arXiv:2412.19437, §3.5.2; model and bits: MMA-Sim, arXiv:2511.10909, whose
authors compared it with the hardware; this file has not been.)

  FAST     all of K in that accumulator
  N        sums of N products, added in float32
  PRECISE  N = 128: cuBLASLt's split accumulator. That it promotes is documented, how often is not;
           CUTLASS does every four instructions (mma_promotion_interval), DeepSeek-V3 too.

A factor that is not finite makes its row or column NaN. Memory: a few float32 [M, N].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.formats import E2M1, E4M3, E5M2
from fp8jax.kernels.gemm import reference
from fp8jax.quantization import scaled_matrix
from fp8jax.recipe.gemm import Accumulate, Accumulation

FORMATS = (E4M3, E5M2, E2M1)  # the last as E4M3, which has its numbers
GROUP = 32  # products of one instruction
_FRACTION = 13
_DROPPED = (1 << 23 - _FRACTION) - 1  # of float32's fraction
_LEAST = {E4M3.dtype: -6, E5M2.dtype: -14}  # exponent of subnormals
_ZERO = -126  # "exponent" of 0: below every other


def supports(problem) -> str | None:
  """None for what Hopper's instruction multiplies, also where the device is none."""
  gemm = problem.gemm
  if not {gemm.lhs.format, gemm.rhs.format} <= {*FORMATS}:
    names = f"{gemm.lhs.format} by {gemm.rhs.format}"
    return f"Hopper's tensor core multiplies e4m3 and e5m2, not {names}"
  if not isinstance(gemm.accumulate, Accumulation) and gemm.accumulate % GROUP:
    return (
      f"accumulate is {gemm.accumulate}; one instruction adds {GROUP} products, so that sums of a "
      f"multiple of {GROUP} can be promoted"
    )
  return None


def num_dots(problem) -> int:
  """FP8 dots that run: none."""
  del problem
  return 0


def scaled_matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, accumulate: Accumulate, out_dtype
):
  """[M, N]; see the module."""
  step = a.shape[1] if accumulate is Accumulation.FAST else reference.step_of(accumulate)
  return reference.promoted(a, b, step, _tensor_core, out_dtype, max_unroll=1)


def _tensor_core(lhs, rhs):
  """float32 [M, N], of 14 bits: the sum of K products of lhs [M, K] and rhs [N, K]."""
  return sum_groups(lhs, rhs, jnp.zeros((lhs.shape[0], rhs.shape[0]), jnp.float32), _add)


def sum_groups(lhs, rhs, total, add: Callable[[Any, Any, Any], Any], result=lambda total: total):
  """float32 [M, N]: result(total) after total = add(total, lhs [32, M], rhs [32, N]) along K."""
  k = lhs.shape[1]
  groups = -(-k // GROUP)
  # Zeros fill a partial group up, as the copy into shared memory does.
  lhs, rhs = (jnp.pad(x, ((0, 0), (0, groups * GROUP - k))) for x in (lhs, rhs))
  parts = tuple(jnp.moveaxis(x.reshape(-1, groups, GROUP), 0, -1) for x in (lhs, rhs))
  total, _ = jax.lax.scan(lambda total, pair: (add(total, *pair), None), total, parts)
  are_finite = [jnp.all(jnp.isfinite(x.astype(jnp.float32)), axis=1) for x in (lhs, rhs)]
  return jnp.where(are_finite[0][:, None] & are_finite[1], result(total), jnp.nan)


def _add(total, lhs, rhs):
  """One instruction: total [M, N] and 32 products of lhs [32, M] and rhs [32, N]."""
  (x, x_exponent), (y, y_exponent) = (
    (t.astype(jnp.float32), _exponent(t.astype(jnp.float32), _LEAST[t.dtype])) for t in (lhs, rhs)
  )

  def larger(i, top):
    return jnp.maximum(top, x_exponent[i][:, None] + y_exponent[i])

  top = jax.lax.fori_loop(0, GROUP, larger, _exponent(total, _ZERO))
  top = jnp.maximum(top, _ZERO // 2)  # all terms are 0
  up = _power_of_two(_FRACTION - top)

  def plus(i, units):
    # Exact: 8 bits by a power of two. The conversion to int32 truncates toward zero.
    return units + (x[i][:, None] * up * y[i]).astype(jnp.int32)

  # At most 33 terms below 2^15: exact in int32, and in float32.
  units = jax.lax.fori_loop(0, GROUP, plus, (total * up).astype(jnp.int32))
  bits = jax.lax.bitcast_convert_type(units.astype(jnp.float32), jnp.int32) & ~_DROPPED
  return jax.lax.bitcast_convert_type(bits, jnp.float32) * _power_of_two(top - _FRACTION)


def _exponent(x, least: int):
  """int32 floor(log2|x|) of float32, at least `least`; _ZERO of 0."""
  field = (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF
  return jnp.where(x == 0, _ZERO, jnp.maximum(field - 127, least))


def _power_of_two(exponent):
  """float32 2^exponent, of int32 from -126 to 127."""
  return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
