"""Numbers about a step (pure) and about speed (pure)."""

import re
from collections.abc import Mapping

from fp8jax import params as params_lib

# Dense BF16 peak of one device in FLOP/s, without sparsity and with float32 accumulation. MFU is
# reported against it in every recipe, so that FP8 and BF16 runs compare. From NVIDIA's data sheets
# (half of the number with sparsity where only that is printed):
#   A100, A10G, T4 (float16: it has no BF16), L4, L40S, H100 and H100 NVL, H200 and H200 NVL, GH200,
#   H800 (H100's tensor cores), H20 (148), HGX B200 and B300 (36 PFLOP/s sparse for eight),
#   GB200 and GB300 NVL72 (360 PFLOP/s sparse for 72);
# and its architecture papers, appendix A: "NVIDIA Ada GPU Architecture" (RTX 4090), "NVIDIA RTX
# Blackwell GPU Architecture" (RTX 5090), "NVIDIA RTX Blackwell PRO GPU Architecture" (RTX PRO
# 6000).
# None where a name contains another's and the number is not known.
PEAK_FLOPS = {
  "A100": 312e12,
  "A10G": 70e12,
  "B200": 2250e12,
  "B300": 2250e12,
  "GB200": 2500e12,
  "GB300": 2500e12,
  "GH200": 989e12,
  "H100": 989e12,
  "H100 NVL": 835e12,
  "H100 PCIe": 756e12,
  "H20": 148e12,
  "H200": 989e12,
  "H200 NVL": 835e12,
  "H800": 989e12,
  "H800 PCIe": 756e12,
  "L4": 121e12,
  "L40S": 362e12,
  "RTX 4090": 165.2e12,
  "RTX 4090 D": None,
  "RTX 4090 Laptop": None,
  "RTX 5090": 209.5e12,
  "RTX 5090 D": None,
  "RTX 5090 Laptop": None,
  "RTX PRO 6000": 503.8e12,
  "RTX PRO 6000 Max Q": 438.9e12,
  "RTX PRO 6000 Server": None,
  "T4": 65e12,
}


def flops_per_token(declaration, dims: Mapping[str, int], length: int) -> float:
  """Training FLOPs per token: 6 per matrix parameter, plus causal attention.

  Attention multiplies twice by an average context of length / 2, forward and twice backward:
  6 N H K length (PaLM, arXiv:2204.02311, appendix B, halved for causality).
  """
  flat = params_lib.flatten(declaration)
  matrices = {k: p for k, p in flat.items() if p.inputs is not None}
  count = sum(params_lib.count({k: p}, dims) for k, p in matrices.items())
  if "head" not in flat:  # tied: the embedding multiplies
    count += dims["V"] * dims["D"]
  return 6.0 * count + 6.0 * dims["N"] * dims["H"] * dims["K"] * length


def peak_flops(device_kind: str) -> float | None:
  """Dense BF16 peak of a device by JAX's name for it, None if unknown."""
  for name, peak in sorted(PEAK_FLOPS.items(), key=lambda item: -len(item[0])):
    if set(name.split()) <= set(re.split("[ -]", device_kind)):
      return peak
  return None
