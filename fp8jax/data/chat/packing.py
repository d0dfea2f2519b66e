"""Samples -> steps: exactly so many samples in exactly so many windows.

The samples of a step are laid into its windows by first fit, the longest first (Johnson 1973). Each
is a segment of its own, numbered from 1, with positions from 0; the room that is left in a window
is segment 0, of weight 0. grain's FirstFitPackIterDataset gives its windows when a sample no longer
fits, so that steps of a fixed number of samples are not to be had from it; held-out samples, which
have no steps, are packed by it.

Every epoch is a permutation of all samples; a step at its end goes on in the next one. Permutations
are functions of (seed, epoch), so a step is made from its number alone: the place in the data is
that number, and processes take different windows of the same step.
"""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from fp8jax.data import reading
from fp8jax.data.chat.encode import Sample
from fp8jax.data.chat.samples import Samples
from fp8jax.errors import UserError

_LOOK_AHEAD = 2**21
Batch = dict[str, np.ndarray]


def first_fit(lengths: Sequence[int] | np.ndarray, room: int) -> np.ndarray:
  """int32 [n]: windows, of `room` positions, of samples; the longest first, ties in their order."""
  free: list[int] = []
  window = np.zeros(len(lengths), np.int32)
  for i in np.argsort(-np.asarray(lengths), kind="stable"):
    size = int(lengths[i])
    at = next((w for w, left in enumerate(free) if left >= size), len(free))
    if at == len(free):
      free.append(room)
    free[at] -= size
    window[i] = at
  return window


def pack(samples: Sequence[Sample], length: int) -> Batch:
  """One window, as the model reads it: arrays [length] that hold all positions of the samples."""
  kinds = {"tokens": np.int32, "targets": np.int32, "weights": np.float32, "segments": np.int32,
           "positions": np.int32}  # fmt: skip
  window = {f"{name}_BL": np.zeros(length, kind) for name, kind in kinds.items()}
  end = 0
  for number, sample in enumerate(samples, 1):
    here = slice(end, end := end + len(sample) - 1)
    own = {"segments_BL": number, "positions_BL": np.arange(len(sample) - 1)}
    for key, x in (_shifted(sample) | own).items():
      window[key][here] = x
  window["positions_BL"][end:] = np.arange(length - end)
  return window


class Steps:
  """Step k of training; a random-access source for grain.

  Args:
    length: positions of a window.
    per_step, windows: samples and windows of a step, over all processes.
    seed: text that the permutations are derived from.
    shard: (index, count): a process takes every count-th window, from the index-th on.

  Raises:
    UserError: there is no sample.
  """

  def __init__(
    self, samples: Samples, length: int, per_step: int, windows: int, seed: str,
    shard: tuple[int, int] = (0, 1),
  ):  # fmt: skip
    if not len(samples):
      raise UserError(
        "data.sources have no sample to train on: all conversations are malformed, too long, "
        "without an assistant or held out; lower data.heldout_fraction or give more data"
      )
    self.samples, self.length, self._seed, self._shard = samples, length, seed, shard
    self._per_step, self._windows = per_step, windows

  def __len__(self):
    return reading.ENDLESS

  def numbers(self, step: int) -> np.ndarray:
    """int64 [samples]: the samples of a step, in the order of their epochs."""
    total = len(self.samples)
    places = range(step * self._per_step, (step + 1) * self._per_step)
    return np.asarray([self._shuffled(*divmod(place, total)) for place in places], np.int64)

  def _shuffled(self, epoch: int, i: int) -> int:
    total = len(self.samples)
    if total == 1:
      return 0
    seed = reading.seed(f"{self._seed}/{epoch}")
    return grain.experimental.index_shuffle(i, max_index=total - 1, seed=seed, rounds=4)

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Step number `index`: arrays [windows of this process, length], with sources_BL; "step"."""
    numbers = self.numbers(index)
    window = first_fit(self.samples.lengths[numbers], self.length)
    self.check(int(window.max()) + 1)
    first, count = self._shard
    rows = [self._packed(numbers[window == w]) for w in range(first, self._windows, count)]
    return {**{key: np.stack([row[key] for row in rows]) for key in rows[0]}, "step": index}

  def _packed(self, numbers: np.ndarray) -> Batch:
    """The window of these samples; the room that is left, of weight 0, counts to source 0."""
    row = pack([self.samples[int(n)] for n in numbers], self.length)
    sources = np.append(0, self.samples.source_of[numbers]).astype(np.int32)
    return row | {"sources_BL": sources[row["segments_BL"]]}

  def needed(self, steps: int) -> int:
    """The largest number of windows that one of the first `steps` steps fills.

    Those of the first _LOOK_AHEAD samples are looked at, in seconds; a later step that does not fit
    is refused when it comes.
    """
    first = map(self.numbers, range(min(steps, max(_LOOK_AHEAD // self._per_step, 1))))
    return max(int(first_fit(self.samples.lengths[n], self.length).max()) + 1 for n in first)

  def check(self, needed: int):
    """Refuses a step that needs more windows than there are."""
    if needed > self._windows:
      raise UserError(
        f"the {self._per_step} samples of a step need {needed} windows of {self.length} positions, "
        f"global_batch={self._windows}; set global_batch={needed} or more, or a smaller "
        "data.samples_per_step"
      )


def batches(samples: Samples, length: int, rows: int, num: int):
  """Exactly `num` batches [rows, length] of samples in order, packed by grain's first fit.

  Where samples run out, the rest is padding of weight 0.
  """
  data = grain.MapDataset.source(samples).map(_shifted).to_iter_dataset()
  packed = grain.experimental.FirstFitPackIterDataset(
    data,
    length_struct=dict.fromkeys(("tokens_BL", "targets_BL", "weights_BL"), length),
    num_packing_bins=rows,
    shuffle_bins=False,
  )
  empty = pack([], length)
  windows = iter(packed) if len(samples) else iter(())
  for _ in range(num):
    made = [_window(row) if (row := next(windows, None)) else empty for _ in range(rows)]
    yield {key: np.stack([window[key] for window in made]) for key in empty}


def _shifted(sample: Sample) -> Batch:
  return {
    "tokens_BL": sample.tokens[:-1],
    "targets_BL": sample.tokens[1:],
    "weights_BL": sample.trained[1:].astype(np.float32),
  }


def _window(packed: Batch) -> Batch:
  """One of grain's windows, with the names of the model."""
  names = {"tokens_BL_segment_ids": "segments_BL", "tokens_BL_positions": "positions_BL"}
  kept = {key: x for key, x in packed.items() if key in names or key.endswith("_BL")}
  return {names.get(key, key): x for key, x in kept.items()}
