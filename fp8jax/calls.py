"""Texts such as "refresh(every=500, alarm='underflow')": a name, and values by key."""

import ast
from collections.abc import Mapping
from typing import Any

from fp8jax.errors import UserError


def parse(text: str, words: bool = False) -> tuple[str, dict[str, Any]]:
  """(name, {key: value}) of NAME, or of NAME(key=value, ...) with Python's literals as values.

  Args:
    words: values are the texts behind "=" instead: of "a=fast, b=1/2" they are "fast" and "1/2".

  Raises:
    UserError: another form, a value that is no literal, or a key that is there twice.
  """
  try:
    node = ast.parse(text := text.strip(), mode="eval").body
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if (
      not isinstance(call.func, ast.Name) or call.args or any(k.arg is None for k in call.keywords)
    ):
      raise ValueError("another form")
    fields = {}
    for keyword in call.keywords:
      if keyword.arg in fields:
        raise ValueError(f"{keyword.arg} is there twice")
      value = keyword.value
      stated = ast.get_source_segment(text, value) if words else ast.literal_eval(value)
      fields[str(keyword.arg)] = stated
  except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
    said = e.msg if isinstance(e, SyntaxError) else str(e).partition(":")[0]
    raise UserError(f"{text!r} is not NAME or NAME(key=value, ...): {said}") from e
  return call.func.id, fields


def write(name: str, fields: Mapping[str, Any], words: bool = False) -> str:
  """The text of which `parse` makes these."""
  return f"{name}({', '.join(f'{k}={v}' if words else f'{k}={v!r}' for k, v in fields.items())})"
