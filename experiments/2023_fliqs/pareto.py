"""The picture and the tables of README.md, of the result files alone.

command: python experiments/2023_fliqs/pareto.py [RESULTS] [STEM of the picture]
"""

import collections
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import altair as alt  # noqa: E402

from fp8jax import statistics  # noqa: E402
from fp8jax.report import charts, page  # noqa: E402


def points(folder: pathlib.Path) -> list[tuple]:
  """(task, method, formats, target, seeds, mean BOPs, statistics.Estimate of the held-out loss).

  Raises:
    ValueError: results of several commits or lengths: they are no comparison.
  """
  results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
  groups = collections.defaultdict(list)
  for task in {r["arm"]["task"] for r in results}:
    of = [r for r in results if r["arm"]["task"] == task]
    kinds = {(r["provenance"]["commit"], r["steps"]) for r in of}
    if len(kinds) > 1:
      raise ValueError(
        f"{task}: results of {sorted(kinds)} are no comparison; name one folder each"
      )
  for r in results:
    a = r["arm"]
    if not a.get("is_twin"):
      groups[a["task"], a["method"], a["formats"], a["target"]].append(r)
  return [
    (*key, len(of), sum(r["bops"] for r in of) / len(of),
     statistics.estimate([r["heldout"] for r in of]))
    for key, of in sorted(groups.items())
  ]  # fmt: skip


# The claims of README.md at one target; uniform arms have none.
TARGETS = (0.07, 0.125)
COMPARISONS = (
  *((("fliqs", of, 0.07), ("uniform", lowest, 0.0)) for of, lowest in (
    ("fp-s", "e2m1_dynamic"), ("fp-l", "e2m1_dynamic"), ("int-s", "int4_dynamic"),
    ("int-l", "int4_dynamic"))),
  *((("fliqs", of, t), ("ranked", of, t)) for t in TARGETS for of in ("fp-s", "int-s")),
  *((("fliqs", f"{of}-l", t), ("fliqs", f"{of}-s", t)) for t in TARGETS for of in ("fp", "int")),
  *((("fliqs", f"fp-{n}", t), ("fliqs", f"int-{n}", t)) for t in TARGETS for n in "sl"),
)  # fmt: skip


# The 3M model's, written before it ran: its search against ranked rules, floating point against
# integers.
COMPARISONS_3M = (
  *((("fliqs", of, 0.125), ("ranked", of, 0.125)) for of in ("fp-s", "int-s")),
  (("fliqs", "fp-s", 0.125), ("fliqs", "int-s", 0.125)),
  (("uniform", "e2m1_dynamic", 0.0), ("uniform", "int4_dynamic", 0.0)),
)


def _heldout(folder: pathlib.Path, task: str, is_twin: bool) -> dict:
  """{(method, formats, target): {seed: held-out loss}}"""
  by: dict = collections.defaultdict(dict)
  for path in folder.glob(f"{task}_*.json"):
    r = json.loads(path.read_text())
    a = r["arm"]
    if a["task"] == task and a.get("is_twin", False) == is_twin:
      by[a["method"], a["formats"], a["target"]][a["seed"]] = r["heldout"]
  return by


def differences(folder: pathlib.Path, task: str) -> list[tuple]:
  """(arm, other arm, statistics.Estimate of the difference of held-out losses, paired by seed,
  largest move of either arm one ulp away or None where no twin ran); together the intervals hold
  at 95 %. Empty where a seed of an arm is missing."""
  by, twins = (_heldout(folder, task, is_twin) for is_twin in (False, True))
  pairs = COMPARISONS_3M if task == "text_3m" else COMPARISONS
  if any(len(by[arm]) < 3 for pair in pairs for arm in pair):
    return []
  floor = {
    arm: max(abs(loss - by[arm][seed]) for seed, loss in of.items()) for arm, of in twins.items()
  }
  return [
    (a, b, statistics.estimate([by[a][s] - by[b][s] for s in sorted(by[a])], len(pairs)),
     max((floor[arm] for arm in (a, b) if arm in floor), default=None))
    for a, b in pairs
  ]  # fmt: skip


def picture(rows: list[tuple], task: str) -> alt.TopLevelMixin:
  """Held-out loss against BOPs, intervals of seeds where there are several."""
  of = [r for r in rows if r[0] == task]
  data = alt.Data(values=[
    dict(method=r[1], formats=r[2], bops=r[5], mean=r[6].mean,
         low=r[6].low if r[4] > 1 else r[6].mean, high=r[6].high if r[4] > 1 else r[6].mean)
    for r in of
  ])  # fmt: skip
  x = alt.X("bops:Q", title="BOPs, share of BF16's", scale=alt.Scale(type="log", nice=False))
  color = alt.Color("formats:N", title=None, scale=alt.Scale(scheme="tableau10"))
  scale, title = alt.Scale(zero=False), "held-out loss, nats"
  base = alt.Chart(data).encode(x=x, color=color)
  rule = base.mark_rule().encode(y=alt.Y("low:Q", title=title, scale=scale), y2="high:Q")
  mark = base.mark_point(filled=True, size=60).encode(
    y=alt.Y("mean:Q", title=title, scale=scale), shape=alt.Shape("method:N", title=None),
    tooltip=["method:N", "formats:N", "bops:Q", "mean:Q"],
  )  # fmt: skip
  return alt.layer(rule, mark).properties(title=task, width=360, height=260)


def main(folder: str = str(HERE / "results"), stem: str = str(HERE / "pareto")):
  rows = points(pathlib.Path(folder))
  print("| task | arm | formats | target | seeds | BOPs | held-out loss |")
  print("|---|---|---|---|---|---|---|")
  for task, method, formats, target, seeds, bops, loss in rows:
    spread = f" [{loss.low:.4f}, {loss.high:.4f}]" if seeds > 1 else ""
    shown = f"{target:g}" if target else "–"
    print(f"| {task} | {method} | {formats} | {shown} | {seeds} | {bops:.4f} | "
          f"{loss.mean:.4f}{spread} |")  # fmt: skip
  print("\n| task | arm | against | difference, nats | one ulp away |\n|---|---|---|---|---|")
  for task in sorted({r[0] for r in rows}):
    for a, b, of, floor in differences(pathlib.Path(folder), task):
      names = (" ".join(str(x) for x in arm if x) for arm in (a, b))
      moved = "no twin" if floor is None else f"{floor:.4f}"
      print(f"| {task} | {' | '.join(names)} | {of.mean:+.4f} [{of.low:+.4f}, {of.high:+.4f}] | "
            f"{moved} |")  # fmt: skip
  with charts.unchecked():
    drawn = alt.hconcat(*(picture(rows, task) for task in sorted({r[0] for r in rows})))
    drawn = drawn.resolve_scale(x="independent", y="independent")
    page.pictures(stem, charts.spec(charts.themed(drawn), checked=False))


if __name__ == "__main__":
  main(*sys.argv[1:])
