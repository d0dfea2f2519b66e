"""--job=prepare: tokenize once, into ArrayRecord files that training reads back at full speed."""

import itertools
import json
import os
from typing import Any

import numpy as np
import rich.console
import rich.progress

from fp8jax.data import config as data_config
from fp8jax.data import loader, tokenize
from fp8jax.data import sources as sources_lib
from fp8jax.errors import UserError

SPLITS = ("train", "heldout")


def run(
  spec: data_config.DataConfig, target: str, shard_tokens: int, out: rich.console.Console
) -> dict[str, Any]:
  """Writes TARGET/<source>/{train,heldout}-*.array_record and an index.json beside them.

  Each record is one document: little-endian uint32 token ids, the end-of-document id last.
  {train,heldout}-lengths.uint32 has the number of tokens of every document.

  Args:
    spec: sources, tokenizer, held-out fraction and policies.
    target: folder; a source that is there with the same fingerprint is left alone.
    shard_tokens: tokens per file.

  Returns:
    {source: index}, as written.
  """
  return {
    name: _one(spec, name, os.path.join(target, name), shard_tokens, out) for name in spec.sources
  }


def _one(
  spec: data_config.DataConfig, name: str, folder: str, shard_tokens: int, out
) -> dict[str, Any]:
  source = sources_lib.open_source(spec.sources[name])
  if isinstance(source, sources_lib.Prepared):
    raise UserError(f"data.sources.{name} is prepared already; prepare reads raw documents")
  fingerprint = loader.source_fingerprint(spec.sources[name])
  wanted = {
    "tokenizer": spec.tokenizer.fingerprint,
    "heldout": spec.heldout,
    "on_malformed": spec.on_malformed,
    "source": fingerprint,
  }
  index_path = os.path.join(folder, "index.json")
  if os.path.exists(index_path):
    index = _index_of_whole(folder)
    if index is not None and all(index.get(k) == v for k, v in wanted.items()):
      out.print(f"{folder} is up to date")
      return index
    os.remove(index_path)
  os.makedirs(folder, exist_ok=True)
  writers = {split: _Shards(folder, split, shard_tokens) for split in SPLITS}
  counts = loader.DocumentCounts()
  encode = tokenize.Tokenize(
    spec.tokenizer, 0.0, "train", spec.seq_len, spec.on_malformed, on_long="split"
  )
  columns = (
    rich.progress.TextColumn(name),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeRemainingColumn(),
  )
  with rich.progress.Progress(*columns, console=out, disable=not out.is_terminal) as progress:
    for i in progress.track(range(len(source))):
      record = source[i]
      document = encode(record)
      counts[document["status"]] += 1
      if len(document["tokens"]):
        held = tokenize.is_held_out(record, spec.heldout)
        writers["heldout" if held else "train"].write(document["tokens"])
  splits = {split: w.close() for split, w in writers.items()}
  index = {**wanted, "passed_over": counts.summary(), "splits": splits}
  with open(index_path + ".part", "w") as f:
    json.dump(index, f, indent=2)
  os.replace(index_path + ".part", index_path)
  for split, info in splits.items():
    out.print(f"{folder} {split}: {info['documents']:,} documents, {info['tokens']:,} tokens")
  return index


def _index_of_whole(folder: str) -> dict[str, Any] | None:
  """The index of a folder that has every file it names."""
  try:
    for split in SPLITS:
      prepared = sources_lib.Prepared(folder, split)
      prepared.check()
      prepared.lengths()
    return prepared.index
  except (UserError, FileNotFoundError, KeyError, TypeError):  # lost, cut off or foreign
    return None


class _Shards:
  """ArrayRecord files of about `limit` tokens."""

  def __init__(self, folder: str, split: str, limit: int):
    self._folder, self._split, self._limit = folder, split, limit
    self._names = (f"{split}-{i:05d}.array_record" for i in itertools.count())
    self._writer, self._in_file = None, 0
    lengths = f"{split}-lengths.uint32"
    self._info = {"files": [], "lengths": lengths, "documents": 0, "tokens": 0}
    self._lengths = open(os.path.join(folder, lengths), "wb")

  def write(self, tokens: np.ndarray):
    if self._writer is None or self._in_file >= self._limit:
      self._writer = self._next_file()
    self._writer.write(tokens.astype("<u4").tobytes())
    self._lengths.write(np.uint32(len(tokens)).astype("<u4").tobytes())
    self._in_file += len(tokens)
    self._info["documents"] += 1
    self._info["tokens"] += len(tokens)

  def _next_file(self):
    if self._writer is not None:
      self._writer.close()
    name = next(self._names)
    self._info["files"].append(name)
    self._in_file = 0
    from array_record.python import array_record_module  # pyright: ignore  (extra `data`)

    # One record per group: documents are read one at a time, in shuffled order.
    path = os.path.join(self._folder, name)
    return array_record_module.ArrayRecordWriter(path, "group_size:1")

  def close(self) -> dict[str, Any]:
    if self._writer is not None:
      self._writer.close()
    self._lengths.close()
    return self._info
