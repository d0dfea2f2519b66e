"""The records of a run: metrics.jsonl, TensorBoard, provenance, progress, tables."""

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fp8jax import records
from fp8jax.data import loader
from fp8jax.phases import policy
from fp8jax.run import goodput, metrics, schemas, tracker
from fp8jax.step.train_spec import TrainSpec


class Metrics:
  """metrics.jsonl (the source of truth) and TensorBoard events. Only process 0 writes."""

  def __init__(
    self, workdir: str, resume_step: int, evaluated: Collection[str], tensorboard: bool,
    track: Callable[[], tracker.Tracker] | None = None,
  ):  # fmt: skip
    """Args: the step that the run goes on from, and the steps whose evaluation it remembers."""
    self._file = self._events = self._tracker = None
    self._workdir, self._has_tensorboard = workdir, tensorboard
    if jax.process_index() != 0:
      return
    self._tracker = track() if track else None
    self.forget(resume_step, evaluated)

  def forget(self, step: int, evaluated: Collection[str]):
    """Drops the rows after a step that the run goes on from: those steps are written again."""
    if jax.process_index() != 0:
      return
    path = _path(self._workdir)
    for open_one in (self._file, self._events):
      if open_one is not None:
        open_one.close()
    lines, gone = [], -1
    for line, row in rows(path):
      if any(map(_is_evaluation, row)) and str(row["step"]) not in evaluated:
        gone = row["step"]  # with what policies did after it
      elif row["step"] <= step and row["step"] != gone:
        lines.append(line)
    if os.path.exists(path):
      records.write_atomic(path, "".join(lines))
    self._file = records.appending(path)
    if self._has_tensorboard:
      import tensorboardX

      self._events = tensorboardX.SummaryWriter(
        os.path.join(self._workdir, "tensorboard"), purge_step=step + 1 if step else None
      )

  def write(self, step: int, values: dict[str, Any]):
    self.write_row(step, values)
    if self._tracker is not None:
      self._tracker.write(step, values)
    if self._events is not None:
      for name, value in values.items():
        if isinstance(value, (int, float)):
          self._events.add_scalar(name, value, step)

  def write_step(
    self, step: int, values: Mapping[str, float], is_finite, counts: loader.DocumentCounts,
    times: Mapping[str, float],
  ):  # fmt: skip
    """The row of a step: its metrics, documents passed over, and `times`."""
    skipped = {} if is_finite else {"skipped": 1}
    self.write(step, {**values, **skipped, **counts.metrics(), **times})

  def write_row(self, step: int, values: dict[str, Any]):
    """A row of the file alone."""
    if self._file is not None:
      records.append(self._file, {"step": step, **values})

  def write_nested(
    self, step: int, key: str, nested: dict[str, Any], draw: Callable[[], np.ndarray]
  ):
    """`nested` as one row of the file, and as one image, uint8 [H, W, 3], in TensorBoard."""
    self.write_row(step, {key: nested})
    if self._events is not None:
      self._events.add_image(key, draw(), step, dataformats="HWC")

  def close(self):
    if self._file is not None:
      self._file.close()
    if self._events is not None:
      self._events.close()
    if self._tracker is not None:
      self._tracker.close()


def _is_evaluation(key: str) -> bool:
  """Whether a key is of the row of an evaluation: of held-out text, or of tasks alone."""
  return key.startswith("heldout/") or key.partition("/")[0] == policy.ACCURACY


def times(
  spec: TrainSpec, step: int, clock: goodput.Clock, waited: float, shares: Mapping[str, float]
) -> dict[str, float]:
  """The seconds of a step's row, and its shares in FP8.

  Args:
    waited: seconds for data.
    shares: of fp8_share.of_phase.
  """
  is_whole = metrics.is_due(step, spec.log.every) or step == spec.steps
  memory = _memory_peak() if is_whole else {}
  return {**clock.metrics(is_whole), "data_wait_seconds": waited, **shares, **memory}


def _memory_peak() -> dict[str, float]:
  """Of the first own device since the process began; nothing where the allocator does not count."""
  stats = jax.local_devices()[0].memory_stats() or {}
  peak = stats.get("peak_bytes_in_use")
  return {} if peak is None else {"memory_peak_gib": peak / 2**30}


def _path(workdir: str) -> str:
  return os.path.join(workdir, "metrics.jsonl")


def rows(path: str, start: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
  """(line, row) of a metrics.jsonl, see records.rows."""
  remedy = "delete the line, and the same command goes on"
  return records.rows(path, schemas.Row, remedy, records.Number, start)


def last_logged(workdir: str, key: str) -> float | None:
  """The newest value of a metric in WORKDIR/metrics.jsonl."""
  values = [row[key] for _, row in rows(_path(workdir)) if key in row]
  return float(values[-1]) if values else None  # "nan" is a string in strict JSON


def accuracies(workdir: str) -> dict[str, dict[str, float]]:
  """{step: {"accuracy", "accuracy/TASK": share of right answers}} of WORKDIR/metrics.jsonl."""
  return {
    str(row["step"]): {k: v for k, v in row.items() if policy.is_accuracy(k)}
    for _, row in rows(_path(workdir)) if policy.ACCURACY in row
  }  # fmt: skip


def holes(workdir: str, origin: int | None, step: int) -> list[str]:
  """A line about steps that a run has taken and metrics.jsonl has no row of; [] without any.

  Args:
    origin: the step that the run began from; None: the first row tells.
    step: that it has reached.
  """
  there = {row["step"] for _, row in rows(_path(workdir)) if "loss" in row}
  first = min(there, default=step + 1) - 1 if origin is None else origin
  missing = [s for s in range(first + 1, step + 1) if s not in there]
  groups = itertools.groupby(enumerate(missing), lambda pair: pair[1] - pair[0])
  runs = [[s for _, s in of] for _, of in groups]
  shown = [f"{r[0]} to {r[-1]}" if r[1:] else str(r[0]) for r in runs]
  steps = ", ".join(shown[:3]) + f" and {len(shown) - 3} more" * (len(shown) > 3)
  return (
    [f"metrics.jsonl has no row of steps {steps}: the curves have a hole there"] if shown else []
  )
