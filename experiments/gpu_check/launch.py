"""launch.py of this repository as a subprocess, and what its metrics.jsonl says."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

from gpu_check import records
from gpu_check.worker import Absent, Context, Cut, Wrong

NEEDED = ("grain", "ml_collections", "msgspec", "orbax.checkpoint", "tensorboardX", "absl")
_POLL_S, _CUT = 0.2, "was out of time"


def missing() -> list[str]:
  """Packages of the trainer that are not here."""

  def is_here(name: str) -> bool:
    try:
      return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
      return False

  return [name for name in NEEDED if not is_here(name)]


def run(
  context: Context, config: str, flags: Iterable[str] = (), shared: bool = True, steps: int = 0,
  on_cpu: bool = False,
  and_then: Callable[[pathlib.Path], None] = lambda workdir: None,
) -> list[dict[str, Any]]:  # fmt: skip
  """The rows of metrics.jsonl.

  Args:
    config: "FILE:ARM".
    shared: whether other processes use the GPU meanwhile: no memory is taken in advance.
    steps: ends the run, with nothing saved, as soon as it has taken so many; 0: at its own end.
    on_cpu: whether JAX computes on the machine's CPU.
    and_then: is given the workdir before that is removed.

  Raises:
    Absent: a package of the trainer.
    Wrong: the run ends with an error, or before `steps`.
    Cut: time is up before.
  """
  if absent := missing():
    raise Absent(f"not installed: {', '.join(absent)}; --wheels FOLDER adds them")
  with tempfile.TemporaryDirectory(dir=_roomy()) as folder:
    command = [sys.executable, "launch.py", f"--config={config}", f"--workdir={folder}", *flags]
    env = os.environ | ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if shared else {})
    env |= {"JAX_PLATFORMS": "cpu"} if on_cpu else {}
    log = pathlib.Path(folder) / "log.txt"
    with open(log, "w") as out:
      process = subprocess.Popen(
        command, cwd=records.ROOT, env=env, stdout=out, stderr=subprocess.STDOUT
      )
    try:
      ended = _wait(context, process, pathlib.Path(folder), steps)
    finally:
      process.kill()
      process.wait()
    print(text := log.read_text()[-8000:], flush=True)
    if ended == _CUT:
      raise Cut(f"launch.py {ended}", _rows(pathlib.Path(folder)))
    if ended:
      lines = text.strip().splitlines() or ["no message"]
      errors = [line for line in lines if line.startswith("error:")]
      raise Wrong(f"launch.py {ended}: {(errors or lines)[-1][:400]}")
    and_then(pathlib.Path(folder))
    return _rows(pathlib.Path(folder))


def _wait(context: Context, process, folder: pathlib.Path, steps: int) -> str:
  """Why the rows are not all there; "" if they are."""
  while process.poll() is None:
    if steps and any(row["step"] >= steps and "loss" in row for row in _rows(folder)):
      return ""
    if time.monotonic() > context.deadline:
      return _CUT
    time.sleep(_POLL_S)
  code = process.returncode
  return f"ended with {code}" if code else f"ended before step {steps}" if steps else ""


def _rows(folder: pathlib.Path) -> list[dict[str, Any]]:
  path = folder / "metrics.jsonl"
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  return [json.loads(line) for line in lines if line.endswith("\n")]


def _roomy() -> str | None:
  """A folder in memory where it has more room than the disk: a 7B's state is asked room for."""
  shm, disk = "/dev/shm", tempfile.gettempdir()
  free = lambda path: shutil.disk_usage(path).free  # noqa: E731
  return shm if os.path.isdir(shm) and free(shm) > free(disk) else None
