"""Pictures of runs, from their folders alone: report.html, and the comparison of several runs."""

import os
from typing import Any

from fp8jax.errors import UserError


def others() -> tuple[Any, ...]:
  """See run_report.Others; needs the extra `report`."""
  from fp8jax.rl import page as of_rl
  from fp8jax.sensitivity import page as of_sensitivity

  return of_sensitivity.of_run, of_rl.of_run


def run(workdir: str, extra: list[str]) -> str:
  """Writes WORKDIR/report.html and pictures of it; prints their paths, returns the page's.

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
  path = run_report.write(workdir, others())
  print("\n".join([path, *run_report.pictures(workdir)]))
  return path


def compare(workdir: str, folders: list[str], baseline: str) -> str:
  """Compares runs; writes compare.html, .json, .svg and .png into WORKDIR, prints the tables.

  Args:
    workdir: "" is runs/compare.
    baseline: the arm that the others are compared with.

  Raises:
    UserError: see report.compare.compare.
  """
  from fp8jax.report import compare as comparison
  from fp8jax.report import compare_page

  result = comparison.compare(folders, baseline)
  path = compare_page.write(result, workdir or os.path.join("runs", "compare"))
  print(f"{compare_page.text(result)}\n\n{path}")
  return path
