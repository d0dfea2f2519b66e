"""The keys of configs/base.py with their defaults and comments, read from its source."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable

from fp8jax.errors import UserError, nearest_key


@dataclasses.dataclass(frozen=True)
class Key:
  """A key of the configuration: "optim.peak_lr", "1e-3", and its comments in one line."""

  name: str
  default: str
  meaning: str


def keys(get_config: Callable) -> list[Key]:
  """Every key that a function assigns as `c.a.b = value`, in its order.

  A comment belongs to the assignment below it or on its line.
  """
  source = inspect.getsource(get_config)
  lines, found, end = source.splitlines(), [], 0
  function = ast.parse(source).body[0]
  for node in function.body:  # pyright: ignore  (a function)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
      above, i = [], node.lineno - 2
      while i >= end and lines[i].strip().startswith("#"):
        above.insert(0, lines[i].strip(" #"))
        i -= 1
      code = lines[node.lineno - 1 : node.end_lineno]
      beside = [line.split("  # ", 1)[1] for line in code if "  # " in line]
      said = [s for s in (*above, *beside) if not s.startswith("fmt:")]
      value = ast.unparse(node.value)
      if not value.startswith("ConfigDict()"):
        short = re.sub(r"^placeholder\(\w+\)$", "None", value)
        found.append(Key(ast.unparse(node.targets[0])[2:], short, " ".join(said)))
    end = node.end_lineno or end
  return found


def explain(name: str, get_config: Callable) -> str:
  """The text of --explain: a key, or every key of a section; "" is all of them.

  Raises:
    UserError: there is no such key; names the nearest.
  """
  known = keys(get_config)
  found = [k for k in known if not name or k.name == name or k.name.startswith(f"{name}.")]
  # Keys below one that the user fills: data.sources.main.path.
  found = found or [k for k in known if name.startswith(f"{k.name}.")]
  if not found:
    near = nearest_key(name, [k.name for k in known])
    hint = f"did you mean {near}?" if near else "--help-config prints all keys"
    raise UserError(f"{name!r} is no key of the configuration; {hint}")
  return "\n".join(_text(k) for k in found)


def _text(key: Key) -> str:
  meaning = textwrap.fill(key.meaning, 96, initial_indent="    ", subsequent_indent="    ")
  return f"{key.name} = {key.default}" + (f"\n{meaning}" if key.meaning else "")
