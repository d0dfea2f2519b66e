"""Reasoning data of the whole recipe: worked solutions to generated questions.

command: python experiments/2025_infir2/reasoning_data.py FOLDER [--samples=N]

reasoning-gym (arXiv:2505.24760) generates the questions; the solutions are written here, step by
step, and end with "The answer is ANSWER." FOLDER gets
  cpt/*.txt       questions and solutions as plain text, 16 to a document
  stage1.jsonl    conversations ("messages"), a family after the other in turn
  stage2.jsonl    others of the same families, whose seeds and questions differ
No question is in two of them, by normalized text. Evaluation leaves out whatever is in one
(eval.trained) and has seeds of its own.
"""

import argparse
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from fp8jax.evaluation import reasoning_gym_tasks  # noqa: E402
from fp8jax.evaluation.tasks import normalized  # noqa: E402

# Families with their arguments, small enough to be learnt from a few hundred samples.
FAMILIES: dict[str, dict[str, Any]] = {
  "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
  "leg_counting": {
    "min_animals": 2, "max_animals": 2, "min_instances": 1, "max_instances": 9,
  },
  "gcd": {"min_numbers": 2, "max_numbers": 2, "max_value": 100},
}  # fmt: skip
# Questions of a family are drawn in this order of parts; far below the evaluation's seeds.
PARTS = ("stage1", "stage2", "cpt")
TRAINING_SEED = 1_000_000
_PER_DOCUMENT = 16


def solution(family: str, entry: Mapping[str, Any]) -> str:
  """The worked solution of a question.

  Raises:
    ValueError: the steps do not lead to the entry's answer.
  """
  steps, answer = _STEPS[family](entry["metadata"])
  if str(answer) != str(entry["answer"]):
    raise ValueError(f"{family}: {steps} leads to {answer}, the answer is {entry['answer']}")
  return f"{steps} The answer is {answer}."


def _sum(data: Mapping[str, Any]) -> tuple[str, int]:
  first, sign, second = data["expression"].split()
  answer = int(first) + int(second) * (1 if sign == "+" else -1)
  return f"{first} {sign} {second} = {answer}.", answer


def _legs(data: Mapping[str, Any]) -> tuple[str, int]:
  from reasoning_gym.arithmetic import leg_counting  # extra `eval`

  legs = {name: leg_counting.ANIMALS[name] for name in data["animals"]}
  parts = [(count, legs[name], name) for name, count in data["animals"].items()]
  steps = [f"{n} {name}{'s' * (n > 1)}: {n} x {each} = {n * each} legs." for n, each, name in parts]
  totals = [n * each for n, each, _ in parts]
  return f"{' '.join(steps)} {' + '.join(map(str, totals))} = {sum(totals)}.", sum(totals)


def _gcd(data: Mapping[str, Any]) -> tuple[str, int]:
  """Euclid's algorithm, a remainder a step."""
  larger, smaller = sorted(data["numbers"], reverse=True)
  steps = []
  while smaller:
    steps.append(f"{larger} = {larger // smaller} x {smaller} + {larger % smaller}.")
    larger, smaller = smaller, larger % smaller
  return " ".join(steps), math.gcd(*data["numbers"])


_STEPS = {"chain_sum": _sum, "leg_counting": _legs, "gcd": _gcd}


def questions(family: str) -> Iterator[Mapping[str, Any]]:
  """Entries of a family whose questions all differ, without end."""
  seen: set[str] = set()
  for chunk in itertools.count():
    size = 10_000
    drawn = reasoning_gym_tasks.entries(
      family, FAMILIES[family], TRAINING_SEED + chunk * size, size
    )
    for i in range(size):
      key = normalized(drawn[i]["question"])
      if key not in seen:
        seen.add(key)
        yield drawn[i]


def write(folder: pathlib.Path, samples: int):
  """Writes the three parts, of each so many samples.

  Args:
    samples: of a part, over all families.
  """
  folder.mkdir(parents=True, exist_ok=True)
  sources = {family: questions(family) for family in FAMILIES}
  for part in PARTS:
    families = itertools.islice(itertools.cycle(FAMILIES), samples)
    pairs = []
    for family in families:
      entry = next(sources[family])
      pairs.append((entry["question"].strip(), solution(family, entry)))
    if part == "cpt":
      _write_documents(folder / part, pairs)
      continue
    rows = [
      {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
      for q, a in pairs
    ]
    (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_documents(folder: pathlib.Path, pairs: list[tuple[str, str]]):
  folder.mkdir(exist_ok=True)
  for number, chunk in enumerate(itertools.batched(pairs, _PER_DOCUMENT)):
    text = "\n\n".join(f"Question: {q}\nAnswer: {a}" for q, a in chunk)
    (folder / f"{number:04}.txt").write_text(text + "\n")


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--samples", type=int, default=720, help="of a part (720)")
  args = parser.parse_args()
  write(args.folder, args.samples)
  print(f"{args.folder}: {args.samples} samples of {', '.join(FAMILIES)} in each part")


if __name__ == "__main__":
  main()
