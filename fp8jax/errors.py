"""What a user can put right: the launcher prints these in one piece, without a traceback."""

import difflib
import json
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any


class UserError(ValueError):
  """Says what was wrong, what was expected and what to do."""


class ConfigError(UserError):
  """Everything that is wrong with a configuration, one line each."""

  def __init__(self, problems: list[str]):
    self.problems = problems
    lines = "\n".join(f"  - {p}" for p in problems)
    super().__init__(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the config:\n{lines}")


def missing_package(e: ModuleNotFoundError) -> str:
  """What to install for an optional import that failed."""
  return f"the package {e.name!r} is not installed; pip install 'fp8jax[hf,data]'"


# Names less alike than this are different names, not misspellings (difflib's ratio). Keys are many,
# and some resemble every wish ("format" and "remat": 0.73).
_ALIKE, _ALIKE_KEY = 0.6, 0.75


def nearest(name: str, known: Iterable[str]) -> str | None:
  """The known name that `name` misspells, or None if it is like none of them."""
  matches = difflib.get_close_matches(name, known, 1, _ALIKE)
  return matches[0] if matches else None


def nearest_key(key: str, known: Collection[str]) -> str | None:
  """The known key of a configuration most like a mistyped one, or None if it is like none.

  The last parts must be alike: a section in common makes no key of a wish.
  """
  last = key.rpartition(".")[2]
  lasts = {k.rpartition(".")[2] for k in known}
  alike = set(difflib.get_close_matches(last, lasts, len(lasts), _ALIKE_KEY))
  alike |= {k for k in lasts if len(last) > 3 and k.startswith(last)}  # "warmup"
  candidates = [k for k in known if k.rpartition(".")[2] in alike]

  def likeness(candidate: str) -> tuple[float, float]:
    of_last = difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio()
    return difflib.SequenceMatcher(None, key, candidate).ratio() + of_last, of_last

  return max(candidates, key=likeness, default=None)


def read_json(path: str, remedy: str) -> dict[str, Any]:
  """The JSON object in a file.

  Raises:
    FileNotFoundError, UserError: it is not there, or no such thing; with the remedy.
  """
  try:
    with open(path) as f:
      value = json.load(f)
  except FileNotFoundError as e:
    raise FileNotFoundError(f"{path} does not exist; {remedy}") from e
  except ValueError as e:  # also bad UTF-8
    raise UserError(f"{path} is not JSON: {e}; {remedy}") from e
  if not isinstance(value, dict):
    raise UserError(f"{path} holds {type(value).__name__}, expected an object; {remedy}")
  return value


class Problems:
  """Collects what is wrong, so that all of it is reported at once."""

  def __init__(self):
    self.found: list[str] = []

  def check(self, ok: bool, message: str):
    if not ok:
      self.found.append(message)

  def extend(self, messages: list[str]):
    self.found += messages

  def one_of(self, key: str, value, allowed):
    """value is one of the strings `allowed`, or the one that it misspells is suggested."""
    if value not in allowed:
      near = nearest(str(value), allowed)
      hint = f"; did you mean {near!r}?" if near else ", nor like one of them"
      self.found.append(f"{key}={value!r} is not one of {', '.join(map(repr, allowed))}{hint}")

  def keys(self, where: str, names: Iterable[str], known: Collection[str]):
    """names are keys of a configuration, or the nearest are suggested."""
    for name in names:
      if name not in known:
        near = nearest_key(name, known)
        hint = f"did you mean {near!r}?" if near else "there is none like it, see configs/base.py"
        self.found.append(f"{where}: {name!r} is no key; {hint}")

  def file(self, key: str, path: str, remedy: str):
    """path is "" or of a file that is there."""
    there = not path or os.path.isfile(os.path.expanduser(path))
    self.check(there, f"{key}={path!r} does not exist; {remedy}")

  def refuse(self):
    """Raises what was found, if anything."""
    if self.found:
      raise ConfigError(self.found)

  def attempt(self, fn: Callable, key: str = ""):
    """fn(), or None with its complaint noted under `key`."""
    try:
      return fn()
    except ConfigError as e:
      self.found += e.problems
    except (ValueError, OSError) as e:
      self.found.append(f"{key}: {e}" if key else str(e))
    except ModuleNotFoundError as e:
      self.found.append(missing_package(e))
    return None
