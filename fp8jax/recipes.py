"""Named recipes. Values only; each cites where it comes from."""

import dataclasses

from fp8jax.formats import E2M1, E4M3, E5M2
from fp8jax.recipe import (
  CURRENT,
  WHOLE,
  Delayed,
  Gemm,
  Hadamard,
  Quant,
  Recipe,
  Rounding,
  Save,
  Scale,
  Source,
  Static,
)

# Every operand in the compute dtype: bfloat16 on accelerators, float32 where the config says so.
BF16 = Recipe("bf16")


def _tensor(name: str, source: Source, gradients=E5M2) -> Recipe:
  act, grad = Quant(E4M3, source=source), Quant(gradients, source=source)
  return Recipe(name, Gemm(act, act), Gemm(grad, act), Gemm(act, grad))


# Per-tensor scales in the hybrid formats of Micikevicius et al. 2022 (arXiv:2209.05433) §3, E4M3
# forward and E5M2 gradients. Scales from the current amax: Transformer Engine's
# Float8CurrentScaling.
TENSOR_CURRENT = _tensor("tensor_current", CURRENT)
# Scales from past amaxes: Transformer Engine's DelayedScaling, with its defaults (the maximum of
# the last 1024 steps, no margin).
TENSOR_DELAYED = _tensor("tensor_delayed", Delayed(steps=1024, reduce="max", margin=0))
# Megatron-LM's overrides of them: the latest amax alone.
TENSOR_DELAYED_LATEST = _tensor("tensor_delayed_latest", Delayed(steps=1, reduce="latest"))
# E4M3 throughout, scales from a calibration, never changed: static scaling as µnit Scaling
# (arXiv:2502.05967) has it, with measured instead of derived ranges.
E4M3_STATIC = _tensor("e4m3_static", Static(), gradients=E4M3)


# One scale per row of each GEMM operand, floored to a power of two through its inverse: torchao's
# `rowwise` (torchao/float8/config.py).
_ROW, _ANY_ROW = Quant(E4M3, (1, WHOLE), Scale.POW2), Quant(E4M3, scale=Scale.POW2)
ROWWISE = Recipe("rowwise", Gemm(_ROW, _ROW), Gemm(_ROW, _ROW), Gemm(_ROW, _ROW))
# torchao's `rowwise_with_gw_hp`: the weight gradient in high precision, and one scale for the
# weight of the data gradient.
ROWWISE_GW_HP = Recipe("rowwise_gw_hp", Gemm(_ROW, _ROW), Gemm(_ROW, _ANY_ROW), Gemm())


def _block(name: str, scale: Scale, gradients=E4M3, save=Save.INPUTS) -> Recipe:
  row, block = Quant(E4M3, (1, 128), scale), Quant(E4M3, (128, 128), scale)
  grad = Quant(gradients, (1, 128), scale)
  return Recipe(
    name,
    fwd=Gemm(row, block, accumulate=128),
    dgrad=Gemm(grad, block, accumulate=128),
    # Both operands are quantised anew along tokens: 1x128 tiles do not survive a transpose.
    wgrad=Gemm(row, grad, accumulate=128),
    save=save,
  )


# Hybrid granularity: activations and gradients 1x128, weights 128x128, E4M3 throughout, partial
# sums promoted to float32 every 128 of K. DeepSeek-V3 (arXiv:2412.19437) §3.3; InfiR2
# (arXiv:2509.22536) trains with it end to end.
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
# The whole method of §4: gradients rounded stochastically, the weight gradient's operands rotated.
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


def _saving(recipe: Recipe) -> Recipe:
  return dataclasses.replace(recipe, name=f"{recipe.name}_saved", save=Save.QUANTIZED)


# The same products with only the weight gradient's FP8 operand kept between forward and backward,
# as Transformer Engine does for every recipe and DeepSeek-V3 (§3.3.3) for its linears.
BLOCK_128_SAVED, BLOCK_128_POW2_SAVED = _saving(BLOCK_128), _saving(BLOCK_128_POW2)
TENSOR_CURRENT_SAVED, TENSOR_DELAYED_SAVED = _saving(TENSOR_CURRENT), _saving(TENSOR_DELAYED)

RECIPES = {
  r.name: r
  for r in (
    BF16, TENSOR_CURRENT, TENSOR_DELAYED, TENSOR_DELAYED_LATEST, E4M3_STATIC, ROWWISE,
    ROWWISE_GW_HP, BLOCK_128, BLOCK_128_POW2, BLOCK_128_HYBRID, MXFP8, NVFP4, NVFP4_SR_RHT,
    BLOCK_128_SAVED, BLOCK_128_POW2_SAVED, TENSOR_CURRENT_SAVED, TENSOR_DELAYED_SAVED,
  )
}  # fmt: skip
