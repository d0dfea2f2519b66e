"""Weights to train from that round to given codes: QAT after GPTQ, AWQ or a folder's codes.

A recipe makes its scales from the weights, so that the dequantized codes w = data * scale give the
codes back where w's own scale is the given one. For a scale amax / max of a tile that is so where
the largest code of the tile is the format's largest (or all are 0), and no weights at all give
codes with a smaller one: whatever w is, its largest element is divided by amax / max and becomes
the code max. A power of two that rounds up is the scale of every amax above max / 2 and up to max
times it: largest codes from max / 2 can be had. That of max / 2 itself takes an element one float32
ulp larger than what it stands for. Below it no weights will do, either.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fp8jax.quantization import quantize
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.quant import Quant, Scale


class StartValues(NamedTuple):
  """Weights for given codes.

  Attributes:
    weights: float32 [rows, contraction], the codes' values (or one ulp larger, see the top).
    differing: float32 scalar, the share of elements whose code is another at the first step.
    error: float32 scalar, the norm of what the first step multiplies less the codes' values, over
      the norm of these; 0 where other codes under another scale are the same values.
  """

  weights: jax.Array
  differing: jax.Array
  error: jax.Array


def start_values(codes: ScaledMatrix, quant: Quant) -> StartValues:
  """The weights that a recipe rounds to the codes, where any are, and how far they miss elsewhere.

  Args:
    codes: [rows, contraction], finite.
    quant: the recipe's, of its weight.

  Raises:
    ValueError: the codes have other tiles than the recipe, or it rounds at random.
  """
  if codes.tile != quant.tile or quant.rounds_randomly or quant.transform:
    raise ValueError(
      f"codes with a scale per {codes.tile} are no weights of {quant}: expected its tile, rounding "
      "to nearest and no rotation; train with the recipe that the codes were made for"
    )
  values, data = codes.dequantize(), codes.in_one_piece().data.astype(jnp.float32)
  weights = values
  if quant.scale is Scale.POW2:
    away = jnp.nextafter(values, jnp.copysign(jnp.inf, values))
    weights = jnp.where(jnp.abs(data) == quant.format.max / 2, away, values)
  again = quantize.quantize(weights, quant)
  differing = jnp.mean(again.data.astype(jnp.float32) != data, dtype=jnp.float32)
  norm = jnp.maximum(jnp.linalg.norm(values), jnp.finfo(jnp.float32).tiny)
  return StartValues(weights, differing, jnp.linalg.norm(again.dequantize() - values) / norm)
