"""Windows of prepared data by number, in an order that is shuffled on two levels.

Source: the document, sample and shuffle index of Megatron-LM's GPTDataset
(megatron/core/datasets/gpt_dataset.py, core_v0.14.0).

  document index   the documents of an epoch, permuted; a new permutation every epoch
  window index     the concatenation of these documents, cut every seq_len + 1 tokens; epochs follow
                   each other without a gap, so that no token is lost at the end of one
  shuffle index    the windows that begin in an epoch, permuted

Differences from Megatron-LM: windows do not overlap (there the last token of one is the first of
the next), the permutations are functions of (seed, source, epoch) and not stored on disk, and the
stream has no last epoch.

Memory: 12 bytes per document and epoch in use (two where a window crosses the boundary), in every
process that reads; the lengths are mapped from disk, the shuffle index is a function.
"""

import functools
import threading
from typing import NamedTuple

import grain
import numpy as np

from fp8jax.data import reading
from fp8jax.data import sources as sources_lib
from fp8jax.errors import UserError

# Of several threads that enter an epoch, one computes it.
_ENTERING = threading.Lock()


class _Epoch(NamedTuple):
  """The concatenation of one epoch's documents.

  Attributes:
    documents: uint32 [documents], the document index.
    starts: int64 [documents + 1], the position in the epoch at which each of them begins.
  """

  documents: np.ndarray
  starts: np.ndarray


class Windows(reading.Reopened):
  """Window k of an endless stream; a random-access source for grain.

  Args:
    source: prepared documents of one split.
    width: tokens per window (seq_len + 1).
    seed: text that the permutations are derived from.
    on_long: documents longer than a window are "split", or passed over ("skip"), or an "error".

  Raises:
    UserError: nothing to read, or a document too long where that is an error.
  """

  def __init__(self, source: sources_lib.Prepared, width: int, seed: str, on_long: str = "split"):
    self._source, self._width, self._seed = source, width, seed
    is_long = source.lengths > (width - 1 if on_long != "split" else 2**32)
    self.too_long = int(np.count_nonzero(is_long))
    if self.too_long and on_long == "error":
      first = int(np.argmax(is_long))
      raise UserError(
        f"{source.path}/{source.split}:{first}: {source.lengths[first]} tokens do not fit a window "
        f"of {width - 1}. Fix it, or set data.on_long='skip' to pass over such documents and count "
        "them"
      )
    self._tokens = int(self._lengths.sum(dtype=np.int64))
    if not len(source.lengths):
      raise UserError(f"{source.path} has no documents to train on; give more data")
    if not self._tokens:
      raise UserError(
        f"{source.path} has no document to train on: {self.too_long} are too long "
        f"(data.on_long={on_long!r}); give more data or set data.on_long='split'"
      )

  @functools.cached_property
  def _kept(self) -> np.ndarray | slice:
    """uint32 numbers of the documents that are read."""
    if not self.too_long:
      return slice(None)
    return np.flatnonzero(self._source.lengths <= self._width - 1).astype(np.uint32)

  @property
  def _lengths(self) -> np.ndarray:
    return self._source.lengths[self._kept]

  def __len__(self):
    return reading.ENDLESS

  def __getitem__(self, index: int):
    """{"tokens", "tokens_segment_ids", "tokens_positions": int32 [width], "too_long": int}.

    Segments are numbered from 1 and positions from 0 in every window, as
    grain's ConcatThenSplitIterDataset numbers them. "too_long" counts the documents that the epoch
    passes over; it is nonzero in one window of an epoch.
    """
    epoch = index * self._width // self._tokens
    begin, end = (-(-e * self._tokens // self._width) for e in (epoch, epoch + 1))
    too_long = self.too_long if index == begin else 0
    # The word in the seed is of before: runs go on in their order.
    own = reading.seed(f"{self._seed}/samples/{epoch}")
    shuffled = grain.experimental.index_shuffle(index - begin, end - begin - 1, own, rounds=4)
    return self._cut((begin + shuffled) * self._width) | {"too_long": too_long}

  def _cut(self, position: int):
    """The window that begins at this token of the endless concatenation."""
    epoch, position = divmod(position, self._tokens)
    at = self._epoch(epoch)
    which = int(np.searchsorted(at.starts, position, side="right")) - 1
    offset = position - int(at.starts[which])
    pieces, left = [], self._width
    while left:
      if which == len(at.documents):
        epoch, which = epoch + 1, 0
        at = self._epoch(epoch)
      tokens = self._source[int(at.documents[which])]["tokens"]
      pieces.append(tokens[offset : offset + left])
      left, which, offset = left - len(pieces[-1]), which + 1, 0
    sizes = [len(piece) for piece in pieces]
    return {
      "tokens": np.concatenate(pieces),
      "tokens_segment_ids": np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes),
      "tokens_positions": np.concatenate([np.arange(n, dtype=np.int32) for n in sizes]),
    }

  def _epoch(self, epoch: int) -> _Epoch:
    with _ENTERING:
      return self._two_epochs(epoch)

  @functools.cached_property
  def _two_epochs(self):
    return functools.lru_cache(maxsize=2)(self._make_epoch)

  def _make_epoch(self, epoch: int) -> _Epoch:
    lengths = self._lengths
    # RandomState's algorithms never change (NEP 19): a run may resume under another NumPy.
    order = np.random.RandomState(reading.seed(f"{self._seed}/documents/{epoch}"))
    permutation = np.arange(len(lengths), dtype=np.uint32)
    order.shuffle(permutation)
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths[permutation], out=starts[1:])
    kept = self._kept
    return _Epoch(permutation if isinstance(kept, slice) else kept[permutation], starts)
