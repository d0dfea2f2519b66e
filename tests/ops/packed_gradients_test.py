"""Packed samples against the same samples one by one, in the three products of block_128.

Tiles of x and g for the forward product and the data gradient lie within a token: packing changes
no bit. Those of the weight gradient are 128 tokens of one column, so that documents share scales.
E4M3 rounds v in a tile of scale s to within max(2^-4 |v|, 2^-10 s): half a step of a normal or of a
subnormal number. Each element of dw = sum_t x_t g_t is then off by at most

  sum_t |x_t| e(g_t) + |g_t| e(x_t) + e(x_t) e(g_t)

whatever the tiles, and two packings differ by at most the sum of both bounds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.dots import dot

LENGTHS = (72, 56)


def _errors(v, lengths):
  """Bound of the rounding error of every element [T, columns], tiles of 128 x 1 of each sample."""
  found, start = np.zeros(v.shape), 0
  for length in lengths:
    for first in range(start, start + length, 128):
      tile = np.s_[first : min(first + 128, start + length)]
      scale = np.abs(v[tile]).max(axis=0, keepdims=True) / 448
      found[tile] = np.maximum(2.0**-4 * np.abs(v[tile]), 2.0**-10 * scale)
    start += length
  return found * 1.0001  # the scale is float32


def _bound(x, g, lengths):
  ex, eg = _errors(x, lengths), _errors(g, lengths)
  return np.abs(x).T @ eg + ex.T @ np.abs(g) + ex.T @ eg


@pytest.mark.parametrize(
  "recipe", ["block_128", pytest.param("block_128_pow2", marks=pytest.mark.slow)]
)
def test_packing_changes_no_bit_but_of_weight_gradients_which_stay_in_their_bound(rng, recipe):
  tokens = sum(LENGTHS)
  # Neighbours of other magnitudes: the case in which sharing a scale costs most.
  size = np.repeat([1.0, 1e-3], LENGTHS)[:, None]
  x = rng.standard_normal((tokens, 160))
  g = size * rng.standard_normal((tokens, 96))
  w = jnp.asarray(rng.standard_normal((160, 96)), jnp.float32)

  @jax.jit
  def products(x, g):
    y, pull = jax.vjp(lambda x, w: dot("BD,DF->BF", x, w, fp8jax.site.single(recipe)), x, w)
    return y, *pull(g)

  x, g = (np.asarray(t, np.float32) for t in (x, g))
  packed = products(x, g)
  cuts = np.cumsum(LENGTHS)[:-1]
  alone = [products(*pair) for pair in zip(np.split(x, cuts), np.split(g, cuts))]
  for n, name in enumerate(("y", "dx")):
    want = np.concatenate([np.asarray(parts[n]) for parts in alone])
    np.testing.assert_array_equal(packed[n], want, err_msg=name)
  dw, sums = np.asarray(packed[2], np.float64), sum(np.asarray(p[2], np.float64) for p in alone)
  slack = 2.0 if recipe == "block_128_pow2" else 1.0  # a scale is up to twice as large
  bound = slack * (_bound(x, g, (tokens,)) + _bound(x, g, LENGTHS))
  assert np.any(dw != sums)
  assert (np.abs(dw - sums) <= bound + 1e-5).all()
  # In norm, roundings are independent: far below the bound of the worst case.
  assert np.linalg.norm(dw - sums) < 0.1 * np.linalg.norm(sums)
