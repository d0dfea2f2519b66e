"""Files by path, wherever they are: compressed (.gz, .zst) and remote (gs://, s3://, az://, hf://)."""

import gzip
import io
import os
from collections.abc import Iterator
from typing import IO, Any, cast

from fp8jax.errors import UserError, one_line

_COMPRESSED = (".gz", ".zst")


def is_remote(path: str) -> bool:
  return "://" in path


def is_compressed(path: str) -> bool:
  return path.endswith(_COMPRESSED)


def _system(path: str) -> tuple[Any, str]:
  """(the file system of a remote path, the path in it)."""
  import fsspec  # extra `data`

  return fsspec.url_to_fs(path)


def find(pattern: str) -> list[str]:
  """Remote files that match a glob, sorted; ** stands for any number of folders.

  Raises:
    UserError: the folder cannot be listed, e.g. for want of the package of its file system.
    FileNotFoundError: no file matches.
  """
  scheme = pattern.partition("://")[0]
  try:
    system, below = _system(pattern)
    entries = system.glob(below, detail=True)
  except (ImportError, OSError, ValueError) as e:
    raise UserError(
      f"{pattern!r} cannot be listed: {one_line(e)}; install the fsspec package of {scheme}:// "
      "(gcsfs, s3fs, adlfs), or copy the files"
    ) from e
  paths = [path for path, info in entries.items() if info["type"] == "file"]
  if not paths:
    raise FileNotFoundError(f"no file matches {pattern!r}")
  return sorted(f"{scheme}://{path.lstrip('/')}" for path in paths)


def size(path: str) -> int:
  """Bytes of a file as it is stored."""
  if not is_remote(path):
    return os.path.getsize(path)
  system, below = _system(path)
  return system.size(below)


def open_stored(path: str) -> IO[bytes]:
  """The bytes of a file as they are stored."""
  if not is_remote(path):
    return open(path, "rb")
  system, below = _system(path)
  return cast(IO[bytes], system.open(below, "rb"))


def open_content(path: str) -> IO[bytes]:
  """The bytes of a file, decompressed by what its name says; reading raises OSError if damaged."""
  stored = open_stored(path)
  if path.endswith(".gz"):
    return cast(IO[bytes], gzip.GzipFile(fileobj=stored))
  if path.endswith(".zst"):
    import pyarrow  # extra `data`

    return cast(IO[bytes], io.BufferedReader(pyarrow.CompressedInputStream(stored, "zstd")))
  return stored


def beginning(path: str) -> bytes:
  """The first 64 bytes of the content; b"" of damage, which `lines` refuses."""
  try:
    with open_content(path) as f:
      return f.read(64)
  except (EOFError, OSError):
    if not is_compressed(path):
      raise
    return b""


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
