"""The end of a sweep: a table, sweep.json, from which others draw, and a comparison of its runs."""

import importlib
import os
import statistics
from typing import Any, TypedDict

import rich.console

from fp8jax import console as console_lib
from fp8jax import records
from fp8jax.errors import UserError, missing_package, one_line
from fp8jax.sweeps.outcome import Outcome
from fp8jax.sweeps.spec import Sweep, Trial

Results = list[tuple[Trial, Outcome]]


def claim(folder: str, path: str, sweep: Sweep):
  """Begins FOLDER/sweep.json. A folder is of one file: its table, comparison and search are.

  Raises:
    UserError: it has been begun by another file.
  """
  remedy = "remove it: the end of the sweep writes it again"
  begun = records.find(folder, "sweep.json", TypedDict("Begun", {"sweep": str}), remedy)
  if begun is None:
    write(folder, path, sweep, [])
  elif begun["sweep"] not in (path, _from(folder, path)):
    raise UserError(
      f"{folder}/sweep.json is of the sweep {begun['sweep']!r}, seen from there, and this is "
      f"{_from(folder, path)!r}; name another folder as --workdir, or remove sweep.json (and "
      "optuna.journal) if the file was renamed"
    )


def write(folder: str, path: str, sweep: Sweep, results: Results):
  """FOLDER/sweep.json: the trials with workdirs, points, seeds, statuses and objectives."""
  trials = [
    {"workdir": t.workdir, "config": t.config, "arm": t.arm, "point": t.point, "seed": t.seed,
     "status": o.status, "objective": o.objective}
    for t, o in results
  ]  # fmt: skip
  content = {"sweep": _from(folder, path), "keys": sweep.keys, "trials": trials}
  # Two sweeps may end in one folder: each writes a part of its own.
  path = os.path.join(folder, "sweep.json")
  records.write_atomic(path, records.to_json(content) + "\n", part=f"{path}.{os.getpid()}.part")


def _from(folder: str, path: str) -> str:
  """The path of the sweep's file seen from the folder: the same from every current directory."""
  return os.path.relpath(os.path.realpath(path), os.path.realpath(folder))


def rows(sweep: Sweep, results: Results) -> list[list[str]]:
  """One row per arm and point: objective's mean, deviation over seeds, and how trials ended."""
  groups: dict[Any, tuple[Trial, list[Outcome]]] = {}
  for trial, outcome in results:
    key = (trial.arm, tuple(map(repr, trial.point.items())))
    groups.setdefault(key, (trial, []))[1].append(outcome)
  means, keyed = {}, []
  for key, (trial, outcomes) in groups.items():
    done = [o.objective for o in outcomes if o.objective is not None]
    if len(done) == len(outcomes):  # none with eval.tokens=0
      means[key] = statistics.mean(done)
    spread = f"{statistics.stdev(done):.4f}" if len(done) > 1 else "-"
    others = [o.status for o in outcomes if o.status != "finished"]
    said = ", ".join(f"{others.count(s)} {s}" for s in dict.fromkeys(others))
    mean = f"{statistics.mean(done):.4f}" if done else "-"
    point = [f"{trial.point.get(k, '')}" for k in sweep.keys]
    finished = f"{len(outcomes) - len(others)}/{len(outcomes)}"
    keyed.append((key, [trial.arm, *point, mean, spread, finished, said]))
  for arm in {key[0] for key in means}:
    best = min((key for key in means if key[0] == arm), key=lambda key: means[key])
    for key, row in keyed:
      if key == best:
        row[-1] = "; ".join(filter(None, ["best", row[-1]]))
  return [row for _, row in keyed]


def show(out: rich.console.Console, sweep: Sweep, results: Results):
  """Prints the table."""
  columns = ["arm", *sweep.keys, "held-out loss", "deviation over seeds", "finished", ""]
  unit = " in nats per token" * all(trial.job == "train" for trial, _ in results)
  title = f"{sweep.config}: objectives{unit}"
  out.print(console_lib.table(title, columns, rows(sweep, results)))


def compare(folder: str, results: Results) -> str:
  """FOLDER/compare.html, .json and .svg of the trials that finished, as --job=compare writes them.

  The baseline is `bf16`; in a sweep without it, the arm of the first trial that finished.

  Returns:
    Its tables and the page's path; or a line that says why there is none.
  """
  finished = [trial.workdir for trial, outcome in results if outcome.status == "finished"]
  try:
    comparison = importlib.import_module("fp8jax.report.compare")
    page = importlib.import_module("fp8jax.report.compare_page")  # needs the extra `report`
    comparison_ = comparison.compare(finished, baseline="")
    path = page.write(comparison_, folder)
    return f"{page.text(comparison_)}\n\n{path}"
  except ModuleNotFoundError as e:
    return f"no comparison: {missing_package(e)}; the same command then draws it"
  except UserError as e:
    return f"no comparison: {e}"
  except Exception as e:  # a picture never fails the sweep that it is of
    return f"no comparison: {type(e).__name__}: {one_line(e)}; the trials themselves are complete"
