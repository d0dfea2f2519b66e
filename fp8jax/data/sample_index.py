"""Samples of prepared data by number, in an order that is shuffled on two levels.

Source: the document, sample and shuffle index of Megatron-LM's GPTDataset
(megatron/core/datasets/gpt_dataset.py, core_v0.14.0).

  document index   the documents of an epoch, permuted; a new permutation every epoch
  sample index     the concatenation of these documents, cut every seq_len + 1 tokens; epochs follow
                   each other without a gap, so that no token is lost at the end of one
  shuffle index    the samples that begin in an epoch, permuted

Differences from Megatron-LM: samples do not overlap (there the last token of one is the first of
the next), the permutations are derived from (seed, source, epoch) and computed when an epoch is
entered, not stored on disk, and the stream has no last epoch.

Memory: 12 bytes per document and epoch in use (two where a sample crosses the boundary), in every
process that reads; the lengths are mapped from disk, the shuffle index is a function.
"""

import dataclasses
import functools
import threading

import grain
import numpy as np

from fp8jax.data import reading
from fp8jax.data import sources as sources_lib
from fp8jax.errors import UserError

# Samples are numbered without end; grain wants a length, and slices it.
_ENDLESS = 2**48


@dataclasses.dataclass(frozen=True)
class _Epoch:
  """The concatenation of one epoch's documents.

  Attributes:
    documents: uint32 [documents], the document index.
    starts: int64 [documents + 1], the position in the epoch at which each of them begins.
  """

  documents: np.ndarray
  starts: np.ndarray


class Samples:
  """Sample k of an endless stream; a random-access source for grain.

  Args:
    source: prepared documents of one split.
    width: tokens per sample (seq_len + 1).
    seed: text that the permutations are derived from; other sources and seeds have another.
    is_shuffled: False keeps the samples in the order of the shuffled documents.
    on_long: documents longer than a sample are "split", or passed over ("skip"), or an "error".

  Raises:
    UserError: nothing to read, or a document too long where that is an error.
  """

  def __init__(
    self, source: sources_lib.Prepared, width: int, seed: str, *, is_shuffled: bool = True,
    on_long: str = "split",
  ):  # fmt: skip
    self._source, self._width, self._seed = source, width, seed
    self._is_shuffled, self._on_long = is_shuffled, on_long
    lengths = source.lengths
    self.too_long = 0 if on_long == "split" else int(np.count_nonzero(lengths > width - 1))
    if self.too_long and on_long == "error":
      first = int(np.argmax(lengths > width - 1))
      raise UserError(
        f"{source.path}/{source.split}:{first}: {lengths[first]} tokens do not fit a window of "
        f"{width - 1}. Fix it, or set data.on_long='skip' to pass over such documents and count "
        "them"
      )
    self._tokens = int(self._lengths.sum(dtype=np.int64))
    if not self._tokens:
      raise UserError(
        f"{source.path} has no document to train on: {self.too_long} are too long "
        f"(data.on_long={on_long!r}); give more data or set data.on_long='split'"
      )
    self._begin()

  def _begin(self):
    """Creates the state that is not pickled: a lock and a cache."""
    self._lock = threading.Lock()
    self._two_epochs = functools.lru_cache(maxsize=2)(self._make_epoch)

  def _epoch(self, epoch: int) -> _Epoch:
    with self._lock:  # of several threads that enter an epoch, one computes it
      return self._two_epochs(epoch)

  @functools.cached_property
  def _kept(self) -> np.ndarray | None:
    """uint32 numbers of the documents that are read; None for all of them."""
    if not self.too_long:
      return None
    return np.flatnonzero(self._source.lengths <= self._width - 1).astype(np.uint32)

  @property
  def _lengths(self) -> np.ndarray:
    lengths = self._source.lengths
    return lengths if self._kept is None else lengths[self._kept]

  def __len__(self):
    return _ENDLESS

  def first(self, epoch: int) -> int:
    """Number of the first sample that begins in an epoch."""
    return -(-epoch * self._tokens // self._width)

  def epoch_of(self, number: int) -> int:
    """The epoch that sample `number` begins in."""
    return number * self._width // self._tokens

  def __getitem__(self, index: int):
    """{"tokens", "tokens_segment_ids", "tokens_positions": int32 [width], "too_long": int}.

    Segments are numbered from 1 and positions from 0 in every sample, as
    grain's ConcatThenSplitIterDataset numbers them. "too_long" counts the documents that the epoch
    passes over; it is nonzero in one sample of an epoch.
    """
    epoch = self.epoch_of(index)
    begin, end = self.first(epoch), self.first(epoch + 1)
    too_long = self.too_long if index == begin else 0
    if self._is_shuffled:
      own = reading.seed(f"{self._seed}/samples/{epoch}")
      last = end - begin - 1
      index = begin + grain.experimental.index_shuffle(index - begin, last, own, rounds=4)
    return self._cut(index * self._width) | {"too_long": too_long}

  def _cut(self, position: int):
    """The sample that begins at this token of the endless concatenation."""
    epoch, position = divmod(position, self._tokens)
    at = self._epoch(epoch)
    which = int(np.searchsorted(at.starts, position, side="right")) - 1
    offset = position - int(at.starts[which])
    keys = ("tokens", "tokens_segment_ids", "tokens_positions")
    sample = {key: np.empty(self._width, np.int32) for key in keys}
    filled, segment = 0, 0
    while filled < self._width:
      if which == len(at.documents):
        epoch, which = epoch + 1, 0
        at = self._epoch(epoch)
      tokens = self._source[int(at.documents[which])]["tokens"][offset:]
      n = min(len(tokens), self._width - filled)
      segment += 1
      there = slice(filled, filled + n)
      sample["tokens"][there] = tokens[:n]
      sample["tokens_segment_ids"][there] = segment
      sample["tokens_positions"][there] = np.arange(n)
      filled, which, offset = filled + n, which + 1, 0
    return sample

  def _make_epoch(self, epoch: int) -> _Epoch:
    lengths = self._lengths
    # RandomState's algorithms never change (NEP 19): a run may resume under another NumPy.
    order = np.random.RandomState(reading.seed(f"{self._seed}/documents/{epoch}"))
    permutation = np.arange(len(lengths), dtype=np.uint32)
    order.shuffle(permutation)
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths[permutation], out=starts[1:])
    documents = permutation if self._kept is None else self._kept[permutation]
    return _Epoch(documents, starts)

  def __getstate__(self):
    # A worker process computes the epochs that it reads.
    own = ("_lock", "_two_epochs", "_kept")
    return {k: v for k, v in self.__dict__.items() if k not in own}

  def __setstate__(self, state):
    self.__dict__.update(state)
    self._begin()
