"""Trials as jobs of a scheduler, by submitit (extra `sweep`).

A job starts launch.py in a child. SLURM's warning before a time limit reaches submitit as SIGUSR2;
the child then gets SIGTERM, saves, exits 75, and the job goes back into the queue. A preemption's
SIGTERM reaches the child by itself; its exit code 75 requeues the job.
"""

import dataclasses
import os
import shutil
import subprocess
import time
from typing import Any

from fp8jax.errors import UserError, one_line
from fp8jax.sweeps import process
from fp8jax.sweeps.outcome import Outcome
from fp8jax.sweeps.spec import Sweep, Trial

CLUSTERS = ("slurm", "local")
# Seconds between the warning and the end: time to save a checkpoint.
_WARNING_S = 300


class Job:
  """The function of a job; submitit pickles it, and calls it again after a requeue."""

  def __init__(self, trial: Trial, root: str, stop_above: float):
    self._trial, self._root, self._stop_above = trial, root, stop_above

  def __call__(self) -> dict[str, Any]:
    import submitit  # pyright: ignore  (extra `sweep`)

    words = process.command(self._trial, self._root)
    self._child = process.Child(words, self._trial, self._stop_above)
    outcome = self._child.wait()
    del self._child
    environment = submitit.JobEnvironment()
    if outcome.status == "interrupted" and environment.cluster == "slurm":
      subprocess.run(["scontrol", "requeue", environment.job_id], check=True)
      time.sleep(_WARNING_S)  # SLURM ends this process; a result would say that the job is done
    return dataclasses.asdict(outcome)

  def checkpoint(self):
    """submitit's question before it requeues: the child saves first."""
    from submitit import helpers  # pyright: ignore  (extra `sweep`)

    self._child.stop()
    self._child.join()
    return helpers.DelayedSubmission(Job(self._trial, self._root, self._stop_above))


class Submitted:
  """A trial in the scheduler's hands."""

  def __init__(self, job, trial: Trial):
    self._job, self.trial, self._is_left = job, trial, False

  def stop(self):
    """The job stays in the queue: the sweep only stops waiting."""
    self._is_left = True

  def poll(self) -> Outcome | None:
    if not self._job.done():
      return Outcome("queued") if self._is_left else None
    if (error := self._job.exception()) is not None:
      os.makedirs(self.trial.workdir, exist_ok=True)
      with open(os.path.join(self.trial.workdir, "log.txt"), "a") as log:
        log.write(f"{error}\n")
      return Outcome("failed")
    return Outcome(**self._job.result())


class Executor:
  """Submits trials of a sweep."""

  def __init__(self, sweep: Sweep, cluster: str, folder: str, root: str):
    import submitit  # pyright: ignore  (extra `sweep`)

    if cluster not in CLUSTERS:
      raise UserError(f"--submit={cluster!r} is not one of {', '.join(CLUSTERS)}")
    self._sweep, self._root = sweep, root
    if cluster == "slurm" and not shutil.which("sbatch"):
      raise UserError(
        "--submit=slurm: this machine has no `sbatch`; start the sweep where jobs are submitted, "
        "or leave --submit out"
      )
    self._executor = submitit.AutoExecutor(f"{folder}/jobs", cluster=cluster)
    parameters = {"name": "fp8jax", "timeout_min": 24 * 60, **sweep.slurm}
    if cluster == "slurm":
      parameters.setdefault("slurm_signal_delay_s", _WARNING_S)
    else:  # has no partitions
      parameters = {k: v for k, v in parameters.items() if not k.startswith("slurm_")}
    try:
      self._executor.update_parameters(**parameters)
    except (NameError, TypeError, ValueError) as e:
      raise UserError(
        f"slurm={dict(sweep.slurm)!r} of the sweep is not what submitit's executor takes: "
        f"{one_line(e)}"
      ) from e

  def start(self, trial: Trial) -> Submitted:
    job = Job(trial, self._root, trial.bound(self._sweep.stop_above))
    try:
      return Submitted(self._executor.submit(job), trial)
    except (OSError, RuntimeError) as e:  # sbatch refuses
      raise UserError(f"--submit: {trial.workdir} was not taken: {one_line(e)}") from e
