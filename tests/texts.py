"""Documents for tests: files of them, the data of a run, its batches, and what prepare makes."""

import json
import os

import numpy as np
import rich.console

from configs import base
from fp8jax.data import config as data_config
from fp8jax.data import loader, pretokenize, tokenize

BYTES = tokenize.Tokenizer("bytes")


def write(path, texts):
  """A document per text, as JSON lines; returns the path."""
  path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  return path


def source(kind="text", path="", **values) -> dict:
  return dict(base.source(kind, str(path), **values))


def spec(of=None, seq_len=32, **values) -> data_config.DataConfig:
  """Data in bytes of one source: an entry of data.sources, or a path of JSON lines."""
  of = source("jsonl", of) if isinstance(of, os.PathLike) else of or source("pydoc")
  values = {"sources": {"main": of}, "tokenizer": BYTES} | values
  return data_config.DataConfig(seq_len=seq_len, **values)


def take(spec, number, batch=4, **kwargs):
  """The first batches of training."""
  iterator = loader.train_batches(spec, batch, **kwargs)
  batches = [next(iterator) for _ in range(number)]
  iterator.close()
  return batches


def resume(spec, state, number, batch=4):
  """`take` from a state on."""
  iterator = loader.train_batches(spec, batch)
  iterator.set_state(json.loads(json.dumps(state)))
  batches = [next(iterator) for _ in range(number)]
  iterator.close()
  return batches


def are_same(a, b) -> bool:
  """Whether two lists of batches are equal to the bit."""
  return all(
    x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x)
    for x, y in zip(a, b, strict=True)
  )


def prepare(spec, folder, shard_tokens=300, processes=0, out=None):
  """(index of the only source, what reads it in training)."""
  out = out or rich.console.Console(quiet=True)
  index = pretokenize.run(spec, str(folder), shard_tokens, out, processes)["main"]
  return index, source("prepared", folder / "main")
