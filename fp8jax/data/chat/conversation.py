"""Rows of a data set -> conversations, in the three formats that data sets have.

  messages   OpenAI's: [{"role": "user", "content": "..."}, ...], with "tools" beside it
  sharegpt   [{"from": "human", "value": "..."}, ...], with "system" beside it
  prompt     two columns, prompt and completion: texts, or lists of messages

A conversation is a record of sources.py: {"messages", "tools", "text", "origin"}, where "text" is
its content as JSON, by which documents are held out; or {"error", "origin"}. Messages, tools, tool
calls and their arguments may be JSON text, which is parsed once. A null is an absent key of a
message, part or call; tools and arguments keep the nulls that JSON states. Parquet and datasets
write nulls for the keys of other rows: `of_table` removes them. A shape that is not known here is
an error.
"""

import json
from collections.abc import Mapping
from typing import Any

from fp8jax.data.chat.template import MARKS
from fp8jax.errors import UserError

Record = dict[str, Any]
_KEYS_OF_CALLS = {"name", "arguments", "id", "type", "index"}
_KEYS, _GPT_KEYS = ("role", "content"), ("from", "value")

# Columns that a format reads unless a source says otherwise, comma-separated.
FIELDS = {"messages": "messages", "sharegpt": "conversations", "prompt": "prompt,completion"}
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
  "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
  "function_call": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
# Columns that are read beside the messages, where a row has them.
BESIDE = {"messages": ("tools",), "sharegpt": ("system", "tools"), "prompt": ("tools",)}


class _Arguments(dict):
  """An object to templates that write `tojson`, JSON text to those that add text (DeepSeek's)."""

  def __str__(self):
    return json.dumps(self, ensure_ascii=False)

  def __radd__(self, text: str) -> str:
    return text + str(self)

  def __add__(self, text: str) -> str:
    return str(self) + text


class _Malformed(ValueError):
  """Says what is wrong with a row, what was expected and what to do."""


def columns(field: str) -> tuple[str, ...]:
  """The columns that a row must have."""
  return tuple(name.strip() for name in field.split(","))


def of_table(row: Mapping[str, Any]) -> dict[str, Any]:
  """A row of a table without the nulls inside its columns; JSON text stays as it is."""
  return {name: _without_nulls(value) for name, value in row.items()}


def read(row: Any, format: str, field: str, origin: str) -> Record:
  """The record of a row, with an "error" if it is malformed.

  Args:
    format, field: a key of FIELDS, and its columns.
    origin: file and line, for messages.
  """
  try:
    messages, tools = _read(row, format, columns(field))
    text = _as_json([messages, tools])
  except (_Malformed, RecursionError) as e:
    return {"error": str(e), "origin": origin}
  return {"messages": messages, "tools": tools, "text": text, "origin": origin}


def prompt(row: Mapping[str, Any], where: str) -> Record:
  """`read` of messages that a model continues.

  Raises:
    UserError: they are malformed; `where` names their file and line.
  """
  record = read(row, "messages", "messages", where)
  if "error" in record:
    raise UserError(f"{where}: {record['error']}")
  return record


def _as_json(value: Any) -> str:
  try:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)
    text.encode("utf-8")
  except UnicodeEncodeError as e:
    raise _Malformed("a message has a lone surrogate") from e
  except (TypeError, ValueError) as e:  # bytes and dates of a table; NaN
    raise _Malformed(f"a message or tool is no JSON ({e}); write the value as text") from e
  if any(mark in text for mark in MARKS):
    raise _Malformed("a message or tool has the characters U+F0F00 or U+F0F01; remove them")
  return text


def _read(row: Any, format: str, names: tuple[str, ...]):
  have = list(row) if isinstance(row, Mapping) else []
  missing = [name for name in names if name not in have]
  if missing:
    raise _Malformed(
      f"missing field {missing[0]!r} (has {', '.join(map(repr, have)) or type(row).__name__}); set "
      "the source's field, or its chat"
    )
  if format == "prompt":
    turns = _side(row[names[0]], "user") + _side(row[names[1]], "assistant")
  else:
    turns = cell(row[names[0]])
  if not isinstance(turns, list) or not turns:
    raise _Malformed(f"field {names[0]!r} is no list of messages; set the source's field or chat")
  turns = [_message(f"message {i}", turn, format) for i, turn in enumerate(turns)]
  if format == "sharegpt" and (system := row.get("system")) not in (None, ""):
    _expect("field 'system'", system, str, "a string")
    turns.insert(0, {"role": "system", "content": system})
  if turns[0]["role"] == "assistant":
    raise _Malformed("the first message is the assistant's, which answers nothing; remove it")
  tools = _objects("field 'tools'", row.get("tools"))
  for tool in tools:
    _name("field 'tools'", tool)
  return turns, tools or None


def _expect(where: str, value: Any, kind: Any, expected: str) -> Any:
  if not isinstance(value, kind):
    name = "null" if value is None else type(value).__name__
    raise _Malformed(f"{where} is {name}, expected {expected}")
  return value


def _side(value: Any, role: str) -> list[Any]:
  """Prompt or completion as messages. A text is messages only if it is a JSON list of them."""
  is_text = isinstance(value, str)
  turns = cell(value) if not is_text or value.lstrip().startswith("[") else value
  if isinstance(turns, list) and (not is_text or turns and all(map(_is_message, turns))):
    return turns
  return [{"role": role, "content": value}]


def _is_message(value: Any) -> bool:
  return isinstance(value, Mapping) and value.get("role", value.get("from")) in ROLES


def cell(value: Any) -> Any:
  """JSON text parsed, where it is any, and blank text null; other values as they are."""
  if not isinstance(value, str):
    return list(value) if isinstance(value, tuple) else value
  try:
    return json.loads(value)
  except (ValueError, RecursionError):
    return value if value.strip() else None


def _without_nulls(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {k: _without_nulls(v) for k, v in value.items() if v is not None}
  return [_without_nulls(v) for v in value] if isinstance(value, (list, tuple)) else value


def _stated(value: Mapping[str, Any]) -> dict[str, Any]:
  """An object without the keys that are null."""
  return {k: v for k, v in value.items() if v is not None}


def _objects(where: str, value: Any) -> list[dict[str, Any]]:
  """A list of objects, of which each may be JSON text too; [] of null."""
  value = cell(value)
  if value is None:
    return []
  _expect(where, value, list, "a list of objects, or JSON text of one")
  items = list(map(cell, value))
  for i, item in enumerate(items):
    _expect(f"{where}[{i}]", item, dict, "an object, or JSON text of one")
  return items


def _name(where: str, value: dict[str, Any]) -> dict[str, Any]:
  """The function of a tool or call, which is OpenAI's {"function": {...}} or the function alone."""
  function = value.get("function", value)
  name = function.get("name") if isinstance(function, dict) else None
  if not isinstance(name, str) or not name:
    raise _Malformed(f"{where} has {str(value)[:80]}, expected a function with its name")
  return function


def _calls(where: str, value: Any) -> list[dict[str, Any]]:
  """Tool calls; arguments are objects, {} where there are none."""
  calls = []
  for call in _objects(f"{where}: tool_calls", value):
    call = _stated(call)
    function = _stated(_name(f"{where}: tool_calls", call))
    if unknown := function.keys() - _KEYS_OF_CALLS:
      raise _Malformed(
        f"{where} calls a tool with {sorted(map(str, unknown))[0]!r}, expected name and arguments"
      )
    arguments = cell(function.get("arguments"))
    arguments = {} if arguments is None else arguments
    _expect(f"{where}: arguments of {function['name']}", arguments, dict, "an object")
    function = {**function, "arguments": _Arguments(arguments)}
    calls.append({**call, "function": function} if "function" in call else function)
  return calls


def _message(where: str, turn: Any, format: str) -> dict[str, Any]:
  """{"role", "content"} and whatever else is there, checked."""
  _expect(where, turn, Mapping, "an object")
  turn = _stated(turn)
  of_role, of_text = _GPT_KEYS if "from" in turn and "role" not in turn else _KEYS
  role, content = turn.pop(of_role, None), turn.pop(of_text, None)
  if format == "sharegpt" and isinstance(role, str):
    if role == "function_call":  # the value is JSON text of one call, or of several
      calls = cell(content)
      turn["tool_calls"], content = calls if isinstance(calls, list) else [calls], None
    role = _SHAREGPT_ROLES.get(role, role)
  if role not in ROLES:
    known = (*ROLES, *_SHAREGPT_ROLES) if format == "sharegpt" else ROLES
    raise _Malformed(
      f"{where} has the unknown role {role!r}, expected one of {', '.join(known)}; rename it"
    )
  calls = _calls(where, turn.pop("tool_calls", None))
  if role != "assistant" and calls or turn.get("function_call"):
    raise _Malformed(f"{where} calls a tool; write that as tool_calls of the assistant's message")
  content = _content(where, content, role)
  if role == "assistant" and not content.strip() and not calls:
    raise _Malformed(f"{where}, the assistant's, is empty; write its answer, or remove the message")
  if isinstance(weight := turn.get("weight", 1), str) or weight not in (0, 1):
    raise _Malformed(f"{where} has weight {weight!r}, expected the number 0 or 1")
  # Templates read "reasoning_content"; data sets have older names for it, too.
  thoughts = [turn[key] for key in ("reasoning_content", "thinking", "reasoning") if key in turn]
  if thoughts:
    _expect(f"{where}: its reasoning", thoughts[0], str, "a string")
    turn = {"thinking": thoughts[0], **turn, "reasoning_content": thoughts[0]}
  return {"role": role, "content": content, **turn, **({"tool_calls": calls} if calls else {})}


def _content(where: str, content: Any, role: str) -> str:
  """Text, also of OpenAI's list of parts."""
  if isinstance(content, list):
    content = "".join(_part(where, part) for part in content) if content else None
  if content is None and role in ("assistant", "tool"):
    return ""  # beside tool calls; of a tool that returns nothing
  return _expect(f"{where}: content", content, str, "a string")


def _part(where: str, part: Any) -> str:
  part = {"text": part} if isinstance(part, str) else part
  part = _stated(_expect(f"{where}: a part of its content", part, Mapping, "an object"))
  kind = part.get("type", "text")
  if kind != "text" or part.keys() - {"type", "text"}:
    other = kind if kind != "text" else ", ".join(sorted(map(str, part.keys() - {"type", "text"})))
    raise _Malformed(f"{where} has parts of type {other}; only text is trained on")
  return _expect(f"{where}: text of a part", part.get("text"), str, "a string")
