"""The queue of the lab: every run that has no result yet, one process and one core each.

command: python experiments/lab/run_queue.py --workdir DIR [SYSTEM ...]

Run it from a worktree that nobody edits: the commit stands in every result. DIR/runs holds the
runs, DIR/results one file per finished or diverged run; nothing is committed. The same command
goes on after Ctrl-C, SIGTERM and crashes: running trials save and stop, finished ones are skipped,
broken ones resume from their checkpoints (arms whose seeds train at once start over). Arms that
this library does not know are named and left out. Exit codes are those of `launch.py --sweep`.
"""

import argparse
import dataclasses
import itertools
import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import design  # noqa: E402
import hours as hours_lib  # noqa: E402
import results  # noqa: E402
import runs as runs_lib  # noqa: E402

from configs import base  # noqa: E402
from fp8jax import console  # noqa: E402
from fp8jax.errors import UserError  # noqa: E402
from fp8jax.run import provenance  # noqa: E402
from fp8jax.sweeps import outcome as outcome_lib  # noqa: E402
from fp8jax.sweeps import plan, process, spec  # noqa: E402
from fp8jax.sweeps import run as sweep_run  # noqa: E402

# Of an arm whose seeds train at once: so many of them.
AT_ONCE = 20


@dataclasses.dataclass(frozen=True)
class Job(spec.Trial):
  """A process of the queue: a run, or with `sweep` the runs of an arm at once.

  Attributes:
    members: (run, its workdir).
    hours: estimated.
    sweep: path of the sweep's file.
  """

  members: tuple[tuple[design.Run, str], ...] = ()
  hours: float = 0.0
  sweep: str = ""

  def arguments(self) -> list[str]:
    if not self.sweep:
      return super().arguments()
    return [f"--sweep={self.sweep}", "--vmap", f"--parallel={AT_ONCE}", f"--workdir={self.workdir}"]


class Together(process.Child):
  """The process of a sweep, which leaves files of runs in folders below its own."""

  def poll(self) -> outcome_lib.Outcome | None:
    code = self._process.poll()
    if code is None:
      return None
    if code == outcome_lib.FAILED:  # one of its trials did; the others have results
      return outcome_lib.Outcome("failed")
    return outcome_lib.Outcome("interrupted" if code else "finished")


class Queue(plan.Listed):
  """Jobs in order; keeps the result of each and says what is left."""

  def __init__(self, jobs: list[Job], folder: str, slots: int, out):
    super().__init__(jobs)
    self._left = {job.workdir: job.hours for job in jobs}
    self._all, self._planned = len(jobs), sum(job.hours for job in jobs)
    self._folder, self._slots, self._out = folder, slots, out
    self._began = time.monotonic()

  def give(self, trial: spec.Trial, outcome: outcome_lib.Outcome):
    assert isinstance(trial, Job)
    if outcome.status in ("interrupted", outcome_lib.ELSEWHERE):
      return
    del self._left[trial.workdir]
    keep(trial, outcome, self._folder, self._out.print)
    spent = self._planned - (left := sum(self._left.values()))
    # Hours as they turn out: estimates are of another load, or of another machine.
    real = (time.monotonic() - self._began) / 3600 * self._slots
    pace = real / spent if spent > 0.5 else 1.0
    self._out.print(
      f"{self._all - len(self._left)}/{self._all}; about {left * pace / self._slots:.1f} h left"
    )


def keep(job: Job, outcome: outcome_lib.Outcome, folder: str, tell):
  """Writes the results of a job's runs that are over."""
  for run, workdir in job.members:
    status = outcome.status
    if job.sweep:  # each of its trials says so itself
      marked, summary = (pathlib.Path(workdir, f"{n}.json") for n in ("trial", "summary"))
      status = "diverged" if marked.exists() else "finished" if summary.exists() else "failed"
    if status not in ("finished", "diverged"):
      continue
    try:
      results.write(results.of_workdir(run, workdir, status), folder)
    except UserError as e:
      tell(f"no result of {run.name}: {e}")


def _sweep(runs: list[design.Run]) -> spec.Sweep:
  """An arm's runs, rate by rate and seed by seed."""
  first = runs[0]
  config, changes = first.trial
  file, _, arm = config.partition(":")
  own = ("seed", "optim.peak_lr", "optim.min_lr")
  points = {
    tuple((k, r.trial[1][k]) for k in own[1:] if k in r.trial[1]): None for r in runs
  }  # fmt: skip
  axes = (spec.Points(tuple(map(dict, points))),) if all(points) else ()
  seeds = tuple(dict.fromkeys(r.seed for r in runs))
  # A trial has no checkpoints and keeps the default of their keys.
  fixed = {k: v for k, v in changes.items() if k not in own}
  defaults = base.get_config().checkpoint
  fixed |= {f"checkpoint.{k}": defaults[k] for k in ("every", "keep")}
  return spec.Sweep(file, axes=axes, arms=(arm,), seeds=seeds, fixed=fixed, stop_above=1.0)


def jobs(
  systems: list[design.System], workdir: str, done: set[str], measured, floors: bool = False
) -> list[Job]:
  """Jobs of all runs that have no result, seed by seed, of a seed verdicts before illustrations.

  Args:
    done: names of runs that are over.
    measured: of hours.py's function.
    floors: of twins and their own runs alone.
  """
  alone = [run for run in design.all_runs([s for s in systems if not s.is_mapped]).values()]
  twins = {(run.group, run.seed) for s in systems for run in s.runs() if run.is_twin}
  wanted = lambda run: not floors or (run.group, run.seed) in twins  # noqa: E731
  made = []
  for run in sorted(alone, key=lambda run: run.seed):
    if run.name not in done and wanted(run):
      folder = os.path.join(workdir, "runs", run.name)
      cost, _ = hours_lib.hours(run, measured)
      made.append(Job(*run.trial, folder, members=((run, folder),), hours=cost))
  for system in (s for s in systems if s.is_mapped):
    for arm, is_twin in itertools.product(system.arms, (False, True)):
      own = [run for run in system.runs((arm,)) if run.is_twin == is_twin and wanted(run)]
      if all(run.name in done for run in own):
        continue
      name = own[0].group.rpartition("-peak_lr")[0] or own[0].group
      folder = os.path.join(workdir, "runs", name + "-twin" * is_twin)
      sweep = _sweep(own)
      members = tuple(zip(own, (t.workdir for t in sweep.trials(folder)), strict=True))
      cost = sum(hours_lib.hours(run, measured, len(own))[0] for run in own)
      made.append(Job(*own[0].trial, folder, members=members, hours=cost, sweep=f"{folder}.py"))
      os.makedirs(os.path.dirname(folder), exist_ok=True)
      text = f"from fp8jax.sweeps.spec import Points, Sweep\n\nSWEEP = {sweep!r}\n"
      pathlib.Path(f"{folder}.py").write_text(text)
  return made


def start(job: Job, slot: process.Slot) -> process.Child:
  kind = Together if job.sweep else process.Child
  return kind(process.command(job, str(ROOT), slot), job, 1.0)


def known(systems: list[design.System], tell) -> list[design.System]:
  """The systems without the arms that cannot start here, each of which is named with the reason."""
  kept, reasons = [], {}
  for system in systems:
    arms = []
    for arm in system.arms:
      run = system.first(arm)
      why = reasons.setdefault((run.config, run.group), run.reason())
      if why:
        command = f"; {system.needs[1]}" if system.needs[0] and system.needs[0] in why else ""
        tell(f"{system.slug}, {arm.name}: not yet known: {why}{command}")
      else:
        arms.append(arm)
    kept.append(dataclasses.replace(system, arms=tuple(arms)))
  return [system for system in kept if system.arms]


def main(arguments: list[str]) -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--workdir", required=True)
  parser.add_argument(
    "--parallel", type=int, default=0, help="processes at a time; 0: one per core"
  )
  parser.add_argument(
    "--floors", action="store_true", help="nudged twins and their own runs alone: noise floors"
  )
  parser.add_argument("--edited", action="store_true", help="run although files were edited")
  parser.add_argument("--dry", action="store_true", help="list the runs and start none")
  parser.add_argument("systems", nargs="*", help="slugs of runs.py; default: all")
  args = parser.parse_args(arguments)
  out, workdir = console.console(), os.path.abspath(args.workdir)
  os.chdir(ROOT)  # configs and assets are named from here
  slugs = [system.slug for system in runs_lib.SYSTEMS]
  if unknown := set(args.systems) - set(slugs):
    raise UserError(f"no system {', '.join(sorted(unknown))}; expected some of {', '.join(slugs)}")
  if provenance.sources()["dirty"] and not args.edited:
    raise UserError("files differ from the commit; commit, or run from another worktree")
  chosen = [s for s in runs_lib.SYSTEMS if s.slug in (args.systems or slugs)]
  folder = os.path.join(workdir, "results")
  done = {path.stem for path in pathlib.Path(folder).glob("*.json")}
  waiting = jobs(known(chosen, out.print), workdir, done, hours_lib.measured(), args.floors)
  slots = process.slots(args.parallel, ())  # the lab compares runs of a CPU
  cost = sum(job.hours for job in waiting)
  out.print(f"{len(done)} results; {len(waiting)} jobs, about {cost:.1f} core-hours")
  if args.dry:
    for job in waiting:
      out.print(f"{job.hours:6.2f} h  {process.shown(job)}", soft_wrap=True)
    return 0
  # A core each; huge pages for scratch memory, a sixth less time per step.
  os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
  queue = Queue(waiting, folder, len(slots), out)
  settled, code = sweep_run.drain(queue, slots, start, out)
  if code is not None:
    out.print("interrupted: the same command goes on")
    return code
  return int(any(outcome.status not in ("finished", "diverged") for _, outcome in settled))


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except UserError as e:
    sys.exit(f"error: {e}")
