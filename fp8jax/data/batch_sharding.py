"""Host batches -> global arrays on the mesh."""

from typing import Any

import jax
import numpy as np

from fp8jax import axes
from fp8jax.data import loader
from fp8jax.data.config import DataConfig
from fp8jax.errors import UserError


class BatchSharder:
  """How the rows of a global batch lie on the mesh, and which of them this process must load.

  Processes that hold the same rows (a tensor axis between hosts) load the same share.

  Attributes:
    local_rows, shard: what this process loads of a batch.
    order: the share of each process.
  """

  def __init__(self, layout: axes.Layout, rows: int, accumulation: int = 1):
    """Args: rows per microbatch over all devices, and number of microbatches.

    Raises:
      UserError: processes have parts of each other's rows, or more than others.
    """
    self._layout = layout
    self._rows = rows
    self._accumulation = accumulation
    sharding = layout.act_sharding("BL")
    if sharding is None:
      self.local_rows, self.shard, self.order = rows, loader.Shard(), [0]
      return
    held: dict[int, set[int]] = {}
    for device, index in sharding.devices_indices_map((rows, 1)).items():
      held.setdefault(device.process_index, set()).update(range(*index[0].indices(rows)))
    shares = sorted({tuple(sorted(of)) for of in held.values()})
    own = tuple(sorted(held[jax.process_index()]))
    if len(own) * len(shares) != rows or any(len(share) != len(own) for share in shares):
      raise UserError(
        f"sharding.acts.B={layout.act_axes('B')} gives processes the rows "
        f"{' and '.join(map(_shown, shares))} of {rows}, and each loads rows that no other has, or "
        "all that another has; let the mesh axes after those of sharding.acts.B multiply to a "
        "divisor of the devices of a process, or to a multiple"
      )
    self.local_rows = len(own)
    self.order = [shares.index(tuple(sorted(held[process]))) for process in sorted(held)]
    self.shard = loader.Shard(shares.index(own), len(shares))

  @property
  def local_batch(self) -> int:
    """Rows of a whole step that this process loads."""
    return self.local_rows * self._accumulation

  def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """[local_batch, L] on host -> [rows, L], or [accumulation, rows, L] when accumulating."""
    return {name: self._place_one(x) for name, x in batch.items()}

  def _place_one(self, x: np.ndarray) -> jax.Array:
    letters = "BL" if self._accumulation == 1 else "ABL"
    x = x if letters == "BL" else x.reshape(self._accumulation, -1, *x.shape[1:])
    sharding = self._layout.act_sharding(letters)  # no rule names A: microbatches are not split
    if sharding is None:
      return jax.device_put(x)
    shape = (*x.shape[:-2], self._rows, x.shape[-1])
    # This transfer is asked for; with several processes JAX takes it for an implicit one.
    with jax.transfer_guard("allow"):
      return jax.make_array_from_process_local_data(sharding, x, shape)


def _shown(rows: tuple[int, ...]) -> str:
  return ",".join(map(str, rows[:4])) + ("..." if len(rows) > 4 else "")


class Batches:
  """Host batches of a run (`iterator`) and `spread`, which places them.

  Attributes:
    shares: parts of the data that processes read apart, where batches depend on their number; 1
      where they do not.
  """

  iterator: Any

  def __init__(self, layout: axes.Layout, rows: int, accumulation: int):
    self.counts, self.spread = loader.DocumentCounts(), BatchSharder(layout, rows, accumulation)
    self.shares = self.spread.shard.count

  def ends(self) -> list[int]:
    """Tokens that close what these batches train, of which a model has to know; the commonest
    first."""
    return []

  def metrics(self) -> dict[str, float]:
    """Of the last batch."""
    return {}

  def losses(self, by_source: np.ndarray | None) -> dict[str, float]:
    """Mean losses by source of a step."""
    del by_source
    return {}


class TrainBatches(Batches):
  """`Batches` of loader.train_batches."""

  def __init__(self, data: DataConfig, layout: axes.Layout, rows: int, accumulation: int):
    super().__init__(layout, rows, accumulation)
    self._data, self._sources = data, tuple(data.sources)
    self.shares = 1 if loader.is_same_in_any_shares(data) else self.shares
    self.iterator = loader.train_batches(
      data, self.spread.local_batch, self.spread.shard, self.counts
    )

  def ends(self) -> list[int]:
    """Special tokens that close the turns of conversations."""
    data = self._data
    return [] if data.chat is None else loader.chat_index(data).ends(data.tokenizer)[0]

  def metrics(self) -> dict[str, float]:
    """Of the last batch, by source: the share of its tokens, documents and their mean length.

    A document that windows cut counts in each. Documents are those of this process, which are mixed
    as all others' are; conversations those of the whole step.
    """
    sums = self.iterator.by_source
    total, values = max(int(sums[:, 0].sum()), 1), {}
    for name, (tokens, documents) in zip(self._sources, sums.tolist(), strict=True):
      of = {"share": tokens / total, "documents": documents, "length": tokens / max(documents, 1)}
      values |= {f"sources/{name}/{what}": value for what, value in of.items()}
    return values

  def losses(self, by_source: np.ndarray | None) -> dict[str, float]:
    """Mean losses of the sources that a step had tokens of, from sums [S, 2] of losses, weights."""
    rows = zip(self._sources, [] if by_source is None else by_source.tolist())
    return {f"sources/{name}/loss": loss / tokens for name, (loss, tokens) in rows if tokens}
