"""Texts such as "refresh(every=500, alarm='underflow')": a name, and values by key."""

import ast
import re
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
  except _UNREADABLE as e:
    raise UserError(f"{text!r} is not NAME or NAME(key=value, ...): {_said(e)}") from e
  return call.func.id, fields


_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)  # of ast


def _said(e: BaseException) -> str:
  if not isinstance(e, SyntaxError) or "leading zeros" not in e.msg:
    return e.msg if isinstance(e, SyntaxError) else str(e).partition(":")[0]
  # Python's grammar has no 016.
  numbers = re.finditer(r"\b0[0-9_]+", e.text or "")
  number = next((n[0] for n in numbers if n.end() >= (e.offset or 0)), "0")
  return f"{number} begins with 0; write {int(number)}"


def whole(key: str, text: str) -> int:
  """The whole number behind "key=", as Python writes it: 1000, 1_000 or 0x3e8.

  Raises:
    UserError: another value; says which number to write where it has one.
  """
  value, hint = None, ""
  try:
    value = ast.literal_eval(text)
  except _UNREADABLE as e:
    hint = f": {_said(e)}" if "leading zeros" in str(e) else ""
  if type(value) is int:
    return value
  if isinstance(value, float) and value.is_integer():
    hint = f"; write {key}={value:.0f}"
  raise UserError(f"{key}={text} is no whole number{hint}")


def write(name: str, fields: Mapping[str, Any], words: bool = False) -> str:
  """The text of which `parse` makes these."""
  return f"{name}({', '.join(f'{k}={v}' if words else f'{k}={v!r}' for k, v in fields.items())})"
