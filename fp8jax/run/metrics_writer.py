"""The records of a run: metrics.jsonl, TensorBoard, provenance, progress, tables."""

import json
import os
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from fp8jax.errors import UserError
from fp8jax.run import tracker
from fp8jax.run.provenance import to_json


class Metrics:
  """metrics.jsonl (the source of truth) and TensorBoard events. Only process 0 writes."""

  def __init__(
    self,
    workdir: str,
    resume_step: int,
    evaluated: Collection[str],
    tensorboard: bool,
    track: Callable[[], tracker.Tracker] | None = None,
  ):
    """Args: the step that the run goes on from, and the steps whose evaluation it remembers."""
    self._file = self._events = self._tracker = None
    self._workdir, self._has_tensorboard = workdir, tensorboard
    if jax.process_index() != 0:
      return
    self._tracker = track() if track else None
    self.forget(resume_step, evaluated)

  def forget(self, step: int, evaluated: Collection[str]):
    """Takes back the rows after a step that the run goes on from; see the constructor."""
    if jax.process_index() != 0:
      return
    path = os.path.join(self._workdir, "metrics.jsonl")
    for open_one in (self._file, self._events):
      if open_one is not None:
        open_one.close()
    _forget(path, step, evaluated)
    self._file = open(path, "a")
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

  def write_row(self, step: int, values: dict[str, Any]):
    """A row of the file alone."""
    if self._file is not None:
      self._file.write(to_json({"step": step, **values}, indent=None) + "\n")
      self._file.flush()

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


def _forget(path: str, step: int, evaluated: Collection[str]):
  """Drops rows after the checkpoint that a run resumes from: those steps are written again."""
  if not os.path.exists(path):
    return
  lines = [
    line
    for line, row in rows(path)
    if row["step"] <= step
    and (not any(k.startswith("heldout/") for k in row) or str(row["step"]) in evaluated)
  ]
  with open(path + ".part", "w") as f:
    f.writelines(lines)
  os.replace(path + ".part", path)


def rows(path: str) -> list[tuple[str, dict[str, Any]]]:
  """(line, row) of a metrics.jsonl. A last line that a killed run has not finished is left out.

  Raises:
    UserError: another line that is no row; names it.
  """
  found = []
  with open(path, errors="replace") as f:
    for number, line in enumerate(f, 1):
      if not line.endswith("\n"):
        continue
      try:
        row = json.loads(line)
        row["step"]  # noqa: B018
      except (ValueError, KeyError, TypeError) as e:
        raise UserError(
          f"{path}, line {number} is no row of metrics: {line.strip()[:60]!r}; delete the line, "
          "and the same command goes on"
        ) from e
      found.append((line, row))
  return found


def last_logged(workdir: str, key: str) -> float | None:
  """The newest value of a metric in WORKDIR/metrics.jsonl."""
  path = os.path.join(workdir, "metrics.jsonl")
  if not os.path.exists(path):
    return None
  found = [row[key] for _, row in rows(path) if key in row]
  return float(found[-1]) if found else None  # "nan" is a string in strict JSON
