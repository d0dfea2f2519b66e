"""Documents to tokens in several processes, in the order of the documents."""

import collections
import dataclasses
import functools
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import numpy as np

from fp8jax.data import sources as sources_lib
from fp8jax.data import tokenize

# Documents per task; tasks that wait per process.
CHUNK, _AHEAD = 128, 4
# Fewer stored bytes than this are tokenized here: starting processes takes as long.
_SMALL = 1 << 23

# Numbers of random-access documents, or (origin, line) of a stream.
Task = range | list[tuple[str, bytes]]


# A document: its status, whether it is held out, and its tokens.
Encoded = tuple[str, bool, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Encoder:
  """From a task to tokens; travels to worker processes. `source` is an entry of data.sources."""

  source: dict[str, Any]
  tokenizer: tokenize.Tokenizer
  heldout: float
  on_malformed: str

  def __call__(self, task: Task) -> list[Encoded]:
    records = self._records(task)
    bad = ("malformed", False, np.zeros((0,), np.int32))
    for record in records:
      if "error" in record:
        tokenize.refuse_malformed(self.on_malformed, record)
    tokens = iter(self.tokenizer.encode_batch([r["text"] for r in records if "error" not in r]))
    return [
      bad if "error" in r else ("used", tokenize.is_held_out(r, self.heldout), next(tokens))
      for r in records
    ]

  def _records(self, task: Task) -> list[sources_lib.Record]:
    if isinstance(task, range):
      source = _opened(*sorted(self.source.items()))
      return [source[i] for i in task]
    rows = sources_lib.Rows("", self.source["field"])
    return [sources_lib.json_line(line, rows, origin) for origin, line in task]


@functools.lru_cache(maxsize=1)
def _opened(*spec: tuple[str, Any]) -> sources_lib.Source:
  """The source of this process, by its entry: line starts are found once."""
  return sources_lib.open_source(dict(spec))


def tasks(source: sources_lib.Source, first: int) -> Iterator[Task]:
  """The documents from number `first` on, CHUNK at a time."""
  if isinstance(source, sources_lib.JsonLinesStream):
    rest = itertools.islice(source.lines(), first, None)
    while chunk := list(itertools.islice(rest, CHUNK)):
      yield chunk
  else:
    for start in range(first, len(source), CHUNK):
      yield range(start, min(start + CHUNK, len(source)))


def encoded(
  encoder: Encoder, source: sources_lib.Source, first: int, processes: int, nbytes: int
) -> Iterator[list[Encoded]]:
  """The documents of a source from number `first` on, in order.

  Args:
    first: documents that were encoded before.
    processes: workers; 0: as many as cores, or none for `nbytes` below 8 MiB.
    nbytes: size of the source's files.
  """
  if processes == 0:
    processes = len(os.sched_getaffinity(0)) if nbytes >= _SMALL else 1
  work = tasks(source, first)
  if processes == 1:
    yield from map(encoder, work)
    return
  context = multiprocessing.get_context("spawn")  # JAX's threads do not survive a fork
  with futures.ProcessPoolExecutor(processes, context, _begin, (encoder,)) as pool:
    waiting: collections.deque[futures.Future] = collections.deque()
    try:
      for task in work:
        waiting.append(pool.submit(_encode, task))
        if len(waiting) > _AHEAD * processes:
          yield waiting.popleft().result()
      while waiting:
        yield waiting.popleft().result()
    finally:
      pool.shutdown(cancel_futures=True)


_ENCODER: list[Encoder] = []


def _begin(encoder: Encoder):
  """In a worker: the library's own threads would compete with the other processes."""
  os.environ["TOKENIZERS_PARALLELISM"] = "false"
  _ENCODER.append(encoder)


def _encode(task: Task) -> list[Encoded]:
  return _ENCODER[0](task)
