"""--job=prepare: tokenize once, into ArrayRecord files that training reads back at full speed."""

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import rich.console
import rich.progress

from fp8jax import console as console_lib
from fp8jax import records
from fp8jax.data import config as data_config
from fp8jax.data import encode, loader, streams
from fp8jax.data import sources as sources_lib
from fp8jax.errors import UserError, read_json, writing

SPLITS = ("train", "heldout")
_REMEDY = "name another folder as --out=FOLDER"


def run(
  spec: data_config.DataConfig, target: str, shard_tokens: int, out: rich.console.Console,
  processes: int = 0, lock: Callable[[str], Any] = contextlib.nullcontext,
) -> dict[str, Any]:  # fmt: skip
  """Writes TARGET/<source>/{train,heldout}-*.array_record and an index.json beside them.

  Each record is one document: little-endian uint32 token ids, the end-of-document id last.
  {train,heldout}-lengths.uint32 has the number of tokens of every document.

  Args:
    target: folder; a source that is there with the same fingerprint is left alone.
    shard_tokens: tokens per file; an interrupted call goes on after the last whole one.
    processes: see encode.encoded; the files do not depend on it.
    lock: keeps other calls out of `target` while this one writes.

  Returns:
    {source: index}, as written.
  """
  rest = (shard_tokens, out, processes)
  return {name: _one(spec, name, target, lock, *rest) for name in spec.sources}


def _one(spec: data_config.DataConfig, name: str, target: str, lock, shard_tokens, out, processes):
  """The index of one source."""
  folder, source = os.path.join(target, name), sources_lib.open_source(spec.sources[name])
  if isinstance(source, sources_lib.Prepared):
    raise UserError(f"data.sources.{name} is prepared already; prepare reads raw documents")
  wanted = {
    "tokenizer": spec.tokenizer.fingerprint,
    "heldout": spec.heldout,
    "on_malformed": spec.on_malformed,
    "source": loader.source_fingerprint(spec.sources[name]),
  }
  if (index := _up_to_date(folder, wanted)) is not None:
    out.print(f"{folder} is up to date")
    return index
  with lock(target):  # another call may have written it meanwhile
    made = _up_to_date(folder, wanted)
    return made or _write(spec, name, folder, source, wanted, shard_tokens, out, processes)


def _up_to_date(folder: str, wanted: dict[str, Any]) -> dict[str, Any] | None:
  """The index of a folder that is whole and was made of these."""
  index = _index_of_whole(folder) if os.path.exists(os.path.join(folder, "index.json")) else None
  return index if index and all(index.get(k) == v for k, v in wanted.items()) else None


def _write(
  spec: data_config.DataConfig, name: str, folder: str, source, wanted: dict[str, Any],
  shard_tokens: int, out: rich.console.Console, processes: int,
) -> dict[str, Any]:  # fmt: skip
  """Writes one source; its index."""
  index_path = os.path.join(folder, "index.json")
  if os.path.exists(index_path):
    os.remove(index_path)
  with writing(folder, _REMEDY):
    os.makedirs(folder, exist_ok=True)
    written = _Written(folder, {**wanted, "shard_tokens": shard_tokens}, shard_tokens)
  if written.read:
    out.print(f"{folder}: goes on after {written.read:,} documents")
  encoder = encode.Encoder(
    dict(spec.sources[name]), spec.tokenizer, spec.heldout, spec.on_malformed
  )
  nbytes = sum(map(streams.size, source.files()))
  total = None if isinstance(source, sources_lib.JsonLinesStream) else len(source)
  bars = (rich.progress.BarColumn, rich.progress.MofNCompleteColumn,
          rich.progress.TimeRemainingColumn)  # fmt: skip
  columns = (console_lib.column("{task.description}"), *(bar() for bar in bars))
  with rich.progress.Progress(*columns, console=out, disable=not out.is_terminal) as progress:
    bar = progress.add_task(console_lib.visible(name), total=total, completed=written.read)
    for chunk in encode.encoded(encoder, source, written.read, processes, nbytes):
      with writing(folder, _REMEDY):
        written.write(chunk)
      progress.update(bar, completed=written.read)
  with writing(folder, _REMEDY):
    splits = written.close()
    index = {**wanted, "passed_over": written.counts.summary(), "splits": splits}
    records.write_atomic(index_path, records.to_json(index))
  written.forget()
  for split, info in splits.items():
    out.print(f"{folder} {split}: {info['documents']:,} documents, {info['tokens']:,} tokens")
  return index


class _Written:
  """The files of both splits so far, and progress.json: where an interrupted call goes on."""

  def __init__(self, folder: str, wanted: dict[str, Any], shard_tokens: int):
    self._path, self._wanted = os.path.join(folder, "progress.json"), wanted
    place: dict[str, Any] = {"read": 0, "counts": {}, "splits": {}}
    if os.path.exists(self._path):
      before = read_json(self._path, "remove it, and the same command begins again")
      if all(before.get(k) == v for k, v in wanted.items()):
        place = before
      else:
        self.forget()
    self._shards = {s: _Shards(folder, s, shard_tokens, place["splits"].get(s)) for s in SPLITS}
    self.counts = loader.DocumentCounts(place["counts"])
    self.read: int = place["read"]

  def write(self, chunk: list[encode.Encoded]):
    """Adds documents; ends the files of both splits when one of `train` is full."""
    for status, is_held_out, tokens in chunk:
      if len(tokens) and not is_held_out and self._shards["train"].is_full:
        splits = {split: shards.cut() for split, shards in self._shards.items()}
        at = {"read": self.read, "counts": dict(self.counts), "splits": splits}
        records.write_atomic(self._path, records.to_json({**self._wanted, **at}))
      self.counts[status] += 1
      if len(tokens):
        self._shards["heldout" if is_held_out else "train"].write(tokens)
      self.read += 1

  def close(self) -> dict[str, Any]:
    return {split: shards.close() for split, shards in self._shards.items()}

  def forget(self):
    pathlib.Path(self._path).unlink(missing_ok=True)


def _index_of_whole(folder: str) -> dict[str, Any] | None:
  """The index of a folder that has every file it names."""
  try:
    for split in SPLITS:
      prepared = sources_lib.Prepared(folder, split)
      prepared.check()
      _ = prepared.lengths
    return prepared.index
  except (UserError, FileNotFoundError, KeyError, TypeError):  # lost, cut off or foreign
    return None


class _Shards:
  """ArrayRecord files of about `limit` tokens; `before` is what `cut` returned earlier."""

  def __init__(self, folder: str, split: str, limit: int, before: dict[str, Any] | None = None):
    self._folder, self._split, self._limit = folder, split, limit
    self._writer, self._in_file = None, 0
    lengths = f"{split}-lengths.uint32"
    self._info = before or {"files": [], "lengths": lengths, "documents": 0, "tokens": 0}
    self._lengths = open(os.path.join(folder, lengths), "r+b" if before else "wb")
    self._lengths.truncate(4 * self._info["documents"])
    self._lengths.seek(0, os.SEEK_END)

  @property
  def is_full(self) -> bool:
    return self._in_file >= self._limit

  def write(self, tokens: np.ndarray):
    if self._writer is None or self.is_full:
      from array_record.python import array_record_module  # pyright: ignore  (extra `data`)

      self.cut()
      name = f"{self._split}-{len(self._info['files']):05d}.array_record"
      self._info["files"].append(name)
      # One record per group: documents are read one at a time, in shuffled order.
      path = os.path.join(self._folder, name)
      self._writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    self._writer.write(tokens.astype("<u4").tobytes())
    self._lengths.write(np.uint32(len(tokens)).astype("<u4").tobytes())
    self._in_file += len(tokens)
    self._info["documents"] += 1
    self._info["tokens"] += len(tokens)

  def cut(self) -> dict[str, Any]:
    """Ends the file that is being written; returns what all files hold."""
    if self._writer is not None:
      self._writer.close()
    self._writer, self._in_file = None, 0
    self._lengths.flush()
    return self._info

  def close(self) -> dict[str, Any]:
    with self._lengths:
      return self.cut()
