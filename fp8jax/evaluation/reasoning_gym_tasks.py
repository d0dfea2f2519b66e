"""Questions of reasoning-gym, generated from seeds (Stojanovski et al. 2025, arXiv:2505.24760).

A data set of seed s draws item i from the random numbers of s + i: neighbouring seeds share items.
Evaluation therefore starts at EVALUATION_SEED, and training uses seeds below it; questions that a
training set holds all the same, by normalized text, are replaced by further ones.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from fp8jax.errors import UserError, one_line
from fp8jax.evaluation import verifiers
from fp8jax.evaluation.tasks import Item, Protocol, Task, Verdict, final_answer, normalized

# Families whose answers are short texts with one right value; each has been generated and scored.
FAMILIES = (
  "base_conversion", "basic_arithmetic", "chain_sum", "count_bits", "fraction_simplification",
  "gcd", "gsm_symbolic", "lcm", "leg_counting", "letter_counting", "number_sorting", "products",
  "simple_equations", "spell_backward", "word_sorting",
)  # fmt: skip
EVALUATION_SEED = 1_000_000_000
# Distance of the seeds of different evaluation sets.
_STRIDE = 10_000_000
SIZE = 200
# A family is exhausted when so many draws per item give no new question.
_PATIENCE = 20
_WHOLE = re.compile(r"-?\d+")
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")


def entries(family: str, arguments: Mapping[str, Any], seed: int, draws: int):
  """A data set of reasoning-gym; index it for {"question", "answer", "metadata"}.

  Args:
    family: a name in FAMILIES.
    arguments: fields of the family's configuration, e.g. {"max_terms": 2}.
    seed: of item 0.

  Raises:
    UserError: the family refuses the arguments.
  """
  import reasoning_gym  # extra `eval`  # pyright: ignore[reportMissingImports]

  try:
    return reasoning_gym.create_dataset(family, seed=seed, size=draws, **arguments)
  except (TypeError, AssertionError, ValueError) as e:
    raise UserError(
      f"reasoning-gym's {family!r} refuses {dict(arguments)}: {one_line(e)}; correct the arguments"
    ) from e


def make(
  family: str, arguments: Mapping[str, Any] | None = None, size: int = 0, seed: int = 0,
  trained: Collection[str] = frozenset(), name: str = "",
) -> Task:  # fmt: skip
  """The task of a family: greedy, a short answer, no system turn.

  Args:
    family, arguments: see `entries`.
    size: number of items; 0 takes SIZE.
    seed: of the evaluation set, from 0 to 99: sets of different seeds share no item.
    trained: normalized questions that must not be asked.
    name: of the task; "" is the family with its arguments.

  Raises:
    UserError: there are fewer than `size` different questions outside `trained`.
  """
  size, arguments = size or SIZE, dict(arguments or {})
  if not 0 <= seed < 100:
    raise UserError(f"seed={seed} of {family!r}, expected a number from 0 to 99")
  if size * _PATIENCE > _STRIDE:
    raise UserError(f"{size:,} questions of {family!r}, expected at most {_STRIDE // _PATIENCE:,}: "
                    "sets of different seeds share no item")  # fmt: skip
  first = EVALUATION_SEED + seed * _STRIDE
  drawn = entries(family, arguments, first, size * _PATIENCE)
  items, seen = [], set(trained)
  for i in range(size * _PATIENCE):
    entry = drawn[i]
    key = normalized(entry["question"])
    if key not in seen:
      seen.add(key)
      question, answer = entry["question"], str(entry["answer"])
      items.append(Item(f"{first + i}", question, answer, derived={"entry": entry}))
    if len(items) == size:
      break
  if len(items) < size:
    raise UserError(
      f"{family} with {arguments} has {len(items)} different questions outside the training set "
      f"among {size * _PATIENCE:,}, expected {size}; ask fewer items, or widen its arguments"
    )
  shown = ",".join(f"{k}={v}" for k, v in arguments.items())
  return Task(
    name=name or (f"{family}({shown})" if shown else family),
    items=tuple(items),
    verify=verify,
    verifier=f"reasoning-gym {family}",
    protocol=Protocol(max_new_tokens=256),
    source=f"reasoning-gym, {family}, seed {first}, {arguments}",
  )


def verify(item: Item, output: str) -> Verdict:
  """The family's own scorer gives the final answer its full mark; partial credit does not count.

  Of a final answer that is an equation, its right side is the answer; where a whole number is asked
  for, the last number of a sentence is.
  """
  import reasoning_gym  # extra `eval`  # pyright: ignore[reportMissingImports]

  answer, entry = final_answer(output), item.derived["entry"]
  if "=" not in item.answer:  # "12 + 7 = 19"
    answer = answer.rpartition("=")[2].strip()
  if _WHOLE.fullmatch(item.answer) and (numbers := _NUMBER.findall(answer)):
    answer = numbers[-1].replace(",", "")
  score = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
  with verifiers.time_limit(verifiers.SECONDS):
    # Its annotation has no parameters.
    mark = float(score(answer, entry)) if answer else 0.0  # pyright: ignore[reportCallIssue]
  return Verdict(mark >= 1.0, answer, "" if mark in (0.0, 1.0) else f"partial credit {mark:.2f}")
