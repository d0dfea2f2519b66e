"""Core-hours of the lab's runs, measured and estimated.

command: python experiments/lab/hours.py            prints systems, seeds, hours, what is unknown
         python experiments/lab/hours.py measure    times 20 steps of what has not run -> hours.json

Seconds per step are of hours.json: CPU seconds of 20 steps at the commit that measured them. Of
what it lacks they are the least of the finished runs of lab/results with this recipe and model,
on the CPU whose hours are counted, else on the one that has most of them: wall seconds of one
core, beside other work, at the commit that ran. Of the rest they are a guess. The table says how
many hours are of each.

The CPU whose hours are counted is this one if it has finished runs, else the one that has most.
Seconds of another are multiplied by the median ratio of what ran on both.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import results  # noqa: E402
import runs  # noqa: E402
from design import LONG, Run, all_runs  # noqa: E402

HOURS, RESULTS, BUDGET_HOURS = HERE / "hours.json", HERE / "results", 24.0
# Where seconds per step come from, best first.
TIMED, RUNS, GUESSED = "hours.json", "runs", "guess"
# Before a recipe of the size was measured; of SmolLM2-135M with 1,024 tokens a step.
UNMEASURED = ({"step_seconds": 1.0, "start_seconds": 20.0},
              {"step_seconds": 9.0, "start_seconds": 60.0})  # fmt: skip
# Recipes without blocks that are not measured: they cost at most twice `bf16`.
ELEMENTWISE = ("bf16", "mask_", "munit_", "unit_", "fp8_unscaled")
# Timed besides: slow recipes of today, for those of blocks that are not known yet.
PROXIES = (
  Run("3m", "python_docs", "mxfp8", (), LONG, 0), Run("0p8m", "python_docs", "nvfp4_sr_rht", (),
                                                      LONG, 0),
)  # fmt: skip


def _timed(run: Run) -> str:
  """The key of a run in hours.json: what its seconds per step depend on."""
  cheap = ("optim.peak_lr", "precision.schedule")
  changes = tuple((k, v) for k, v in run.changes if k not in cheap)
  same = dataclasses.replace(run, corpus="text", steps=LONG, changes=changes)
  return same.group


def _shape(name: str) -> tuple[str, ...]:
  """Of a key of hours.json: the model."""
  return (name.partition("-")[0], *re.findall(r"(?:hidden_size|num_layers)=\d+", name))


def of_results(
  found: Iterable[results.Result], cpu: str
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
  """({key: {"step_seconds", "runs", "cpu"}} of finished runs, {cpu: ratio}); see above.

  A row's seconds are of the CPU whose hours are counted, its runs those of `cpu`. A ratio is 1
  where nothing ran on both.

  Args:
    cpu: of this machine (results.cpu). Runs of seeds that trained at once have no seconds.
  """
  samples = collections.defaultdict(lambda: collections.defaultdict(list))
  runs_of = collections.Counter()
  for result in found:
    if result.status == "finished" and result.seconds > 0:
      seconds = result.seconds / len(result.losses)
      samples[_timed(result.run)][result.origin["cpu"]].append(seconds)
      runs_of[result.origin["cpu"]] += 1
  # Other work on the machine only adds.
  least = {name: {c: min(own) for c, own in by.items()} for name, by in samples.items()}
  counted = max(runs_of, key=lambda one: (one == cpu, runs_of[one], one), default=cpu)
  ratios = {}
  for one in runs_of:
    both = [by[counted] / by[one] for by in least.values() if counted in by and one in by]
    ratios[one] = statistics.median(both or [1.0])
  made = {}
  for name, by_cpu in samples.items():
    used = max(by_cpu, key=lambda one: (one == counted, len(by_cpu[one]), one))
    step = least[name][used] * ratios[used]
    made[name] = {"step_seconds": step, "runs": len(by_cpu[used]), "cpu": used}
  return made, ratios


def measured(folder: pathlib.Path = RESULTS, cpu: str = "") -> dict[str, dict[str, Any]]:
  """{RUNS: {key: row}, TIMED: {key: row}}: of the results below a folder, and hours.json.

  A result does not have the seconds of its start: hours.json does, or the slowest of its size.
  Rows of hours.json that do not say their CPU are taken as they are.
  """
  timed = json.loads(HOURS.read_text()) if HOURS.exists() else {}
  found, ratios = of_results(
    map(results.read, sorted(folder.rglob("*.json"))), cpu or results.cpu()
  )
  for row in timed.values():
    ratio = ratios.get(row.get("cpu"), 1.0)
    row |= {key: row[key] * ratio for key in ("step_seconds", "start_seconds")}
  for name, row in found.items():
    same = [r for n, r in timed.items() if _shape(n) == _shape(name)]
    starts = [timed[name]] if name in timed else same or UNMEASURED[name.startswith("reasoning") :]
    row["start_seconds"] = max(r["start_seconds"] for r in starts)
  return {RUNS: found, TIMED: timed}


def hours(run: Run, measured: Mapping[str, Mapping[str, Any]], at_once: int = 1):
  """(core-hours, TIMED, RUNS or GUESSED): a guess is hours.json's slowest of the size.

  Args:
    measured: of `measured`, or {}.
    at_once: runs that share one start (--vmap).
  """
  timed = measured.get(TIMED, {})
  for origin in (TIMED, RUNS):
    if row := measured.get(origin, {}).get(_timed(run)):
      break
  else:
    like, origin = dataclasses.replace(run, recipe="bf16", changes=()), GUESSED
    elementwise = timed.get(_timed(like), {}) if run.recipe.startswith(ELEMENTWISE) else {}
    twice = {name: 2 * seconds for name, seconds in elementwise.items()}
    row = twice or max(
      (r for name, r in timed.items() if _shape(name) == _shape(_timed(run))),
      key=lambda r: r["step_seconds"], default=UNMEASURED[bool(run.config)],
    )  # fmt: skip
  seconds = row["start_seconds"] / at_once + run.steps * row["step_seconds"] * 1.05
  return seconds / 3600, origin


def _cpu_seconds(run: Run, steps: int) -> float | None:
  """CPU seconds of a process that takes so many steps on one core; None, said, where it fails."""
  config, changes = dataclasses.replace(run, steps=steps, seed=0, is_twin=False).trial
  changes |= {"steps": steps, "eval.tokens": 0, "checkpoint.every": 0}
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  with tempfile.TemporaryDirectory() as workdir:
    flags = [f"--config.{k}={v}" for k, v in changes.items()]
    words = [sys.executable, "launch.py", f"--config={config}", *flags, f"--workdir={workdir}"]
    words = ["taskset", "-c", "0", *words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
  if done.returncode:
    print(f"{_timed(run)}: {done.stdout[-300:]}{done.stderr[-300:]}", flush=True)
    return None
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(names: list[str], steps: int = 20):
  """Times so many steps of what has not run and starts here, on one core -> hours.json.

  CPU seconds, of which an idle core has one a second: what else runs here does not count. Those of
  the start are of a run of two steps.
  """
  found = json.loads(HOURS.read_text()) if HOURS.exists() else {}
  have = measured()[RUNS].keys() | found.keys()
  firsts = {_timed(run): run for run in (*reversed(all_runs(runs.SYSTEMS).values()), *PROXIES)}
  for name, run in firsts.items():
    if (names and name not in names) or (not names and name in have):
      continue
    if why := run.reason():
      print(f"{name}: not yet known: {why}", flush=True)
      continue
    short, whole = _cpu_seconds(run, 2), _cpu_seconds(run, 2 + steps)
    if short is None or whole is None:
      continue
    step = (whole - short) / steps
    if step <= 0:
      print(f"{name}: {steps} steps took no longer than the start: measure it again", flush=True)
      continue
    start = round(short - 2 * step, 1)
    found[name] = {"step_seconds": round(step, 3), "start_seconds": start, "cpu": results.cpu()}
    HOURS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    print(name, found[name], flush=True)


def table() -> str:
  """Markdown: systems with seeds, runs, hours by origin, and arms that are not known here yet."""
  have = measured()
  columns = ("system", "arms", "seeds", "runs", "core-hours", f"of {TIMED}", f"of {RUNS}",
             GUESSED, "not yet known")  # fmt: skip
  lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
  seen, total, startable = set(), collections.Counter(), 0.0
  for system in sorted(runs.SYSTEMS, key=lambda s: s.illustration):
    unknown = {arm for arm in system.arms if system.first(arm).reason()}
    cost = collections.Counter()
    for arm in system.arms:
      new = [run for run in system.runs((arm,)) if run.name not in seen]
      seen |= {run.name for run in new}
      at_once = len(new) if system.is_mapped else 1
      for own, origin in (hours(run, have, at_once) for run in new):
        cost[origin] += own
        startable += own * (arm not in unknown)
    total += cost
    seeds = "/".join(map(str, sorted({system.seeds(arm) for arm in system.arms})))
    name = system.slug + " (illustration)" * system.illustration
    names = ", ".join(arm.name for arm in system.arms if arm in unknown)
    cells = (name, len(system.arms), seeds, len(system.runs()), *_hours(cost), names)
    lines.append(f"| {' | '.join(map(str, cells))} |")
  cells = ("all", "", "", len(seen), *_hours(total), f"{startable:.1f} can start")
  lines.append(f"| {' | '.join(map(str, cells))} |")
  cpus = collections.Counter(row["cpu"] for row in have[RUNS].values())
  told = ", ".join(f"{count} on {cpu}" for cpu, count in cpus.most_common())
  return "\n".join([*lines, "", f"Recipes and models whose seconds are of finished runs: {told}."])


def _hours(cost: Mapping[str, float]) -> list[str]:
  """Cells: all, then by origin."""
  return [f"{sum(cost.values()):.1f}", *(f"{cost[o]:.1f}" for o in (TIMED, RUNS, GUESSED))]


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("command", nargs="?", choices=("measure",))
  parser.add_argument("names", nargs="*", help="of hours.json, to measure them again")
  args = parser.parse_args()
  if args.command == "measure":
    measure(args.names)
  print(table())
