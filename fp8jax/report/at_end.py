"""The report that a run draws of itself at its end."""

import importlib

from fp8jax.errors import missing_package, one_line


def attempt(workdir: str) -> str:
  """Writes the report at the end of a run; returns a line that says where it is, or why not."""
  try:
    run_report = importlib.import_module("fp8jax.report.run_report")  # needs the extra `report`
    return f"report: {run_report.write(workdir)}"
  except ModuleNotFoundError as e:
    return f"no report.html: {missing_package(e)}; then --job=report --workdir={workdir}"
  except Exception as e:  # a picture never fails the run that it is of
    return f"no report.html: {type(e).__name__}: {one_line(e)}; the run itself is complete"
