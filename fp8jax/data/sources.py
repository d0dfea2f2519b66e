"""Random-access collections of documents.

A source is a sequence: `source[i]` is a record {"text" or "tokens", "origin"} or, where the input
is malformed, {"error", "origin"}; reading never raises for bad content, because the config decides
what that means (see tokenize.py). Origins name file and line.
"""

import dataclasses
import functools
import glob
import json
import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from fp8jax.errors import UserError, read_json

KINDS = ("pydoc", "text", "jsonl", "parquet", "tfds", "prepared")

# Keys of an entry of `data.sources`.
KEYS = ("kind", "path", "field", "dataset", "split", "weight")

Record = dict[str, Any]


class Source(Protocol):
  """What grain reads from."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Record: ...

  def files(self) -> list[str]:
    """Paths whose content the source depends on, for fingerprints."""
    ...


def open_source(spec: Mapping[str, Any], split: str = "train") -> Source:
  """The source that one entry of `data.sources` describes.

  Args:
    spec: kind, path, field, dataset, split (see configs/base.py).
    split: "train" or "heldout"; only prepared data are stored apart.

  Raises:
    ValueError, FileNotFoundError: with what was wrong and what to do.
  """
  kind = spec["kind"]
  if kind == "pydoc":
    return PydocTopics()
  if kind == "tfds":
    return Tfds(spec["dataset"], spec["split"], spec["path"], spec["field"])
  if kind == "prepared":
    return Prepared(spec["path"], split)
  paths = find_files(spec["path"])
  if kind == "text":
    return TextFiles(paths)
  if kind == "jsonl":
    return JsonLines(paths, spec["field"])
  if kind == "parquet":
    return Parquet(paths, spec["field"])
  raise ValueError(f"unknown source kind {kind!r}; expected one of {', '.join(KINDS)}")


def find_files(pattern: str) -> list[str]:
  """Files that match a glob, sorted; ** descends."""
  if not pattern:
    raise UserError("path is empty; give a glob of files")
  pattern = os.path.expanduser(pattern)
  paths = sorted(p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p))
  if not paths:
    hint = f"; it is a folder, try {os.path.join(pattern, '**/*')!r}" * os.path.isdir(pattern)
    raise FileNotFoundError(f"no file matches {pattern!r}{hint}")
  return paths


class PydocTopics:
  """The language reference that ships with Python: 79 or so documents, no download."""

  @functools.cached_property
  def _topics(self) -> list[tuple[str, str]]:
    from pydoc_data import topics  # half a megabyte of text, only for those who use it

    return sorted(topics.topics.items())

  def __len__(self):
    return len(self._topics)

  def __getitem__(self, index):
    name, text = self._topics[index]
    return {"text": text.strip(), "origin": f"pydoc topic {name!r}"}

  def files(self):
    from pydoc_data import topics

    return [topics.__file__]


@dataclasses.dataclass
class TextFiles:
  """One document per file."""

  paths: list[str]

  def __len__(self):
    return len(self.paths)

  def __getitem__(self, index):
    path = self.paths[index]
    with open(path, "rb") as f:
      return _decoded(f.read(), path)

  def files(self):
    return self.paths


class JsonLines:
  """One document per line, in `field` of a JSON object."""

  def __init__(self, paths: list[str], field: str):
    self.paths = paths
    self.field = field

  @functools.cached_property
  def _offsets(self) -> list[np.ndarray]:
    """Start of every line of every file: 8 bytes per document."""
    return [_line_starts(path) for path in self.paths]

  @functools.cached_property
  def _ends(self) -> np.ndarray:
    return np.cumsum([len(o) - 1 for o in self._offsets])

  def __len__(self):
    return int(self._ends[-1])

  def __getitem__(self, index):
    which = int(np.searchsorted(self._ends, index, side="right"))
    line = index - (int(self._ends[which - 1]) if which else 0)
    start, end = self._offsets[which][line : line + 2]
    path = self.paths[which]
    origin = f"{path}:{line + 1}"
    with open(path, "rb") as f:
      f.seek(start)
      record = _decoded(f.read(end - start).strip(), origin)
    if "error" in record:
      return record
    try:
      value = json.loads(record["text"])
    except json.JSONDecodeError as e:
      return {"error": f"broken JSON ({e.msg} at column {e.colno})", "origin": origin}
    except (ValueError, RecursionError) as e:  # a number or a nesting beyond Python's limits
      return {"error": f"broken JSON ({e})", "origin": origin}
    return _field(value, self.field, origin)

  def files(self):
    return self.paths


class Parquet:
  """One document per row, in column `field`.

  Rows come in shuffled order and a row group is read whole; the last few stay in memory. Large row
  groups are read many times over: use --job=prepare.
  """

  def __init__(self, paths: list[str], field: str):
    self.paths = paths
    self.field = field

  @functools.cached_property
  def _footers(self) -> list[Any]:
    """Metadata of every file."""
    import pyarrow.parquet as pq  # extra `data`

    footers = []
    for path in self.paths:
      try:
        footers.append(pq.ParquetFile(path).metadata)
      except ValueError as e:
        raise UserError(f"{path} is not a Parquet file: {e}") from e
      names = footers[-1].schema.to_arrow_schema().names
      if self.field not in names:
        raise UserError(
          f"{path}: no column {self.field!r}; it has {', '.join(names)}. Set data.sources.*.field"
        )
    return footers

  @functools.cached_property
  def _groups(self) -> list[tuple[int, int, int]]:
    """(file, row group, first row in file) of every row group; group -1 of a file without rows."""
    groups = []
    for i, footer in enumerate(self._footers):
      first = 0
      if not footer.num_rows:
        groups.append((i, -1, 0))
        continue
      for g in range(footer.num_row_groups):
        groups.append((i, g, first))
        first += footer.row_group(g).num_rows
    return groups

  @functools.cached_property
  def _ends(self) -> np.ndarray:
    # A file without rows is one malformed document, so that it is reported and not passed over.
    rows = [1 if g < 0 else self._footers[i].row_group(g).num_rows for i, g, _ in self._groups]
    return np.cumsum(rows)

  def __len__(self):
    return int(self._ends[-1])

  def __getitem__(self, index):
    which = int(np.searchsorted(self._ends, index, side="right"))
    row = index - (int(self._ends[which - 1]) if which else 0)
    if self._groups[which][1] < 0:
      return {"error": "no rows", "origin": self.paths[self._groups[which][0]]}
    file, group, first = self._groups[which]
    origin = f"{self.paths[file]}:row {first + row}"
    text = _row_group(self.paths[file], group, self.field)[row].as_py()
    return _field({self.field: text}, self.field, origin)

  def files(self):
    return self.paths


@functools.lru_cache(maxsize=8)
def _row_group(path: str, group: int, field: str):
  import pyarrow.parquet as pq

  return pq.ParquetFile(path).read_row_group(group, columns=[field]).column(field)


class Tfds:
  """A TensorFlow Datasets set in array_record format, read without TensorFlow."""

  def __init__(self, dataset: str, split: str, data_dir: str, field: str):
    self.dataset, self.split, self.field = dataset, split, field
    self.data_dir = data_dir or None

  @functools.cached_property
  def _source(self):
    import tensorflow_datasets as tfds  # extra `data`

    try:
      return tfds.data_source(self.dataset, split=self.split, data_dir=self.data_dir)
    except NotImplementedError as e:
      raise UserError(
        f"tfds dataset {self.dataset!r} (data_dir {self.data_dir!r}) is stored in a format without "
        "random access; make it again with "
        "tfds.builder(..., file_format='array_record').download_and_prepare()"
      ) from e

  def __len__(self):
    return len(self._source)

  def __getitem__(self, index):
    origin = f"tfds {self.dataset}[{self.split}]:{index}"
    return _field(self._source[index], self.field, origin)

  def files(self):
    import tensorflow_datasets as tfds

    try:
      builder = tfds.builder(self.dataset, data_dir=self.data_dir)
    except Exception as e:  # whose message lists every dataset there is
      first = str(e).splitlines()[0] if str(e) else type(e).__name__
      raise UserError(f"tfds cannot open dataset {self.dataset!r}: {first}") from e
    return [str(f) for info in builder.info.splits.values() for f in info.filepaths]

  def __getstate__(self):
    # Readers hold file handles; workers open their own.
    return {k: v for k, v in self.__dict__.items() if k != "_source"}


class Prepared:
  """Token sequences that `--job=prepare` wrote to ArrayRecord files."""

  def __init__(self, path: str, split: str):
    self.path, self.split = path, split

  @functools.cached_property
  def index(self) -> dict[str, Any]:
    """What prepare wrote down: fingerprints, token counts, files per split."""
    name = os.path.join(self.path, "index.json")
    index = read_json(name, "write it with --job=prepare")
    if not {"tokenizer", "heldout", "splits"} <= index.keys():
      raise UserError(f"{name} was not written by --job=prepare; prepare again")
    return index

  @functools.cached_property
  def _source(self):
    import grain

    return grain.sources.ArrayRecordDataSource(self.files())

  def lengths(self) -> np.ndarray:
    """uint32 [documents]: tokens of every document, mapped from disk.

    Raises:
      UserError: the file is missing, or does not belong to the documents.
    """
    return self._lengths

  @functools.cached_property
  def _lengths(self) -> np.ndarray:
    info = self.index["splits"][self.split]
    if "lengths" not in info:
      raise UserError(
        f"{self.path} was prepared without the lengths of its documents, which shuffling needs; "
        "prepare it again with --job=prepare, or set data.shuffle_windows=0"
      )
    path = os.path.join(self.path, info["lengths"])
    again = "write it again with --job=prepare"
    if not os.path.exists(path):
      raise FileNotFoundError(f"{path} does not exist; {again}")
    if not info["documents"]:
      return np.zeros(0, np.uint32)
    lengths = np.memmap(path, "<u4", "r") if os.path.getsize(path) else np.zeros(0, np.uint32)
    total = int(lengths.sum(dtype=np.int64))
    if (len(lengths), total) != (info["documents"], info["tokens"]):
      raise UserError(
        f"{path} has {len(lengths)} documents of {total} tokens, index.json says "
        f"{info['documents']} of {info['tokens']}; {again}"
      )
    return lengths

  def __len__(self):
    return self.index["splits"][self.split]["documents"]

  def __getitem__(self, index):
    tokens = np.frombuffer(self._source[index], np.dtype("<u4")).astype(np.int32)
    return {"tokens": tokens, "origin": f"{self.path}/{self.split}:{index}"}

  def files(self):
    paths = [os.path.join(self.path, f) for f in self.index["splits"][self.split]["files"]]
    missing = [p for p in paths if not os.path.exists(p)]
    if missing:
      raise FileNotFoundError(f"{missing[0]} does not exist; write it again with --job=prepare")
    return paths

  def __getstate__(self):
    return {"path": self.path, "split": self.split}


def _decoded(data: bytes, origin: str) -> Record:
  if not data.strip():
    return {"error": "empty document", "origin": origin}
  try:
    return {"text": data.decode("utf-8"), "origin": origin}
  except UnicodeDecodeError as e:
    return {"error": f"bad UTF-8 at byte {e.start}", "origin": origin}


def _field(value: Any, field: str, origin: str) -> Record:
  if not isinstance(value, Mapping) or value.get(field) is None:
    have = ", ".join(map(repr, value)) if isinstance(value, Mapping) else type(value).__name__
    return {"error": f"missing field {field!r} (has {have})", "origin": origin}
  text = value[field]
  if isinstance(text, bytes):
    return _decoded(text, origin)
  if not isinstance(text, str):
    kind = type(text).__name__
    return {"error": f"field {field!r} is {kind}, expected a string", "origin": origin}
  if not text.strip():
    return {"error": "empty document", "origin": origin}
  try:
    text.encode("utf-8")  # JSON may spell half of a surrogate pair
  except UnicodeEncodeError as e:
    return {"error": f"lone surrogate at character {e.start}", "origin": origin}
  return {"text": text, "origin": origin}


def _line_starts(path: str) -> np.ndarray:
  """Byte offset of every line and of the end of the file; blank lines at the end do not count."""
  starts, end, last = [0], 0, 0
  with open(path, "rb") as f:
    for line in f:
      end += len(line)
      starts.append(end)
      if line.strip():
        last = len(starts) - 1
  starts = starts[: last + 1]
  if len(starts) == 1:
    # An empty file is one malformed document, so that it is reported and not passed over.
    starts.append(0)
  return np.asarray(starts, np.int64)
