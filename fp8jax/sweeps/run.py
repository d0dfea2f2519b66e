"""--sweep: runs what is not finished, and ends in a table and a comparison.

Exit codes: 0 all trials are over (finished or diverged), 1 one failed, 75 after SIGTERM and 130
after Ctrl-C: running trials were saved, and the same command goes on.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import rich.console

from fp8jax import console as console_lib
from fp8jax import records
from fp8jax.config.needs import Needs
from fp8jax.errors import UserError
from fp8jax.report import files
from fp8jax.sweeps import file, process, slurm, stacked, table
from fp8jax.sweeps import outcome as outcome_lib
from fp8jax.sweeps import plan as plan_lib
from fp8jax.sweeps.outcome import Outcome
from fp8jax.sweeps.spec import Trial

_POLL_S = 0.2


# A trial that runs somewhere.
Handle = process.Child | slurm.Submitted


def run(
  path: str, root: str, folder: str, parallel: int, submit: str, is_printed: bool,
  is_mapped: bool = False, needs: Mapping[str, Needs] = file.TRAINS,
) -> int:  # fmt: skip
  """Runs the sweep in a file; returns the exit code.

  Args:
    root: the folder of launch.py.
    folder: of its trials, an absolute path.
    parallel: trials at a time; 0: one per GPU or core, all of those for a scheduler.
    submit: "" for processes here, or a cluster of submitit.
    is_printed: print the commands of the trials that are not over, and start none.
    is_mapped: train trials that differ in seed and schedule alone at once (sweeps/stacked.py).
    needs: of the jobs that trials may be of.
  """
  if parallel < 0:
    raise UserError(f"--parallel={parallel}: expected 1 or more, or 0 for one per GPU or core")
  if is_mapped and (submit or is_printed):
    raise UserError("--vmap starts no trial by itself; leave --submit, --print or --vmap out")
  # Trials of a scheduler run elsewhere; mapped ones in this process, on its own devices.
  own = None if submit or is_mapped else process.here()
  if own is not None and own.device is not None:
    sweep = file.load(path, own.num_devices, own.device, needs)
  else:
    sweep = file.load(path, jax.device_count() if is_mapped else None, needs=needs)
  if sweep.search is not None and (is_mapped or is_printed):
    raise UserError("a search suggests points from objectives; leave --vmap and --print out")
  out = console_lib.console()
  if is_printed:
    for trial in sweep.trials(folder):
      if outcome_lib.read(trial) is None:
        print(process.shown(trial))
    return 0
  records.make_folder(folder, "--workdir")
  gpus = own.gpus if own else ()
  begin = None if is_mapped else _starter(sweep, root, folder, parallel, submit, gpus)
  table.claim(folder, path, sweep)
  if begin is None:
    results = _mapped(sweep, folder, parallel, out)
    return _ended(sweep, path, folder, results, None, out)
  results, code = drain(plan_lib.of(sweep, folder), *begin, out)
  return _ended(sweep, path, folder, results, code, out)


def _mapped(sweep, folder: str, count: int, out: rich.console.Console) -> table.Results:
  """Every trial, those of a group at once."""
  trials = sweep.trials(folder)
  outcomes = {t.workdir: outcome_lib.read(t) for t in trials}
  for members in stacked.groups([t for t in trials if outcomes[t.workdir] is None], count):
    out.print(f"starts {len(members)} trials at once: {members[0].trial.config}")
    for trial, outcome in stacked.run(members, sweep.stop_above, out.print):
      said = f" {outcome.objective:.4f}" if outcome.objective is not None else ""
      out.print(f"{outcome.status}{said}: {trial.workdir}")
      outcomes[trial.workdir] = outcome
  return [(t, o) for t in trials if (o := outcomes[t.workdir]) is not None]


def _ended(sweep, path: str, folder: str, results: table.Results, code, out) -> int:
  """Writes and shows the end of a sweep; its exit code."""
  elsewhere = outcome_lib.ELSEWHERE  # another sweep may have finished it meanwhile
  results = [(t, outcome_lib.attempt(t) or o if o.status == elsewhere else o) for t, o in results]
  table.write(folder, path, sweep, results)
  table.show(out, sweep, results)
  out.print(f"{folder}/sweep.json has the trials and their workdirs")
  if code is not None:  # interrupted: trials are missing, and whoever interrupts may not wait
    return code
  out.print(table.compare(folder, results), soft_wrap=True)
  return int(any(o.status not in ("finished", "diverged") for _, o in results))


def _starter(sweep, root: str, folder: str, parallel: int, submit: str, gpus: Sequence[str]):
  """([a place per trial at a time], (trial, place) -> Handle)."""
  if submit:
    executor = slurm.Executor(sweep, submit, folder, root)
    return [None] * (parallel or len(sweep)), lambda trial, place: executor.start(trial)
  return process.slots(parallel, gpus), lambda trial, place: process.Child(
    process.command(trial, root, place), trial, trial.bound(sweep.stop_above)
  )


def drain(
  plan: plan_lib.Listed | plan_lib.Suggested,
  free: list,
  start: Callable[..., Handle],
  out: rich.console.Console,
) -> tuple[table.Results, int | None]:
  """Every trial of a sweep, in so many places at a time; the exit code of an interruption."""
  results, running, asked = [], [], []
  before = {n: signal.signal(n, lambda n, _: asked.append(n)) for n in _SIGNALS}

  def settle(trial: Trial, outcome: Outcome, verb: str):
    said = f" {outcome.objective:.4f}" if outcome.objective is not None else ""
    out.print(f"{verb}{outcome.status}{said}: {outcome.why or trial.workdir}")
    results.append((trial, outcome))
    plan.give(trial, outcome)

  try:
    while True:
      while free and not asked and (trial := plan.take()) is not None:
        if (outcome := outcome_lib.attempt(trial)) is not None:
          settle(trial, outcome, "was ")
          continue
        place = free.pop(0)
        out.print(f"starts: {trial.workdir}")
        running.append((start(trial, place), place))
      if not running:
        return results, _SIGNALS[asked[0]] if asked else None
      for entry in list(running):
        handle, place = entry
        if asked:
          handle.stop()
        if (outcome := handle.poll()) is not None:
          running.remove(entry)
          free.append(place)
          settle(handle.trial, outcome, "")
          if outcome.status == "failed" and not outcome.why:
            out.print(f"  see {handle.trial.workdir}/log.txt")
      time.sleep(_POLL_S)
  except BaseException:  # nobody would wait for the others
    for handle, _ in running:
      handle.stop()
    raise
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


_SIGNALS = {signal.SIGTERM: outcome_lib.PREEMPTED, signal.SIGINT: outcome_lib.INTERRUPTED}


def one(config: str, workdir: str, changes: Mapping[str, Any], root: str) -> files.RunFiles:
  """The files of a single run: started, gone on with, or finished before.

  An interrupted run ends the program with its exit code: 75 after SIGTERM, which is passed on to
  it, 130 after Ctrl-C. A workdir of another configuration ends it too: launch.py refuses it and
  names what differs.
  """
  trial = Trial(config, dict(changes), workdir)
  outcome = outcome_lib.read(dataclasses.replace(trial, config=os.path.join(root, config)))
  if outcome is None or outcome.status != "finished":
    if code := _waited(process.command(trial, root), root):
      sys.exit(code)
  return files.read(workdir)


def _waited(command: list[str], root: str) -> int:
  """The exit code of a command. It gets this process's SIGTERM, which a scheduler may send to one
  process alone; Ctrl-C reaches it from the terminal, and it saves before this process goes on."""
  running: list[subprocess.Popen] = []
  handlers = {signal.SIGTERM: lambda *_: [child.terminate() for child in running],
              signal.SIGINT: lambda *_: None}  # fmt: skip
  before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
  try:
    running.append(subprocess.Popen(command, cwd=root))
    return running[0].wait()
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
