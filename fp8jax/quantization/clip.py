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


def counts(shape: tuple[int, int], extents: tuple[int, int]) -> np.ndarray:
  """int64 [tiles of rows, tiles of columns]: elements of the matrix in each tile."""
  each = [
    np.minimum(extent, n - extent * np.arange(-(-n // extent)))
    for n, extent in zip(shape, extents, strict=True)
  ]
  return np.outer(*each)


def amax(tiles, largest, clip: Clip, shape: tuple[int, int], shared: Axes):
  """float32 [tiles, tiles]: what takes the place of each tile's largest magnitude.

  Args:
    largest: float32 [tiles, tiles], the largest magnitudes.
    clip: any rule; those that search (LeastError) or clamp first keep the largest.
    shape: of the matrix.
    shared: mesh axes that a tile extends over, inside `shard_map`.
  """
  if isinstance(clip, Largest):
    return largest * np.float32(clip.times)
  count = counts(shape, tiles.shape[1::2])
  values = jnp.where(jnp.isnan(tiles), 0.0, tiles)
  if isinstance(clip, Rms):
    total = jnp.asarray(count, jnp.float32)
    moments = [jnp.sum(values**power, axis=(1, 3)) for power in (1, 2)]
    if shared:
      total, *moments = (jax.lax.psum(x, shared) for x in (total, *moments))
    mean, square = (m / total for m in moments)
    variance = square - mean * mean if clip.is_centred else square
    return np.float32(clip.times) * jnp.sqrt(jnp.maximum(variance, 0.0))
  if isinstance(clip, Quantile):
    return _in_order(jnp.abs(values), count, shared, lambda n: np.floor(clip.share * (n - 1)))
  return largest


def clamped(x, clip: Clamp, tile_axes: tuple[bool, bool], shared: Axes):
  """A matrix within the signed quantiles of each row, column, or of all of it; NaN stays.

  Args:
    tile_axes: whether a tile extends over (all rows, all columns); it is one element otherwise.
    shared: mesh axes that a tile extends over.
  """
  extents = tuple(n if whole else 1 for n, whole in zip(x.shape, tile_axes, strict=True))
  rows, columns = (n // e for n, e in zip(x.shape, extents, strict=True))
  tiles = x.astype(jnp.float32).reshape(rows, extents[0], columns, extents[1])
  values, count = jnp.where(jnp.isnan(tiles), 0.0, tiles), counts(x.shape, extents)
  low, high = (
    _in_order(values, count, shared, lambda n, s=s: np.minimum(np.floor(s * n), n - 1))
    for s in (1 - clip.share, clip.share)
  )
  return jnp.clip(tiles, low[:, None, :, None], high[:, None, :, None]).reshape(x.shape)


def _in_order(values, count: np.ndarray, shared: Axes, index: Callable):
  """[tiles, tiles]: the element number index(n) of each tile's n in ascending order."""
  rows, columns = values.shape[::2]
  places = values.shape[1] * values.shape[3]
  flat = jnp.moveaxis(values, 2, 1).reshape(rows, columns, places)
  parts = 1
  if shared:
    flat = jax.lax.all_gather(flat, shared, axis=2, tiled=True)
    parts = flat.shape[2] // places
  elif (count < places).any():
    inside = _is_inside(values.shape, count)
    flat = jnp.where(jnp.moveaxis(inside, 2, 1).reshape(flat.shape), flat, jnp.inf)
  chosen = jnp.asarray(index(count * parts).astype(np.int32))
  return jnp.take_along_axis(jnp.sort(flat, axis=2), chosen[..., None], axis=2)[..., 0]


def _is_inside(shape, count: np.ndarray) -> np.ndarray:
  """bool, like tiles: what is no padding; the last tile of either axis may be partial."""
  _, height, _, width = shape
  heights, widths = count[:, 0] // min(width, count[0, 0]), count[0] // min(height, count[0, 0])
  return (np.arange(height)[None, :, None, None] < heights[:, None, None, None]) & (
    np.arange(width)[None, None, None, :] < widths[None, None, :, None]
  )


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
    error = rounding.nearest(values * (1.0 / wide), format) * wide - values
    error = jnp.sum(error * error, axis=(1, 3))
    error = jax.lax.psum(error, shared) if shared else error
    if least is None:
      noise = jnp.max(jnp.abs(values), axis=(1, 3)) * np.float32(2.0**-20)
      noise, least = noise * noise, error
      noise = jax.lax.pmax(noise, shared) if shared else noise
      continue
    is_less = error < least * np.float32(1 - 2.0**-12) - noise
    best, least = jnp.where(is_less, scale, best), jnp.where(is_less, error, least)
  return best
