"""What a run leaves behind and shows: metrics.jsonl, TensorBoard, provenance, progress, tables."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Collection
from typing import IO, Any, cast

import jax
import rich.console
import rich.progress
import rich.table

from fp8jax.errors import UserError, read_json


def console(stderr: bool = False) -> rich.console.Console:
  """Where humans read: process 0. Not a terminal: plain lines, wide enough not to wrap tables."""
  target = sys.stderr if stderr else sys.stdout
  return rich.console.Console(
    file=cast(IO[str], _Outliving(target)),
    highlight=False,
    width=None if target.isatty() else 120,
    soft_wrap=not target.isatty(),
    quiet=jax.process_index() != 0,
  )


class _Outliving:
  """A stream whose reader may leave (`| head`): the run goes on without it."""

  def __init__(self, stream):
    self._stream = stream

  def __getattr__(self, name):
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    self._attempt(lambda: self._stream.write(text))
    return len(text)

  def flush(self):
    self._attempt(self._stream.flush)

  def _attempt(self, action):
    try:
      action()
    except BrokenPipeError:
      # Python flushes the stream once more when it exits.
      with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), self._stream.fileno())
      if self._stream is not sys.stderr:
        print("nobody reads the output any more; the run goes on", file=sys.stderr)


class Metrics:
  """metrics.jsonl (the source of truth) and TensorBoard events. Only process 0 writes."""

  def __init__(self, workdir: str, resume_step: int, evaluated: Collection[str], tensorboard: bool):
    """Args: the step that the run goes on from, and the steps whose evaluation it remembers."""
    self._file = self._events = None
    if jax.process_index() != 0:
      return
    path = os.path.join(workdir, "metrics.jsonl")
    _forget(path, resume_step, evaluated)
    self._file = open(path, "a")
    if tensorboard:
      import tensorboardX

      self._events = tensorboardX.SummaryWriter(
        os.path.join(workdir, "tensorboard"), purge_step=resume_step + 1 if resume_step else None
      )

  def write(self, step: int, values: dict[str, Any]):
    if self._file is None:
      return
    self._file.write(to_json({"step": step, **values}, indent=None) + "\n")
    self._file.flush()
    if self._events is not None:
      for name, value in values.items():
        if isinstance(value, (int, float)):
          self._events.add_scalar(name, value, step)

  def write_nested(self, step: int, key: str, nested: dict[str, Any], curves: dict[str, float]):
    """`nested` as one row of the file, `curves` as one curve each in TensorBoard."""
    if self._file is None:
      return
    self._file.write(to_json({"step": step, key: nested}, indent=None) + "\n")
    self._file.flush()
    if self._events is not None:
      for name, value in curves.items():
        if math.isfinite(value):  # a tensor that stays wide has no signal-to-noise ratio
          self._events.add_scalar(name, value, step)

  def close(self):
    if self._file is not None:
      self._file.close()
    if self._events is not None:
      self._events.close()


def _forget(path: str, step: int, evaluated: Collection[str]):
  """What happened after the checkpoint that a run resumes from happens again: once is enough."""
  if not os.path.exists(path):
    return
  lines = [
    line
    for line, row in _rows(path)
    if row["step"] <= step
    and (not any(k.startswith("heldout/") for k in row) or str(row["step"]) in evaluated)
  ]
  with open(path + ".part", "w") as f:
    f.writelines(lines)
  os.replace(path + ".part", path)


def _rows(path: str) -> list[tuple[str, dict[str, Any]]]:
  """(line, row) of a metrics.jsonl. A last line that a killed run has not finished is left out.

  Raises:
    UserError: another line that is no row; names it.
  """
  rows = []
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
      rows.append((line, row))
  return rows


def last_logged(workdir: str, key: str) -> float | None:
  """The newest value of a metric in WORKDIR/metrics.jsonl."""
  path = os.path.join(workdir, "metrics.jsonl")
  if not os.path.exists(path):
    return None
  found = [row[key] for _, row in _rows(path) if key in row]
  return float(found[-1]) if found else None  # "nan" is a string in strict JSON


def write_json(workdir: str, name: str, value):
  """Writes WORKDIR/name atomically, from process 0."""
  if jax.process_index() != 0:
    return
  path = os.path.join(workdir, name)
  with open(path + ".part", "w") as f:
    f.write(to_json(value) + "\n")
  os.replace(path + ".part", path)


def to_json(value, indent: int | None = 2) -> str:
  """Strict JSON: numbers that are not finite become the strings "nan", "inf" and "-inf"."""

  def plain(x):
    if isinstance(x, dict):
      return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
      return [plain(v) for v in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x

  return json.dumps(plain(value), indent=indent, allow_nan=False)


PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml-dtypes",
            "ml-collections", "tokenizers", "safetensors", "fp8jax")  # fmt: skip


def provenance(
  config: dict[str, Any], data: str, seed: int, num_devices: int | None = None
) -> dict[str, Any]:
  """Everything needed to know what produced a number; num_devices of those that there are."""
  devices = jax.devices()[:num_devices]
  return {
    "command": sys.argv,
    "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    **_git(),
    "config": config,
    "seed": seed,
    "data_fingerprint": data,
    "versions": {"python": platform.python_version(), **_versions()},
    "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
    "driver": _driver(),
    "processes": jax.process_count(),
    "host": {"machine": platform.machine(), "cpus": os.cpu_count(), "system": platform.system()},
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def history(workdir: str, start: int, config: dict[str, Any]) -> dict[str, Any]:
  """Where a leg of a run starts, and the provenances of those before it, oldest first.

  Each is without "config" where the leg after it has the same.
  """
  path = os.path.join(workdir, "provenance.json")
  if not start or not os.path.exists(path):
    return {"from_step": start, "earlier": []}
  before = read_json(path, "rename it, and the same command goes on without the earlier legs")
  legs = before.pop("earlier", [])
  if before.get("config") == config:
    del before["config"]
  return {"from_step": start, "earlier": [*legs, before]}


def _versions() -> dict[str, str]:
  found = {}
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def _driver(path: str = "/proc/driver/nvidia/version") -> str | None:
  """Version of NVIDIA's driver, None where there is none."""
  try:
    with open(path) as f:
      found = re.search(r"NVRM version: .*?(\d+\.\d[\d.]*)", f.read())
  except OSError:
    return None
  return found[1] if found else None


def _git() -> dict[str, Any]:
  def run(*args):
    here = os.path.dirname(os.path.abspath(__file__))
    return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True)

  try:
    top = run("rev-parse", "--show-toplevel").stdout.strip()
    if not os.path.exists(os.path.join(top, "fp8jax", "writers.py")):
      return {"commit": None, "dirty": None}  # installed inside another project
    commit = run("rev-parse", "HEAD").stdout.strip()
    return {"commit": commit, "dirty": bool(run("status", "--porcelain").stdout.strip())}
  except (OSError, subprocess.CalledProcessError):
    return {"commit": None, "dirty": None}


class Progress:
  """A live bar on a terminal, a line every `every` steps elsewhere. Silent beyond process 0."""

  def __init__(self, total: int, start: int, every: int, out: rich.console.Console):
    self._total, self._every, self._out = total, every, out
    self._is_silent = jax.process_index() != 0
    self._bar = None
    if not self._is_silent and out.is_terminal:
      self._bar = rich.progress.Progress(
        rich.progress.TextColumn("step {task.completed}/{task.total}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.fields[text]}"),
        rich.progress.TimeElapsedColumn(),
        console=out,
      )
      self._bar.start()
      self._task = self._bar.add_task("", total=total, completed=start, text="compiling")

  def update(self, step: int, loss: float, speed: "Speed"):
    """Shows the state after `step`."""
    if self._is_silent:
      return
    text = f"loss {loss:.4f}  {speed.text(self._total - step)}"
    if self._bar is not None:
      self._bar.update(self._task, completed=step, text=text)
    elif step % self._every == 0 or step == self._total:
      self._out.print(f"step {step}/{self._total}  {text}")

  def close(self):
    if self._bar is not None:
      self._bar.stop()


class Speed:
  """Tokens per second over a sliding window of steps; compilation is not in it."""

  def __init__(
    self, tokens_per_step: int, flops_per_step: float, peak: float | None, window: int = 20
  ):
    self._tokens, self._flops, self._peak, self._window = (
      tokens_per_step,
      flops_per_step,
      peak,
      window,
    )
    self._times: list[float] = []

  def tick(self):
    """A step's result has arrived."""
    self._times = [*self._times[-self._window :], time.perf_counter()]

  def restart(self):
    """Something else took time since the last step: measure anew."""
    self._times = []

  @property
  def seconds_per_step(self) -> float | None:
    if len(self._times) < 2:
      return None
    return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

  def values(self) -> dict[str, float]:
    seconds = self.seconds_per_step
    if seconds is None:
      return {}
    found = {"tokens_per_second": self._tokens / seconds, "step_seconds": seconds}
    if self._peak is not None:
      found["mfu"] = self._flops / seconds / self._peak
    return found

  def text(self, steps_left: int) -> str:
    values = self.values()
    if not values:
      return ""
    mfu = f"  MFU {values['mfu']:.1%}" if "mfu" in values else ""
    left = datetime.timedelta(seconds=round(values["step_seconds"] * steps_left))
    return f"{values['tokens_per_second']:,.0f} tokens/s{mfu}  {left} left"


def table(title: str, columns: list[str], rows: list[list[str]]) -> rich.table.Table:
  """A plain table; numbers to the right."""
  made = rich.table.Table(title=title, title_justify="left")
  for i, name in enumerate(columns):
    made.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
  for row in rows:
    made.add_row(*row)
  return made
