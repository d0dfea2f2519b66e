"""Result files: what is kept of a run of the lab, one JSON file each, small enough to be committed.

A file has the run as a value (runs.Run), how it ended, its training losses and held-out losses, and
its origin: commit, CPU, jax, backend and data. Runs of different origins are never compared.
"""

import dataclasses
import json
import math
import pathlib
import platform
import statistics
from typing import Any

import design

from fp8jax import records
from fp8jax.errors import UserError
from fp8jax.report import files

# What all runs of a comparison must share, in the order in which a refusal names it. Of a seed the
# two runs share their data besides, whose fingerprint has the seed in it.
ORIGIN = ("commit", "cpu", "jax", "jaxlib", "backend")


@dataclasses.dataclass(frozen=True)
class Result:
  """A run and what came of it.

  Attributes:
    status: "finished" or "diverged".
    losses: training loss of every step, nats per token; not finite where the run was not.
    warmup: steps of the warm-up.
    heldout: {source: {precision: nats per token}} at the end; {} of a run that diverged.
    origin: {name of ORIGIN: text}.
    data: fingerprint.
    seconds: of all steps, each as long as the median one: a process that was stopped for an hour
      did not compute for an hour.
  """

  run: design.Run
  status: str
  losses: tuple[float, ...]
  warmup: int
  heldout: dict[str, dict[str, float]]
  origin: dict[str, str]
  data: str
  seconds: float

  @property
  def key(self) -> tuple[str, ...]:
    return tuple(self.origin[name] for name in ORIGIN)

  def files(self) -> files.RunFiles:
    """The run as fp8jax.report.compare reads it: losses, warm-up, and whether it diverged."""
    import numpy as np

    steps = np.arange(1, len(self.losses) + 1)
    stopped = {"step": len(self.losses) + 1} if self.status == "diverged" else None
    return files.RunFiles(
      "", self.run.name, {"loss": files.Curve(steps, np.array(self.losses, np.float64))}, (), None,
      (), {"optim.warmup_steps": self.warmup}, {}, {}, (), None, stopped,
      None if stopped else {"step": len(self.losses)},
    )  # fmt: skip


def cpu(path: str = "/proc/cpuinfo") -> str:
  """The processor's name with family, model and stepping; "unknown" where Linux does not say."""
  if not pathlib.Path(path).exists():
    return platform.processor() or "unknown"
  text = pathlib.Path(path).read_text()
  facts = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
  of = {key.strip(): value.strip() for key, value in facts.items()}
  numbers = "-".join(of.get(key, "?") for key in ("cpu family", "model", "stepping"))
  return f"{of.get('model name', 'unknown')} ({numbers})"


def of_workdir(run: design.Run, workdir: str, status: str) -> Result:
  """The result of a run that is over.

  Raises:
    UserError: the folder is damaged, or its processes were of several commits.
  """
  found = files.read(workdir)
  last = found.provenance
  commits = {f"{leg.get('commit')}{'+' * bool(leg.get('dirty'))}"
             for leg in (*last.get("earlier", ()), last)}  # fmt: skip
  if len(commits) != 1:
    raise UserError(f"{workdir}: its processes were of several commits, {', '.join(commits)}")
  versions, resolved = last["versions"], found.resolved
  origin = {
    "commit": commits.pop(), "cpu": cpu(), "jax": versions["jax"], "jaxlib": versions["jaxlib"],
    "backend": f"{last['devices']}, matmul {resolved['kernels.matmul']}",
  }  # fmt: skip
  loss, took = found.curves.get("loss"), found.curves.get("step_seconds")
  steps = () if took is None else tuple(map(float, took.values))
  return Result(
    run, status,
    () if loss is None else tuple(float(f"{x:.6g}") for x in loss.values),
    int(resolved.get("optim.warmup_steps", 0)),
    {s: {_own(p): v for p, v in by.items()} for s, by in found.evaluation(-1).items()}
    if found.heldout and status == "finished" else {},
    origin, last["data_fingerprint"],
    round(statistics.median(steps) * len(steps), 1) if steps else 0.0,
  )  # fmt: skip


def _own(precision: str) -> str:
  """ "bf16" or "own": the precision of a forward pass, whatever its recipe."""
  return "bf16" if precision == files.UNQUANTIZED else "own"


def write(result: Result, folder: str):
  """FOLDER/NAME.json, whole or not at all."""
  pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
  value = dataclasses.asdict(result)
  records.write_atomic(path(result.run, folder), records.to_json(value, indent=None) + "\n")


def path(run: design.Run, folder: str) -> str:
  return str(pathlib.Path(folder, f"{run.name}.json"))


def read(file: str | pathlib.Path) -> Result:
  """A result file.

  Raises:
    UserError: it is no result; names it.
  """
  try:
    value = json.loads(pathlib.Path(file).read_text())
    run = design.Run(**{**value["run"], "changes": _tuples(value["run"]["changes"])})
    losses = tuple(map(float, value["losses"]))
    result = Result(**{**value, "run": run, "losses": losses})
    missing = [name for name in ORIGIN if name not in result.origin]
  except (ValueError, TypeError, KeyError) as e:
    raise UserError(f"{file} is no result of the lab: {type(e).__name__}: {e}") from e
  if missing or result.status not in ("finished", "diverged"):
    raise UserError(f"{file}: status {result.status!r}, origin without {missing}")
  return result


def _tuples(value: Any):
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def own_loss(result: Result) -> float:
  """Held-out loss in the run's own precision, mean over sources; infinite where it diverged."""
  if not result.heldout:
    return math.inf if result.status == "diverged" else math.nan
  values = [by.get("own", by.get("bf16")) for by in result.heldout.values()]
  return sum(values) / len(values)
