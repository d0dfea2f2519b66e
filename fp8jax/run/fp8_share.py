"""How much of a run's work is in FP8: shares of its FLOPs and of the bytes that its GEMMs read.

They are those of the spec, on every backend; the strict check (compiled/fp8_gemms.py) holds the
compiled program to it. Emulated FP4 is carried by 8 bits and counts.
"""

import math
from collections.abc import Mapping

from fp8jax.compiled import expected_gemms
from fp8jax.models import transformer
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import PASSES
from fp8jax.run import metrics
from fp8jax.step.train_spec import TrainSpec

FLOPS, GEMM_BYTES = "fp8_flops_share", "fp8_gemm_bytes_share"


def of_phase(spec: TrainSpec, phase: int = 0) -> dict[str, float]:
  """The shares of a step of one phase of the precision schedule.

  Returns:
    fp8_flops_share: of the FLOPs that MFU counts (metrics.flops_per_token): attention's products of
      activations are in the whole, recomputed products are not.
    fp8_gemm_bytes_share: of the bytes of both operands of every site's GEMMs, each read once per
      GEMM; scales, results and recomputed products aside. Unquantized operands have the compute
      dtype: the share is larger where that is float32.
  """
  declared = site_tree.find_sites(transformer.site_params(spec.model))
  dims, layout, wide = spec.model.dims, spec.run.layout, spec.run.dtype.itemsize
  flops, narrow_bytes, all_bytes = 0.0, 0, 0
  for name, site in site_lib.flatten(spec.sites(phase=phase)).items():
    param = declared[rules.path_of(name)]
    weights = len(site.layer_names) * math.prod(dims[c] for c in param.letters if c != "N")
    for which in PASSES if param.trainable else PASSES[:2]:
      gemm = getattr(site.recipe, which)
      flops += 2.0 * weights * gemm.multiplies_codes
      for tokens, calls in expected_gemms.calls(spec, site):
        m, n, k = site_tree.local_size(param, dims, layout, tokens).of(which)
        for quant, elements in ((gemm.lhs, m * k), (gemm.rhs, k * n)):
          narrow_bytes += calls * elements * (quant is not None)
          all_bytes += calls * elements * (wide if quant is None else 1)
  whole = metrics.flops_per_token(spec.model, spec.data.seq_len)
  return {FLOPS: flops / whole, GEMM_BYTES: narrow_bytes / all_bytes}


def of_run(spec: TrainSpec, steps: int) -> Mapping[str, float]:
  """The means of `of_phase` over the first so many steps."""
  starts = [phase.start for phase in spec.precision.phases]
  ends = [*starts[1:], steps]
  total = {FLOPS: 0.0, GEMM_BYTES: 0.0}
  for phase, (start, end) in enumerate(zip(starts, ends, strict=True)):
    if (taken := min(end, steps) - min(start, steps)) > 0:
      for name, share in of_phase(spec, phase).items():
        total[name] += share * taken / steps
  return total if steps else of_phase(spec)
