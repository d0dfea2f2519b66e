"""D = A . B' as one FP8 dot whose output is scaled: what XLA hands to cuBLASLt on GPU.

Only scales that are constant along K can be applied after the product.

XLA reads how to accumulate from the precision of the operands: with DEFAULT it sets cuBLASLt's flag
for fast accumulation on every FP8 product, with any other it does not. On the CPU it widens FP8 to
float32, so that products are exact and either precision gives the same sums.

Operands that FP8 does not hold, of INT8, E5M6 or a logarithmic format, are multiplied in float32: a
CPU runs them, a GPU by the backend `reference` alone.
"""

import jax
import jax.numpy as jnp

from fp8jax.formats import E2M1, E4M3, E5M2
from fp8jax.quantization import scaled_matrix
from fp8jax.recipe.gemm import Accumulate, Accumulation, Gemm
from fp8jax.recipe.quant import WHOLE

_PRECISION = {
  Accumulation.FAST: jax.lax.Precision.DEFAULT,
  Accumulation.PRECISE: jax.lax.Precision.HIGHEST,
}
_FP8 = (E4M3.dtype, E5M2.dtype)


def is_fp8(gemm: Gemm) -> bool:
  """Whether `factors` of its operands are FP8."""
  quants = (gemm.lhs, gemm.rhs)
  return all(quant and quant.format.dtype in (*_FP8, E2M1.dtype) for quant in quants)


def supports(problem) -> str | None:
  for name, quant in (("lhs", problem.gemm.lhs), ("rhs", problem.gemm.rhs)):
    if quant.tile[1] != WHOLE:
      return f"{name} scales change along K every {quant.tile[1]}; one XLA dot takes one scale"
  if problem.gemm.accumulate not in _PRECISION:
    return f"float32 promotion every {problem.gemm.accumulate} of K needs a loop"
  if problem.platform == "cpu":
    return None
  pair = (problem.gemm.lhs.format, problem.gemm.rhs.format)
  if pair == (E5M2, E5M2) or not {*pair} <= {E4M3, E5M2, E2M1}:
    return f"cuBLASLt does not multiply {pair[0]} by {pair[1]}"
  return None


def num_dots(problem) -> int:
  """FP8 dots that run."""
  del problem
  return 1


def factors(*operands):
  """The numbers of operands as a dot takes them: all in FP8, or all in float32.

  Hopper multiplies no 4-bit numbers and XLA:CPU refuses to; every E2M1 number is an E4M3 one.
  """
  data = tuple(x.astype(E4M3.dtype) if x.dtype == E2M1.dtype else x for x in operands)
  is_held = all(x.dtype in _FP8 for x in data)
  return data if is_held else tuple(x.astype(jnp.float32) for x in operands)


def precision(factor, accumulate: Accumulate) -> jax.lax.Precision:
  """Of a dot of `factors`: in float32 all of its bits, which a GPU otherwise rounds to TF32."""
  is_wide = factor.dtype == jnp.float32
  return _PRECISION[Accumulation.PRECISE if is_wide else Accumulation(accumulate)]


def scaled_matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, accumulate: Accumulate, out_dtype
):
  """[M, N]; accumulate is FAST or PRECISE."""
  lhs, rhs = factors(a.data, b.data)
  product = jax.lax.dot_general(
    lhs,
    rhs,
    (((1,), (1,)), ((), ())),
    precision=precision(lhs, accumulate),
    preferred_element_type=jnp.float32,
  )
  rows = scaled_matrix.expand(a.scale, 0, a.tile[0], a.shape[0])
  cols = scaled_matrix.expand(b.scale, 0, b.tile[0], b.shape[0])
  return ((product * rows) * cols.T).astype(out_dtype)
