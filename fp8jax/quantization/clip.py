"""The magnitude of a tile that its scale makes the format's largest, by the rules of `Quant.clip`.

A scale from the largest magnitude spends the format's range on outliers; a smaller one saturates
these and leaves more of it to the rest. Here the program does, tile by tile; clipping.py
finds that of a whole calibration on the host.

Source: recipe/quant.py cites each rule's.
Assumes: tiles are float32 [tiles of rows, rows, tiles of columns, columns]; the elements beyond the
matrix are zeros. NaN counts as 0. Orders are exact; sums are float32's, in XLA's order, so that two
factors of LeastError with errors equal to a rounding may change places between two programs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.formats import Format
from fp8jax.quantization import rounding
from fp8jax.recipe.quant import Clamp, Clip, Largest, Quantile, Rms

Axes = tuple[str, ...]


def _extents(matrix: tuple[int, ...], tiles: tuple[int, ...]) -> list[np.ndarray]:
  """int64 [tiles of rows], [tiles of columns]: rows and columns of the matrix in each tile."""
  return [
    np.minimum(extent, n - extent * np.arange(count))
    for n, count, extent in zip(matrix, tiles[::2], tiles[1::2], strict=True)
  ]


def amax(tiles, largest, clip: Clip, shape: tuple[int, int], shared: Axes):
  """float32 [tiles, tiles]: what takes the place of each tile's largest magnitude.

  Args:
    largest: float32 [tiles, tiles], the largest magnitudes.
    clip: any rule; those that search (LeastError) or clamp first keep the largest.
    shared: mesh axes that a tile extends over, inside `shard_map`.
  """
  if isinstance(clip, Largest):
    return largest * np.float32(clip.times)
  extents = _extents(shape, tiles.shape)
  values = jnp.where(jnp.isnan(tiles), 0.0, tiles)
  if isinstance(clip, Rms):
    total = _sum(jnp.asarray(np.outer(*extents), jnp.float32), shared)
    if clip.is_centred:
      mean = _sum(jnp.sum(values, axis=(1, 3)), shared) / total
      values = jnp.where(_is_inside(tiles.shape, extents), values - mean[:, None, :, None], 0.0)
    square = _sum(jnp.sum(values * values, axis=(1, 3)), shared) / total
    return np.float32(clip.times) * jnp.sqrt(square)
  if isinstance(clip, Quantile):
    return _in_order(jnp.abs(values), extents, shared, lambda n: np.floor(clip.share * (n - 1)))
  return largest


def _sum(x, shared: Axes):
  return jax.lax.psum(x, shared) if shared else x


def clamped(x, clip: Clamp, tile_axes: tuple[bool, bool], shared: Axes):
  """A matrix within the signed quantiles of each row, column, or of all of it; NaN stays.

  Args:
    tile_axes: whether a tile extends over (all rows, all columns); it is one element otherwise.
    shared: mesh axes that a tile extends over.
  """
  (m, n), (all_rows, all_columns) = x.shape, tile_axes
  shape = (1, m) * all_rows or (m, 1), (1, n) * all_columns or (n, 1)
  tiles = x.astype(jnp.float32).reshape(*shape[0], *shape[1])
  values, extents = jnp.where(jnp.isnan(tiles), 0.0, tiles), _extents(x.shape, tiles.shape)
  low, high = (
    _in_order(values, extents, shared, lambda n, s=s: np.minimum(np.floor(s * n), n - 1))
    for s in (1 - clip.share, clip.share)
  )
  return jnp.clip(tiles, low[:, None, :, None], high[:, None, :, None]).reshape(x.shape)


def _in_order(values, extents, shared: Axes, index: Callable):
  """[tiles, tiles]: the element number index(n) of each tile's n in ascending order.

  Counted from the nearer end: XLA's CPU sorts all of a row in 25 times the time of its largest.
  """
  count = np.outer(*extents)
  places = values.shape[1] * values.shape[3]
  flat = jnp.moveaxis(values, 2, 1).reshape(count.size, places)
  parts = jax.lax.axis_size(shared) if shared else 1
  n = parts * count.reshape(-1, 1)
  place = index(n).astype(np.int32)
  is_high = np.max(n - 1 - place) < np.max(place)
  place, sign = (n - 1 - place, 1) if is_high else (place, -1)
  flat = sign * flat
  if (count < places).any():
    inside = np.moveaxis(_is_inside(values.shape, extents), 2, 1).reshape(flat.shape)
    flat = jnp.where(inside, flat, -jnp.inf)
  flat = jax.lax.all_gather(flat, shared, axis=1, tiled=True) if shared else flat
  first, _ = jax.lax.top_k(flat, int(place.max()) + 1)
  return sign * jnp.take_along_axis(first, jnp.asarray(place), axis=1).reshape(count.shape)


def _is_inside(shape, extents) -> np.ndarray:
  """bool, like tiles of a shape: what is no padding."""
  inside = [np.arange(n) < e[:, None] for n, e in zip(shape[1::2], extents, strict=True)]
  return inside[0][:, :, None, None] & inside[1][None, None]


def least_error(tiles, scales, format: Format, shared: Axes):
  """float32 [tiles, tiles]: of several scales the one that leaves the least squared error.

  An error counts as less if it is so by more than 2^-12 of itself and of the largest's rounding.

  Args:
    scales: float32 [tiles, tiles] each, in order of preference.
  """
  values = jnp.where(jnp.isnan(tiles), 0.0, tiles)
  best, least = scales[0], None
  for scale in scales:
    wide = scale[:, None, :, None]
    error = rounding.nearest(values * (1.0 / wide), format, (1, 3)) * wide - values
    error = _sum(jnp.sum(error * error, axis=(1, 3)), shared)
    if least is None:
      noise = jnp.max(jnp.abs(values), axis=(1, 3)) * np.float32(2.0**-20)
      noise, least = noise * noise, error
      noise = jax.lax.pmax(noise, shared) if shared else noise
      continue
    is_less = error < least * np.float32(1 - 2.0**-12) - noise
    best, least = jnp.where(is_less, scale, best), jnp.where(is_less, error, least)
  return best
