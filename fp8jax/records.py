"""Files that a program writes and reads again: JSON documents, JSON lines that grow, replacements.

A reader names the file, the line and the field that is not as its type says. Types are those of
`typing`; msgspec compares values with them. A writer leaves the old file or the new one, whole.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator
from typing import IO, Any, Literal

from fp8jax.errors import UserError, load_json, not_written

# Strict JSON has no number that is not finite: these strings stand for them, see `to_json`.
Number = float | Literal["nan", "inf", "-inf"]

_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "object": "an object",
          "array": "a list", "bool": "true or false"}  # fmt: skip
_MOST = 60  # characters of a value in a message


def to_json(value, indent: int | None = 2, ascii: bool = True) -> str:
  """Strict JSON: numbers that are not finite become the strings "nan", "inf" and "-inf"."""

  def plain(x):
    if isinstance(x, dict):
      return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
      return [plain(v) for v in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x

  return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=ascii)


# --- reading -------------------------------------------------------------------------------------


def read(path: str, kind: Any, remedy: str) -> Any:
  """The JSON document in a file, as it stands there; it has the type `kind`.

  Raises:
    FileNotFoundError, UserError: it is not there, no JSON, or of another type; with the remedy.
  """
  value = load_json(path, remedy)
  check(value, kind, path, remedy)
  return value


def find(folder: str, name: str, kind: Any, remedy: str) -> Any:
  """`read` of FOLDER/NAME; None where there is no such file."""
  path = os.path.join(folder, name)
  return read(path, kind, remedy) if os.path.exists(path) else None


def rows(
  path: str, kind: Any, remedy: str, others: Any = Any, start: int = 0
) -> Iterator[tuple[str, Any]]:
  """(line, object) of a file of JSON lines; none where there is no file.

  A last line that a killed process has not finished is left out.

  Args:
    kind: type of every value.
    others: type of the fields that `kind`, a TypedDict, does not name.
    start: bytes that are passed over, whole lines.

  Raises:
    UserError: another line is no JSON or of another type; names it, with the remedy.
  """
  if not os.path.exists(path):
    return
  try:
    with open(path, "rb") as f:
      f.seek(start)
      for number, line in enumerate(f, 1):
        if not (line := _ended(line)):
          continue
        where = f"{path}:{number}"
        try:
          text = line.decode()
          value = json.loads(text)
        except (ValueError, RecursionError) as e:  # also bad UTF-8
          raise UserError(f"{where} is no JSON: {e}; {remedy}") from e
        check(value, kind, where, remedy)
        if others is not Any:
          rest = {k: v for k, v in value.items() if k not in kind.__annotations__}
          check(rest, dict[str, others], where, remedy)
        yield text, value
  except OSError as e:
    raise UserError(f"{path} cannot be read: {e.strerror}; {remedy}") from e


def check(value: Any, kind: Any, where: str, remedy: str):
  """Refuses a value, read from a file, that is not of a type.

  Raises:
    UserError: names the place, the field, its value and the expected type.
  """
  import msgspec  # of the extra `train`; what only writes needs none

  try:
    msgspec.convert(value, kind)
  except msgspec.ValidationError as e:
    message, _, place = str(e).partition(" - at `$")
    field, there = _field(value, kind, place.rstrip("`"))
    if match := re.search("missing required field `(.*)`", message):
      inside = f"field {field!r}" if field else "it"
      raise UserError(f"{where}: {inside} has no field {match[1]!r}; {remedy}") from e
    what = f"field {field!r} is" if field else "holds"
    shown = json.dumps(there)
    shown = shown if len(shown) <= _MOST else shown[:_MOST] + " ..."
    shown = repr(there) if isinstance(there, str) and len(there) < _MOST else shown
    raise UserError(f"{where}: {what} {shown}, expected {_expected(message)}; {remedy}") from e


def _expected(message: str) -> str:
  """The words for a type of msgspec's "Expected `int` >= 0, got `str`"."""
  match = re.match(r"Expected `([^`]*)`(.*?)(?:, got .*)?$", message)
  if not match:  # a word in place of a Number; a number that no float holds
    return "a number"
  kinds = match[1].split(" | ")
  kinds = [k for k in kinds if "float" not in kinds or k not in ("str", "int")]
  return " or ".join(_WORDS.get(k, k) for k in kinds) + match[2]


def _field(value: Any, kind: Any, place: str) -> tuple[str, Any]:
  """(name, value) of the field at a place of msgspec's, ".rows[2].kind" or "[...].x".

  "[...]" is some key of a dictionary: all but the culprit are taken out of `value`.
  """
  import msgspec

  name = ""
  node: Any = value
  key: Any = None
  while place:
    if place.startswith("[...]"):
      whole = dict(node)
      for key in whole:
        node.clear()
        node[key] = whole[key]
        try:
          msgspec.convert(value, kind)
        except msgspec.ValidationError:
          break
      place = place[len("[...]") :]
    elif isinstance(node, list):
      index, _, place = place[1:].partition("]")
      key = int(index)
    else:  # keys have dots, too
      key = max((k for k in node if place.startswith(k, 1)), key=len)
      place = place[1 + len(key) :]
    name += f"[{key}]" if isinstance(key, int) else f".{key}" if name else key
    node = node[key]
  return name, node


# --- writing -------------------------------------------------------------------------------------


def _ended(line: bytes) -> bytes:
  """A line with its end; b"" for a last one that a killed process cut off: no whole object."""
  try:
    is_whole = line.endswith(b"\n") or isinstance(json.loads(line), dict)
  except (ValueError, RecursionError):
    is_whole = False
  return line.removesuffix(b"\n") + b"\n" if is_whole else b""


def appending(path: str) -> IO[str]:
  """A file of JSON lines to append to, without a last line that a killed process cut off."""
  if os.path.exists(path):
    with open(path, "rb+") as f:
      text = f.read()
      f.seek(text.rfind(b"\n") + 1)
      last = text[f.tell() :]
      f.truncate()
      f.write(_ended(last))
  return open(path, "a", encoding="utf-8")


def append(file: IO[str], row: Any, ascii: bool = True):
  """Writes a row at once."""
  file.write(to_json(row, None, ascii) + "\n")
  file.flush()


@contextlib.contextmanager
def replacing(path: str, part: str = "") -> Iterator[str]:
  """The path of a file to write, which then takes the place of `path`: nobody sees half of it.

  Args:
    part: this path; "" is PATH.part. It is removed where writing fails.

  Raises:
    UserError: the file cannot be written, and why.
  """
  part = part or f"{path}.part"
  try:
    yield part
    os.replace(part, path)
  except BaseException as e:
    with contextlib.suppress(OSError):
      os.remove(part)
    if isinstance(e, OSError) and e.filename in (None, part, path):
      raise not_written(path, e, "name another place, or remove what is in the way") from e
    raise


def write_atomic(path: str, content: str | bytes, part: str = ""):
  """Writes a file at once, see `replacing`."""
  with replacing(path, part) as name, open(name, "wb") as f:
    f.write(content.encode() if isinstance(content, str) else content)


def make_folder(path: str, key: str):
  """Makes a folder unless it is there.

  Raises:
    UserError: it cannot be made; names the setting `key` that names it.
  """
  try:
    os.makedirs(path, exist_ok=True)
  except OSError as e:
    raise UserError(f"{key}={path} cannot be a folder: {e.strerror}; name another one") from e
