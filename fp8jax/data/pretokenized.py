"""Documents that --job=prepare tokenized, read back by number.

The index, the files that it names and the token ids are checked: a damaged record or an id beyond
the vocabulary stops the run.
"""

import functools
import os
from collections.abc import Sized
from typing import Annotated, Any, NotRequired, TypedDict, cast

import grain
import msgspec
import numpy as np

from fp8jax import records
from fp8jax.data import reading
from fp8jax.errors import UserError, inside, one_line

_AGAIN = "delete the folder and write it again with --job=prepare"
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Split(TypedDict):
  files: list[str]
  documents: _Count
  tokens: _Count
  lengths: NotRequired[str]


class _Splits(TypedDict):
  train: _Split
  heldout: _Split


class _Index(TypedDict):
  tokenizer: str
  heldout: float
  splits: _Splits


class Prepared(reading.Reopened):
  """Token sequences that `--job=prepare` wrote to ArrayRecord files."""

  def __init__(self, path: str, split: str, vocab_size: int | None = None):
    self.path, self.split = os.path.expanduser(path), split
    self.vocab_size = vocab_size

  @functools.cached_property
  def index(self) -> dict[str, Any]:
    """The index that prepare wrote: fingerprints, token counts, files per split."""
    name = os.path.join(self.path, "index.json")
    remedy = "name a folder that --job=prepare wrote, or write it again with --job=prepare"
    index = records.read(name, _Index, remedy)
    for split, info in index["splits"].items():
      _check_split(self.path, f"{name}: splits.{split}", info)
    return index

  def check(self):
    """Refuses files that are missing or damaged, and documents not as many as the index says."""
    count = len(cast(Sized, self._source)) if self.files() else 0
    if count != len(self):
      raise UserError(
        f"{self.path}: the {self.split} files hold {count} documents, index.json says {len(self)}; "
        f"{_AGAIN}"
      )

  @functools.cached_property
  def _source(self):
    try:
      return grain.sources.ArrayRecordDataSource(self.files())
    except RuntimeError as e:
      raise UserError(f"{self._damaged()} is damaged ({one_line(e)}); {_AGAIN}") from e

  def _damaged(self) -> str:
    """The first file that cannot be opened."""
    for path in self.files():
      try:
        grain.sources.ArrayRecordDataSource([path])
      except RuntimeError:
        return path
    return self.path

  @functools.cached_property
  def lengths(self) -> np.ndarray:
    """uint32 [documents]: tokens of every document, mapped from disk; checked."""
    info = self.index["splits"][self.split]
    if "lengths" not in info:
      raise UserError(
        f"{self.path} was prepared without the lengths of its documents, which shuffling needs; "
        "prepare it again with --job=prepare, or set data.shuffle_windows=0"
      )
    path = os.path.join(self.path, info["lengths"])
    if not os.path.exists(path):
      raise FileNotFoundError(f"{path} does not exist; {_AGAIN}")
    if (size := os.path.getsize(path)) % 4:
      raise UserError(f"{path} has {size} bytes, no multiple of 4; {_AGAIN}")
    lengths = np.memmap(path, "<u4", "r") if size else np.zeros(0, np.uint32)
    total = int(lengths.sum(dtype=np.int64))
    if (len(lengths), total) != (info["documents"], info["tokens"]):
      raise UserError(
        f"{path} has {len(lengths)} documents of {total} tokens, index.json says "
        f"{info['documents']} of {info['tokens']}; {_AGAIN}"
      )
    return lengths

  def __len__(self):
    return self.index["splits"][self.split]["documents"]

  def __getitem__(self, index):
    origin = f"{self.path}/{self.split}:{index}"
    try:
      record = self._source[index]
    except (RuntimeError, ValueError, IndexError) as e:
      raise UserError(f"{origin} cannot be read ({one_line(e)}); {_AGAIN}") from e
    if not record or len(record) % 4:
      raise UserError(f"{origin} has {len(record)} bytes, no whole token ids; {_AGAIN}")
    tokens = np.frombuffer(record, np.dtype("<u4"))
    largest = int(tokens.max())
    if self.vocab_size is not None and largest >= self.vocab_size:
      raise UserError(
        f"{origin} has token {largest}, the tokenizer has ids below {self.vocab_size}; {_AGAIN}"
      )
    # Where the lengths are in use, positions are computed from them.
    lengths = self.__dict__.get("lengths")
    if lengths is not None and lengths[index] != len(tokens):
      raise UserError(
        f"{origin} has {len(tokens)} tokens, {self.index['splits'][self.split]['lengths']} says "
        f"{lengths[index]}; {_AGAIN}"
      )
    return {"tokens": tokens.astype(np.int32), "origin": origin}

  def files(self):
    paths = [os.path.join(self.path, f) for f in self.index["splits"][self.split]["files"]]
    missing = [p for p in paths if not os.path.exists(p)]
    if missing:
      raise FileNotFoundError(f"{missing[0]} does not exist; write it again with --job=prepare")
    return paths


def _check_split(folder: str, where: str, info: Any):
  """One split of a prepared index: files are inside the folder, and each is there once."""
  names = [*info["files"], *([info["lengths"]] if "lengths" in info else [])]
  for name in names:
    inside(folder, name, where)
  if len(set(names)) < len(names):
    raise UserError(f"{where} names a file twice; {_AGAIN}")
  if info["documents"] and not info["files"]:
    raise UserError(f"{where} counts {info['documents']} documents in no file; {_AGAIN}")
