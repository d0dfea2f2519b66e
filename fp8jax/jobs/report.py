"""Pictures of runs, from their folders alone: report.html, and the comparison of several runs."""

import importlib

from fp8jax.errors import UserError, missing_package, one_line


def run(workdir: str, extra: list[str]) -> str:
  """Writes WORKDIR/report.html; prints and returns its path.

  Raises:
    UserError: no folder is named, or it is no run's.
  """
  from fp8jax.report import run_report

  if not workdir or extra:
    named = " ".join(extra)
    raise UserError(
      f"--job=report draws one run: --job=report --workdir={named or 'runs/NAME'}; for several "
      f"--job=compare {named or 'runs/A runs/B'}"
    )
  path = run_report.write(workdir)
  print(path)
  return path


def attempt(workdir: str) -> str:
  """Writes the report at the end of a run; returns a line that says where it is, or why not."""
  try:
    run_report = importlib.import_module("fp8jax.report.run_report")  # needs the extra `report`
    return f"report: {run_report.write(workdir)}"
  except ModuleNotFoundError as e:
    return f"no report.html: {missing_package(e)}; then --job=report --workdir={workdir}"
  except Exception as e:  # a picture never fails the run that it is of
    return f"no report.html: {type(e).__name__}: {one_line(e)}; the run itself is complete"


def compare(workdir: str, folders: list[str], baseline: str):
  """Writes WORKDIR/compare.html and its tables; default folder runs/compare."""
  raise UserError("--job=compare is not there yet")
