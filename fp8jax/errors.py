"""What a user can put right: the launcher prints these in one piece, without a traceback."""

import difflib
from collections.abc import Callable


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
    """value is one of the strings `allowed`, or the nearest of them is suggested."""
    if value not in allowed:
      near = difflib.get_close_matches(str(value), allowed, 1, 0.0)
      self.found.append(
        f"{key}={value!r} is not one of {', '.join(map(repr, allowed))}; did you mean {near[0]!r}?"
      )

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
