"""D = A . B' in float32 of operands that are dequantized once: emulation on a CPU, the fast one.

One product per GEMM, without partial sums, of values that a quantizer makes in float32 without
storing data between (ScaledMatrix.values). The codes and scales are those of `reference`; only sums
differ. It scales sums, here every element is scaled, which is exact where scales are powers of two
and one rounding elsewhere:

  |D - exact| <= n u / (1 - n u) sum_k |A_mk| |B_nk|,   u = 2^-24

with n = K for powers of two, else K + 2 (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., §3.1). An element below 2^-126 counts as 0, as XLA:CPU has it, and one beyond float32's
largest is infinite, although its product with a small one may not be.
"""

import jax
import jax.numpy as jnp

from fp8jax.quantization import scaled_matrix
from fp8jax.recipe.gemm import Accumulate, Accumulation


def supports(problem) -> str | None:
  if problem.platform != "cpu":
    return (
      "it is for CPUs: elsewhere XLA folds the rounding of dequantized operands away; "
      "'reference' emulates there"
    )
  how = problem.gemm.accumulate
  if how not in (Accumulation.FAST, Accumulation.PRECISE) and type(how) is not int:
    return f"it adds in float32, which is not accumulate={how}"
  return None


def num_dots(problem) -> int:
  """FP8 dots that run: none."""
  del problem
  return 0


def scaled_matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, accumulate: Accumulate, out_dtype
):
  """[M, N]; all sums are float32's, which is at least as precise as any `accumulate`."""
  del accumulate
  contracted = (((1,), (1,)), ((), ()))
  return jax.lax.dot_general(
    a.dequantize(), b.dequantize(), contracted, preferred_element_type=jnp.float32
  ).astype(out_dtype)
