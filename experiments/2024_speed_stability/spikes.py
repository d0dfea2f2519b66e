"""Balancing speed and stability: losses of 5,000 steps and where they spike, as a picture.

command: python experiments/2024_speed_stability/spikes.py    (seconds)

From the lab's results, as many as there are; the ledger prints counts and losses by domain, and
experiments/lab/stability.py has the rule. Writes spikes.svg.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments"), str(ROOT / "experiments/lab")]

import altair as alt  # noqa: E402
import ledger  # noqa: E402
import numpy as np  # noqa: E402
import runs as runs_lib  # noqa: E402
import stability  # noqa: E402
import vl_convert  # noqa: E402

from fp8jax.report import charts, page  # noqa: E402

SLUG, EVERY = "2024_speed_stability", 25


def chart(of: stability.Found) -> alt.TopLevelMixin:
  """A line per run, its median of EVERY steps, and a dot per spike at the loss that it begins."""
  if not of:
    return alt.Chart(alt.Data(values=[{}])).mark_text(text="no run yet", size=16).properties(
      width=420, height=60
    )  # fmt: skip
  lines, dots = [], []
  for (arm, _), by_seed in of.items():
    for seed, result in by_seed.items():
      losses, run = np.array(result.losses), {"arm": arm, "seed": f"seed {seed}"}
      for i in range(0, len(losses) - EVERY + 1, EVERY):
        lines.append({**run, "step": i + EVERY, "loss": float(np.median(losses[i : i + EVERY]))})
      begins = stability.spikes(losses)
      dots += [{**run, "step": i + 1, "loss": float(losses[i])} for i in begins]
  axes = dict(
    x="step:Q", y=alt.Y("loss:Q", title="training loss").scale(zero=False), color=alt.Color("arm:N")
  )
  dash = alt.StrokeDash("seed:N", title=None)
  layers = alt.layer(
    alt.Chart(charts.rows(**_columns(lines)))
    .mark_line(strokeWidth=1)
    .encode(**axes, strokeDash=dash),
    alt.Chart(charts.rows(**_columns(dots))).mark_circle(size=25).encode(**axes),
  )
  return layers.properties(width=560, height=260)


def _columns(rows: list[dict]) -> dict[str, list]:
  return {key: [row[key] for row in rows] for key in ("arm", "seed", "step", "loss")}


def main():
  (system,) = (s for s in runs_lib.SYSTEMS if s.slug == SLUG)
  found = stability.found(system, ledger.read())
  spec = charts.spec(chart(found))
  page.write(str(HERE / "spikes.svg"), vl_convert.vegalite_to_svg(spec))
  print(f"{sum(map(len, found.values()))} runs of {len(system.runs())}")


if __name__ == "__main__":
  main()
