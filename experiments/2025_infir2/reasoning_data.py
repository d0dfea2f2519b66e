"""Training data of result (a): worked solutions of reasoning-gym's questions, as text and as chats.

command: python experiments/2025_infir2/reasoning_data.py OUT [--samples 160] [--tasks FILE ...]
needs:   pip install "fp8jax[eval]"

The test questions are drawn first, as the evaluation draws them from tasks/*.json; a training
question that equals one of them, or an earlier training question, but for case and white space is
left out. Training seeds lie below those of evaluations. OUT gets

  cpt.jsonl      {"text": question and solution}: continual pre-training
  stage1.jsonl   {"messages": [user, assistant]}: supervised fine-tuning
  stage2.jsonl   likewise, other questions
  counts.json    how many of each family were written and left out, and the files' SHA-256

The solutions are short: tens and units, legs per animal, Euclid's steps, and gsm_symbolic's
own. Each is checked against the family's answer, and by its scorer, before it is written.
"""

import argparse
import hashlib
import json
import pathlib
import re
import signal
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

if __name__ == "__main__":
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback

from fp8jax.evaluation import jsonl_tasks, reasoning_gym_tasks, tasks  # noqa: E402

# Seed of the first question of each file; far apart, for item i of seed s is item 0 of s + i.
SEEDS = {"cpt": 0, "stage1": 100_000_000, "stage2": 200_000_000}


def chain_sum(entry: dict) -> tuple[list[str], int]:
  """47 - 38: tens and units apart, term by term."""
  parts = entry["metadata"]["expression"].split()
  total, steps = int(parts[0]), []
  for sign, text in zip(parts[1::2], parts[2::2]):
    a, b = total, int(text)
    tens, units = (10 * (a // 10), 10 * (b // 10)), (a % 10, b % 10)
    high, low = (x + y if sign == "+" else x - y for x, y in (tens, units))
    total = high + low
    joined = f"{high} + {low}" if low >= 0 else f"{high} - {-low}"
    steps.append(f"{tens[0]} {sign} {tens[1]} = {high}, {units[0]} {sign} {units[1]} = {low}, "
                 f"{joined} = {total}.")  # fmt: skip
  return steps, total


def leg_counting(entry: dict) -> tuple[list[str], int]:
  """Legs of each kind, then their sum."""
  from reasoning_gym.arithmetic.leg_counting import ANIMALS

  animals = entry["metadata"]["animals"]
  legs = [count * ANIMALS[name] for name, count in animals.items()]
  steps = [
    f"{name}: {count} x {ANIMALS[name]} = {n}." for (name, count), n in zip(animals.items(), legs)
  ]
  return [*steps, f"{' + '.join(map(str, legs))} = {sum(legs)}."], sum(legs)


def gcd(entry: dict) -> tuple[list[str], int]:
  """Euclid's algorithm, number by number."""
  numbers = entry["metadata"]["numbers"]
  a, steps = numbers[0], []
  for b in numbers[1:]:
    a, b = max(a, b), min(a, b)
    while b:
      steps.append(f"{a} = {a // b} x {b} + {a % b}.")
      a, b = b, a % b
  return steps, a


def gsm_symbolic(entry: dict) -> tuple[list[str], int]:
  """The family's own solution."""
  text, _, answer = entry["metadata"]["answer_cot"].rpartition("####")
  return text.strip().split("\n"), int(float(answer))


SOLVERS = {f.__name__: f for f in (chain_sum, leg_counting, gcd, gsm_symbolic)}


def solution(entry: dict) -> str:
  """The worked solution of a question.

  Raises:
    ValueError: it ends in another answer than the family's.
  """
  steps, answer = SOLVERS[entry["metadata"]["source_dataset"]](entry)
  text = " ".join([*steps, f"The answer is {answer}."])
  item = tasks.Item("", entry["question"], entry["answer"], derived={"entry": entry})
  if not reasoning_gym_tasks.verify(item, text).correct:
    raise ValueError(f"{text!r} does not answer {entry['question']!r} with {entry['answer']!r}")
  return text


def draw(family: str, arguments: dict, seed: int, count: int, taken: set[str]):
  """(count entries whose questions are not in `taken`, how many were left out); adds to `taken`."""
  draws = 50 * count
  drawn = reasoning_gym_tasks.entries(family, arguments, seed, draws)
  found, left_out = [], 0
  for i in range(draws):
    key = tasks.normalized(drawn[i]["question"])
    if key in taken:
      left_out += 1
      continue
    taken.add(key)
    found.append(drawn[i])
    if len(found) == count:
      return found, left_out
  raise ValueError(f"{family} {arguments} has no {count} further questions; lower --samples")


def main(out: pathlib.Path, paths: list[str], samples: int):
  out.mkdir(parents=True, exist_ok=True)
  described = [json.loads(pathlib.Path(path).read_text()) for path in paths]
  for path, one in zip(paths, described):
    if one.get("family") not in SOLVERS:
      sys.exit(f"error: {path} is of no family with worked solutions: {', '.join(SOLVERS)}")
  tests = [jsonl_tasks.from_description(path) for path in paths]
  taken = {tasks.normalized(item.question) for test in tests for item in test.items}
  counts: dict = {"test": {t.name: {"items": len(t.items), "fingerprint": t.fingerprint}
                           for t in tests}}  # fmt: skip
  for name, seed in SEEDS.items():
    columns, counts[name] = [], {}
    for one in described:
      entries, left_out = draw(one["family"], one["arguments"], seed, samples, taken)
      columns.append(entries)
      counts[name][one["family"]] = {"written": len(entries), "left_out": left_out}
    lines = []
    for entry in (e for row in zip(*columns) for e in row):  # families take turns
      user, assistant = entry["question"].strip(), solution(entry)
      messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
      row = {"text": f"{user}\n{assistant}"} if name == "cpt" else {"messages": messages}
      lines.append(json.dumps(row) + "\n")
    text = "".join(lines)
    (out / f"{name}.jsonl").write_text(text)
    counts[name]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    counts[name]["words"] = len(re.findall(r"\S+", text))
  (out / "counts.json").write_text(json.dumps(counts, indent=1) + "\n")
  print(json.dumps(counts, indent=1))


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("out", type=pathlib.Path)
  parser.add_argument("--samples", type=int, default=160, help="questions per family and file")
  default = sorted(map(str, (HERE / "tasks").glob("*.json")))
  parser.add_argument("--tasks", nargs="+", default=default, help="task files")
  asked = parser.parse_args()
  main(asked.out, asked.tasks, asked.samples)
