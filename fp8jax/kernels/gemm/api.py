"""D[M, N] = A[M, K] . B[N, K]' for ScaledMatrix operands: one signature, several backends.

Both operands are contraction-last ("K-major"), the only order in which Hopper's FP8 matrix unit
reads them. A backend is a module with `supports(problem) -> None or the reason why not`,
`scaled_matmul(a, b, accumulate, out_dtype) -> [M, N]` and `num_dots(problem) -> int`, the FP8 GEMMs
that one call executes: what a compiled program is checked against (compiled/fp8_gemms.py).
"""

import jax.numpy as jnp

from fp8jax.kernels.gemm import (
  dequantized,
  emulated_sm90,
  exact,
  mosaic_sm90,
  reference,
  xla,
  xla_sm90,
)  # fmt: skip
from fp8jax.quantization import scaled_matrix
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.recipe.gemm import Accumulate

# In order of preference for "auto".
BACKENDS = {
  "xla_sm90": xla_sm90, "xla": xla, "mosaic_sm90": mosaic_sm90, "reference": reference,
  "dequantized": dequantized, "emulated_sm90": emulated_sm90, "exact": exact,
}  # fmt: skip
# Backends that emulate what a GPU's matrix unit does, or could do. "auto" takes of these only
# `reference`, and that on a CPU.
EMULATED = ("reference", "dequantized", "emulated_sm90", "exact")
# Backends that multiply values instead of data and scales (see ScaledMatrix).
WITH_VALUES = ("dequantized",)
# Backends with operands from kernels/quantize, where that supports them.
WITH_QUANTIZER = ("xla_sm90", "mosaic_sm90")
# Backends that read a B gathered along K in its shards; the others need one matrix.
WITH_SHARDS = ("mosaic_sm90",)
# Backends that read B, and add to D, as one layer of a stack where it lies.
WITH_LAYERS = ("mosaic_sm90",)
# Backends whose programs stay on their multiprocessors until the product is done.
HOLDING = ("mosaic_sm90",)


def scaled_matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix | Entry, *, accumulate: Accumulate,
  backend: str, out_dtype=jnp.float32, spare: int = 0, add_to=None,
):  # fmt: skip
  """[M, N] in out_dtype, or the stack of an add_to that is an Entry.

  Args:
    a: [M, K].
    b: [N, K], for backends in WITH_SHARDS perhaps in shards, for those in WITH_LAYERS perhaps an
      entry of a stack.
    accumulate: Accumulation.FAST, PRECISE, or K per partial sum that is promoted to float32.
    backend: a key of BACKENDS that supports this problem (see kernels/choose.py).
    out_dtype: float32 or bfloat16.
    spare: multiprocessors that stay free, if the backend's kernel holds those that it is given.
    add_to: for backends that add (`adds`), a matrix in out_dtype, or an Entry, that the product is
      added to before it is rounded.
  """
  of_b = b.stack.data.shape[1:] if isinstance(b, Entry) else b.shape
  if a.shape[1] != of_b[1]:
    raise ValueError(f"contraction sizes differ: A is {a.shape}, B is {of_b}, both [rows, K]")
  more = {"spare": spare} if backend in HOLDING else {}
  more |= {} if add_to is None else {"add_to": add_to}
  return BACKENDS[backend].scaled_matmul(a, b, accumulate, out_dtype, **more)


def adds(backend: str, shape: tuple[int, ...], out_dtype) -> bool:
  """Whether a backend adds to a matrix [M, N], or an entry of a stack, where it lies."""
  return backend in WITH_LAYERS and BACKENDS[backend].adds(shape, out_dtype)
