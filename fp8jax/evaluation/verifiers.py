"""Verifiers of answers as text: exact, by regular expression, by math-verify."""

import functools
import re
from collections.abc import Callable

from fp8jax import patterns
from fp8jax.errors import UserError
from fp8jax.evaluation import tasks
from fp8jax.evaluation.tasks import Item, Verdict, final_answer

EXACT, REGEX, MATH = "exact", "regex", "math-verify"
NAMES = (MATH, EXACT, REGEX)
SECONDS = 5.0  # of one verdict, as math-verify has for one parse
_CHOICE = re.compile(
  r"answer\s*:[\s*$(\[\\]*(?:\\?(?:boxed|text|textbf|mathrm|mathbf)\{)*([A-D])\b", re.IGNORECASE
)


def exact(item: Item, output: str) -> Verdict:
  """The final answer is the expected text, but for case, white space, width and decoration."""
  answer = final_answer(output)
  is_same = tasks.plain(answer) == tasks.plain(tasks.bare(item.answer))
  return Verdict(bool(answer) and is_same, answer)  # a gold of decoration alone is nobody's answer


def regex(item: Item, output: str) -> Verdict:
  """The item's answer, a regular expression, matches the whole final answer."""
  answer = final_answer(output)
  with time_limit(SECONDS):
    return Verdict(re.fullmatch(item.answer, answer) is not None, answer)


def time_limit(seconds: float):
  """`patterns.time_limit` of a verdict; raises UserError, see `_check_thread`."""
  _check_thread()
  return patterns.time_limit(seconds)


def _check_thread():
  """Refuses a thread in which no alarm rings: a regular expression could match for ever."""
  if not patterns.in_main_thread():
    raise UserError(
      "answers are verified in the main thread: Python hands signals to it alone, and nothing else "
      "stops a verdict at its time limit; call from there, or from a process of its own"
    )


def choice(item: Item, output: str) -> Verdict:
  """The letter from A to D after the last "ANSWER:" is the item's, as in "ANSWER: (C)".

  The rule of openai/simple-evals for GPQA, which takes the first; a sentence is no letter there,
  either: "Answer: I think it is (B)" is wrong.
  """
  letters = _CHOICE.findall(output)
  letter = letters[-1].upper() if letters else ""
  return Verdict(letter == item.answer, letter, "" if letter else "no letter after ANSWER:")


def math_verify(item: Item, output: str) -> Verdict:
  r"""The answer equals what is in the last \boxed{...} or <answer>, else the last expression.

  By math-verify (symbolic, LaTeX and plain). By itself it joins boxes that stand close together.
  Source: huggingface/Math-Verify. Its timeouts are alarms.

  Raises:
    UserError: see `_check_thread`; it would be caught there, and every answer wrong.
  """
  _check_thread()
  import math_verify  # extra `eval`  # pyright: ignore[reportMissingImports]

  boxed, tagged = tasks.boxed_answer(output), tasks.tagged_answer(output)
  if boxed is not None:
    texts = [f"\\boxed{{{boxed}}}"]
  elif tagged is not None:  # an expression, or a sentence with one
    texts = [f"\\boxed{{{tasks.bare(tagged)}}}", tagged]
  else:
    texts = [output]
  parsed = [value for text in texts if (value := math_verify.parse(text))]
  gold = _gold(item.answer)
  right = next((value for value in parsed if math_verify.verify(gold, value)), None)
  shown = right or next(iter(parsed), None)
  note = "" if shown else "no expression"
  return Verdict(right is not None, str(shown[-1]) if shown else "", note)


@functools.lru_cache(maxsize=4096)
def _gold(answer: str):
  import math_verify  # extra `eval`  # pyright: ignore[reportMissingImports]

  return math_verify.parse(f"\\boxed{{{answer}}}")


def by_name(name: str) -> Callable[[Item, str], Verdict]:
  """The verifier of a name in NAMES."""
  return {EXACT: exact, REGEX: regex, MATH: math_verify}[name]


def check_pattern(pattern: str, where: str):
  """Refuses an answer that is no regular expression."""
  if problem := patterns.problem(pattern):
    raise UserError(f"{where}: {problem}; correct it")
