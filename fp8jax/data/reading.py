"""Reads the elements of a grain MapDataset ahead, in threads or worker processes; its seeds."""

import functools
import hashlib
import multiprocessing
import os
import signal
import threading

import grain

# Elements that are numbered without end; grain wants a length, and slices it.
ENDLESS = 2**48


class Reopened:
  """Travels to worker processes without its cached properties: each opens files of its own."""

  def __getstate__(self):
    cached, own = functools.cached_property, type(self)
    return {k: v for k, v in vars(self).items() if not isinstance(getattr(own, k, None), cached)}


def read(data: grain.MapDataset, workers: int, buffer: int = 16):
  """The elements of `data` in order, made by 4 threads, or by so many worker processes.

  Args:
    buffer: elements held ready.
  """
  threads = grain.ReadOptions(num_threads=0 if workers else 4, prefetch_buffer_size=buffer)
  stream = data.to_iter_dataset(threads)
  if not workers:
    return stream
  return stream.mp_prefetch(
    grain.MultiprocessingOptions(num_workers=workers), worker_init_fn=_outlive_signals
  )


def seed(text: str) -> int:
  """An unsigned 32-bit seed that depends on a text."""
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def _outlive_signals(index: int, count: int):
  """In a worker process: the run alone answers Ctrl-C and SIGTERM, which reach the whole group.

  It asks for a few more batches before it leaves. A worker ends when told to, or with the run.
  """
  del index, count
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
  parent = multiprocessing.parent_process()
  if parent is not None:
    parent.join()
    os._exit(0)
