"""Functions of single tokens, in tiles of one size, so that bits depend on the token alone.

XLA chooses how to sum by the sizes of arrays: a token's norm, product or quotient has other last
bits in another batch, and an FP8 recipe turns those into other codes. Here a function is compiled
once, for `tile` rows, and a loop whose length the compiler does not know calls it for every tile.
Barriers keep the loop's inside apart from what is around it. A row then has the same bits among
any others, at any place, in every program on one machine.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def token_wise(function: Callable[..., Any], tile: int) -> Callable[..., Any]:
  """(held, *arrays) -> function(held, *arrays), in tiles.

  Args:
    function: of `held` and trees of arrays [B, L, ...], every token by itself; gives such a tree.
    tile: rows of a tile, for which it is called with B = 1; 0 calls it once, for all.
  """
  return function if not tile else lambda held, *rows: _in_tiles(function, tile, held, *rows)


def _in_tiles(function, tile: int, held, *arrays):
  batch, length = jax.tree.leaves(arrays)[0].shape[:2]
  rows, count = batch * length, -(-batch * length // tile)

  def flat(x):
    x = x.reshape(rows, *x.shape[2:])
    return jnp.pad(x, [(0, count * tile - rows)] + [(0, 0)] * (x.ndim - 1))

  def one(arrays):
    # Copies of sites: a trace uses a site once.
    own, arrays = jax.lax.optimization_barrier((jax.tree.map(lambda x: x, held), arrays))
    return jax.lax.optimization_barrier(function(own, *arrays))

  def part(x, i):
    return jax.lax.dynamic_slice_in_dim(x, i * tile, tile)[None]

  flats = jax.tree.map(flat, arrays)
  made = jax.eval_shape(lambda xs: one(jax.tree.map(lambda x: part(x, 0), xs)), flats)
  whole = jax.tree.map(lambda y: jnp.zeros((count * tile, *y.shape[2:]), y.dtype), made)

  def step(i, whole):
    made = one(jax.tree.map(lambda x: part(x, i), flats))
    put = lambda all_, y: jax.lax.dynamic_update_slice_in_dim(all_, y[0], i * tile, 0)  # noqa: E731
    return jax.tree.map(put, whole, made)

  # A loop of known length may be unrolled, and a tile then fused with its neighbours.
  whole = jax.lax.fori_loop(0, jax.lax.optimization_barrier(jnp.int32(count)), step, whole)
  return jax.tree.map(lambda y: y[:rows].reshape(batch, length, *y.shape[1:]), whole)


def with_gradients_of(plain: Callable, function: Callable) -> Callable[..., Any]:
  """`function`, differentiated as `plain`, which computes the same but for rounding: again from the
  arguments, so that nothing else is saved."""

  @jax.custom_vjp
  def both(*args) -> Any:
    return function(*args)

  def backward(args, g):
    return jax.vjp(plain, *args)[1](g)

  both.defvjp(lambda *args: (function(*args), args), backward)
  return both
