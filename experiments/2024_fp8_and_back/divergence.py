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

import altair as alt  # noqa: E402
import ledger  # noqa: E402
import runs as runs_lib  # noqa: E402
import stability  # noqa: E402
import vl_convert  # noqa: E402

from fp8jax.report import charts, page  # noqa: E402

SLUG = "2024_fp8_and_back"


def chart(shares: list[stability.Share], planned: int) -> alt.TopLevelMixin:
  """A panel per rate, a line per arm: share, Wilson's interval, number of runs."""
  if not shares:
    return (
      alt.Chart(alt.Data(values=[{}]))
      .mark_text(text="no run yet", size=16)
      .properties(width=420, height=60)
    )
  values = [
    {"arm": s.arm, "rate": f"rate {s.rate:g}", "share": 100 * s.diverged.estimate,
     "low": 100 * s.diverged.low, "high": 100 * s.diverged.high, "n": f"{s.runs} of {planned}"}
    for s in shares
  ]  # fmt: skip
  arms = list(dict.fromkeys(s.arm for s in shares))
  base = alt.Chart().encode(y=alt.Y("arm:N", sort=arms, title=None))
  said = "runs that diverge, %"
  ends = alt.X("low:Q", title=said).scale(domain=[0, 130]).axis(values=[0, 25, 50, 75, 100])
  layers = alt.layer(
    base.mark_rule(strokeWidth=2).encode(x=ends, x2="high:Q"),
    base.mark_circle(size=70, opacity=1).encode(x="share:Q"),
    base.mark_text(align="left").encode(x=alt.datum(104), text="n:N"),
    data=alt.Data(values=values),
  )
  return layers.properties(width=230, height=130).facet(column=alt.Column("rate:N", title=None))


def main():
  (system,) = (s for s in runs_lib.SYSTEMS if s.slug == SLUG)
  shares = stability.shares(system, stability.found(system, ledger.read()))
  spec = charts.spec(chart(shares, system.fixed_seeds))
  page.write(str(HERE / "divergence.svg"), vl_convert.vegalite_to_svg(spec))
  print(f"{sum(s.runs for s in shares)} runs of {len(system.runs())}")


if __name__ == "__main__":
  main()
