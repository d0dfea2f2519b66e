"""Host batches -> global arrays on the mesh."""

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding

from fp8jax import axes
from fp8jax.data import loader


class Spread:
  """How the rows of a global batch lie on the mesh, and which of them this process must load.

  Processes that hold the same rows (a tensor axis between hosts) load the same share.
  """

  def __init__(self, layout: axes.Layout, rows: int, accumulation: int = 1):
    """Args: rows per microbatch over all devices, and number of microbatches."""
    self._layout = layout
    self._rows = rows
    self._accumulation = accumulation
    if layout.mesh is None:
      self.local_rows, self.shard = rows, loader.Shard()
      return
    sharding = NamedSharding(layout.mesh, layout.act_spec("BL"))
    starts = {
      (index[0].start or 0, rows if index[0].stop is None else index[0].stop)
      for index in sharding.addressable_devices_indices_map((rows, 1)).values()
    }
    first, last = min(s for s, _ in starts), max(e for _, e in starts)
    self.local_rows = last - first
    self.shard = loader.Shard(first // self.local_rows, rows // self.local_rows)

  @property
  def local_batch(self) -> int:
    """Rows of a whole step that this process loads."""
    return self.local_rows * self._accumulation

  def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """[local_batch, L] on host -> [rows, L], or [accumulation, rows, L] when accumulating."""
    return {name: self._place_one(x) for name, x in batch.items()}

  def _place_one(self, x: np.ndarray) -> jax.Array:
    letters = "BL"
    if self._accumulation > 1:
      x = x.reshape(self._accumulation, -1, *x.shape[1:])
      letters = "ABL"
    if self._layout.mesh is None:
      return jax.device_put(x)
    sharding = _sharding(self._layout, letters)
    shape = (*x.shape[:-2], self._rows, x.shape[-1])
    return jax.make_array_from_process_local_data(sharding, x, shape)


@functools.cache
def _sharding(layout: axes.Layout, letters: str) -> NamedSharding:
  """A is the microbatch: no rule names it, so it is never split."""
  return NamedSharding(layout.mesh, layout.act_spec(letters))
