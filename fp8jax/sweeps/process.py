"""One trial as a child process of launch.py, with a share of the machine."""

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import jax

from fp8jax.errors import UserError
from fp8jax.kernels import choose
from fp8jax.run import machine, workdir
from fp8jax.sweeps import outcome as outcome_lib
from fp8jax.sweeps.outcome import Outcome
from fp8jax.sweeps.spec import Trial

_POLL_S = 0.2
# Of a GPU's memory, for all trials that share it: each has a CUDA context of half a GB besides.
_SHARED_MEMORY = 0.8


@dataclasses.dataclass(frozen=True)
class Slot:
  """A share of the machine: environment variables and cores of one trial at a time."""

  environment: tuple[tuple[str, str], ...] = ()
  cores: tuple[int, ...] = ()

  def prefix(self) -> list[str]:
    """Words before a command that keep it to its share."""
    words = ["env", *(f"{k}={v}" for k, v in self.environment)] if self.environment else []
    if self.cores and shutil.which("taskset"):
      words += ["taskset", "-c", ",".join(map(str, self.cores))]
    return words


@dataclasses.dataclass(frozen=True)
class Here:
  """The machine that trials run on.

  Attributes:
    gpus: their names in CUDA_VISIBLE_DEVICES; () where trials compute on the CPU.
    device: of a trial; None if nvidia-smi does not say what its GPU is.
    num_devices: of a trial: its GPU, or those that JAX makes of the CPU.
  """

  gpus: tuple[str, ...]
  device: choose.Device | None
  num_devices: int


def here() -> Here:
  """This machine. Where it has GPUs, JAX computes on the CPU in this process from now on: it takes
  most of a GPU's memory as soon as it is asked for anything, and that is the trials'."""
  gpus = () if jax.config.jax_platforms == "cpu" else tuple(machine.visible_gpus())
  if not gpus:
    return Here((), choose.current_device(), jax.device_count())
  number = machine.compute_capability()
  jax.config.update("jax_platforms", "cpu")
  return Here(gpus, choose.Device("gpu", number) if number else None, 1)


def slots(parallel: int, gpus: Sequence[str]) -> list[Slot]:
  """Shares of this machine: GPUs, or without a GPU the cores, in equal parts.

  More trials than GPUs share them, each with its part of the memory. That pays where a trial fills
  no GPU; seconds and tokens per second then say what the neighbours left.

  Args:
    parallel: how many; 0: one per GPU, or one per core.
    gpus: of `here`.

  Raises:
    UserError: there are fewer cores.
  """
  if gpus:
    sharers = -(-parallel // len(gpus)) if parallel else 1
    memory = (("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{_SHARED_MEMORY / sharers:.3f}"),)
    slots_ = [
      Slot((("CUDA_VISIBLE_DEVICES", name), *(memory if sharers > 1 else ())))
      for _ in range(sharers)
      for name in gpus
    ]
  else:
    cores = sorted(os.sched_getaffinity(0))
    count = parallel or len(cores)
    each = max(len(cores) // count, 1)
    shares = [tuple(cores[i * each : (i + 1) * each]) for i in range(count)]
    slots_ = [Slot(cores=share) for share in shares if share]
  if parallel > len(slots_):
    raise UserError(f"--parallel={parallel}: this machine has {len(slots_)} cores for trials")
  return slots_[: parallel or None]


def command(trial: Trial, root: str, slot: Slot | None = None) -> list[str]:
  """The command of a trial; `root` is the folder of launch.py."""
  words = slot.prefix() if slot else []
  return [*words, sys.executable, os.path.join(root, "launch.py"), *trial.arguments()]


def shown(trial: Trial) -> str:
  """The command as a person types it in the folder of launch.py."""
  return shlex.join(["python", "launch.py", *trial.arguments()])


class Child:
  """A trial that runs now. It gets a signal only from `stop`: its session is its own."""

  def __init__(self, words: Sequence[str], trial: Trial, stop_above: float):
    self.trial = trial
    self._asked, self._why = False, ""
    self._watch = outcome_lib.LossWatch(trial.workdir, stop_above)
    os.makedirs(trial.workdir, exist_ok=True)
    with open(os.path.join(trial.workdir, "log.txt"), "a") as log:
      self._process = subprocess.Popen(
        words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
      )

  def stop(self):
    """SIGTERM: the run saves and exits 75; once."""
    if not self._asked and self._process.poll() is None:
      self._asked = True
      self._process.send_signal(signal.SIGTERM)

  def poll(self) -> Outcome | None:
    """How it ended, None while it runs. A trial that has diverged is stopped."""
    code = self._process.poll()
    if code is None:
      if not self._asked and (why := self._watch.verdict()):
        self._why = why
        self.stop()
      return None
    if code == outcome_lib.DIVERGED:
      self._why = "loss or gradient not finite, see nonfinite/report.json"
    if self._why and code != outcome_lib.FINISHED:
      outcome_lib.mark_diverged(self.trial, self._why)
      return Outcome("diverged")
    if code == outcome_lib.FINISHED:
      return outcome_lib.attempt(self.trial) or Outcome("failed")
    if code == outcome_lib.FAILED and workdir.is_locked(self.trial.workdir):
      return Outcome(outcome_lib.ELSEWHERE)
    # 143: SIGTERM before training had begun, with nothing to save.
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM):
      return Outcome("interrupted")
    return Outcome(outcome_lib.STATUS.get(code, "failed"))

  def join(self):
    """Returns when the process is over; for a signal handler that interrupted `poll`."""
    with contextlib.suppress(ChildProcessError):  # over, and `poll` knows
      os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)

  def wait(self) -> Outcome:
    while (outcome := self.poll()) is None:
      time.sleep(_POLL_S)
    return outcome
