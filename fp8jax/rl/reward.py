"""Rewards of completions: a task's verifier, or a function that the user brings."""

import hashlib
import importlib
import math
import os
import pathlib
import runpy
from collections.abc import Callable, Sequence
from typing import Any

from fp8jax.errors import UserError, one_line
from fp8jax.evaluation import tasks
from fp8jax.rl.rollout import Answer

FORM = '"PATH.py:NAME" or "MODULE:NAME" of a function (item, output) -> number'


def of_verifiers(answers: Sequence[Answer]) -> list[float]:
  """1 for a right answer, else 0."""
  return [float(q.task.judge(q.item, c.text).correct) for q, c in answers]


class OfFunction:
  """The rewards of a user's function of an evaluation.tasks.Item and the output that follows the
  thoughts; the fingerprint is of its file, and a run that goes on must have the same one."""

  def __init__(self, name: str):
    """Of a name as FORM says.

    Raises:
      UserError: there is no such function.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
      raise UserError(f"rl.reward={name!r} names no function; write {FORM}")
    try:
      if place.endswith(".py"):
        path = os.path.expanduser(place)
        members: dict[str, Any] = runpy.run_path(path)
      else:
        module = importlib.import_module(place)
        path, members = getattr(module, "__file__", "") or "", vars(module)
    except Exception as e:  # whatever the user's file raises
      raise UserError(
        f"rl.reward={name!r}: {place} cannot be run: {type(e).__name__}: {one_line(e)}; {FORM}"
      ) from e
    call: Callable[..., Any] | None = members.get(function)
    if not callable(call):
      raise UserError(f"rl.reward={name!r}: {place} has no function {function!r}; {FORM}")
    self._name, self._call = name, call
    self.fingerprint = (
      hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16] if path else ""
    )

  def __call__(self, answers: Sequence[Answer]) -> list[float]:
    """
    Raises:
      UserError: the function raised, or gave no finite number.
    """
    return [self._one(*answer) for answer in answers]

  def _one(self, question, completion) -> float:
    where = f"rl.reward={self._name!r} of {question.task.name}, {question.item.name}"
    try:
      output = tasks.without_thoughts(completion.text, question.task.think_end)
      value = self._call(question.item, output)
    except Exception as e:  # whatever the user's function raises
      raise UserError(
        f"{where} raised {type(e).__name__}: {one_line(e)}, for the output "
        f"{completion.text[:200]!r}; let the function give a number for every output"
      ) from e
    return checked(value, where, completion.text)


def checked(value: Any, where: str, output: str) -> float:
  """A reward as a float.

  Raises:
    UserError: it is no finite number.
  """
  try:
    number = float(value)
  except (TypeError, ValueError, OverflowError):
    number = math.nan
  if not math.isfinite(number):
    raise UserError(
      f"{where} is {value!r} for the output {output[:200]!r}, expected a finite number; an update "
      "would spread it over all parameters. Let the function give a number for every output"
    )
  return number
