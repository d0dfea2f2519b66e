"""Weights to train from that round to given codes: QAT after GPTQ, AWQ or a folder's codes.

A recipe makes its scales from the weights, so that the dequantized codes w = data * scale give the
codes back where w's own scale is the given one. For a scale amax / max of a tile that is so where
the largest code of the tile is the format's largest (or all are 0), and no weights at all give
codes with a smaller one: whatever w is, its largest element is divided by amax / max and becomes
the code max. A power of two that rounds up is the scale of every amax above max / 2 and up to max
times it: largest codes from max / 2 can be had. That of max / 2 itself takes an element one float32
ulp larger than what it stands for. Below it no weights will do, either.

Of such a tile one element can be raised to the format's largest: the scale is then the given one,
and this code alone is another. Each tile takes the raised element or its plain values, whichever
errs less. Codes beyond the format's largest, -8 of INT4 as others write it, become the largest.

Of two levels the first has the same condition: the given one comes back where a tile has both the
largest E4M3 number and the largest code, in one of the matrices that have it in common. The caller
says in which: its largest element is made the amax whose scale is the given one, to the bit. It
then differs from what its code stands for by an ulp or two, or in another tile raises that.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.quantization import quantize, scaled_matrix
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.quant import Quant, Scale


class StartValues(NamedTuple):
  """Weights for given codes.

  Attributes:
    weights: float32 [rows, contraction], the codes' values but for what the top says.
    differing: float32 scalar, the share of elements whose code is another at the first step.
    error: float32 scalar, the norm of what the first step multiplies less the codes' values, over
      the norm of these; 0 where other codes under another scale are the same values.
  """

  weights: jax.Array
  differing: jax.Array
  error: jax.Array


def first_level_amax(scale: float, quant: Quant) -> np.float32:
  """The amax of a tensor whose first of two levels is `scale`, or next to it where none is.

  Every scale that was made as 1 / (2688 / amax) has one, as in compressed-tensors; of those made as
  amax / 2688, ModelOpt's, 83 % have, and the others come back one ulp beside.
  """
  one = np.float32(scale) / np.float32(quantize.tensor_scale(1.0, quant))
  ulps = np.array([0, -1, 1, -2, 2, -3, 3, -4, 4], np.int32)
  near = (np.float32(one).view(np.int32) + ulps).view(np.float32)
  missed = np.abs(np.asarray(quantize.tensor_scale(near, quant)) - np.float32(scale))
  return near[np.argmin(missed)]


def start_values(
  codes: ScaledMatrix, quant: Quant, tensor_amax=None, is_largest=False
) -> StartValues:
  """The weights that a recipe rounds to the codes, where any are, and how far they miss elsewhere.

  Args:
    codes: [rows, contraction], finite.
    quant: the recipe's, of its weight.
    tensor_amax: float32 scalar that the first of two levels is made from, at least the largest
      value but for an ulp or two, which go; None: the matrix's own.
    is_largest: whether this matrix has the element of that magnitude.

  Raises:
    ValueError: the codes have other tiles than the recipe, or it rounds at random.
  """
  if codes.tile != quant.tile or quant.rounds_randomly or quant.transform:
    raise ValueError(
      f"codes with a scale per {codes.tile} are no weights of {quant}: expected its tile, rounding "
      "to nearest and no rotation; train with the recipe that the codes were made for"
    )
  values, own = codes.dequantize(), codes.in_one_piece().data.astype(jnp.float32)
  data = jnp.clip(own, -quant.format.max, quant.format.max)
  scale = scaled_matrix.per_element(codes.scale, codes.tile, codes.shape)
  plain = data * scale
  if quant.scale is Scale.POW2:
    away = jnp.nextafter(plain, jnp.copysign(jnp.inf, plain))
    plain = jnp.where(jnp.abs(data) == quant.format.max / 2, away, plain)
  raised = _with_largest(data, quant) * scale

  def again(weights):
    return quantize.quantize(weights, quant, tensor_amax=tensor_amax)

  def errors(weights):
    missed = again(weights).dequantize() - values
    return jnp.sum(quantize.tiled(jnp.square(missed), quant), axis=(1, 3))

  is_raised = scaled_matrix.per_element(errors(raised) < errors(plain), codes.tile, codes.shape)
  weights = jnp.where(is_raised, raised, plain)
  if tensor_amax is not None:
    flat = jnp.clip(weights, -tensor_amax, tensor_amax).ravel()
    at = jnp.argmax(jnp.abs(flat))
    raised = jnp.copysign(jnp.float32(tensor_amax), flat[at])
    weights = jnp.where(is_largest, flat.at[at].set(raised), flat).reshape(weights.shape)
  made = again(weights)
  differing = jnp.mean(made.data.astype(jnp.float32) != own, dtype=jnp.float32)
  norm = jnp.maximum(jnp.linalg.norm(values), jnp.finfo(jnp.float32).tiny)
  return StartValues(weights, differing, jnp.linalg.norm(made.dequantize() - values) / norm)


def _with_largest(data, quant: Quant):
  """Codes [rows, contraction] whose first largest of every tile is the format's largest."""
  tiles = quantize.tiled(data, quant)
  flat = jnp.swapaxes(tiles, 1, 2)  # [tiles of rows, tiles, rows, columns]
  lists = flat.reshape(*flat.shape[:2], -1)
  is_first = jnp.arange(lists.shape[-1]) == jnp.argmax(jnp.abs(lists), axis=-1)[..., None]
  largest = jnp.copysign(jnp.float32(quant.format.max), lists)
  lists = jnp.where(is_first & (lists != 0), largest, lists)
  return quantize.as_lies(jnp.swapaxes(lists.reshape(flat.shape), 1, 2), data)
