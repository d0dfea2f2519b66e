"""Starts a subprocess per family, within the time given, and writes the report. Imports no jax."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

from gpu_check import plan, records, report

# Asked of a process of its own, so that this one never holds the device.
PROBE = """
import json, jax
d = jax.devices()[0]
print(json.dumps({"platform": d.platform, "device": d.device_kind, "jax": jax.__version__,
                  "capability": str(getattr(d, "compute_capability", ""))}))
"""
GRACE = 15.0  # seconds beyond a family's time in which a line that has begun may end


def arguments(argv=None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="gpu_check.py", description="Every figure that needs a Hopper GPU, without network."
  )
  parser.add_argument("--out", type=pathlib.Path, help="folder of results; a second call continues")
  parser.add_argument("--minutes", type=float, default=plan.MINUTES, help="wall clock of the call")
  parser.add_argument("--stages", nargs="+", choices=plan.STAGES, default=[],
                      help="default: all")  # fmt: skip
  parser.add_argument("--families", nargs="+", default=[], help="only these, see --plan")
  parser.add_argument("--plan", action="store_true", help="print what would run, and end")
  parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU, interpreted")
  parser.add_argument("--wheels", type=pathlib.Path, help="folder of wheels for this call")
  flags = parser.parse_args(argv)
  if not flags.out and not flags.plan:
    parser.error("--out DIR is missing: where results go, and where a second call continues")
  if flags.minutes <= 0:
    parser.error(f"--minutes={flags.minutes} must be positive")
  return flags


def selected(flags: argparse.Namespace) -> list[plan.Family]:
  """The families of this call, in order. Raises SystemExit for a name that is none."""
  all_of_them = plan.families(flags.dry)
  if unknown := set(flags.families) - {f.name for f in all_of_them}:
    sys.exit(f"--families: {sorted(unknown)} are none of {[f.name for f in all_of_them]}")
  stages = flags.stages or plan.STAGES
  return [f for f in all_of_them
          if (f.name in flags.families if flags.families else f.stage in stages)]  # fmt: skip


def print_plan(families: list[plan.Family], minutes: float):
  """Stages, families, seconds and lines, in the order in which they run."""
  factor = _available(60 * minutes) / sum(f.wall_seconds for f in families)
  print(f"{minutes:g} minutes; a family's lines run in this order, one subprocess per family,")
  print(f"{plan.PARALLEL} at a time in {' and '.join(plan.SIDE_BY_SIDE)}. Unused time goes on.")
  start = 0.0
  for family in families:
    seconds = family.wall_seconds * factor
    print(f"\n{start:6.0f} s  {family.stage}/{family.name}, {seconds:.0f} s")
    for line in family.lines:
      print(f"            {line}")
    start += seconds
  print(f"\n{start:6.0f} s  report.md; {sum(len(f.lines) for f in families)} lines in all")


def _available(seconds: float) -> float:
  return max(seconds - plan.RESERVE, 0.8 * seconds)


def environment(flags: argparse.Namespace, site: str) -> dict[str, str]:
  """Of the subprocesses: the repository and the wheels on the path."""
  paths = [str(records.ROOT), str(records.ROOT / "experiments"), site,
           os.environ.get("PYTHONPATH", "")]  # fmt: skip
  found = {
    **os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
  }  # fmt: skip
  if flags.dry:  # an interpreted kernel takes a thread of its own for each program
    found |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
  return found


def memory(family: plan.Family) -> dict[str, str]:
  """JAX's share of the device: what it needs where families or another framework share it, else
  most of it from the start, so that no allocation stands between two kernels that are timed."""
  is_shared = family.stage in (*plan.SIDE_BY_SIDE, "rivals")
  return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false" if is_shared else "true"}


def install(wheels: pathlib.Path | None, out: pathlib.Path) -> str:
  """A temporary folder with these wheels, "" for none. Raises SystemExit if pip fails."""
  if not wheels:
    return ""
  files = sorted(map(str, wheels.glob("*.whl")))
  if not files:
    sys.exit(f"--wheels {wheels} has no .whl file")
  site = tempfile.mkdtemp(prefix="site_", dir=out)
  command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target",
             site, *files]  # fmt: skip
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    sys.exit(f"pip could not install the wheels of {wheels}:\n{done.stderr[-2000:]}")
  return site


def probe(env: dict[str, str], is_dry: bool) -> dict[str, Any]:
  """The device that JAX computes on. Raises SystemExit unless it can run everything."""
  done = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True)
  dry = "--dry runs everything with tiny shapes on a CPU"
  if done.returncode:
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    sys.exit(f"JAX does not start here: {last}\nIt needs jax with CUDA wheels; {dry}.")
  found = json.loads(done.stdout.splitlines()[-1])
  if is_dry:
    return found
  if found["platform"] != "gpu":
    driver = "is there" if shutil.which("nvidia-smi") else "is not there"
    sys.exit(
      f"no GPU: JAX {found['jax']} computes on {found['device']} ({found['platform']}) and "
      f"nvidia-smi {driver}. This needs one Hopper GPU, its driver and jax with CUDA wheels "
      f"(pip install 'jax[cuda13]'); JAX_PLATFORMS must not be 'cpu'. {dry}."
    )
  if found["capability"] != "9.0":
    sys.exit(
      f"{found['device']} has compute capability {found['capability']}; the kernels are Hopper's "
      f"(9.0). {dry}."
    )
  return found


class Call:
  """One call of the script: where results go, and how much time is left."""

  def __init__(self, flags, families, env, key, start):
    self.families, self.env, self.key, self.is_dry = families, env, key, flags.dry
    self.out, self.path = flags.out, flags.out / "results.jsonl"
    self.deadline = start + _available(60 * flags.minutes)
    self.processes: set[subprocess.Popen] = set()
    self.is_stopped = False

  @property
  def remaining(self) -> float:
    return self.deadline - time.monotonic()

  def run(self):
    """All families, those of plan.SIDE_BY_SIDE several at a time."""
    left = list(self.families)
    while left:
      stage = left[0].stage
      side_by_side = stage in plan.SIDE_BY_SIDE
      group = [f for f in left if f.stage == stage] if side_by_side else left[:1]
      left = [f for f in left if f not in group]
      share = self.remaining / sum(f.wall_seconds for f in [*group, *left])
      workers = 1 if self.is_dry else min(plan.PARALLEL, len(group))
      with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        # Every error of this program is raised here.
        list(pool.map(lambda f, share=share: self.family(f, f.seconds * share), group))

  def stop(self, number, frame):
    """A signal's handler: ends every subprocess, which would hold the device, and this call."""
    del frame
    self.is_stopped = True
    for process in list(self.processes):
      os.killpg(process.pid, signal.SIGKILL)
    sys.exit(128 + number)

  def family(self, family: plan.Family, seconds: float):
    """Runs a family until its lines are done or `seconds` are over; begins again behind a line that
    ended the process."""
    end = time.monotonic() + min(seconds, self.remaining)
    before = None
    while names := records.unfinished(family.lines, records.read(self.path, self.key)):
      left = end - time.monotonic()
      # Nothing new began since the last process, or no time: the report lists what is missing.
      if names == before or left < 2 or self.is_stopped:
        return
      before = names
      self._process(family, names, left)

  def _process(self, family: plan.Family, names: Iterable[str], seconds: float):
    cupti = records.read(self.path, self.key).get("environment/cupti", {}).get("values", {})
    request = {
      "module": family.module, "lines": {n: family.lines[n] for n in names}, "out": str(self.path),
      "key": self.key, "is_dry": self.is_dry, "cupti": bool(cupti.get("works")), "seconds": seconds,
    }  # fmt: skip
    start = time.monotonic()
    with open(self.out / f"{family.name}.log", "a") as log:
      process = subprocess.Popen(
        [sys.executable, "-m", "gpu_check"], stdin=subprocess.PIPE, stdout=log, stderr=log,
        env=self.env | memory(family), text=True, start_new_session=True,
      )  # fmt: skip
      self.processes.add(process)
      try:
        process.communicate(json.dumps(request), timeout=seconds + min(GRACE, 0.5 * seconds + 5))
        ended = f"ended with {process.returncode}"
      except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        ended = "killed: out of time"
      finally:
        self.processes.discard(process)
    found = records.read(self.path, self.key)
    done = sum(found.get(n, {}).get("status") in records.FINISHED for n in family.lines)
    took = time.monotonic() - start
    text = f"{done} of {len(family.lines)} lines, {took:.0f} s, {ended}"
    print(f"{family.stage}/{family.name}: {text}", flush=True)


def exit_status(families: list[plan.Family], found: dict[str, dict[str, Any]]) -> int:
  """See experiments/gpu_check.py."""
  status = {name: found.get(name, {}).get("status", "not run")
            for f in families for name in f.lines}  # fmt: skip
  checks = [s for name, s in status.items() if name.startswith("correctness/")]
  ours = {s for name, s in status.items() if not name.startswith("rival/")}
  if "wrong" in ours or {"failed", "begun"} & set(checks):
    return 1
  return 2 if "not run" in checks else 0


def main(argv=None) -> int:
  start, flags = time.monotonic(), arguments(argv)
  families = selected(flags)
  if flags.plan:
    print_plan(families, flags.minutes)
    return 0
  flags.out = flags.out.resolve()
  flags.out.mkdir(parents=True, exist_ok=True)
  site = install(flags.wheels, flags.out)
  try:
    env = environment(flags, site)
    device = probe(env, flags.dry)
    key = {"commit": records.commit(), "sources": records.sources(), "dry": flags.dry, **device}
    call = Call(flags, families, env, key, start)
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, call.stop)
    call.run()
  finally:
    if site:
      shutil.rmtree(site)
  found = records.read(call.path, key)
  page = report.page(families, found, key)
  (flags.out / "report.md").write_text(page)
  status = exit_status(families, found)
  print(f"{flags.out / 'report.md'}: {report.summary(families, found)}; exit status {status}")
  return status
