"""Ordered rules, pairs of a regular expression and a value: the first whole match wins.

Every match of a pattern that a user wrote goes through `matches` or `first`, which have a limit.
"""

import collections
import contextlib
import functools
import re
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from fp8jax.errors import UserError

SECONDS = 2.0  # of all matches of one pattern in a process; a sound one takes microseconds each
_LAYER = re.compile(r"layers/(\d+)/(.+)")
_spent: dict[str, float] = collections.defaultdict(float)


class OutOfTime(Exception):
  """A block took longer than its limit."""


def in_main_thread() -> bool:
  """Whether a `time_limit` can ring: Python hands signals to the main thread alone."""
  return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def time_limit(seconds: float):
  """Stops a block of the main thread, also inside of `re`, which looks for signals as it matches.

  Raises:
    OutOfTime: the block took longer.
  """

  def stop(*_):
    raise OutOfTime(f"longer than {seconds:g} s")

  before = signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@functools.lru_cache(maxsize=1 << 16)
def _matches(pattern: str, name: str) -> bool:
  """Whether the pattern matches the whole name.

  Another thread has no limit, and refuses a pattern that may need one by its form.

  Raises:
    UserError: the pattern has taken SECONDS, or may.
  """
  left, begin = SECONDS - _spent[pattern], time.perf_counter()
  try:
    if not in_main_thread():
      if re.search(r"\)[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 4:
        raise OutOfTime("a time that has no limit outside of the main thread")
      return re.fullmatch(pattern, name) is not None
    with time_limit(max(left, 1e-6)):  # of 0 seconds, none rings
      return re.fullmatch(pattern, name) is not None
  except OutOfTime as e:
    limit = f"longer than {SECONDS:g} s" if in_main_thread() else e
    raise UserError(
      f"{pattern!r} takes {limit} to match {name!r}: it tries every way to split the name; write "
      "each repeat once and none around another, '.*X' for '((.+)+)+X'"
    ) from e
  finally:
    _spent[pattern] += time.perf_counter() - begin


def problem(pattern: Any, names: Iterable[str] = ()) -> str:
  """Why this is no regular expression, or none to match with these names; or ""."""
  try:
    re.compile(pattern)
    matches(pattern, names)
  except (re.error, TypeError, OverflowError, RecursionError) as e:
    return f"{pattern!r} is no regular expression: {e}"
  except UserError as e:
    return f"{e}"
  return ""


def matches(pattern: str, names: Iterable[str]) -> list[str]:
  """The names that a regular expression matches whole. Raises UserError as `_matches`."""
  return [name for name in names if _matches(pattern, name)]


def first(rules: Iterable[Sequence[Any]], name: str) -> int:
  """Number of the first rule that matches the whole name; -1 for none. Raises as `matches`."""
  return next((i for i, rule in enumerate(rules) if _matches(rule[0], name)), -1)


def used[T: Sequence[Any]](rules: Sequence[T], names: Iterable[str], so: bool = True) -> list[T]:
  """Rules that decide something; not `so`: those that match no name that earlier ones do not."""
  numbers = {first(rules, name) for name in names}
  return [rule for i, rule in enumerate(rules) if (i in numbers) == so]


def of_layer(name: str) -> tuple[int | None, str]:
  """(3, "mlp/up") of "layers/3/mlp/up", and (None, "head") of a name in no layer."""
  match = _LAYER.fullmatch(name)
  return (int(match[1]), match[2]) if match else (None, name)
