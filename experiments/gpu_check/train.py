"""Steps of launch.py at full size: what a user sees of speed and memory."""

import functools
import glob
import math
import pathlib
import statistics
from typing import Any

from gpu_check import environment, launch
from gpu_check.worker import Absent, Context, Cut, Wrong

WARM_UP = 3  # the first step compiles, the second reads what the first left
TRACED = 8  # this step's kernels are traced; it is not among the timed ones
SHARE = 0.95  # of the GPU's memory that JAX may take (memory.gpu_fraction)
ENOUGH = 4  # timed steps, of a run that is cut


def run(context: Context, config: str, steps: int, gib: float = 0) -> dict[str, Any]:
  """{"step_ms", "spread_ms", "tokens_per_second", "mfu", "memory_gib", "fp8_share", losses, and
  what layer.of_events finds}.

  Args:
    config: "FILE:ARM"; it logs every step.
    gib: memory that it takes.

  Raises:
    Absent, Wrong: as launch.run; a GPU with so much memory; a loss is not finite.
    Cut: time was up before ENOUGH steps were timed.
  """
  has = environment.memory_gib()
  if has and gib > SHARE * has:
    raise Absent(f"a GPU with more memory: {config} takes {gib:.1f} GiB")
  traced: dict[str, Any] = {}
  try:
    rows = launch.run(
      context, config, [f"--config.log.profile=({TRACED - 1},1)"], shared=False, steps=steps,
      and_then=functools.partial(_by_kernel, traced),
    )  # fmt: skip
  except Cut as e:
    if len(_timed(e.rows)) < ENOUGH:
      raise
    rows = e.rows
  return judge(rows) | traced


def _timed(rows: list[dict[str, Any]]) -> list[float]:
  """Milliseconds of every step that counts; the trace is begun before its step, written after."""
  ends = {row["step"]: row["elapsed_seconds"] for row in rows if "loss" in row}
  timed = [s for s in ends if s > WARM_UP and s not in (TRACED - 1, TRACED, TRACED + 1)]
  return [1e3 * (ends[s] - ends[s - 1]) for s in timed]


def _by_kernel(found: dict[str, Any], workdir: pathlib.Path):
  """Milliseconds by kernel of the traced step; why, if there are none."""
  try:
    from gpu_check import layer  # imports JAX, of which only the reader of traces is asked

    (path,) = glob.glob(f"{workdir}/profile/**/*.xplane.pb", recursive=True)
    found |= layer.of_trace(path)
  except Exception as e:  # the clock's times remain
    found["profile_failed"] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """Values of the steps behind WARM_UP. Raises Wrong if a loss is not finite."""
  steps = [row for row in rows if "loss" in row]
  losses = [float(row["loss"]) for row in steps]
  if not all(map(math.isfinite, losses)):
    raise Wrong(f"losses {losses}")
  each = _timed(rows)
  last, step_ms = steps[-1], statistics.median(each)
  tokens = last["tokens_per_second"] * last["step_seconds"]
  values = {
    "step_ms": step_ms, "spread_ms": max(each) - min(each), "steps": len(each),
    "tokens_per_second": 1e3 * tokens / step_ms, "memory_gib": last.get("memory_peak_gib"),
    "fp8_share": last.get("fp8_flops_share"), "seconds_to_step_1": steps[0]["elapsed_seconds"],
    "losses": losses,
  }  # fmt: skip
  if "mfu" in last:
    values["mfu"] = last["mfu"] * 1e3 * last["step_seconds"] / step_ms
  return values
