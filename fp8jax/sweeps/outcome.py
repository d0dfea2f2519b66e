"""The files that a trial leaves, and the verdict they allow: finished, diverged or neither."""

import contextlib
import dataclasses
import math
import os
from typing import Required, TypedDict

from fp8jax import records
from fp8jax.config import identity, named
from fp8jax.errors import UserError
from fp8jax.run import metrics_writer
from fp8jax.run import workdir as workdir_lib
from fp8jax.run.provenance import write_json
from fp8jax.sweeps.spec import Trial

# Exit codes of launch.py.
FINISHED, FAILED, DIVERGED, PREEMPTED, INTERRUPTED = 0, 1, 3, 75, 130
STATUS = {
  FINISHED: "finished", FAILED: "failed", DIVERGED: "diverged", PREEMPTED: "interrupted",
  INTERRUPTED: "interrupted",
}  # fmt: skip
# Of a trial whose workdir another process holds: of another sweep in the folder.
ELSEWHERE = "running elsewhere"
# The files of a trial, as far as they decide.
_FILES = {
  "config": TypedDict("Config", {"resolved": dict}),
  "provenance": TypedDict("Provenance", {"job": str}, total=False),
  "trial": TypedDict("Marked", {"status": str}),
  "summary": TypedDict("Summary", {
    "step": Required[int], "steps": int, "objective": Required[records.Number | None],
  }, total=False),
}  # fmt: skip
# Steps whose mean loss decides.
_WINDOW = 8


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a trial ended.

  Attributes:
    status: one of STATUS, ELSEWHERE, or "queued".
    objective: in nats, of one that finished and was evaluated.
    why: of one that failed, where its log does not say it.
  """

  status: str
  objective: float | None = None
  why: str = ""


def read(trial: Trial) -> Outcome | None:
  """The outcome of a trial that is over, None of one that is yet to be run or to go on.

  A workdir of another configuration or job is not this trial's; launch.py then says what differs.

  Raises:
    UserError: a file of the workdir is not as a run leaves it; names it.
  """

  def find(name: str):
    remedy = "remove the folder to run the trial again"
    return records.find(trial.workdir, f"{name}.json", _FILES[name], remedy)

  wanted = named.flat(trial.config, trial.changes)
  if (config := find("config")) is None or identity.diff(wanted, config["resolved"]):
    return None
  if (find("provenance") or {}).get("job", trial.job) != trial.job:
    return None
  if marked := find("trial"):
    return Outcome(marked["status"])
  if (summary := find("summary")) is None or not workdir_lib.is_over(summary, wanted):
    return None
  return ended(summary["objective"])


def ended(objective: records.Number | None) -> Outcome:
  """Of a trial that took all steps."""
  if objective is None:
    return Outcome("finished")
  value = float(objective)
  return Outcome("finished", value) if math.isfinite(value) else Outcome("diverged")


def attempt(trial: Trial) -> Outcome | None:
  """`read`, or a failure with its reason: the other trials of a sweep go on."""
  try:
    return read(trial)
  except UserError as e:
    return Outcome("failed", why=str(e))


def mark_diverged(trial: Trial, why: str):
  """Writes WORKDIR/trial.json; the trial is not started again until the file is removed."""
  write_json(trial.workdir, "trial.json", {"status": "diverged", "why": why})


class LossWatch:
  """Reads the metrics of a run while it writes them, and tells when the loss has run away."""

  def __init__(self, workdir: str, stop_above: float):
    self._path = os.path.join(workdir, "metrics.jsonl")
    self._stop_above = stop_above
    self._file, self._read, self._losses = 0, 0, []

  def verdict(self) -> str:
    """Why the run has diverged by the rows that are new, or ""."""
    if not os.path.exists(self._path):
      return ""
    stat = os.stat(self._path)
    if stat.st_ino != self._file or stat.st_size < self._read:  # a resumed run writes it anew
      self._file, self._read, self._losses = stat.st_ino, 0, []
    if stat.st_size == self._read:
      return ""
    with contextlib.suppress(UserError):  # a row that is none: the run itself says so
      for line, row in metrics_writer.rows(self._path, self._read):
        self._read += len(line.encode())
        self._losses += [float(row["loss"])] if "loss" in row else []
      return divergence(self._losses, self._stop_above)
    return ""


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
