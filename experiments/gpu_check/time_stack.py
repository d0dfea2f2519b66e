"""Time of a product whose weight, or sum, is one layer of a stack: read or added to where it lies
("layers"), beside the copy or the addition that this replaces ("copied") and the product alone.

All three by the wall clock and with all kernels of the program: the copies are what is asked for.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.quantization.scaled_matrix import Entry
from gpu_check import measure, programs, time_gemm
from gpu_check.worker import Context, Wrong


def run(context: Context, product: str, shape, kind: str) -> dict[str, Any]:
  """{"ms", "tflops", "sum_error", ...}. Raises Wrong, before it is timed, as time_gemm does."""
  m, n, k = shape
  program = programs.gemm(product, tuple(shape), None, kind)
  arguments = program.concrete()
  error = float(_error(jax.jit(program.function)(*arguments), arguments, product, bool(kind)))
  del arguments
  if not error <= 1:
    raise Wrong(f"a sum is off by {error:.3g} of what 14 bits and rounding explain")
  # One call: of two equal products XLA would make one. CUPTI could not donate the stack.
  found = measure.time_program(dataclasses.replace(context, cupti=False), program, calls=1)
  return {"tflops": 2 * m * n * k / found["ms"] / 1e9, **found, "sum_error": error}


def _error(got, arguments, product: str, is_layer: bool):
  """time_gemm.sum_error of layer 0, the one that is read or added to; NaN if another changed."""
  if not is_layer:
    return time_gemm.sum_error(got, *arguments)
  if product == "fwd":
    a, stack, i = arguments
    return time_gemm.sum_error(got, a, Entry(stack, i).take())
  (new,), (sums, a, b, _) = got, arguments
  is_kept = jnp.array_equal(new[1:], sums[1:])
  return jnp.where(is_kept, time_gemm.sum_error(new[0] - sums[0], a, b), jnp.nan)
