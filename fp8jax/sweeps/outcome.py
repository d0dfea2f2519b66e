"""The files that a trial leaves, and the verdict they allow: finished, diverged or neither."""

import dataclasses
import json
import math
import os
from typing import Any

from fp8jax.config import identity, named
from fp8jax.errors import read_json
from fp8jax.run.provenance import to_json
from fp8jax.sweeps.spec import Trial

# Exit codes of launch.py.
FINISHED, FAILED, DIVERGED, PREEMPTED, INTERRUPTED = 0, 1, 3, 75, 130
STATUS = {
  FINISHED: "finished", FAILED: "failed", DIVERGED: "diverged", PREEMPTED: "interrupted",
  INTERRUPTED: "interrupted",
}  # fmt: skip
# Steps whose mean loss decides.
_WINDOW = 8


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a trial ended: one of STATUS, and its objective in nats where it finished."""

  status: str
  objective: float | None = None


def read(trial: Trial) -> Outcome | None:
  """The outcome of a trial that is over, None of one that is yet to be run or to go on.

  A workdir of another configuration is not this trial's; launch.py then says what differs.
  """
  config = _json(trial.workdir, "config.json")
  if config is None:
    return None
  if identity.diff(named.flat(trial.config, trial.changes), config["resolved"]):
    return None
  if (mark := _json(trial.workdir, "trial.json")) is not None:
    return Outcome(mark["status"])
  summary = _json(trial.workdir, "summary.json")
  if summary is None or summary["step"] < config["resolved"]["steps"]:
    return None
  return Outcome("finished", summary.get("objective"))


def mark_diverged(trial: Trial, why: str):
  """Writes WORKDIR/trial.json; the trial is not started again until the file is removed."""
  path = os.path.join(trial.workdir, "trial.json")
  with open(path + ".part", "w") as f:
    f.write(to_json({"status": "diverged", "why": why}) + "\n")
  os.replace(path + ".part", path)


class LossWatch:
  """Reads the metrics of a run while it writes them, and tells when the loss has run away."""

  def __init__(self, workdir: str, stop_above: float):
    self._path = os.path.join(workdir, "metrics.jsonl")
    self._stop_above = stop_above
    self._read = 0

  def verdict(self) -> str:
    """Why the run has diverged, or ""."""
    if not os.path.exists(self._path) or os.path.getsize(self._path) == self._read:
      return ""
    self._read = os.path.getsize(self._path)
    return divergence(_losses(self._path), self._stop_above)


def divergence(losses: list[float], stop_above: float) -> str:
  """Why a run with these losses has diverged by its last steps, or ""."""
  if len(losses) <= _WINDOW:
    return ""
  last = list(filter(math.isfinite, losses[-_WINDOW:]))  # single steps may be skipped or undone
  first = next(filter(math.isfinite, losses), math.nan)
  if not last:
    return f"no finite loss in {_WINDOW} steps"
  mean = sum(last) / len(last)
  if mean <= first + stop_above:
    return ""
  return f"mean loss of {_WINDOW} steps {mean:.3f}, first {first:.3f}"


def ever_diverged(losses: list[float], stop_above: float) -> str:
  """`divergence` at the first step at which a watched run would have been stopped, or ""."""
  reasons = (divergence(losses[:end], stop_above) for end in range(_WINDOW, len(losses) + 1))
  return next(filter(None, reasons), "")


def _losses(path: str) -> list[float]:
  losses = []
  with open(path) as f:
    for line in f:
      if line.endswith("\n") and '"loss"' in line:
        losses.append(float(json.loads(line)["loss"]))
  return losses


def _json(workdir: str, name: str) -> dict[str, Any] | None:
  path = os.path.join(workdir, name)
  return read_json(path, "remove the folder to run it anew") if os.path.exists(path) else None


@dataclasses.dataclass(frozen=True)
class Records:
  """A finished run's files: summary.json, provenance.json, the lines of metrics.jsonl."""

  summary: dict[str, Any]
  provenance: dict[str, Any]
  steps: list[dict[str, Any]]

  def heldout(self, which: int) -> dict[str, dict[str, float]]:
    """{source: {precision: nats per token}} of the first evaluation (0) or the last (-1)."""
    evaluations = self.summary["evaluations"]
    evaluation = evaluations[sorted(evaluations, key=int)[which]]
    return {
      source: {precision: values["loss"] for precision, values in by_precision.items()}
      for source, by_precision in evaluation.items()
    }

  def logged(self, name: str) -> list:
    """A metric at every step that has it."""
    return [step[name] for step in self.steps if name in step]


def records(workdir: str) -> Records:
  """Those of a finished run."""
  summary, provenance = (
    read_json(os.path.join(workdir, f"{name}.json"), "run it first")
    for name in ("summary", "provenance")
  )
  with open(os.path.join(workdir, "metrics.jsonl")) as f:
    return Records(summary, provenance, [json.loads(line) for line in f])
