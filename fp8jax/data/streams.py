"""Files by path, wherever they are: compressed (.gz, .zst) and remote (gs://, s3://, az://, hf://)."""

import fnmatch
import gzip
import io
import os
import re
from collections.abc import Iterator
from typing import IO, Any, cast

from fp8jax.errors import UserError, one_line

_COMPRESSED = (".gz", ".zst")


def is_remote(path: str) -> bool:
  return "://" in path


def is_compressed(path: str) -> bool:
  return path.endswith(_COMPRESSED)


def find(pattern: str) -> list[str]:
  """Remote files that match a glob, sorted; ** stands for any number of folders.

  Raises:
    UserError: the folder cannot be listed, e.g. for want of the package of its file system.
    FileNotFoundError: no file matches.
  """
  scheme, _, rest = pattern.partition("://")
  fixed = re.split(r"[*?\[]", rest)[0].rpartition("/")[0]
  try:
    paths = [str(p) for p in _below(_path(f"{scheme}://{fixed}"))]
  except (ImportError, KeyError, NotImplementedError, ValueError) as e:
    raise UserError(
      f"{pattern!r} cannot be listed: {one_line(e)}; install the fsspec package of {scheme}:// "
      "(gcsfs, s3fs, adlfs), or copy the files"
    ) from e
  wanted = pattern.replace("/**/", "/*")  # fnmatch's * passes "/"
  depth = None if "**" in pattern else pattern.count("/")
  found = [p for p in paths if fnmatch.fnmatchcase(p, wanted) and depth in (None, p.count("/"))]
  if not found:
    raise FileNotFoundError(f"no file matches {pattern!r}")
  return sorted(found)


def _below(folder) -> Iterator[Any]:
  """Files in a folder and in those below it."""
  if not folder.is_dir():
    if folder.exists():
      yield folder
    return
  for path in folder.iterdir():
    yield from _below(path)


def _path(path: str):
  from etils import epath  # extra `data`

  return epath.Path(path)


def size(path: str) -> int:
  """Bytes of a file as it is stored."""
  return _path(path).stat().length if is_remote(path) else os.path.getsize(path)


def open_stored(path: str) -> IO[bytes]:
  """The bytes of a file as they are stored."""
  return cast(IO[bytes], _path(path).open("rb") if is_remote(path) else open(path, "rb"))


def open_content(path: str) -> IO[bytes]:
  """The bytes of a file, decompressed by what its name says; reading raises OSError if damaged."""
  stored = open_stored(path)
  if path.endswith(".gz"):
    return cast(IO[bytes], gzip.GzipFile(fileobj=stored))
  if path.endswith(".zst"):
    import pyarrow  # extra `data`

    return cast(IO[bytes], io.BufferedReader(pyarrow.CompressedInputStream(stored, "zstd")))
  return stored


def lines(path: str) -> Iterator[bytes]:
  """Every line; blank ones at the end do not count, an empty file is one empty line.

  Raises:
    UserError: the file is damaged.
  """
  blank, count = 0, 0
  try:
    with open_content(path) as f:
      for line in f:
        if not line.strip():
          blank += 1
          continue
        yield from [b""] * blank
        yield line
        count, blank = count + blank + 1, 0
  except (OSError, EOFError) as e:
    if is_remote(path) and isinstance(e, FileNotFoundError):
      raise
    raise UserError(f"{path} is damaged after line {count}: {one_line(e)}; fetch it again") from e
  if not count:
    yield b""  # one malformed document, so that it is reported and not passed over
