"""Rows of a data set -> conversations, in the three formats that data sets have.

  messages   OpenAI's: [{"role": "user", "content": "..."}, ...], with "tools" beside it
  sharegpt   [{"from": "human", "value": "..."}, ...], with "system" beside it
  prompt     two columns, prompt and completion: texts, or lists of messages

A conversation is a record of sources.py: {"messages", "tools", "text", "origin"}, where "text" is
its content as JSON, by which documents are held out; or {"error", "origin"}.
"""

import json
from collections.abc import Mapping
from typing import Any

from fp8jax.data.chat.template import MARKS

Record = dict[str, Any]

# Columns that a format reads unless a source says otherwise, comma-separated.
FIELDS = {"messages": "messages", "sharegpt": "conversations", "prompt": "prompt,completion"}
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
  "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
  "observation": "tool", "function_response": "tool",
}  # fmt: skip
# Beside the messages, where a row has them.
_BESIDE = {"messages": ("tools",), "sharegpt": ("system", "tools"), "prompt": ("tools",)}


class _Malformed(ValueError):
  """Says what is wrong with a row, what was expected and what to do."""


def columns(field: str) -> tuple[str, ...]:
  """The columns that a row must have."""
  return tuple(name.strip() for name in field.split(","))


def optional_columns(format: str) -> tuple[str, ...]:
  """The columns that are read where they exist."""
  return _BESIDE[format]


def read(row: Any, format: str, field: str, origin: str) -> Record:
  """The conversation in a row.

  Args:
    row: a mapping of columns.
    format: a key of FIELDS.
    field: its columns, see FIELDS.
    origin: file and line, for messages.

  Returns:
    The record; malformed rows are records with an "error".
  """
  try:
    messages, tools = _read(row, format, columns(field))
  except _Malformed as e:
    return {"error": str(e), "origin": origin}
  text = json.dumps([messages, tools], ensure_ascii=False, sort_keys=True)
  try:
    text.encode("utf-8")
  except UnicodeEncodeError:
    return {"error": "a message has a lone surrogate", "origin": origin}
  return {"messages": messages, "tools": tools, "text": text, "origin": origin}


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
    turns = _decoded(row[names[0]])
  if not isinstance(turns, (list, tuple)) or not turns:
    raise _Malformed(f"field {names[0]!r} is no list of messages; set the source's field or chat")
  turns = [_message(i, turn, format) for i, turn in enumerate(turns)]
  if format == "sharegpt" and row.get("system"):
    turns.insert(0, {"role": "system", "content": str(row["system"])})
  if turns[0]["role"] == "assistant":
    raise _Malformed("the first message is the assistant's, which answers nothing; remove it")
  return turns, _decoded(row.get("tools")) or None


def _side(value: Any, role: str) -> list[Any]:
  """Prompt or completion as messages. A text is messages only if it is a JSON list of them."""
  found = _decoded(value)
  if isinstance(found, (list, tuple)) and (found is value or all(map(_is_message, found))):
    return list(found)
  return [{"role": role, "content": value}]


def _is_message(value: Any) -> bool:
  return isinstance(value, Mapping) and value.get("role", value.get("from")) in ROLES


def _decoded(value: Any) -> Any:
  """Lists that a table stores as JSON text."""
  if not isinstance(value, str) or not value.lstrip().startswith("[{"):
    return value
  try:
    return json.loads(value)
  except (ValueError, RecursionError):
    return value


def _message(i: int, turn: Any, format: str) -> dict[str, Any]:
  """{"role", "content"} and whatever else is there, checked."""
  if not isinstance(turn, Mapping):
    raise _Malformed(f"message {i} is {type(turn).__name__}, expected an object")
  turn = {k: v for k, v in turn.items() if v is not None}  # Parquet has every key in every message
  of_role, of_text = _GPT_KEYS if "from" in turn and "role" not in turn else _KEYS
  role = turn.pop(of_role, None)
  if format == "sharegpt" and isinstance(role, str):
    role = _SHAREGPT_ROLES.get(role, role)
  if role not in ROLES:
    known = (*ROLES, *_SHAREGPT_ROLES) if format == "sharegpt" else ROLES
    raise _Malformed(
      f"message {i} has the unknown role {role!r}, expected one of {', '.join(known)}; rename it"
    )
  content = _content(i, turn.pop(of_text, ""))
  if role == "assistant" and not content.strip() and not turn.get("tool_calls"):
    raise _Malformed(
      f"message {i}, the assistant's, is empty; write its answer, or remove the message"
    )
  # Templates read "reasoning_content"; data sets have older names for it, too.
  thoughts = [turn[key] for key in ("reasoning_content", "thinking", "reasoning") if key in turn]
  if thoughts:
    turn = {"thinking": thoughts[0], **turn, "reasoning_content": thoughts[0]}
  found = str(turn)
  if any(mark in content or mark in found for mark in MARKS):
    raise _Malformed(f"message {i} has the characters U+F0F00 or U+F0F01; remove them")
  return {"role": role, "content": content, **turn}


_KEYS, _GPT_KEYS = ("role", "content"), ("from", "value")


def _content(i: int, content: Any) -> str:
  """Text, also of OpenAI's list of parts."""
  if isinstance(content, (list, tuple)):
    kinds = {p.get("type", "text") if isinstance(p, Mapping) else "text" for p in content}
    if kinds - {"text"}:
      raise _Malformed(
        f"message {i} has parts of type {', '.join(sorted(map(str, kinds)))}; only text is trained "
        "on"
      )
    content = "".join(p["text"] if isinstance(p, Mapping) else str(p) for p in content)
  if not isinstance(content, str):
    raise _Malformed(f"message {i} has content of type {type(content).__name__}, expected a string")
  return content
