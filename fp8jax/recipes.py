"""Named recipes. Values only; each cites where it comes from."""

from fp8jax.formats import E4M3, E5M2
from fp8jax.recipe import Gemm, Quant, Recipe, Scale

# Every operand in the compute dtype: bfloat16 on accelerators, float32 where the config says so.
BF16 = Recipe("bf16")

# Per-tensor scales from the current amax, E4M3 forward and E5M2 gradients: the hybrid format of
# Micikevicius et al. 2022 (arXiv:2209.05433) §3 with Transformer Engine's Float8CurrentScaling.
_TENSOR, _TENSOR_GRAD = Quant(E4M3), Quant(E5M2)
TENSOR_CURRENT = Recipe(
  "tensor_current",
  fwd=Gemm(_TENSOR, _TENSOR),
  dgrad=Gemm(_TENSOR_GRAD, _TENSOR),
  wgrad=Gemm(_TENSOR, _TENSOR_GRAD),
)


def _block(name: str, scale: Scale) -> Recipe:
  row = Quant(E4M3, (1, 128), scale)
  block = Quant(E4M3, (128, 128), scale)
  return Recipe(
    name,
    fwd=Gemm(row, block, accumulate=128),
    dgrad=Gemm(row, block, accumulate=128),
    # Both operands are quantised anew along tokens: 1x128 tiles do not survive a transpose.
    wgrad=Gemm(row, row, accumulate=128),
  )


# Hybrid granularity: activations and gradients 1x128, weights 128x128, E4M3 throughout, partial
# sums promoted to float32 every 128 of K. DeepSeek-V3 (arXiv:2412.19437) §3.3; InfiR2
# (arXiv:2509.22536) trains with it end to end.
BLOCK_128 = _block("block_128", Scale.F32)
# The same with scales rounded up to a power of two: what InfiR2's CPT and SFT scripts run
# (Transformer Engine's default), and what UE8M0 hardware can hold.
BLOCK_128_POW2 = _block("block_128_pow2", Scale.POW2)

RECIPES = {r.name: r for r in (BF16, TENSOR_CURRENT, BLOCK_128, BLOCK_128_POW2)}
