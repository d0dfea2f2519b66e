"""D = A . B' by XLA's FP8 dot, one scale per tensor, operands by the Hopper quantizer.

The product is gemm/xla.py's, cuBLASLt's on GPU. Its operands come from another place:
kernels/quantize writes both orientations of a tensor from one reading, K-major each, where XLA's
own fusions read it twice and transpose FP8 on the way.
"""

from fp8jax.kernels.gemm import xla
from fp8jax.recipe.quant import AMAX, WHOLE, Rounding, Scale


def missing(device) -> str | None:
  """Why our kernels do not run on a device."""
  if (device.platform, device.capability) == ("gpu", 90):
    return None
  reason = "needs a Hopper GPU (compute capability 9.0)"
  if device.platform == "gpu" and device.capability >= 100:
    reason += "; there is no sm_100 kernel yet, and recipes tensor_... run on cuBLASLt"
  return reason


def supports(problem) -> str | None:
  if reason := missing(problem.device):
    return reason
  for name, quant in (("lhs", problem.gemm.lhs), ("rhs", problem.gemm.rhs)):
    if quant.tile != (WHOLE, WHOLE):
      return f"{name} scales are per {quant.tile}, its quantizer writes one per tensor"
    is_plain = quant.clip == AMAX and quant.scale in (Scale.F32, Scale.POW2)
    if quant.rounding is not Rounding.NEAREST or quant.transform or not is_plain:
      return f"{name} is {quant}; its quantizer rounds to nearest, clips and transforms nothing"
  return xla.supports(problem)


num_dots, scaled_matmul = xla.num_dots, xla.scaled_matmul
