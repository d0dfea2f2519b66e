"""Numbers about a step (pure) and about speed (pure)."""

import re

from fp8jax import params as params_lib
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.ops import site_tree

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
  "A100": 312e12, "A10G": 70e12, "B200": 2250e12, "B300": 2250e12, "GB200": 2500e12,
  "GB300": 2500e12, "GH200": 989e12, "H100": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12,
  "H20": 148e12, "H200": 989e12, "H200 NVL": 835e12, "H800": 989e12, "H800 PCIe": 756e12,
  "L4": 121e12, "L40S": 362e12, "RTX 4090": 165.2e12, "RTX 4090 D": None, "RTX 4090 Laptop": None,
  "RTX 5090": 209.5e12, "RTX 5090 D": None, "RTX 5090 Laptop": None, "RTX PRO 6000": 503.8e12,
  "RTX PRO 6000 Max Q": 438.9e12, "RTX PRO 6000 Server": None, "T4": 65e12,
}  # fmt: skip


def flops_per_token(cfg: ModelConfig, length: int) -> float:
  """Training FLOPs per token: forward and twice that backward, once where a weight is frozen.

  2 per weight of a GEMM, and what mixers multiply beside these (attention).
  """
  weights = site_tree.find_sites(transformer.site_params(cfg))
  flops = 0.0
  for name, p in weights.items():
    flops += (6.0 if p.trainable else 4.0) * params_lib.count({name: p}, cfg.dims)
  activations = sum(mixer.flops_per_token(cfg, length) for mixer in transformer.mixers(cfg))
  return flops + 3.0 * cfg.num_layers * activations


def peak_flops(device_kind: str, count: int = 1) -> float | None:
  """Dense BF16 peak of so many devices by JAX's name for them, None if unknown."""
  for name, peak in sorted(PEAK_FLOPS.items(), key=lambda item: -len(item[0])):
    if set(name.split()) <= set(re.split("[ -]", device_kind)):
      return None if peak is None else peak * count
  return None


def is_due(step: int, every: int) -> bool:
  """Whether something that happens every so many steps happens now; 0: never."""
  return every > 0 and step % every == 0
