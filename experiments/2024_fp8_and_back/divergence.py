"""To FP8 and back: the share of runs that diverge, by mask and rate, as a picture.

command: python experiments/2024_fp8_and_back/divergence.py    (seconds)

From the lab's results, as many as there are; the ledger prints the same numbers as a table, and
experiments/lab/stability.py has the rule. Writes divergence.svg.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments"), str(ROOT / "experiments/lab")]

import ledger  # noqa: E402
import pictures  # noqa: E402
import runs as runs_lib  # noqa: E402
import stability  # noqa: E402
import vl_convert  # noqa: E402

from fp8jax.report import charts, page  # noqa: E402

SLUG = "2024_fp8_and_back"


def main():
  (system,) = (s for s in runs_lib.SYSTEMS if s.slug == SLUG)
  shares = stability.shares(system, stability.found(system, ledger.read()))
  spec = charts.spec(pictures.diverged(system, shares))
  page.write(str(HERE / "divergence.svg"), vl_convert.vegalite_to_svg(spec))
  print(f"{sum(s.runs for s in shares)} runs of {len(system.runs())}")


if __name__ == "__main__":
  main()
