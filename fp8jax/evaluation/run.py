"""The evaluation of tasks: ask, verify, store, sum up, compare.

I is an item; J is a sample, one of the outputs of an item.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fp8jax import statistics
from fp8jax.errors import UserError
from fp8jax.evaluation import store
from fp8jax.evaluation.tasks import Item, Task, Verdict
from fp8jax.generation.completion import ERROR
from fp8jax.generation.settings import Sampling

# Renders and encodes the prompt of an item: (text as it is stored, token ids).
Ask = Callable[[Task, Item], tuple[str, Sequence[int]]]


class Generates(Protocol):
  """The part of generation.api.Generator that evaluations call."""

  def generate(self, prompts, sampling, num_samples=1, on_text=None, numbers=()) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Evaluated:
  """A finished task.

  Attributes:
    scores_IJ: 0 or 1, (items, samples).
    summary: JSON values: avg@n and pass@k with intervals, finish reasons, lengths, seconds.
  """

  task: Task
  scores_IJ: np.ndarray
  summary: dict[str, Any]


def evaluate(
  task: Task, generator: Generates, ask: Ask, folder: str, settings: Mapping[str, Any],
  seed: int = 0, say: Callable[[str], None] = print,
) -> Evaluated:  # fmt: skip
  """Asks the items that are not answered yet, and sums up all.

  Args:
    settings: what decides the outputs besides the task and the seed; "stop": texts at which an
      output ends, beside the task's own.
    say: takes a line of progress, ten or so per task.

  Raises:
    UserError: the folder holds another evaluation, or a prompt is too long.
  """
  writer = store.Writer(folder, task, {**settings, "seed": seed})
  try:
    stop = (*task.protocol.stop, *settings.get("stop", ()))
    seconds = _ask_the_rest(task, generator, ask, writer, seed, stop, say)
    return Evaluated(task, writer.scores(), _summary(task, writer, seconds))
  finally:
    writer.close()


def _ask_the_rest(
  task: Task, generator, ask: Ask, writer: store.Writer, seed: int, stop: tuple[str, ...], say
) -> float:
  """Seconds of generation and verification; 0 where all was answered before."""
  rest = [item for item in task.items if item.name not in writer.done]
  if len(rest) < len(task.items):
    say(f"{task.name}: {len(task.items) - len(rest)} of {len(task.items)} items are answered")
  protocol, start = task.protocol, time.perf_counter()
  # An item draws the same whether others with its prompt are answered or not.
  asked, numbers, seen = [], [], collections.Counter()
  for item in task.items:
    text, ids = ask(task, item)
    if item.name not in writer.done:
      asked.append((text, ids))
      numbers.append(seen[tuple(ids)])
    elif (before := store.prompt_of(writer.done[item.name])) != text:
      raise UserError(
        f"{writer.path}: {item.name} was asked as {before!r}, and is now {text!r}; evaluate with "
        "the same chat template, or into another workdir"
      )
    seen[tuple(ids)] += protocol.samples if protocol.temperature else 1
  if not rest:
    return 0.0
  sampling = Sampling(
    temperature=protocol.temperature, top_p=protocol.top_p, stop=stop,
    max_new_tokens=protocol.max_new_tokens, seed=seed,
  )  # fmt: skip
  total, correct, done = len(rest) * protocol.samples, 0, 0

  def on_text(index: int, sample: int, piece: str, completion):
    nonlocal correct, done
    del piece
    if completion is None:
      return
    verdict = Verdict(False, "", "its logits are not finite")
    if completion.finish_reason != ERROR:
      verdict = task.judge(rest[index], completion.text)
    writer.add(rest[index], sample, asked[index][0], completion, verdict)
    correct, done = correct + verdict.correct, done + 1
    if done * 10 // total > (done - 1) * 10 // total:
      minutes = (time.perf_counter() - start) / 60
      say(f"{task.name}: {done}/{total} outputs, {correct} correct, {minutes:.1f} min")

  prompts = [ids for _, ids in asked]
  generator.generate(prompts, sampling, protocol.samples, on_text, numbers)
  return time.perf_counter() - start


def _summary(task: Task, writer: store.Writer, seconds: float) -> dict[str, Any]:
  rows, scores_IJ = writer.rows(), writer.scores()
  n = task.protocol.samples
  ks = sorted({k for k in (2, 4, 8, 16, 32) if k < n} | ({n} if n > 1 else set()))
  passed = {k: statistics.pass_at_k_of_items(scores_IJ, k) for k in ks}
  reasons = collections.Counter(row["finish_reason"] for row in rows)
  notes = collections.Counter(row["note"].partition(":")[0] for row in rows if row["note"])
  return {
    "items": len(task.items),
    "samples": n,
    "avg": dataclasses.asdict(statistics.interval(scores_IJ)),
    "pass": {str(k): dataclasses.asdict(statistics.of_items(x)) for k, x in passed.items()},
    "finish_reasons": dict(sorted(reasons.items())),
    "notes": dict(notes.most_common(8)),
    "mean_tokens": sum(row["tokens"] for row in rows) / len(rows),
    "seconds": round(seconds, 1),
    "protocol": dataclasses.asdict(task.protocol),
    "margin": task.margin,
    "fingerprint": task.fingerprint,
    "source": task.source,
  }


def compare(
  candidates: Sequence[Mapping[str, store.Scores]], baselines: Sequence[Mapping[str, store.Scores]]
) -> dict[str, statistics.Comparison]:
  """{task: comparison} of two arms, paired by seed and item.

  Args:
    candidates, baselines: the stored scores of every seed, in the same order of seeds; the tasks of
      the first candidate are compared. The margin is the one stored with the task.

  Raises:
    UserError: a run lacks a task, or has it with another definition; or two runs of a pair were
      asked in different ways.
  """
  if len(candidates) != len(baselines) or not candidates:
    raise UserError(
      f"{len(candidates)} runs of one arm and {len(baselines)} of the other; expected the same "
      "seeds"
    )
  comparisons = {}
  for name, first in candidates[0].items():
    for run in (*candidates, *baselines):
      if name not in run:
        raise UserError(f"a run has not finished the task {name!r}; evaluate it there too")
      if run[name].fingerprint != first.fingerprint:
        raise UserError(f"two runs have different definitions of {name!r}; evaluate one of them "
                        "again, with the same eval settings")  # fmt: skip
    for run, other in zip(candidates, baselines):
      _check_asked_alike(name, run[name], other[name])
    arms = [
      np.stack([run[name].scores_IJ.mean(1) for run in runs]) for runs in (candidates, baselines)
    ]
    comparisons[name] = statistics.compare(*arms, margin=first.margin)
  return comparisons


# Settings that are the same in both runs of a pair. The weights and their precision are what is
# compared; another seed draws other samples of the same kind.
_ASKED = ("chat", "tokenizer", "stop", "stop_tokens", "max_length")


def _check_asked_alike(task: str, run: store.Scores, other: store.Scores):
  mine, others = run.settings, other.settings
  has_prompts = bool(run.prompts and other.prompts)  # results collected before have none
  keys = _ASKED if has_prompts else (*_ASKED, "template")
  different = [k for k in keys if mine.get(k) != others.get(k)]
  if different:
    key = different[0]
    raise UserError(
      f"two runs answered {task!r} with different settings: {key} is {mine.get(key)!r} and "
      f"{others.get(key)!r}; evaluate one of them again with the other's"
    )
  of_items = zip(run.items, run.prompts, other.prompts, strict=True) if has_prompts else ()
  for name, prompt, its in of_items:
    if prompt != its:
      raise UserError(
        f"two runs answered {task!r} with different prompts ({name}: {prompt!r} and {its!r}); "
        "evaluate one of them again with the other's chat template"
      )
