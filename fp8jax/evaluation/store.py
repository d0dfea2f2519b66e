"""Stored evaluations: prompts, outputs and verdicts of a task as JSON lines, and its definition.

FOLDER/TASK.json holds the definition: everything that decides the outputs and their verdicts, the
margin of comparisons among it; it is written before the first output. FOLDER/TASK.jsonl holds one
line per output, in the order in which they ended. An evaluation goes on after the items whose
samples are all there. I is an item; J is a sample, one of the outputs of an item.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from fp8jax import records
from fp8jax.errors import UserError
from fp8jax.evaluation.tasks import Item, Task, Verdict


# The fields of a row, of a definition, and of a summary, that are read again.
class _Row(TypedDict):
  item: str
  sample: int
  prompt: str
  output: str
  correct: bool
  note: str
  finish_reason: str
  tokens: int  # fmt: skip


class _Protocol(TypedDict):
  samples: int


class _Definition(TypedDict):
  name: str
  fingerprint: str
  margin: float
  items: list[str]
  protocol: _Protocol
  settings: dict  # fmt: skip


class _OfTask(TypedDict):
  seconds: float


class _Summary(TypedDict):
  tasks: dict[str, _OfTask]


@dataclasses.dataclass(frozen=True)
class Scores:
  """The verdicts of a task.

  Attributes:
    task: its name.
    margin: of comparisons, in points.
    items: names, in the order of the rows.
    scores_IJ: 0 or 1, (items, samples).
    settings: what else decided the outputs: weights, precision, seed, ...
    prompts: of every item.
  """

  task: str
  fingerprint: str
  margin: float
  items: tuple[str, ...]
  scores_IJ: np.ndarray
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  prompts: tuple[str, ...] = ()


class Writer:
  """Appends the outputs of one task to its file; `done` has {item name: {sample: row}} of the items
  whose samples are all there."""

  def __init__(self, folder: str, task: Task, settings: Mapping[str, Any]):
    """
    Args:
      folder: of the evaluation; made where it is not there.
      settings: what else decides the outputs: weights, precision, seed, ...; JSON values.

    Raises:
      UserError: the folder holds this task with another definition; names what differs.
    """
    os.makedirs(folder, exist_ok=True)
    self._task, stem = task, os.path.join(folder, file_name(task.name))
    self.path, definition = stem + ".jsonl", _definition(task, settings)
    if os.path.exists(stem + ".json"):
      _check_same(stem + ".json", definition)
    elif os.path.exists(self.path):
      raise UserError(f"{self.path} has no definition beside it; delete or move it")
    else:
      records.write_atomic(stem + ".json", records.to_json(definition, ascii=False) + "\n")
    rows = read_rows(self.path)
    self.done = _complete(rows, {i.name for i in task.items}, task.protocol.samples)
    kept = [row for samples in self.done.values() for row in samples.values()]
    if len(kept) != len(rows):
      lines = (records.to_json(row, None, ascii=False) + "\n" for row in kept)
      records.write_atomic(self.path, "".join(lines))
    self._file = records.appending(self.path)

  def add(self, item: Item, sample: int, prompt: str, completion, verdict: Verdict):
    """Appends one output; `completion` as the generator gives it."""
    row = {
      "item": item.name, "sample": sample, "correct": verdict.correct,
      "extracted": verdict.extracted, "answer": item.answer, "note": verdict.note,
      "finish_reason": completion.finish_reason, "tokens": len(completion.tokens),
      "prompt": prompt, "output": completion.text,
    }  # fmt: skip
    self.done.setdefault(item.name, {})[sample] = row
    records.append(self._file, row, ascii=False)

  def close(self):
    self._file.close()

  def rows(self) -> list[dict[str, Any]]:
    """In the order of the task's items and samples."""
    return [self.done[i.name][j] for i in self._task.items for j in sorted(self.done[i.name])]

  def scores(self) -> np.ndarray:
    """0 or 1, (items, samples)."""
    return _scores(self.done, [item.name for item in self._task.items])


def read_scores(folder: str) -> dict[str, Scores]:
  """{task: Scores} of every finished task in a folder.

  Raises:
    FileNotFoundError, UserError: there is none, or a file is damaged.
  """
  scores = {}
  names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
  for name in names:
    stem = os.path.join(folder, name.removesuffix(".json"))
    if not name.endswith(".json") or not os.path.exists(stem + ".jsonl"):
      continue
    remedy = "evaluate again into another workdir"
    definition = records.read(stem + ".json", _Definition, remedy)
    items, n = tuple(definition["items"]), definition["protocol"]["samples"]
    done = _complete(read_rows(stem + ".jsonl"), set(items), n)
    if len(done) == len(items):
      scores[definition["name"]] = Scores(
        definition["name"], definition["fingerprint"], definition["margin"], items,
        _scores(done, items), definition["settings"], tuple(prompt_of(done[i]) for i in items),
      )  # fmt: skip
  if not scores:
    raise FileNotFoundError(f"{folder} holds no finished task; evaluate with --job=evaluate first")
  return scores


def prompt_of(samples: Mapping[int, Mapping[str, Any]]) -> str:
  """That of an item's rows, {sample: row}."""
  return next(iter(samples.values()))["prompt"]


def _scores(done: Mapping[str, dict[int, dict[str, Any]]], items: Sequence[str]) -> np.ndarray:
  """0 or 1, (items, samples), of {item: {sample: row}}."""
  return np.array([[done[i][j]["correct"] for j in sorted(done[i])] for i in items], np.float64)


def newest(workdir: str, other_than: str = "") -> str:
  """The folder of a workdir's newest evaluation, by the time of its summary, but for one folder.

  Raises:
    FileNotFoundError: there is none.
  """
  root = os.path.join(os.path.expanduser(workdir), FOLDER)
  names = os.listdir(root) if os.path.isdir(root) else []
  paths = [os.path.join(root, name, SUMMARY) for name in names]
  paths = [path for path in paths if os.path.exists(path)]
  own = os.path.realpath(other_than) if other_than else ""
  paths = [path for path in paths if os.path.dirname(os.path.realpath(path)) != own]
  if not paths:
    raise FileNotFoundError(
      f"{root} holds no finished evaluation{' but this one' * bool(own)}; run --job=evaluate with "
      "the same eval.tasks there"
    )
  return os.path.dirname(max(paths, key=os.path.getmtime))


FOLDER, SUMMARY = "evaluation", "summary.json"


def slug(name: str) -> str:
  """A file name of a task's name."""
  return re.sub(r"[^\w.=-]+", "_", name).strip("_")


def file_name(task: str) -> str:
  """The name of a task's files without its ending, which is never the summary's."""
  name = slug(task)
  return name + "_" if f"{name}.json".casefold() == SUMMARY else name


def read_rows(path: str) -> list[dict[str, Any]]:
  """The rows of a file; a last line that a killed process has not finished is left out.

  Raises:
    UserError: another line is no row; names it.
  """
  remedy = "delete the line, and the same command asks that item again"
  return [row for _, row in records.rows(path, _Row, remedy)]


def earlier_seconds(folder: str) -> dict[str, float]:
  """Seconds per task of a summary that is replaced: a finished task is not asked again.

  Raises:
    UserError: the summary is damaged.
  """
  remedy = "delete it; the same command writes it again"
  there = records.find(folder, SUMMARY, _Summary, remedy) or {"tasks": {}}
  return {name: summary["seconds"] for name, summary in there["tasks"].items()}


def _definition(task: Task, settings: Mapping[str, Any]) -> dict[str, Any]:
  fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
  del fields["verify"]
  if not task.chat:  # as definitions of before there was this field
    del fields["chat"]
  fields["items"] = [item.name for item in task.items]
  fields["protocol"] = dataclasses.asdict(task.protocol)
  made = {"fingerprint": task.fingerprint, **fields, "settings": dict(settings)}
  return json.loads(json.dumps(made))


def _check_same(path: str, definition: Mapping[str, Any]):
  old = records.read(path, _Definition, "move it away, and the same command starts over")
  different = [k for k in definition if definition[k] != old.get(k)]
  if not different:
    return
  inner = [k for k in different if isinstance(definition[k], dict) and isinstance(old.get(k), dict)]
  shown = [k for k in different if k not in (*inner, "fingerprint", "items")]
  for k in inner:
    pairs = ((x, definition[k].get(x), old[k].get(x)) for x in {**definition[k], **old[k]})
    shown += [f"{k}.{x} ({b!r} there, {a!r} here)" for x, a, b in pairs if a != b]
  raise UserError(
    f"{path} describes another evaluation: {', '.join(shown or ['the items'])} differ; take "
    "another --workdir, or move the folder away"
  )


def _complete(rows, names: set[str], samples: int) -> dict[str, dict[int, dict[str, Any]]]:
  """{item: {sample: row}} of the items that have all of their samples."""
  by_item: dict[str, dict[int, dict[str, Any]]] = {}
  for row in rows:
    by_item.setdefault(row["item"], {})[row["sample"]] = row
  wanted = set(range(samples))
  return {k: v for k, v in by_item.items() if k in names and v.keys() == wanted}
