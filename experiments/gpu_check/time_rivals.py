"""Rivals on the same shapes: PyTorch's products and DeepGEMM, whichever can be imported.

PyTorch's adapters are those of experiments/bench/kernels; DeepGEMM's is here, written after its
interface (github.com/deepseek-ai/DeepGEMM, csrc/apis/gemm.hpp). None has run on a GPU. A rival
whose result is wrong is not timed; one that the machine does not have is absent, with the reason.
"""

from typing import Any

import jax.numpy as jnp
import rivals
import rivals_torch
import timing

from gpu_check import operands, programs
from gpu_check.worker import Absent, Context, Wrong


def _deep_gemm() -> rivals.Rival:
  torch = rivals_torch._torch()
  library = rivals.need("deep_gemm", "fp8_gemm_nt", "get_mn_major_tma_aligned_tensor")

  def gemm(product, out):
    is_wgrad = product == "wgrad"
    dtype = torch.float32 if is_wgrad else torch.bfloat16
    # Granularity of scales: rows of A, rows of B, K. With (1, 1, 128) its kernel adds to float32.
    recipe = (1, 1, 128) if is_wgrad else (1, 128, 128)
    lay_out = library.get_mn_major_tma_aligned_tensor

    def prepare(a, b):
      a, a_scale, b, b_scale = rivals_torch._operands(torch, rivals.BLOCK, product, a, b)
      d = torch.zeros((a.shape[0], b.shape[1]), device="cuda", dtype=dtype)
      a_scale, b_scale = lay_out(a_scale.contiguous()), b_scale.contiguous()
      return (a, a_scale), (b.t(), lay_out(b_scale) if is_wgrad else b_scale), d

    def run(a, b, d):
      how = dict(c=d) if is_wgrad else {}
      library.fp8_gemm_nt(a, b, d, recipe=recipe, disable_ue8m0_cast=True, **how)
      return d

    return rivals.Call(prepare, run)

  return rivals_torch._rival("deep_gemm", gemm, rivals.without("DeepGEMM has no layer"))


MAKERS = {"deep_gemm": _deep_gemm, **rivals_torch.MAKERS}


def run(context: Context, rival: str, product: str, shape) -> dict[str, Any]:
  """{"tflops", "ms", "error"}, times by CUDA events around many calls.

  Raises:
    Absent: the machine does not have it.
    Wrong: its result is not the float32 one.
  """
  m, n, k = shape
  out = programs.out_dtype(product)
  try:
    entrant = MAKERS[rival]()
    call = entrant.gemm(product, out)
  except rivals.Absent as e:
    raise Absent(str(e)) from e
  a, b = (programs.array(jnp.bfloat16, rows, k) for rows in (m, n))
  sets = [operands.concrete((a, b), seed) for seed in range(2)]
  bench = timing.Bench(None, context.is_dry, {"lines": {}})  # pyright: ignore
  found = rivals.measure(bench, entrant, call, sets, rivals.gemm_in_float32)
  if "failed" in found:
    raise (Wrong if "float32 result" in found["failed"] else RuntimeError)(found["failed"])
  return {"tflops": 2 * m * n * k / found["ms"] / 1e9, **found, "how": "CUDA events"}
