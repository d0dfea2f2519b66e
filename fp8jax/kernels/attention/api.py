"""Causal self-attention: the problem, and what each backend says to it.

Between documents of one sequence there is no attention where `is_isolated`. An explicit mask is an
array of length x length per sequence: 2 GiB of bias in 16 bits at 32,768 tokens. `square_bytes`
says what a backend writes of such arrays; the tokamax kernel reads a first key per query instead.
"""

import dataclasses

from fp8jax.kernels.attention import tokamax_sm90
from fp8jax.kernels.device import Device

# Compute capability x 10 of the first GPUs with cuDNN's fused attention.
_AMPERE = 80
_SIXTEEN_BITS = ("bfloat16", "float16")
# In order of preference for "auto"; without isolation cuDNN's causal attention comes first.
BACKENDS = ("tokamax", "cudnn", "xla")
# Bytes of one array of length x length that "auto" accepts for isolation: 8,192 tokens in 16 bits
# and one sequence are half of it.
LARGEST_SQUARE = 2**28


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
  """Causal grouped-query self-attention as a backend sees it: sizes of one device.

  Attributes:
    sequences, length: of the batch.
    num_heads, num_kv_heads, head_dim: of queries, of keys and values, of both.
    dtype: of queries, keys and values.
    is_isolated: whether a token sees its own document alone.
  """

  sequences: int
  length: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  dtype: str
  is_isolated: bool
  device: Device


def preference(problem: AttentionProblem) -> tuple[str, ...]:
  """The order in which "auto" asks."""
  return BACKENDS if problem.is_isolated else ("cudnn", "tokamax", "xla")


def supports(backend: str, problem: AttentionProblem) -> str | None:
  """Why a backend of BACKENDS cannot run a problem, or None."""
  if backend == "cudnn":
    return lacks_cudnn(problem.device) or _needs_sixteen_bits(problem)
  if backend == "tokamax":
    if problem.device.platform != "gpu" or problem.device.capability != tokamax_sm90.CAPABILITY:
      return "its kernels are compiled for Hopper, sm_90, here"
    sizes = (problem.length, problem.head_dim)
    return _needs_sixteen_bits(problem) or tokamax_sm90.lacks_size(*sizes) or tokamax_sm90.lacks()
  return None


def lacks_cudnn(device: Device) -> str | None:
  """Why cuDNN's attention does not run on a device, or None."""
  if device.platform != "gpu" or device.capability == 0:
    return "needs an NVIDIA GPU"
  if device.capability < _AMPERE:
    return f"needs compute capability 8.0 or newer and this GPU is sm_{device.capability}"
  return None


def _needs_sixteen_bits(problem: AttentionProblem) -> str | None:
  if problem.dtype in _SIXTEEN_BITS:
    return None
  return f"needs 16-bit inputs, precision.compute_dtype is {problem.dtype!r}"


def square_bytes(backend: str, problem: AttentionProblem) -> int:
  """Bytes of the largest length x length array that isolation costs on a GPU, per device."""
  square = problem.sequences * problem.length**2
  if backend == "tokamax" or not problem.is_isolated or problem.device.platform != "gpu":
    return 0
  return 2 * square if backend == "cudnn" else 4 * square * problem.num_heads


def too_large(backend: str, problem: AttentionProblem) -> str | None:
  """Why "auto" does not take a backend that could run, or None."""
  nbytes = square_bytes(backend, problem)
  # In 32 bits there is no other attention, with and without isolation.
  if nbytes <= LARGEST_SQUARE or problem.dtype not in _SIXTEEN_BITS:
    return None
  return (
    f"isolates documents by an array of {nbytes / 2**20:,.0f} MiB per device "
    f"({problem.sequences} x {problem.length} x {problem.length})"
  )
