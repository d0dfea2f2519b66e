"""Results as JSON lines, each written at once: an interrupted job goes on from them."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from fp8jax.errors import UserError
from fp8jax.run.provenance import to_json

FORMAT = "fp8jax sensitivity 1"
_REMEDY = "move the file away, or name another folder as sensitivity.path"


class Records:
  """Results by name. The first line of the file says of what they are; one killed mid-line is made
  again."""

  def __init__(self, path: str, header: Mapping[str, Any]):
    """
    Args:
      path: of the file, which is made if it is not there.
      header: everything that results depend on, JSON-able.

    Raises:
      UserError: the file is another study's, or damaged; says what differs.
    """
    self._path, self._found = path, {}
    stated = json.loads(to_json({"format": FORMAT, **header}))
    lines = _whole_lines(path)
    if lines:
      _check_header(path, lines[0], stated)
      for number, line in enumerate(lines[1:], 2):
        record = _parsed(path, number, line)
        self._found[record["name"]] = record["value"]
    else:
      with open(path, "w") as f:
        f.write(to_json(stated, indent=None) + "\n")

  def get(self, name: str, make: Callable[[], Any]) -> Any:
    """The result of this name; the first time it is made and written."""
    if name not in self._found:
      value = make()
      with open(self._path, "a") as f:
        f.write(to_json({"name": name, "value": value}, indent=None) + "\n")
      self._found[name] = value
    return self._found[name]

  def __len__(self) -> int:
    return len(self._found)


def _whole_lines(path: str) -> list[str]:
  """The lines of a file, without a last one that a killed job has not finished, which is cut."""
  if not os.path.exists(path):
    return []
  with open(path, errors="replace") as f:
    text = f.read()
  whole, newline, rest = text.rpartition("\n")
  if rest:
    with open(path, "r+b") as f:
      f.truncate(len((whole + newline).encode()))
  return whole.split("\n") if newline else []


def _parsed(path: str, number: int, line: str) -> dict[str, Any]:
  try:
    record = json.loads(line)
    return {"name": record["name"], "value": record["value"]}
  except (ValueError, KeyError, TypeError) as e:
    raise UserError(
      f"{path}, line {number} is no result: {line[:60]!r}; delete the line, and the same command "
      "measures it again"
    ) from e


def _check_header(path: str, line: str, header: dict[str, Any]):
  try:
    there = json.loads(line)
    keys = sorted(there.keys() | header.keys())
  except (ValueError, AttributeError) as e:
    raise UserError(f"{path} holds no results of --job=sensitivity; {_REMEDY}") from e
  different = [
    f"{k} was {there.get(k)!r} and is {header.get(k)!r}"
    for k in keys
    if there.get(k) != header.get(k)
  ]
  if different:
    raise UserError(f"{path} holds results of something else: {'; '.join(different)}. {_REMEDY}")
