"""Speed of the GEMM by configuration; a result that is wrong is not timed."""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.kernels.gemm import tile_config
from gpu_check import measure, programs
from gpu_check.worker import Context, Wrong


def run(context: Context, product, shape, config=None) -> dict[str, Any]:
  """{"tflops", "ms", "config", "sum_error", ...}. Raises Wrong, as check_gemm does."""
  m, n, k = shape
  program = programs.gemm(product, tuple(shape), config)
  errors = []

  def check(d, a, b):
    errors.append(float(sum_error(d, a, b)))
    if not errors[0] <= 1:
      raise Wrong(f"a sum is off by {errors[0]:.3g} of what 14 bits and rounding explain")

  dtype = programs.out_dtype(product)
  chosen = config or str(tile_config.choice(m, n, k, product != "wgrad", dtype))
  found = measure.time_program(context, program, check=check)
  rate = 2 * m * n * k / found["ms"] / 1e9
  return {"tflops": rate, **found, "sum_error": errors[0], "config": chosen}


@jax.jit
def sum_error(d, a, b):
  """The largest error of D = A . B' in what the tensor core's 14 bits and rounding explain."""
  a, b = a.dequantize(), b.dequantize()

  def multiply(x, y):
    return jnp.matmul(x, y.T, precision=jax.lax.Precision.HIGHEST)

  want, magnitudes = multiply(a, b), multiply(jnp.abs(a), jnp.abs(b))
  slack = tile_config.SUM_ERROR * magnitudes + jnp.finfo(d.dtype).eps * jnp.abs(want)
  off = jnp.abs(d.astype(jnp.float32) - want) / jnp.maximum(slack, 1e-30)
  return jnp.max(jnp.where(jnp.isnan(off), jnp.inf, off))
