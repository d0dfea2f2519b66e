"""Named recipes. Values only; each cites its source.

Accumulation on Hopper follows the source, too. Transformer Engine for PyTorch, Flax's
Fp8DotGeneral, torchao and MS-AMP accumulate the forward product FAST and both gradients PRECISE.
Transformer Engine for JAX accumulates all three FAST unless
NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION=1; here `tensor_delayed(accumulate=fast)` does.
"""

import dataclasses

from fp8jax.formats import E2M1, E4M3, E5M2
from fp8jax.recipe.gemm import Accumulation, Gemm, Recipe
from fp8jax.recipe.quant import (
  CURRENT,
  WHOLE,
  Delayed,
  Hadamard,
  Quant,
  Rounding,
  Scale,
  Source,
  Static,
)

# Every operand in the compute dtype: bfloat16 on accelerators, float32 where the config says so.
BF16 = Recipe("bf16")


_FAST, _PRECISE = Accumulation.FAST, Accumulation.PRECISE


def _hybrid(name: str, x: Quant, w: Quant, g: Quant) -> Recipe:
  """A recipe of three Quants, one for every use of a tensor, that accumulates FAST forward."""
  return Recipe(name, Gemm(x, w, _FAST), Gemm(g, w, _PRECISE), Gemm(x, g, _PRECISE))


def _tensor(name: str, source: Source, gradients=E5M2) -> Recipe:
  act = Quant(E4M3, source=source)
  return _hybrid(name, act, act, Quant(gradients, source=source))


# Per-tensor scales in the hybrid formats of Micikevicius et al. 2022 (arXiv:2209.05433) §3, E4M3
# forward and E5M2 gradients. Scales from the current amax: Transformer Engine's
# Float8CurrentScaling.
TENSOR_CURRENT = _tensor("tensor_current", CURRENT)
# The same with activations in E5M2, 2^-16 to 57344 instead of E4M3's 2^-9 to 448, for layers of
# wide activations. cuBLASLt multiplies no E5M2 by E5M2, so weights stay E4M3, and the weight
# gradient is in high precision, as in `rowwise_gw_hp`.
_E4M3, _E5M2 = Quant(E4M3), Quant(E5M2)
TENSOR_CURRENT_E5M2 = Recipe(
  "tensor_current_e5m2", Gemm(_E5M2, _E4M3, _FAST), Gemm(_E5M2, _E4M3, _PRECISE), Gemm()
)
# Scales from past amaxes: Transformer Engine's DelayedScaling, with its defaults (the maximum of
# the last 1024 steps, no margin).
TENSOR_DELAYED = _tensor("tensor_delayed", Delayed(steps=1024, reduce="max", margin=0))
# Megatron-LM's overrides of them: the latest amax alone.
TENSOR_DELAYED_LATEST = _tensor("tensor_delayed_latest", Delayed(steps=1, reduce="latest"))
# E4M3 throughout, scales from a calibration, never changed. FP8 checkpoints for inference have such
# scales; for training this recipe follows no paper and is a baseline for delayed scales. It
# accumulates like the other recipes with a scale per tensor: the weight gradient has the longest
# sums, over tokens. µnit Scaling (arXiv:2502.05967) is another method: scales of 1, E5M2 gradients,
# and products multiplied by constants instead of a calibration.
E4M3_STATIC = _tensor("e4m3_static", Static(), gradients=E4M3)
# FP8-LM (arXiv:2310.18313) as its code, MS-AMP, multiplies: activations and gradients scaled by the
# largest amax of 16 steps, weights by their current one, all by powers of two.
_FP8LM_X, _FP8LM_G = (Quant(f, scale=Scale.POW2, source=Delayed(steps=16)) for f in (E4M3, E5M2))
FP8LM = _hybrid("fp8lm", _FP8LM_X, Quant(E4M3, scale=Scale.POW2), _FP8LM_G)


# One scale per row of each GEMM operand, floored to a power of two through its inverse: torchao's
# `rowwise` (torchao/float8/config.py). Its predecessor there, `all_axiswise`, had float32 scales
# and accumulated all three products FAST, as `rowwise(accumulate=fast)` does.
_ROW, _ANY_ROW = Quant(E4M3, (1, WHOLE), Scale.POW2), Quant(E4M3, scale=Scale.POW2)
ROWWISE = _hybrid("rowwise", _ROW, _ROW, _ROW)
# torchao's `rowwise_with_gw_hp`: the weight gradient in high precision, and one scale for the
# weight of the data gradient.
ROWWISE_GW_HP = Recipe(
  "rowwise_gw_hp", Gemm(_ROW, _ROW, _FAST), Gemm(_ROW, _ANY_ROW, _PRECISE), Gemm()
)


def _block(name: str, scale: Scale, gradients=E4M3) -> Recipe:
  row, block = Quant(E4M3, (1, 128), scale), Quant(E4M3, (128, 128), scale)
  grad = Quant(gradients, (1, 128), scale)
  return Recipe(
    name,
    fwd=Gemm(row, block, accumulate=128),
    dgrad=Gemm(grad, block, accumulate=128),
    # Both operands are requantised along tokens: 1x128 tiles do not survive a transpose.
    wgrad=Gemm(row, grad, accumulate=128),
  )


# Hybrid granularity: activations and gradients 1x128, weights 128x128, E4M3 throughout, partial
# sums promoted to float32 every 128 of K: the tiles of DeepSeek-V3 (arXiv:2412.19437) §3.3, as
# Transformer Engine's Float8BlockScaling has them and InfiR2 (arXiv:2509.22536) trains with them.
# All operands are made from the unquantized tensors. DeepSeek-V3 differs: it keeps activations in
# FP8 and quantizes these again along tokens for the weight gradient; the inputs of attention's
# output projection and of the MoE's up-projection, and the gradient into its down-projection, have
# power-of-two scales there.
BLOCK_128 = _block("block_128", Scale.F32)
# The same with scales rounded up to a power of two: what InfiR2's CPT and SFT scripts run
# (Transformer Engine's default), and what UE8M0 hardware can hold.
BLOCK_128_POW2 = _block("block_128_pow2", Scale.POW2)
# The same with E5M2 gradients, which tracked BF16 more closely in TransformerEngine issue 2754.
BLOCK_128_HYBRID = _block("block_128_hybrid", Scale.F32, gradients=E5M2)

# OCP MX blocks of 32, E4M3 for every tensor, scales rounded up: MXFP8 as Mishra et al. 2025
# (arXiv:2506.08027) train it. The specification's own rule (round down) can overflow.
_MX = Quant(E4M3, (1, 32), Scale.POW2)
_MX_GEMM = Gemm(_MX, _MX, accumulate=32)
MXFP8 = Recipe("mxfp8", _MX_GEMM, _MX_GEMM, _MX_GEMM)

# Blocks of 16 with two-level scales: formats and tiles of NVFP4 pre-training (arXiv:2509.25149
# §3), emulated. Rounding to nearest and no rotation; see NVFP4_SR_RHT.
_FP4 = Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32)
_FP4_WEIGHT = Quant(E2M1, (16, 16), Scale.E4M3_OVER_F32)
NVFP4 = Recipe(
  "nvfp4",
  fwd=Gemm(_FP4, _FP4_WEIGHT, accumulate=16),
  dgrad=Gemm(_FP4, _FP4_WEIGHT, accumulate=16),
  wgrad=Gemm(_FP4, _FP4, accumulate=16),
)
# With §4's stochastic rounding of gradients and random Hadamard transform of the weight gradient's
# operands. The whole method also leaves about 15 % of the linears in BF16, mostly the last ones;
# with all in FP4 the paper's runs diverge. Say which by precision.last_bf16: 4 for SmolLM2's 30
# layers.
_FP4_SR = dataclasses.replace(_FP4, rounding=Rounding.STOCHASTIC)
NVFP4_SR_RHT = Recipe(
  "nvfp4_sr_rht",
  fwd=NVFP4.fwd,
  dgrad=Gemm(_FP4_SR, _FP4_WEIGHT, accumulate=16),
  wgrad=Gemm(
    dataclasses.replace(_FP4, transform=Hadamard(16)),
    dataclasses.replace(_FP4_SR, transform=Hadamard(16)),
    accumulate=16,
  ),
)


RECIPES = {
  r.name: r
  for r in (
    BF16, TENSOR_CURRENT, TENSOR_CURRENT_E5M2, TENSOR_DELAYED, TENSOR_DELAYED_LATEST, E4M3_STATIC,
    FP8LM, ROWWISE, ROWWISE_GW_HP, BLOCK_128, BLOCK_128_POW2, BLOCK_128_HYBRID, MXFP8, NVFP4,
    NVFP4_SR_RHT,
  )
}  # fmt: skip
