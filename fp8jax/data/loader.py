"""Batches of packed documents, from a weighted mixture of sources. Thin over grain.

  source -> shuffle -> repeat -> this process's share -> tokenize (threads or worker processes)
         -> drop and count -> pack to windows -> shuffle windows \\
  prepared source -> windows by number -> this process's share     > mix by weight -> batch
  ...the same for every other source...                           /  -> prefetch

Deterministic in the seed; independent of how many threads or workers do the work, since packing
comes after them; resumable at any step, since the iterator's state is a small JSON value. Weights
are shares of windows, hence of tokens.

The windows of a long document follow each other, and would fill whole batches: Spec.shuffle_windows
shuffles them. Prepared data have random access and are shuffled over the whole epoch
(window_index.py). Text that is tokenized during training is shuffled in blocks of that many
windows (grain's WindowShuffleIterDataset): a process holds a block of every source in memory, 12
bytes per token, waits for a whole block at its end, and reads the present block again when it
resumes; documents that a block passes over are counted when it is read.
"""

import collections
import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils

from fp8jax.data import reading, streams, tokenize, window_index
from fp8jax.data import sources as sources_lib
from fp8jax.data.chat import packing
from fp8jax.data.chat import samples as chat_samples
from fp8jax.data.config import DataConfig
from fp8jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Shard:
  """Which of `count` disjoint shares of the documents this process reads."""

  index: int = 0
  count: int = 1


# Outcomes of a document other than training on it or holding it out.
PASSED_OVER = ("malformed", "too long", "untrained")


class DocumentCounts(collections.Counter):
  """Documents by what became of them, as far as this process has read in this run."""

  def summary(self) -> dict[str, int]:
    """Nonzero counts of what was passed over."""
    return {k: v for k, v in sorted(self.items()) if k in PASSED_OVER and v}

  def metrics(self) -> dict[str, int]:
    """`summary` for a row of metrics."""
    return {f"documents/{k.replace(' ', '_')}": v for k, v in self.summary().items()}

  def summary_everywhere(self) -> dict[str, int]:
    """The same over all processes, which must all ask."""
    if jax.process_count() == 1:
      return self.summary()
    numbers = np.asarray([self[what] for what in PASSED_OVER])
    total = multihost_utils.process_allgather(numbers).sum(0)
    return {what: int(n) for what, n in zip(PASSED_OVER, total) if n}


def train_batches(
  spec: DataConfig, batch: int, shard: Shard = Shard(), counts: DocumentCounts | None = None
):
  """Endless batches of this process's share.

  Args:
    batch: sequences per batch on this process.
    counts: filled while reading.

  Returns:
    A grain DatasetIterator over arrays [batch, L] by name, see models/transformer.py.
  """
  counts = DocumentCounts() if counts is None else counts
  if spec.chat is not None:
    return _chat_steps(spec, batch, shard, counts)
  streams = [
    _train_windows(spec, n, s, shard, counts).map(functools.partial(_with, source=np.int32(i)))
    for i, (n, s) in enumerate(spec.sources.items())
  ]
  weights = [float(source["weight"]) for source in spec.sources.values()]
  mixed = streams[0] if len(streams) == 1 else grain.IterDataset.mix(streams, weights)
  make = _Batch(spec.cross_document, len(spec.sources), spec.tells_sources)
  ready = mixed.batch(batch, drop_remainder=True).map(make)
  if spec.prefetch:
    ready = grain.experimental.ThreadPrefetchIterDataset(ready, prefetch_buffer_size=spec.prefetch)
  return _Resumable(iter(ready))


def is_same_in_any_shares(spec: DataConfig) -> bool:
  """Whether the batches of all processes together are the same, however many shares these read.

  Steps of conversations and the shuffled windows of a prepared source are numbered. Text is packed
  by each process, and mixtures are mixed by each.
  """
  kinds = [source["kind"] for source in spec.sources.values()]
  return spec.chat is not None or (kinds == ["prepared"] and bool(spec.shuffle_windows))


def _with(element, **fields):
  return {**element, **fields}


def _by_source(source, tokens, documents, number: int) -> np.ndarray:
  """int64 [sources, 2]: sums of tokens and documents over items with these numbers of a source."""
  sums = [np.bincount(source, weights=x, minlength=number) for x in (tokens, documents)]
  return np.stack(sums, axis=-1).astype(np.int64)


class _Resumable(grain.DatasetIterator):
  """An iterator with a state that JSON can hold.

  Attributes:
    by_source: int64 [sources, 2], tokens and documents of the last batch.

  grain 0.2.18's ConcatThenSplitIterDataset compares a slice of its state with a tuple; JSON brings
  back a list, an empty remainder is then taken for a document, and the next one is lost. Delete
  this class when a state that went through JSON resumes exactly without it
  (tests/data/loader_test.py).
  """

  def __init__(self, parent: grain.DatasetIterator):
    super().__init__(parent)
    self.by_source = np.zeros((0, 2), np.int64)

  def __next__(self):
    try:
      batch = dict(next(self._parent))
      self.by_source = batch.pop("by_source")
      return batch
    except RuntimeError as e:
      if "terminated unexpectedly" not in str(e):
        raise
      raise UserError(
        f"a worker process that reads the data has died: {str(e).splitlines()[0]} The system may "
        "have killed it for memory: lower data.workers or data.shuffle_windows. The same command "
        "goes on from the newest checkpoint"
      ) from e

  def get_state(self):
    return self._parent.get_state()

  def set_state(self, state):
    self._parent.set_state(_slices_as_tuples(state))

  def close(self):
    self._parent.close()


def _slices_as_tuples(state, key: str = ""):
  if key == "remainder_slices":
    return {k: tuple(v) for k, v in state.items()}
  if isinstance(state, list):
    return [_slices_as_tuples(x) for x in state]
  is_dict = isinstance(state, dict)
  return {k: _slices_as_tuples(v, k) for k, v in state.items()} if is_dict else state


def heldout_batches(
  spec: DataConfig, name: str, batch: int, num: int, shard: Shard = Shard(),
  counts: DocumentCounts | None = None,
):  # fmt: skip
  """Exactly `num` batches of one source's held-out documents, in an order that never changes.

  Every process reads all of them and keeps its rows of each batch: a loss is of the same windows,
  however many processes there are. Where documents run out, the rest is padding of weight 0.

  Args:
    batch: rows of this process.
    counts: filled while reading, the same in every process.
  """
  counts = DocumentCounts() if counts is None else counts
  rows, first = batch * shard.count, batch * shard.index
  for whole in _heldout_batches(spec, name, rows, num, counts):
    yield {key: x[first : first + batch] for key, x in whole.items()}


def _heldout_batches(spec: DataConfig, name: str, rows: int, num: int, counts: DocumentCounts):
  """The same of all processes together."""
  if spec.chat is not None:
    chats = chat_samples.of_split(spec, chat_index(spec), "heldout", name)
    yield from packing.batches(chats, spec.seq_len, rows, num)
    return
  windows = iter(_windows(spec, name, spec.sources[name], "heldout", Shard(), counts))
  make, keys = _Batch(spec.cross_document), ("tokens", "tokens_segment_ids", "tokens_positions")
  empty = dict.fromkeys(keys, np.zeros(spec.seq_len + 1, np.int32))
  for _ in range(num):
    own = [next(windows, empty) for _ in range(rows)]
    yield make({key: np.stack([row[key] for row in own]) for key in empty})


def chat_index(spec: DataConfig) -> chat_samples.Index:
  """The samples of all chats, which are read once in a process to know their lengths."""
  key = fingerprint(spec)
  if key not in _INDICES:
    _INDICES.clear()
    _INDICES[key] = chat_samples.make_index(spec)
  return _INDICES[key]


_INDICES: dict[str, chat_samples.Index] = {}  # the newest alone


def chat_steps(spec: DataConfig, windows: int, shard: Shard = Shard()) -> packing.Steps:
  """The steps of training on chats, by number; `windows` over all processes."""
  return packing.Steps(
    chat_samples.of_split(spec, chat_index(spec), "train"),
    spec.seq_len,
    spec.chat.samples_per_step if spec.chat else 0,
    windows,
    f"{spec.seed}/chat",
    (shard.index, shard.count),
  )


def _chat_steps(spec: DataConfig, batch: int, shard: Shard, counts: DocumentCounts):
  """Endless steps of chats, this process's windows of each."""
  steps = chat_steps(spec, batch * shard.count, shard)
  passed_over = chat_index(spec).counts if shard.index == 0 else {}
  ready = reading.read(grain.MapDataset.source(steps), spec.workers, max(spec.prefetch, 4))
  samples, number = steps.samples, len(spec.sources)

  def count(batch):
    if not batch["step"]:  # all that steps pass over is counted at the first one
      counts.update(passed_over)
    of = steps.numbers(int(batch["step"]))
    sums = _by_source(samples.source_of[of], samples.lengths[of], np.ones(len(of)), number)
    dropped = ("step",) if spec.tells_sources else ("step", "sources_BL")
    return {k: v for k, v in batch.items() if k not in dropped} | {"by_source": sums}

  return _Resumable(iter(ready.map(count)))


def _train_windows(spec: DataConfig, name: str, source, shard: Shard, counts: DocumentCounts):
  """Endless windows of this process's share of a source."""
  if source["kind"] == "prepared" and spec.shuffle_windows:
    return _shuffled_windows(spec, name, source, shard, counts)
  stream = _windows(spec, name, source, "train", shard, counts)
  if not spec.shuffle_windows:
    return stream
  # 31 bits: grain adds the number of a block.
  seed = reading.seed(f"{spec.seed}/{name}/windows") >> 1
  return grain.experimental.WindowShuffleIterDataset(
    stream, window_size=spec.shuffle_windows, seed=seed
  )


def _shuffled_windows(spec: DataConfig, name: str, source, shard: Shard, counts: DocumentCounts):
  """Shuffled windows of prepared documents.

  Processes take turns, so that the batches of all of them together are the same windows, however
  many they are.
  """
  windows = window_index.Windows(
    sources_lib.Prepared(source["path"], "train", spec.tokenizer.vocab_size),
    spec.seq_len + 1, f"{spec.seed}/{name}", spec.on_long,
  )  # fmt: skip
  data = grain.MapDataset.source(windows)[shard.index :: shard.count]

  def counted(window):
    counts.update({"too long": window["too_long"]})
    return {key: x for key, x in window.items() if key != "too_long"}

  return reading.read(data, spec.workers).map(counted)


def _windows(spec: DataConfig, name: str, source, split: str, shard: Shard, counts: DocumentCounts):
  """Windows of seq_len + 1 tokens with segment ids and positions."""
  documents = sources_lib.open_source(source, split, spec.tokenizer.vocab_size)
  if not len(documents):
    raise UserError(
      f"data.sources.{name} has no {split} documents; give more data"
      + (", or another data.heldout_fraction" if split == "heldout" else "")
    )
  if len(documents) < shard.count:
    raise UserError(
      f"data.sources.{name} has {len(documents)} {split} documents, fewer than the {shard.count} "
      "processes that read it; use fewer processes or more data"
    )
  # The seed differs by source, so that sources of equal length do not move in step. Held-out
  # documents come in one fixed order: the first few are a fair sample, the same in every run.
  seed = reading.seed(f"{spec.seed if split == 'train' else 'heldout'}/{name}")
  data = grain.MapDataset.source(documents).shuffle(seed=seed)
  if split == "train":
    data = data.repeat()
  data = data[shard.index :: shard.count]
  data = data.map(
    tokenize.Tokenize(
      spec.tokenizer, spec.heldout, split, spec.seq_len, spec.on_malformed, spec.on_long
    )
  )
  patience = None if split == "heldout" else 2 * len(documents)
  stream = reading.read(data, spec.workers).filter(_Keep(counts, name, patience))
  stream = stream.map(lambda document: {"tokens": document["tokens"]})
  return grain.experimental.ConcatThenSplitIterDataset(
    stream, length_struct={"tokens": spec.seq_len + 1}
  )


class _Keep:
  """Drops documents that are not in the stream, and counts all of them."""

  def __init__(self, counts: DocumentCounts, name: str, patience: int | None):
    self._counts, self._name, self._patience = counts, name, patience
    self._dropped = 0

  def __call__(self, document) -> bool:
    self._counts[document["status"]] += 1
    is_kept = len(document["tokens"]) > 0
    self._dropped = 0 if is_kept else self._dropped + 1
    if self._patience is not None and self._dropped > self._patience:
      # An endless stream of nothing would hang the run.
      raise UserError(
        f"data.sources.{self._name} has no document to train on: all of them are malformed, too "
        f"long or held out ({dict(self._counts)}); lower data.heldout_fraction or give more data"
      )
    return is_kept


@dataclasses.dataclass(frozen=True)
class _Batch:
  """Packed windows -> what the model reads; of so many sources also "by_source" and, if it tells
  them, "sources_BL"."""

  cross_document: bool
  sources: int = 0
  tells: bool = False

  def __call__(self, window):
    tokens = window["tokens"]
    segments = window["tokens_segment_ids"]
    length = tokens.shape[1] - 1
    counts = segments[:, 1:] != 0
    batch = {"tokens_BL": tokens[:, :-1], "targets_BL": tokens[:, 1:]}
    if self.cross_document:
      batch["positions_BL"] = np.broadcast_to(
        np.arange(length, dtype=np.int32), (len(tokens), length)
      )
    else:
      counts &= segments[:, 1:] == segments[:, :-1]
      batch["segments_BL"] = segments[:, :-1]
      batch["positions_BL"] = window["tokens_positions"][:, :-1]
    batch["weights_BL"] = counts.astype(np.float32)
    if self.sources:  # segments of a window are numbered from 1, 0 is padding
      there = segments[:, :-1]
      numbers = ((there != 0).sum(1), there.max(1))
      batch["by_source"] = _by_source(window["source"], *numbers, self.sources)
    if self.tells:
      batch["sources_BL"] = np.broadcast_to(window["source"][:, None], there.shape)
    return batch


def fingerprint(spec: DataConfig) -> str:
  """Changes whenever a run would see other data: sources, tokenizer, packing, seed, split."""
  parts = [
    spec.tokenizer.fingerprint, spec.seq_len, spec.heldout, spec.cross_document, spec.seed,
    spec.on_malformed, spec.on_long, spec.shuffle_windows,
    [(n, s["weight"], source_fingerprint(s)) for n, s in sorted(spec.sources.items())],
  ]  # fmt: skip
  if spec.chat is not None:
    parts.append(spec.chat.fingerprint() + "|spaces" * spec.tokenizer.trims_offsets)
  return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def source_fingerprint(source: Mapping[str, Any]) -> str:
  """Changes with the content of a source.

  Files enter by name, size and a sample of their bytes (all of them up to 2 MiB), so that terabytes
  need not be read.
  """
  digest = hashlib.sha256()
  digest.update(repr([source[k] for k in ("kind", "field", "dataset", "split")]).encode())
  digest.update(source.get("chat", "").encode())
  opened = sources_lib.open_source(source)
  if isinstance(opened, sources_lib.Prepared):
    digest.update(repr(opened.index).encode())  # of both splits
  for path in opened.files():
    size = streams.size(path)
    digest.update(repr((os.path.basename(path), size)).encode())
    with streams.open_stored(path) as f:
      digest.update(f.read(1 << 20))
      f.seek(max(size - (1 << 20), 0))
      digest.update(f.read(1 << 20))
  return digest.hexdigest()[:16]
