"""Verifiers of answers as text: exact, by regular expression, by math-verify."""

import functools
import re
from collections.abc import Callable

from fp8jax.errors import UserError
from fp8jax.evaluation.tasks import Item, Verdict, final_answer, normalized

EXACT, REGEX, MATH = "exact", "regex", "math-verify"
NAMES = (MATH, EXACT, REGEX)


def exact(item: Item, output: str) -> Verdict:
  """The final answer is the expected text, but for case and white space."""
  answer = final_answer(output)
  return Verdict(normalized(answer) == normalized(item.answer), answer)


def regex(item: Item, output: str) -> Verdict:
  """The item's answer, a regular expression, matches the whole final answer."""
  answer = final_answer(output)
  return Verdict(re.fullmatch(item.answer, answer) is not None, answer)


def choice(item: Item, output: str) -> Verdict:
  """The letter after the last "ANSWER:" is the item's, as in "ANSWER: (C)"."""
  found = re.findall(
    r"answer\s*:\s*[\s*$(\[\\]*(?:boxed\{|text\{)*([A-Z])\b", output, re.IGNORECASE
  )
  letter = found[-1].upper() if found else ""
  return Verdict(letter == item.answer, letter, "" if letter else "no letter after ANSWER:")


def math_verify(item: Item, output: str) -> Verdict:
  r"""The output's last expression equals the answer, by math-verify (symbolic, LaTeX and plain).

  Source: huggingface/Math-Verify. Its timeouts are alarms: call it in the main thread.
  """
  import math_verify  # extra `eval`  # pyright: ignore[reportMissingImports]

  found = math_verify.parse(output)
  correct = bool(found) and bool(math_verify.verify(_gold(item.answer), found))
  return Verdict(correct, str(found[-1]) if found else "", "" if found else "no expression")


@functools.lru_cache(maxsize=4096)
def _gold(answer: str):
  import math_verify  # extra `eval`  # pyright: ignore[reportMissingImports]

  return math_verify.parse(f"\\boxed{{{answer}}}")


def by_name(name: str) -> Callable[[Item, str], Verdict]:
  """The verifier of a name in NAMES."""
  return {EXACT: exact, REGEX: regex, MATH: math_verify}[name]


def check_pattern(pattern: str, where: str):
  """Refuses an answer that is no regular expression."""
  try:
    re.compile(pattern)
  except re.error as e:
    raise UserError(f"{where}: {pattern!r} is no regular expression: {e}; correct it") from e
