"""Recipes of papers, for comparison: what each one multiplies, as values.

`library.py` has the recipes to train with. On a GPU "auto" takes those of these that its FP8 GEMMs
multiply exactly (E2M1 under a scale per row or tensor, as E4M3) and refuses the others, which
`kernels.matmul="reference"` emulates. Each cites its source and says where the paper and its code
differ. A recipe's comment names the parts that a configuration adds, such as layers in 16 bits.
"""

import dataclasses
from collections.abc import Sequence

from fp8jax.formats import (
  E2M1,
  E3M2,
  E4M3,
  E4M3_240,
  E5M2,
  E7M7,
  E8M3,
  E8M4,
  E8M5,
  E8M6,
  INT8,
  LNS8,
  Format,
)  # fmt: skip
from fp8jax.recipe import library
from fp8jax.recipe.estimators import Differentiable, SlopeAlone, TrustMask
from fp8jax.recipe.gemm import Accumulation, Backward, Gain, Gemm, Recipe
from fp8jax.recipe.quant import (
  WHOLE,
  Clamp,
  Delayed,
  Hadamard,
  Largest,
  LeastError,
  Quant,
  Rms,
  Rounding,
  Scale,
)

_PRECISE = Accumulation.PRECISE


def _named(recipe: Recipe, name: str, **changes) -> Recipe:
  return dataclasses.replace(recipe, name=name, **changes)


def _throughout(name: str, q: Quant) -> Recipe:
  """One Quant for all operands."""
  return Recipe(name, Gemm(q, q), Gemm(q, q), Gemm(q, q))


# --- FP4 training (arXiv:2501.17116) -------------------------------------------------------------
# A scale per token and per output channel; the backward pass multiplies the forward operands again,
# in FP8 by gradients in E5M2 (MS-AMP's code; the paper does not say). The paper clamps at quantiles
# of the tensor, its code of each token, as here. Compensation is the paper's; its code has none.
_W4 = Quant(E2M1, (1, WHOLE))
_G8, _B8 = Quant(E5M2), Quant(E4M3)


def _fp4(name: str, x: Quant, compensates: bool = False, estimate_w=None) -> Recipe:
  return Recipe(
    name,
    Gemm(x, _W4, compensates=compensates),
    Gemm(_G8, _B8),
    Gemm(_B8, _G8),
    Backward.DEQUANTIZED,
    estimate_w,
  )


_CLAMPED = dataclasses.replace(_W4, clip=Clamp(0.99))
_FP4 = (
  _fp4("fp4_w4a8", Quant(E4M3, (1, WHOLE))),
  _fp4("fp4_w4a4", _W4),
  _fp4("fp4_dge", _W4, estimate_w=Differentiable()),
  _fp4("fp4_occ", _CLAMPED, compensates=True),
  _fp4("fp4", _CLAMPED, compensates=True, estimate_w=Differentiable()),
  # The control of DGE: its factor alone, every product in the compute dtype.
  Recipe("bf16_dge", estimate_w=SlopeAlone()),
)

# --- MXFP4 and Quartet (arXiv:2505.14669, version 4) ---------------------------------------------
_MX = Quant(E2M1, (1, 32), Scale.FLOOR)
_MX_GEMM = Gemm(_MX, _MX, 32)
# OCP MX v1.0's own rule for every operand.
MXFP4 = Recipe("mxfp4", _MX_GEMM, _MX_GEMM, _MX_GEMM)
# Forward: rotated by the plain H32, the scale by the standard deviation. The floor of a logarithm
# in its code clips at 1.5 deviations and errs twice as much as its own table says (that is in
# experiments/2025_quartet); EVEN is within 2 % of the table. Backward, version 4 of the paper: to
# the nearest (its first versions and its code's main branch round stochastically), after fresh
# signs, from what the forward pass multiplied; masks in rotated space.
_QUEST = Quant(
  E2M1, (1, 32), Scale.EVEN, clip=Rms(2.92247856, is_centred=True), transform=Hadamard(32, "none")
)
_QUARTET_BACK = Quant(E2M1, (1, 32), Scale.FLOOR_4_3, transform=Hadamard(32, "fresh"))
_BACK = Gemm(_QUARTET_BACK, _QUARTET_BACK, 32)
QUARTET = Recipe(
  "quartet", Gemm(_QUEST, _QUEST, 32), _BACK, _BACK, Backward.DEQUANTIZED, TrustMask(), TrustMask()
)

# --- NVFP4 pre-training (arXiv:2509.25149) and after ---------------------------------------------
# `library.NVFP4_SR_RHT` is the method but for the layers in BF16 (precision.last_bf16). Without one
# of its parts each:
_FULL, _PLAIN = library.NVFP4_SR_RHT, library.NVFP4
_SR, _ROTATED = _FULL.dgrad.lhs, _FULL.wgrad.lhs


_NVFP4_PARTS = (
  _named(_FULL, "nvfp4_rht", dgrad=_PLAIN.dgrad, wgrad=Gemm(_ROTATED, _ROTATED, 16)),
  _named(_FULL, "nvfp4_sr", wgrad=Gemm(_PLAIN.fwd.lhs, _SR, 16)),
  _named(
    _FULL,
    "nvfp4_1d",
    fwd=Gemm(_PLAIN.fwd.lhs, _PLAIN.fwd.lhs, 16),
    dgrad=Gemm(_SR, _PLAIN.fwd.lhs, 16),
  ),
  # §4.5's late switch: the forward pass in 16 bits for the last part of a run (precision.schedule).
  _named(_FULL, "nvfp4_backward", fwd=Gemm()),
)


def _four_or_six(q: Quant) -> Quant:
  is_nearest = q.rounding is Rounding.NEAREST and q.transform is None
  return dataclasses.replace(q, clip=LeastError((1.0, 1.5))) if is_nearest else q


# Four over six (arXiv:2512.02010) wherever elements are rounded to the nearest and not rotated
# (Transformer Engine does not combine it with rotations either).
NVFP4_46 = _named(_FULL.map_quants(lambda q, _: _four_or_six(q)), "nvfp4_4or6")
# Quartet II (arXiv:2601.22813): both backward products of operands rotated afresh, in blocks of 64
# (the paper: 128), which small models have; elements to the nearest and scales without bias
# (MS-EDEN), against stochastic elements with room for 17/16.
_EDEN = Quant(
  E2M1, (1, 16), Scale.E4M3_OVER_F32, rounding=Rounding.EDEN, transform=Hadamard(64, "fresh")
)
_ROOM = dataclasses.replace(_EDEN, rounding=Rounding.STOCHASTIC, clip=Largest(17 / 16))
_QUARTET_II = tuple(
  _named(_PLAIN, name, dgrad=Gemm(q, q, 16), wgrad=Gemm(q, q, 16))
  for name, q in (("nvfp4_eden", _EDEN), ("nvfp4_sr_room", _ROOM))
)

# --- DeepSeek-V3 (arXiv:2412.19437) --------------------------------------------------------------
# Appendix B.2's negative result: gradients in 128x128 tiles, too.
_BLOCK = library.BLOCK_128.fwd.rhs
BLOCK_128_G = Recipe(
  "block_128_g128",
  library.BLOCK_128.fwd,
  Gemm(_BLOCK, _BLOCK, 128),
  Gemm(library.BLOCK_128.wgrad.lhs, _BLOCK, 128),
)
# Its own weight gradient: activations are kept in FP8 and quantized again along tokens.
BLOCK_128_REQUANTIZED = _named(
  library.BLOCK_128, "block_128_requantized", backward=Backward.DEQUANTIZED
)

# --- Unit scaling (arXiv:2303.11257) and µnit scaling (arXiv:2502.05967) -------------------------
# Scales of 1 and constant factors. Three exponents are in use for the weight gradient's tokens (-1
# in the first paper's code, -3/4, -1/2): -1/2 makes its variance 1.
_ONE, _ONE_G = Quant(E4M3, scale=Scale.ONE), Quant(E5M2, scale=Scale.ONE)


def _unit(name: str, gains: Sequence[Gain | None], x: Quant | None, g: Quant | None) -> Recipe:
  fwd, dgrad, wgrad = gains
  return Recipe(name, Gemm(x, x, gain=fwd), Gemm(g, x, gain=dgrad), Gemm(x, g, gain=wgrad))


_QUARTER, _HALF = Gain(-0.25, -0.25), Gain(fan_in=-0.5)
_UNIT_GAINS = (_QUARTER, _QUARTER, Gain(tokens=-0.5))
_UNIT = (
  _unit("unit_scaling", _UNIT_GAINS, _ONE, _ONE_G),
  _unit("unit_scaling_wide", _UNIT_GAINS, None, None),
  _unit("munit_scaling", (_HALF,) * 3, _ONE, _ONE_G),
  _unit("munit_scaling_wide", (_HALF,) * 3, None, None),
  # Of heads, in 16 bits. The model has the factors of unit scaling's gradients (unit_scaling.py).
  _unit("munit_head", (Gain(fan_in=-1.0),) * 3, None, None),
  _unit("unit_head", (_HALF, None, None), None, None),
  # Plain products in FP8 without scales, which both are for.
  _unit("fp8_unscaled", (None,) * 3, _ONE, _ONE_G),
)

# --- HALO (arXiv:2501.02625) ---------------------------------------------------------------------
# One scale per tensor. Level 0 rotates nothing, 1 the features of the forward product, 2 also the
# tokens of the data gradient. The paper rotates whole axes (here blocks of 64: 576 and 1536 are
# multiples) and draws no signs. FP8 products accumulate FAST. "_hq": the data gradient multiplies
# the forward product's codes and is rotated back along the features, as under the paper's HQ-FSDP
# and PEFT, so that one copy of a weight in codes is enough (model.lora.base).
_H64 = Hadamard(64, "none")


def _halo(name: str, format: Format, level: int, is_one: bool = False) -> Recipe:
  plain, how = Quant(format), Accumulation.FAST if format is E4M3 else _PRECISE
  rotated = dataclasses.replace(plain, transform=_H64 if level else None)
  rows = (_H64 if level == 2 else None, _H64 if is_one else None)
  return Recipe(
    name, Gemm(rotated, rotated, how), Gemm(plain, plain, how, rows), Gemm(plain, plain, how)
  )


_HALO = (
  _halo("halo_fp8_0", E4M3, 0),
  _halo("halo_int8_0", INT8, 0),
  _halo("halo_int8_2", INT8, 2),
  _halo("halo_fp6_1", E3M2, 1),
  _halo("halo_fp4_2", E2M1, 2),
  _halo("halo_int8_2_hq", INT8, 2, is_one=True),
  _halo("halo_fp6_1_hq", E3M2, 1, is_one=True),
)

# --- trillion-token training (arXiv:2409.12517) --------------------------------------------------
# As its code multiplies: E4M3 to 240 forward, E5M2 backward, gradients rounded stochastically, and
# powers of two from the amax of the step before, without a margin.
_STEP = Delayed(steps=1)
_T4, _T5 = (Quant(f, scale=Scale.POW2, source=_STEP) for f in (E4M3_240, E5M2))
_TG = dataclasses.replace(_T5, rounding=Rounding.STOCHASTIC)
TRILLION = Recipe("trillion_token", Gemm(_T4, _T4), Gemm(_TG, _T5), Gemm(_T5, _TG))

# --- masked BF16 (arXiv:2405.18710) --------------------------------------------------------------
# Inputs of every product with their last bits cut off, no scales; E7M7 by saturation instead.
_MASKS = tuple(
  _throughout(f"mask_{f.name}", Quant(f, scale=Scale.ONE, rounding=how))
  for f, how in (
    *((f, Rounding.TOWARD_ZERO) for f in (E8M3, E8M4, E8M5, E8M6)), (E7M7, Rounding.NEAREST)
  )
)  # fmt: skip

# --- logarithmic numbers (arXiv:2106.13914) ------------------------------------------------------
# 8 bits, 8 numbers per octave, a scale per row of each operand.
_LNS = Quant(LNS8, (1, WHOLE))
LNS = _throughout("lns8", _LNS)

PAPERS = {
  r.name: r
  for r in (
    *_FP4,
    MXFP4,
    QUARTET,
    *_NVFP4_PARTS,
    NVFP4_46,
    *_QUARTET_II,
    BLOCK_128_G,
    BLOCK_128_REQUANTIZED,
    *_UNIT,
    *_HALO,
    TRILLION,
    *_MASKS,
    LNS,
  )
}
