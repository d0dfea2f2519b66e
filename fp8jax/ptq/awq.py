"""AWQ: scales of input channels that leave less error in the outputs, and amaxes that clip.

Source: Lin et al. 2023 (arXiv:2306.00978) §3.2: a channel that is loud on average has its weights
multiplied by s, and its activations divided, so that rounding costs it less. s = mean|x|^ratio,
divided by sqrt(largest * smallest); the ratio is searched. §3.2 and its code search the clipping
of every group after that.

Here errors come from the Gram matrix of the inputs, so that a candidate costs one product.
N is produced, K is contracted.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.ptq.moments import Moments, product
from fp8jax.quantization import quantize
from fp8jax.quantization.scaled_matrix import per_element
from fp8jax.recipe.quant import WHOLE, Quant


class Choice(NamedTuple):
  """Result of a search.

  Attributes:
    scale_K: float32; weights times it, inputs divided by it.
    ratio: float32, the exponent that makes it.
    losses: float32 [grid], squared errors of the outputs for the ratios 0, 1 / grid, ...; the first
      is that of no scales.
  """

  scale_K: jax.Array
  ratio: jax.Array
  losses: jax.Array


def scales(mean_K, ratio):
  """float32 [K]: mean^ratio over sqrt(largest * smallest); 1 where the mean is 0 or not finite."""
  is_live = (mean_K > 0) & (mean_K < jnp.inf)
  raised_K = jnp.where(is_live, jnp.where(is_live, mean_K, 1.0) ** ratio, 1.0)
  most = jnp.max(jnp.where(is_live, raised_K, 0.0), initial=np.float32(2.0**-126))
  least = jnp.min(jnp.where(is_live, raised_K, jnp.inf), initial=np.float32(2.0**127))
  return jnp.where(is_live, raised_K / (jnp.sqrt(most) * jnp.sqrt(least)), 1.0)


@functools.partial(jax.jit, static_argnames=("quants", "grid"))
def search(
  ws: Sequence[jax.Array], moments: Moments, quants: tuple[Quant, ...], grid: int = 20,
  mean_K=None,
) -> Choice:  # fmt: skip
  """The scales for the weights of several layers that share their input.

  Args:
    ws: float32 [N, K] each.
    grid: ratios that are tried, from 0 to below 1; of equal losses the smaller one wins.
    mean_K: in the place of mean |x|, where channels must have equal scales (fold.pooled).
  """
  mean_K = moments.abs_sum_K / moments.count if mean_K is None else mean_K

  def loss(ratio):
    scale_K = scales(mean_K, ratio)
    total = jnp.float32(0)
    for w_NK, quant in zip(ws, quants, strict=True):
      back_NK = quantize.quantize(w_NK * scale_K, quant).dequantize() / scale_K
      total += jnp.sum(moments.errors(back_NK - w_NK))
    return total

  ratios = jnp.arange(grid, dtype=jnp.float32) / grid
  losses = jax.lax.map(loss, ratios)
  ratio = ratios[jnp.argmin(losses)]
  return Choice(scales(mean_K, ratio), ratio, losses)


@functools.partial(jax.jit, static_argnames=("quant", "grid"))
def clipped(w_NK, moments: Moments, quant: Quant, grid: int = 20):
  """float32 [N, K]: the weight within the share of its tiles' amaxes that leaves the least error.

  A tile's error counts its own channels alone. Shares are 1, 1 - 1 / grid, ..., above one half.

  Args:
    w_NK: float32.
    quant: of the weight; with two levels the tensor's amax shrinks with those of the tiles.
    grid: steps of the whole amax.
  """
  rows, width = w_NK.shape
  group = width if quant.tile[1] == WHOLE else quant.tile[1]
  pad = -width % group
  count = (width + pad) // group
  # Of every tile of K the columns and rows of the Gram matrix that belong to it.
  blocks = jnp.pad(moments.gram_KK, ((0, pad), (0, pad))).reshape(count, group, count, group)
  blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=0, axis2=2), -1, 0)
  amax = _per_tile(jnp.abs(w_NK), quant, jnp.max)

  def error(share):
    limit_NK = per_element(amax * share, quant.tile, w_NK.shape)
    back_NK = quantize.quantize(jnp.clip(w_NK, -limit_NK, limit_NK), quant).dequantize()
    parts = jnp.pad(back_NK - w_NK, ((0, 0), (0, pad))).reshape(rows, -1, group).swapaxes(0, 1)
    of_rows = jnp.sum(jax.vmap(product)(parts, blocks) * parts, axis=-1).T
    return _per_tile(of_rows, Quant(quant.format, (quant.tile[0], 1)), jnp.sum)

  shares = 1 - jnp.arange(grid // 2, dtype=jnp.float32) / grid
  best = shares[jnp.argmin(jax.lax.map(error, shares), axis=0)]
  limit_NK = per_element(amax * best, quant.tile, w_NK.shape)
  return jnp.clip(w_NK, -limit_NK, limit_NK)


def _per_tile(x, quant: Quant, reduce):
  """[tiles of rows, tiles of columns]: x, not negative, reduced over every tile."""
  return reduce(quantize.tiled(x, quant), axis=(1, 3))
