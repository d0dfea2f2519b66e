"""D = A . B' in plain JAX, for every recipe: authoritative, and what other backends must equal.

FP8 operands go into the dot itself, behind a barrier. Dequantising first would be folded away on
GPU: XLA removes a cast to FP8 before a cast to 16 bits and multiplies in 16 bits.

Partial sums are added in float32 every so many K, which implements every accumulation but FAST. On
a device without FP8 units all sums are at least as precise as asked for, on a CPU exact products
are added in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.kernels.gemm import xla
from fp8jax.quantization import scaled_matrix
from fp8jax.recipe.gemm import Accumulate, Accumulation

# Beyond this many steps along K the loop is rolled, to bound program size.
_MAX_UNROLL = 16
# K per partial sum where the recipe names none.
_DEFAULT_STEP = 128
_FP8_UNITS = 89  # CUDA compute capability x 10 from which GPUs have them


def supports(problem) -> str | None:
  """None but for fast accumulation where there is such a thing, and that is of FP8 operands."""
  device = problem.device
  has_units = device.platform == "gpu" and device.capability >= _FP8_UNITS
  if problem.gemm.accumulate is Accumulation.FAST and has_units and xla.is_fp8(problem.gemm):
    return (
      f"it adds sums of {_DEFAULT_STEP} products in float32, which is not 'fast' accumulation; "
      "kernels.matmul='xla' is, or put (accumulate=precise) behind the recipe's name"
    )
  return None


def step_of(accumulate: Accumulate) -> int:
  """K per partial sum."""
  return _DEFAULT_STEP if isinstance(accumulate, Accumulation) else accumulate


def num_dots(problem) -> int:
  """FP8 dots that run: one per partial sum."""
  return -(-problem.k // step_of(problem.gemm.accumulate))


def scaled_matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, accumulate: Accumulate, out_dtype
):
  """[M, N]; partial sums of `accumulate` products, or 128, are added in float32."""
  # Within a step the matrix unit adds as it does for a product that is promoted.
  how = Accumulation.PRECISE if accumulate is Accumulation.PRECISE else Accumulation.FAST

  def multiply(lhs, rhs):
    return jax.lax.dot_general(
      lhs,
      rhs,
      (((1,), (1,)), ((), ())),
      precision=xla.precision(lhs, how),
      preferred_element_type=jnp.float32,
    )

  return promoted(a, b, step_of(accumulate), multiply, out_dtype)


def promoted(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, step: int,
  multiply: Callable[[Any, Any], jax.Array], out_dtype, max_unroll: int = _MAX_UNROLL,
):  # fmt: skip
  """[M, N]: multiply(lhs [M, n], rhs [N, n]) of every `step` of K, added in float32."""
  (m, k), n = a.shape, b.shape[0]
  rows = scaled_matrix.expand(a.scale, 0, a.tile[0], m)
  cols = scaled_matrix.expand(b.scale, 0, b.tile[0], n).T
  # The second purpose of the barrier: computed once, not inside every fused multiply-add.
  lhs, rhs, rows, cols = jax.lax.optimization_barrier((a.data, b.data, rows, cols))
  lhs, rhs = xla.factors(lhs, rhs)

  def partial(i, size):
    """Step `i` of K: an FP8 product, scaled on its way into the float32 accumulator."""
    start = i * step
    product = multiply(
      jax.lax.dynamic_slice_in_dim(lhs, start, size, axis=1),
      jax.lax.dynamic_slice_in_dim(rhs, start, size, axis=1),
    )
    # Scale by A, then by B: the product of two scales alone could overflow or vanish.
    product = product * jax.lax.dynamic_slice_in_dim(rows, _tile(a, start), 1, axis=1)
    return product * jax.lax.dynamic_slice_in_dim(cols, _tile(b, start), 1, axis=0)

  whole_steps, rest = divmod(k, step)
  if whole_steps <= max_unroll:
    total = sum((partial(i, step) for i in range(whole_steps)), jnp.zeros((), jnp.float32))
  else:
    zeros = jnp.zeros((m, n), jnp.float32)
    total = jax.lax.fori_loop(0, whole_steps, lambda i, t: t + partial(i, step), zeros)
  total = total + partial(whole_steps, rest) if rest else total
  return total.astype(out_dtype)


def _tile(x: scaled_matrix.ScaledMatrix, start):
  """Which scale along K holds for the step that begins at `start`."""
  return start // x.tile[1] if x.scale.shape[1] > 1 else 0
