"""Tasks of the user's own: a JSONL file of questions, or a JSON file that describes a task."""

import dataclasses
import math
import os
from collections.abc import Collection
from typing import Any

from fp8jax import records
from fp8jax.data import text_files
from fp8jax.errors import ConfigErrors, UserError, nearest, read_json
from fp8jax.evaluation import reasoning_gym_tasks, verifiers
from fp8jax.evaluation.tasks import Item, Protocol, Task, Verdict, apart, check_items

FORMAT = (
  'one JSON per line: {"question": TEXT, "answer": TEXT, "verifier": "math-verify", "exact" or '
  '"regex" (optional), "name": TEXT (optional)}'
)


def from_jsonl(path: str, verifier: str = verifiers.MATH, name: str = "") -> Task:
  """The task of a JSONL file; its format is FORMAT.

  Args:
    verifier: of lines that name none.
    name: of the task; "" is the file's.

  Raises:
    UserError, FileNotFoundError: with file and line.
  """
  path = os.path.expanduser(path)
  items = []
  for number, (where, row) in enumerate(text_files.json_lines(path), 1):
    question, answer = row.get("question"), row.get("answer")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
      if not math.isfinite(answer):
        raise UserError(f"{where}: answer {answer} is no number; correct it, or write it as a text")
      answer = str(answer)
    if not isinstance(question, str) or not question.strip() or not isinstance(answer, str):
      raise UserError(f"{where} has no 'question' or no 'answer'; expected {FORMAT}")
    own = row.get("verifier", verifier)
    if own not in verifiers.NAMES:
      near = nearest(str(own), verifiers.NAMES)
      hint = f"; did you mean {near!r}?" if near else ""
      raise UserError(f"{where}: verifier {own!r} is not one of {verifiers.NAMES}{hint}")
    if own == verifiers.REGEX:
      verifiers.check_pattern(answer, where)
    label = str(row.get("name", row.get("id", number)))
    items.append(Item(label, question, answer, {"verifier": own}))
  return Task(
    name=name or os.path.splitext(os.path.basename(path))[0],
    items=check_items(items, path),
    verify=verify,
    verifier="/".join(sorted({i.data["verifier"] for i in items})),
    source=path,
  )


def verify(item: Item, output: str) -> Verdict:
  """By the item's own verifier."""
  return verifiers.by_name(item.data["verifier"])(item, output)


@dataclasses.dataclass(frozen=True)
class _Description:
  """The keys of a task file and their defaults; None is the default of the kind of task."""

  questions: str = ""
  family: str = ""
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
  name: str = ""
  items: int = 0
  seed: int = 0
  verifier: str = verifiers.MATH
  prompt: str | None = None
  system: str | None = None
  prefix: str | None = None
  think_end: str | None = None
  margin: float | None = None
  samples: int | None = None
  temperature: float | None = None
  top_p: float | None = None
  max_new_tokens: int | None = None
  stop: list[str] | None = None


def from_description(path: str, trained: Collection[str] = frozenset()) -> Task:
  """The task that a JSON file describes.

  Its keys: "questions" (a JSONL file beside it) or "family" with "arguments" and "seed"
  (reasoning-gym); "name", "items", "verifier"; and the fields of Task and Protocol "prompt",
  "system", "prefix", "think_end", "margin", "samples", "temperature", "top_p", "max_new_tokens",
  "stop". A family asks no normalized question that is in `trained`.

  Raises:
    UserError, FileNotFoundError: all that is wrong with the file.
  """
  path = os.path.expanduser(path)
  read = _checked(path, read_json(path, "write a task file, see the guide on evaluation"))
  name = read.name or os.path.splitext(os.path.basename(path))[0]
  if read.family:
    task = reasoning_gym_tasks.make(
      read.family, read.arguments, read.items, read.seed, trained, name
    )
  else:
    questions = os.path.join(os.path.dirname(path), os.path.expanduser(read.questions))
    task = from_jsonl(questions, read.verifier, name)
    items, _ = apart(task.items, trained)
    items = check_items(items, f"{questions} without eval.train_data")
    task = dataclasses.replace(task, items=items[: read.items or None])
  given = {k: v for k, v in dataclasses.asdict(read).items() if v is not None}
  of_task = ("prompt", "system", "prefix", "think_end", "margin")
  if "stop" in given:
    given["stop"] = tuple(given["stop"])
  protocol = {f.name: given[f.name] for f in dataclasses.fields(Protocol) if f.name in given}
  return dataclasses.replace(
    task,
    protocol=dataclasses.replace(task.protocol, **protocol),
    **{k: given[k] for k in of_task if k in given},
  )


def _checked(path: str, raw: dict[str, Any]) -> _Description:
  problems = ConfigErrors()
  known = {f.name: f for f in dataclasses.fields(_Description)}
  for key, value in raw.items():
    problems.one_of(f"{path}: key", key, tuple(known))
    problems.check(value is not None, f"{path}: {key}=null; leave it out, or give it a value")
  problems.refuse()
  records.check(raw, _Description, path, "correct it")
  read = _Description(**raw)
  problems.check(
    bool(read.questions) != bool(read.family),
    f"{path}: name either 'questions', a JSONL file, or 'family', one of reasoning-gym",
  )
  if read.family:
    problems.one_of(f"{path}: family", read.family, reasoning_gym_tasks.FAMILIES)
  problems.one_of(f"{path}: verifier", read.verifier, verifiers.NAMES)
  problems.check(read.items >= 0, f"{path}: items={read.items} must be at least 0 (0: all)")
  problems.check(
    read.margin is None or read.margin > 0, f"{path}: margin={read.margin} must be positive"
  )
  has_question = read.prompt is None or "{question}" in read.prompt
  problems.check(has_question, f"{path}: prompt={read.prompt!r} lacks {{question}}; add it")
  problems.refuse()
  return read
