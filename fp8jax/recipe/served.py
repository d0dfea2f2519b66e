"""Recipes as servers multiply: what checkpoints are quantized to, after training and in QAT.

A scheme of compressed-tensors is the forward product of a recipe, `lhs` the activations and `rhs`
the weight, and its name is that of llm-compressor's preset in lower case. Gradients pass straight
through the rounding (QAT: Krishnamoorthi 2018, arXiv:1806.08342 §4): the backward products multiply
what the forward one did, in the compute dtype. So one value is quantized after training, trained
with, generated from and exported. Export writes SERVED; no server reads MEASURED. Where a recipe of
library.py or papers.py has the name already, these end in "_ste", straight-through estimation.

Static activations have a scale per tensor from --job=calibrate. A weight alone is dequantized
before its product, which is then in 16 bits (W4A16). The first level of NVFP4's weights is joint:
q, k and v, and gate and up have one, as in the folder, so that what is trained is what is exported.
"""

import dataclasses

from fp8jax.formats import E2M1, E3M4_30, E4M3, E4M3_240, E5M2, INT4, INT8, Format, by_name
from fp8jax.recipe.gemm import Accumulate, Accumulation, Backward, Gemm, Recipe
from fp8jax.recipe.quant import WHOLE, Largest, LeastError, Quant, Scale, Static

_FAST, _PRECISE = Accumulation.FAST, Accumulation.PRECISE


def _served(name: str, w: Quant, x: Quant | None = None, how: Accumulate = _PRECISE) -> Recipe:
  return Recipe(name, Gemm(x, w, how), backward=Backward.DEQUANTIZED)


def channel(format: Format) -> Quant:
  """A scale per output channel, or per token."""
  return Quant(format, (1, WHOLE))


_FP8, _FP8_STATIC = Quant(E4M3), Quant(E4M3, source=Static())
_FP8_GROUP, _FP8_BLOCK = Quant(E4M3, (1, 128)), Quant(E4M3, (128, 128))
# Gaudi 2's four scales with back-off: 1/2 of the range of weights, 1/4 of activations.
_GAUDI2 = Quant(E4M3_240, scale=Scale.GAUDI2, clip=Largest(2.0))
_GAUDI2_X = Quant(E4M3_240, scale=Scale.GAUDI2, source=Static(2))
# GPTQ's and AWQ's groups: 128 inputs of an output channel.
_INT4, _INT4_64 = Quant(INT4, (1, 128)), Quant(INT4, (1, 64))
_MX8, _MX4 = (Quant(f, (1, 32), Scale.POW2) for f in (E4M3, E2M1))
_NV4_X = Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32)
_NV4 = dataclasses.replace(_NV4_X, is_joint=True)
# arXiv:2512.02010, of weights: the reader sees scales.
_NV4_46 = dataclasses.replace(_NV4, clip=LeastError((1.0, 1.5)))

SERVED = {
  r.name: r
  for r in (
    _served("fp8", _FP8, _FP8_STATIC, _FAST),
    _served("fp8_channel_static", channel(E4M3), _FP8_STATIC, _FAST),
    _served("fp8_dynamic", channel(E4M3), channel(E4M3), _FAST),
    _served("fp8_block", _FP8_BLOCK, _FP8_GROUP, 128),
    # For Gaudi 2, in E4M3 codes (arXiv:2503.09975).
    _served("fp8_240_dynamic", channel(E4M3_240), channel(E4M3_240)),
    _served("fp8_gaudi2", _GAUDI2, _GAUDI2_X),
    _served("w8a16", channel(INT8)),
    _served("int8", channel(INT8), channel(INT8)),
    _served("int8_static", channel(INT8), Quant(INT8, source=Static())),
    _served("w4a16", _INT4),
    _served("w4afp8", _INT4, channel(E4M3), 128),
    # Of widths that 128 does not divide, such as 576. vLLM 0.32 has no W4AFP8 of 64.
    _served("w4a16_g64", _INT4_64),
    _served("w4afp8_g64", _INT4_64, channel(E4M3), 64),
    _served("mxfp8_ste", _MX8, _MX8, 32),
    _served("mxfp4a16", _MX4),
    _served("mxfp4_ste", _MX4, _MX4, 32),
    _served("nvfp4a16", _NV4),
    _served("nvfp4_ste", _NV4, _NV4_X, 16),
    _served("nvfp4a16_4or6", _NV4_46),
    _served("nvfp4_ste_4or6", _NV4_46, _NV4_X, 16),
  )
}

# Formats of studies: E5M2 and E3M4 to 30 of arXiv:2309.14592; minifloats and integers of 3 to 7
# bits of arXiv:2311.12359, without infinities and NaN. Weights by channel, activations by token.
_MINIFLOATS = tuple(
  by_name(f"e{e}m{m}(inf=False, nan=False)" if f"e{e}m{m}" not in ("e2m1", "e2m3", "e3m2")
          else f"e{e}m{m}")
  for e, m in ((2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (4, 2), (3, 3), (2, 4))
)  # fmt: skip
_STUDIED = (E5M2, E3M4_30, *_MINIFLOATS, *(by_name(f"int{n}") for n in range(3, 8)))


def _plain(format: Format) -> str:
  return format.name.partition("(")[0]


MEASURED = {
  r.name: r
  for f in _STUDIED
  for r in (
    _served(f"{_plain(f)}_dynamic", channel(f), channel(f)),
    _served(f"{_plain(f)}_weights", channel(f)),
  )
}
# arXiv:2309.14592's best for text: precision where it is needed, range for activations.
MEASURED["e3m4_30_e4m3"] = _served("e3m4_30_e4m3", channel(E3M4_30), channel(E4M3))
