"""Ordered rules, pairs of a regular expression and a value: the first whole match wins."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

_LAYER = re.compile(r"layers/(\d+)/(.+)")


def problem(pattern: Any) -> str:
  """Why this is no regular expression, or ""."""
  try:
    re.compile(pattern)
  except (re.error, TypeError) as e:
    return f"{pattern!r} is no regular expression: {e}"
  return ""


def matches(pattern: str, names: Iterable[str]) -> list[str]:
  """The names that a regular expression matches whole."""
  return [name for name in names if re.fullmatch(pattern, name)]


def first(rules: Iterable[Sequence[Any]], name: str) -> int:
  """Number of the first rule that matches the whole name; -1 for none."""
  return next((i for i, rule in enumerate(rules) if re.fullmatch(rule[0], name)), -1)


def used[T: Sequence[Any]](rules: Sequence[T], names: Iterable[str], so: bool = True) -> list[T]:
  """Rules that decide something; not `so`: those that match no name that earlier ones do not."""
  numbers = {first(rules, name) for name in names}
  return [rule for i, rule in enumerate(rules) if (i in numbers) == so]


def of_layer(name: str) -> tuple[int | None, str]:
  """(3, "mlp/up") of "layers/3/mlp/up", and (None, "head") of a name in no layer."""
  match = _LAYER.fullmatch(name)
  return (int(match[1]), match[2]) if match else (None, name)
