"""Steps of launch.py at full size: what a user sees of speed and memory."""

import functools
import glob
import math
import pathlib
import statistics
from typing import Any

from gpu_check import launch
from gpu_check.worker import Context, Wrong

WARM_UP = 3  # the first step compiles, the second reads what the first left
TRACED = 8  # this step's kernels are traced; it is not among the timed ones


def run(context: Context, config: str, steps: int) -> dict[str, Any]:
  """{"step_ms", "spread_ms", "tokens_per_second", "mfu", "memory_gib", "fp8_share", losses, and
  what layer.of_events finds}.

  Args:
    config: "FILE:ARM"; it logs every step.

  Raises:
    Absent, Wrong: as launch.run; a loss is not finite.
  """
  traced: dict[str, Any] = {}
  rows = launch.run(
    context, config, [f"--config.log.profile=({TRACED - 1},1)"], shared=False, steps=steps,
    and_then=functools.partial(_by_kernel, traced),
  )  # fmt: skip
  return judge(rows) | traced


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
  ends = {row["step"]: row["elapsed_seconds"] for row in steps}
  # The trace is begun before its step and written after it.
  timed = [s for s in ends if s > WARM_UP and s not in (TRACED - 1, TRACED, TRACED + 1)]
  each = [1e3 * (ends[s] - ends[s - 1]) for s in timed]
  last, step_ms = steps[-1], statistics.median(each)
  tokens = last["tokens_per_second"] * last["step_seconds"]
  found = {
    "step_ms": step_ms, "spread_ms": max(each) - min(each), "steps": len(each),
    "tokens_per_second": 1e3 * tokens / step_ms, "memory_gib": last.get("memory_peak_gib"),
    "fp8_share": last.get("fp8_flops_share"), "seconds_to_step_1": steps[0]["elapsed_seconds"],
    "losses": losses,
  }  # fmt: skip
  if "mfu" in last:
    found["mfu"] = last["mfu"] * 1e3 * last["step_seconds"] / step_ms
  return found
