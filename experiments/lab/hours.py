"""Core-hours of the lab's runs, measured and estimated.

command: python experiments/lab/hours.py            prints systems, seeds, hours, what is unknown
         python experiments/lab/hours.py measure    times 20 steps of every recipe -> hours.json
"""

import argparse
import dataclasses
import json
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import runs  # noqa: E402
from design import LONG, Run, all_runs  # noqa: E402

HOURS, BUDGET_HOURS = HERE / "hours.json", 24.0
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


def hours(run: Run, measured: Mapping[str, Mapping[str, float]], at_once: int = 1) -> float:
  """Estimated core-hours; of what was not measured, those of the slowest of its size.

  Args:
    measured: hours.json.
    at_once: runs that share one start (--vmap).
  """
  like = dataclasses.replace(run, recipe="bf16", changes=())
  elementwise = measured.get(_timed(like), {}) if run.recipe.startswith(ELEMENTWISE) else {}
  twice = {name: 2 * seconds for name, seconds in elementwise.items()}
  row = measured.get(_timed(run)) or twice or max(
    (r for name, r in measured.items() if _shape(name) == _shape(_timed(run))),
    key=lambda r: r["step_seconds"], default=UNMEASURED[bool(run.config)],
  )  # fmt: skip
  return (row["start_seconds"] / at_once + run.steps * row["step_seconds"] * 1.05) / 3600


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
  """Times so many steps of every configuration that starts here, on one core -> hours.json.

  CPU seconds, of which an idle core has one a second: what else runs here does not count. Those of
  the start are of a run of two steps.
  """
  found = json.loads(HOURS.read_text()) if HOURS.exists() else {}
  firsts = {_timed(run): run for run in (*reversed(all_runs(runs.SYSTEMS).values()), *PROXIES)}
  for name, run in firsts.items():
    if (names and name not in names) or (not names and name in found):
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
    found[name] = {"step_seconds": round(step, 3), "start_seconds": round(short - 2 * step, 1)}
    HOURS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    print(name, found[name], flush=True)


def table() -> str:
  """Markdown: systems with seeds, runs, hours, and arms that this library does not know yet."""
  measured = json.loads(HOURS.read_text()) if HOURS.exists() else {}
  columns = ("system", "arms", "seeds", "runs", "core-hours", "not yet known")
  lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
  seen, total, startable = set(), 0.0, 0.0
  for system in sorted(runs.SYSTEMS, key=lambda s: s.illustration):
    unknown = {arm for arm in system.arms if system.first(arm).reason()}
    cost = 0.0
    for arm in system.arms:
      new = [run for run in system.runs((arm,)) if run.name not in seen]
      seen |= {run.name for run in new}
      at_once = len(new) if system.is_mapped else 1
      own = sum(hours(run, measured, at_once) for run in new)
      cost, startable = cost + own, startable + own * (arm not in unknown)
    total += cost
    seeds = "/".join(map(str, sorted({system.seeds(arm) for arm in system.arms})))
    name = system.slug + " (illustration)" * system.illustration
    names = ", ".join(arm.name for arm in system.arms if arm in unknown)
    count = len(system.runs())
    lines.append(f"| {name} | {len(system.arms)} | {seeds} | {count} | {cost:.1f} | {names} |")
  lines.append(f"| all | | | {len(seen)} | {total:.1f}; {startable:.1f} can start | |")
  return "\n".join(lines)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("command", nargs="?", choices=("measure",))
  parser.add_argument("names", nargs="*", help="of hours.json, to measure them again")
  args = parser.parse_args()
  if args.command == "measure":
    measure(args.names)
  print(table())
