"""Results as JSON lines, each written at once: an interrupted job goes on from them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from fp8jax import records
from fp8jax.errors import UserError
from fp8jax.records import to_json
from fp8jax.run import schemas

FORMAT = "fp8jax sensitivity 1"
_REMEDY = "move the file away, or name another folder as --out"
_AGAIN = f"delete the line to measure it again, or {_REMEDY}"


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
    self._found: dict[str, Any] = {}
    stated = json.loads(to_json({"format": FORMAT, **header}))
    lines = records.rows(path, dict[str, Any], _AGAIN)
    first = next(lines, None)
    if first is not None:
      _check_header(path, first[1], stated)
      for number, (_, record) in enumerate(lines, 2):
        records.check(record, schemas.Measurement, f"{path}:{number}", _AGAIN)
        self._found[record["name"]] = record["value"]
    self._file = records.appending(path)
    if first is None:
      records.append(self._file, stated)

  def get(self, name: str, make: Callable[[], Any]) -> Any:
    """The result of this name; the first time it is made and written."""
    if name not in self._found:
      self._found[name] = make()
      records.append(self._file, {"name": name, "value": self._found[name]})
    return self._found[name]

  def __len__(self) -> int:
    return len(self._found)


def _check_header(path: str, there: dict[str, Any], header: dict[str, Any]):
  different = [
    f"{k} was {there.get(k)!r} and is {header.get(k)!r}"
    for k in sorted(there.keys() | header.keys())
    if there.get(k) != header.get(k)
  ]
  if different:
    raise UserError(f"{path} holds results of something else: {'; '.join(different)}. {_REMEDY}")
