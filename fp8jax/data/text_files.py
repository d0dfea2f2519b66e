"""Text and JSON lines that users bring; every complaint names the file and the line.

UTF-8 with or without a byte order mark. JSON lines hold one object each: a list, a nesting beyond
Python's limit and half of a surrogate pair, which no tokenizer encodes, are refused.
"""

import json
import os
import re
from typing import Any

from fp8jax.errors import UserError

BOM = "\ufeff"
ARRAY = (
  "it begins a JSON array, expected one object per line; write the elements as lines (jq -c '.[]' "
  "FILE > FILE.jsonl)"
)
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read(path: str, remedy: str, ends: bool = False) -> str:
  """The text of a file, lines ending in "\\n", or in their own `ends`.

  Raises:
    FileNotFoundError, UserError: it is not there, or is no text; with the remedy.
  """
  try:
    with open(os.path.expanduser(path), "rb") as f:
      return decoded(f.read(), path, ends)
  except FileNotFoundError as e:
    raise FileNotFoundError(f"{path} does not exist; {remedy}") from e
  except OSError as e:  # a folder, no permission
    raise UserError(f"{path} cannot be read: {e.strerror}; {remedy}") from e


def decoded(data: bytes, name: str, ends: bool = False) -> str:
  """`read` of bytes; `name` stands for the file in messages."""
  try:
    text = data.decode("utf-8").removeprefix(BOM)
  except UnicodeDecodeError as e:
    line, start = data.count(b"\n", 0, e.start) + 1, data.rfind(b"\n", 0, e.start) + 1
    raise UserError(
      f"{name}, line {line}: bad UTF-8 at byte {e.start - start}; save the file as UTF-8"
    ) from e
  return text if ends else text.replace("\r\n", "\n").replace("\r", "\n")


def json_lines(path: str, remedy: str = "name a file of JSON lines") -> list[tuple[str, dict]]:
  """[("FILE, line 3", object)] of the lines that are not blank.

  Raises:
    FileNotFoundError, UserError: there is no such file, or a line is no JSON object of text.
  """
  numbered = (
    (f"{path}, line {i}", line) for i, line in enumerate(read(path, remedy).split("\n"), 1)
  )
  return [(where, _object(line, where)) for where, line in numbered if line.strip()]


def _object(line: str, where: str) -> dict[str, Any]:
  try:
    value = parsed(line)
    if _ESCAPED_SURROGATE.search(line):
      json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError as e:
    raise UserError(f"{where} has a lone surrogate; correct the line, or delete it") from e
  except ValueError as e:
    raise UserError(f"{where} is not JSON of one object: {e}; correct the file") from e
  if not isinstance(value, dict):
    raise UserError(f"{where} is {type(value).__name__}, expected a JSON object")
  return value


def parsed(line: str) -> Any:
  """The value in a line of JSON lines; ValueError says what is wrong with it, not where."""
  line = line.removeprefix(BOM).strip()
  if line.startswith("["):
    raise ValueError(ARRAY)
  try:
    return json.loads(line)
  except (ValueError, RecursionError) as e:  # also a number or a nesting beyond Python's limits
    reason = f"{e.msg} at column {e.colno}" if isinstance(e, json.JSONDecodeError) else e
    raise ValueError(f"broken JSON ({reason})") from e
