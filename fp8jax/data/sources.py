"""Random-access collections of documents.

A source is a sequence: `source[i]` is a record {"text" or "tokens", "origin"} or, where the input
is malformed, {"error", "origin"}; reading never raises for bad content, because the config decides
what that means (see tokenize.py). Origins name file and line.
"""

import dataclasses
import functools
import glob
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from fp8jax.data import streams, text_files
from fp8jax.data.chat import conversation
from fp8jax.data.pretokenized import Prepared
from fp8jax.data.tables import HfDataset, Tfds
from fp8jax.errors import UserError, one_line

KINDS = ("pydoc", "text", "jsonl", "parquet", "datasets", "tfds", "prepared")
CHAT_KINDS = ("jsonl", "parquet", "datasets")  # whose rows may be conversations
# Keys of an entry of `data.sources`.
KEYS = ("kind", "path", "chat", "field", "dataset", "split", "weight")
# A row is a document (""), or a conversation in one of chat/conversation.py's formats.
CHAT_FORMATS = ("", *conversation.FIELDS)

Record = dict[str, Any]


class Source(Protocol):
  """The source that grain reads from; `files` are those that it depends on, for fingerprints."""

  def __len__(self) -> int: ...
  def __getitem__(self, index: int) -> Record: ...
  def files(self) -> list[str]: ...


def open_source(
  spec: Mapping[str, Any], split: str = "train", vocab_size: int | None = None
) -> Source:
  """The source that one entry of `data.sources` describes.

  Args:
    spec: see configs/base.py.
    split: "train" or "heldout"; only prepared data are stored apart.
    vocab_size: prepared token ids must be smaller; None does not check them.

  Raises:
    ValueError, FileNotFoundError: with what was wrong and what to do.
  """
  kind = spec["kind"]
  rows = Rows(spec.get("chat", ""), spec["field"], kind in ("parquet", "datasets"))
  if kind == "pydoc":
    return PydocTopics()
  if kind == "tfds":
    if not spec["dataset"]:
      raise UserError("dataset is empty; set it to the name of a tfds set, name[/config][:version]")
    return Tfds(spec["path"], spec["dataset"], spec["split"], rows)
  if kind == "prepared":
    return Prepared(spec["path"], split, vocab_size)
  if kind == "datasets":
    if not spec["path"] and not spec["dataset"]:
      raise UserError(
        "path and dataset are empty; set path to a folder that Dataset.save_to_disk wrote, or "
        "dataset to a name"
      )
    dataset = "" if spec["path"] else spec["dataset"]
    return HfDataset(spec["path"], dataset, spec["split"], rows)
  paths = find_files(spec["path"])
  if kind == "text":
    return TextFiles(paths)
  if kind == "jsonl":
    streamed = [p for p in paths if streams.is_remote(p) or streams.is_compressed(p)]
    if streamed and rows.chat:
      raise UserError(
        f"{streamed[0]}: conversations are read from the files themselves, in shuffled order; "
        "copy them to disk and decompress them"
      )
    return (JsonLinesStream if streamed else JsonLines)(paths, rows)
  if kind != "parquet":
    raise ValueError(f"unknown source kind {kind!r}; expected one of {', '.join(KINDS)}")
  if remote := [p for p in paths if streams.is_remote(p)]:
    raise UserError(f"{remote[0]}: Parquet files are read from disk; copy them")
  return Parquet(paths, rows)


@dataclasses.dataclass(frozen=True)
class Rows:
  """From a row, a mapping of columns, to a record.

  Attributes:
    chat: one of CHAT_FORMATS.
    field: the column of the text; of conversations see chat/conversation.py.
    of_table: whether the rows are of a table, which has nulls for the keys of other rows.
  """

  chat: str
  field: str
  of_table: bool = False

  def __call__(self, row: Any, origin: str) -> Record:
    if not self.chat:
      return _field(row, self.field, origin)
    row = conversation.of_table(row) if self.of_table else row
    return conversation.read(row, self.chat, self.field, origin)

  def columns(self, have: Collection[str]) -> list[str]:
    """The columns to read of a table that has these; those that must be there first."""
    if not self.chat:
      return [self.field]
    beside = (name for name in conversation.BESIDE[self.chat] if name in have)
    return [*conversation.columns(self.field), *beside]


def find_files(pattern: str) -> list[str]:
  """Files that match a glob, sorted; ** descends.

  Raises:
    UserError: links lead to one file by several paths; its documents would be read several times.
  """
  if not pattern:
    raise UserError("path is empty; give a glob of files")
  if streams.is_remote(pattern):
    return streams.find(pattern)
  pattern = os.path.expanduser(pattern)
  if os.path.isfile(pattern):  # whose name may have [ or *
    return [pattern]
  first: dict[str, str] = {}
  for path in glob.iglob(pattern, recursive=True):  # lazy: two links to a folder above never end
    other = first.setdefault(os.path.realpath(path), path) if os.path.isfile(path) else path
    if other != path:
      raise UserError(
        f"{pattern!r} matches one file twice, as {other!r} and {path!r}; remove the link, or give "
        "a glob that does not follow it"
      )
  if not first:
    hint = "; set the source's path to a file or a glob"
    if os.path.isdir(pattern):
      hint = f"; it is a folder, try {os.path.join(pattern, '**/*')!r}"
    raise FileNotFoundError(f"no file matches {pattern!r}{hint}")
  return sorted(first.values())


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


class _Files:
  """Documents of some files, numbered through all of them."""

  def __init__(self, paths: list[str], rows: Rows):
    self.paths, self.rows = paths, rows

  @functools.cached_property
  def _ends(self) -> np.ndarray:
    """Documents up to the end of every part."""
    raise NotImplementedError

  def __len__(self):
    return int(self._ends[-1])

  def _place(self, index: int) -> tuple[int, int]:
    """(number of the part that a document is in, its number there)."""
    part = int(np.searchsorted(self._ends, index, side="right"))
    return part, index - (int(self._ends[part - 1]) if part else 0)

  def files(self):
    return self.paths


@dataclasses.dataclass
class TextFiles:
  """One document per file."""

  paths: list[str]

  def __len__(self):
    return len(self.paths)

  def __getitem__(self, index):
    path = self.paths[index]
    try:
      with streams.open_content(path) as f:
        return _decoded(f.read(), path)
    except (EOFError, OSError) as e:
      if not streams.is_compressed(path):
        raise
      return {"error": f"damaged ({one_line(e)})", "origin": path}

  def files(self):
    return self.paths


class _JsonFiles(_Files):
  """One document or conversation per line, in fields of a JSON object."""

  def check(self):
    """Refuses a JSON array, whose lines would be malformed one by one."""
    for path in self.paths:
      if streams.beginning(path).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        raise UserError(f"{path}: {text_files.ARRAY}")


class JsonLines(_JsonFiles):
  """Lines of files on disk, by number."""

  @functools.cached_property
  def _offsets(self) -> list[np.ndarray]:
    return [_line_starts(path) for path in self.paths]  # 8 bytes per document

  @functools.cached_property
  def _ends(self) -> np.ndarray:
    return np.cumsum([len(o) - 1 for o in self._offsets])

  def __getitem__(self, index):
    which, line = self._place(index)
    start, end = self._offsets[which][line : line + 2]
    with open(self.paths[which], "rb") as f:
      f.seek(start)
      return json_line(f.read(end - start), self.rows, f"{self.paths[which]}:{line + 1}")


class JsonLinesStream(_JsonFiles):
  """Lines of compressed or remote files, which are read from the first to the last.

  Training reads documents in shuffled order: --job=prepare alone takes them.
  """

  def lines(self) -> Iterator[tuple[str, bytes]]:
    """(origin, line) of every document."""
    for path in self.paths:
      for number, line in enumerate(streams.lines(path), 1):
        yield f"{path}:{number}", line

  def __len__(self):
    raise UserError(
      f"{self.paths[0]} can only be read from its first line on, and training reads documents in "
      "shuffled order; tokenize it once with --job=prepare and train on kind='prepared'"
    )

  def __getitem__(self, index: int) -> Record:
    return {"error": str(len(self)), "origin": self.paths[0]}  # which len refuses


def json_line(line: bytes, rows: Rows, origin: str) -> Record:
  """The record of a line of a .jsonl file."""
  record = _decoded(line.strip(), origin)
  if "error" in record:
    return record
  try:
    value = text_files.parsed(record["text"])
  except ValueError as e:
    return {"error": str(e), "origin": origin}
  return rows(value, origin)


class Parquet(_Files):
  """One document or conversation per row.

  Rows come in shuffled order and a row group is read whole; the last few stay in memory. Large row
  groups are read many times over: use --job=prepare.
  """

  @functools.cached_property
  def _opened(self) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, int, int, int]]]:
    """({path: columns to read}; (path, row group, first row, rows) of all groups).

    A file without rows is one malformed document, group -1, so that it is reported and not passed
    over.
    """
    import pyarrow.parquet as pq  # extra `data`

    columns, groups = {}, []
    for path in self.paths:
      try:
        footer = pq.read_metadata(path)
        names = footer.schema.to_arrow_schema().names
      except FileNotFoundError:
        raise
      except (ValueError, OSError) as e:
        raise UserError(f"{path} is not a Parquet file: {one_line(e)}") from e
      for name in self.rows.columns(()):
        if name not in names:
          raise UserError(
            f"{path}: no column {name!r}; it has {', '.join(names)}. Set data.sources.*.field"
          )
      columns[path], first = tuple(self.rows.columns(names)), 0  # a file may have more than others
      for group in range(footer.num_row_groups if footer.num_rows else 0):
        rows = footer.row_group(group).num_rows
        groups.append((path, group, first, rows))
        first += rows
      groups += [(path, -1, 0, 1)] * (not footer.num_rows)
    return columns, groups

  @functools.cached_property
  def _ends(self) -> np.ndarray:
    return np.cumsum([rows for *_, rows in self._opened[1]])

  def __getitem__(self, index):
    which, row = self._place(index)
    columns, groups = self._opened
    path, group, first, _ = groups[which]
    if group < 0:
      return {"error": "no rows", "origin": path}
    origin = f"{path}:row {first + row}"
    try:
      value = _row_group(path, group, columns[path]).slice(row, 1).to_pylist()[0]
    except UnicodeDecodeError as e:
      return {"error": f"bad UTF-8 at byte {e.start}", "origin": origin}
    except (ValueError, OSError, IndexError) as e:  # pyarrow's, for damaged bytes
      return {"error": f"row group {group} cannot be read ({one_line(e)})", "origin": origin}
    return self.rows(value, origin)


@functools.lru_cache(maxsize=8)
def _row_group(path: str, group: int, columns: tuple[str, ...]):
  import pyarrow.parquet as pq

  return pq.ParquetFile(path).read_row_group(group, columns=list(columns))


def _decoded(data: bytes, origin: str) -> Record:
  if not data.strip():
    return {"error": "empty document", "origin": origin}
  try:
    return {"text": data.decode("utf-8").removeprefix(text_files.BOM), "origin": origin}
  except UnicodeDecodeError as e:
    return {"error": f"bad UTF-8 at byte {e.start}", "origin": origin}


def _field(value: Any, field: str, origin: str) -> Record:
  if not isinstance(value, Mapping) or field not in value:
    have = ", ".join(map(repr, value)) if isinstance(value, Mapping) else type(value).__name__
    return {"error": f"missing field {field!r} (has {have})", "origin": origin}
  text = value[field]
  if isinstance(text, bytes):
    return _decoded(text, origin)
  if not isinstance(text, str):
    kind = "null" if text is None else type(text).__name__
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
