"""The report that a run draws of itself at its end."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from fp8jax.errors import missing_package, one_line


def attempt(workdir: str, others: Callable[[], Sequence[Any]] = tuple) -> str:
  """Writes the report at the end of a run; returns a line that says where it is, or why not.

  Args:
    others: imports the features whose sections it has too, see run_report.Others.
  """
  try:
    run_report = importlib.import_module("fp8jax.report.run_report")  # needs the extra `report`
    return f"report: {run_report.write(workdir, others())}"
  except ModuleNotFoundError as e:
    return f"no report.html: {missing_package(e)}; then --job=report --workdir={workdir}"
  except Exception as e:  # a picture never fails the run that it is of
    return f"no report.html: {type(e).__name__}: {one_line(e)}; the run itself is complete"
