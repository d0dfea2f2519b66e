"""The pictures of lab.md: from the ledger's rows and curves, and the folders' results.json.

Written by `python experiments/ledger.py` to experiments/lab/pictures. An effect stands beside the
number of its seeds, its noise floor and the ledger's own word; a comparison without a run is a line
that says so. Errors are of single passes and decide nothing about a loss.
"""

import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import altair as alt  # noqa: E402
import design  # noqa: E402
import runs as runs_lib  # noqa: E402
import stability  # noqa: E402
import vl_convert  # noqa: E402

from fp8jax.compiled import saved_tensors  # noqa: E402
from fp8jax.config import files, named, resolve  # noqa: E402
from fp8jax.kernels.choose import Device  # noqa: E402
from fp8jax.report import charts, page  # noqa: E402

FOLDER = HERE / "pictures"
QUESTIONS = ("trains", "scales", "breaks", "saves", "rates")
WIDTH, LINE = 420, 19  # pixels of a panel, and of one of its lines
# Colours of Okabe and Ito (palette.py) by the first words of a verdict.
COLORS = {"as claimed": "#0072B2", "met": "#0072B2", "opposite": "#D55E00", "missed": "#D55E00",
          "diverged": "#D55E00", "illustration": "#999999", "no verdict": "#999999"}  # fmt: skip
# Linear within +-0.25 %, so that 0.3 % and 30 % have room in one picture.
TICKS = (-100, -30, -10, -3, -1, -0.25, 0, 0.25, 1, 3, 10, 30, 100)
# Candidates that differ from their baseline in how a tile gets its scale.
SCALES = ("- 2-D weights", "four or six", "128x128 gradients")
# Systems of picture 3 whose arms differ in the bits of everything.
BITS = ("2021_lns_madam", "2024_fp8_and_back", "2025_halo")


# --- effects --------------------------------------------------------------------------------------


def trains(row) -> bool:
  """Whether picture 1 shows the row: against a wide baseline, at one rate."""
  return row.baseline in ("bf16", "float32") and row.rate is None


def scales(row) -> bool:
  return row.candidate in SCALES


def breaks(row) -> bool:
  return row.system in BITS


def label(row) -> str:
  """A comparison with n, floor and verdict."""
  name = row.candidate if row.rate is None else f"{row.candidate}, rate {row.rate:g}"
  what = "" if row.quantity == "training" else f", {row.quantity}"
  name = f"{name} against {row.baseline} ({row.system.partition('_')[2]}{what})"
  if not row.seeds:
    # Why stands in the ledger; here it would be cut off.
    return f"{name}: {'refused' if row.verdict.startswith('refused') else row.verdict}"
  floor = "no twin" if row.floor is None else f"floor {row.floor:.2f} %"
  return f"{name}: n = {row.count}, {floor}, {row.verdict}"


def effects(rows: Sequence[Any], title: str) -> alt.LayerChart:
  """A line per row: effect, interval, and the noise floor about 0 as a grey bar."""
  values = []
  for row in rows:
    one: dict[str, Any] = {"row": label(row), "word": _word(row.verdict)}
    if row.effect is not None and math.isfinite(row.effect):
      one["effect"] = row.effect
      if math.isfinite(row.low) and math.isfinite(row.high):
        one |= {"low": max(row.low, -100), "high": min(row.high, 100)}
    if row.floor is not None and math.isfinite(row.floor):
      one |= {"under": -row.floor, "over": row.floor}
    values.append(one)
  scale = alt.Scale(type="symlog", constant=0.25, domain=[-100, 100], nice=False)
  axis = alt.Axis(values=list(TICKS), labelExpr="'' + datum.value")
  x = {"scale": scale, "axis": axis, "title": "effect, % of the baseline's loss (symlog)"}
  names = [label(row) for row in rows]
  y = alt.Y("row:N", sort=names, title=None, scale=alt.Scale(domain=names),
            axis=alt.Axis(labelLimit=560, grid=True))  # fmt: skip
  words = [w for w in COLORS if any(one["word"] == w and "effect" in one for one in values)]
  color = alt.Color("word:N", title="the ledger's verdict",
                    scale=alt.Scale(domain=words, range=[COLORS[w] for w in words]))  # fmt: skip
  base = alt.Chart(alt.Data(values=values)).encode(y=y)
  zero = alt.Chart(alt.Data(values=[{"at": 0}])).mark_rule(color="#333333")
  layers = [
    base.transform_filter("isValid(datum.over)").mark_bar(color="#bbbbbb", height=12)
    .encode(x=alt.X("under:Q", **x), x2="over:Q"),
    zero.encode(x=alt.X("at:Q", **x)),
    base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2)
    .encode(x=alt.X("low:Q", **x), x2="high:Q", color=color),
    base.transform_filter("isValid(datum.effect)").mark_circle(size=60, opacity=1)
    .encode(x=alt.X("effect:Q", **x), color=color),
  ]  # fmt: skip
  return alt.layer(*layers).properties(
    title=_titled(title), width=WIDTH, height=LINE * max(len(rows), 1)
  )


def _titled(text: str) -> alt.TitleParams:
  """Of a panel, flush with its left edge."""
  return alt.TitleParams(text, frame="group")


def _word(verdict: str) -> str:
  return next((word for word in COLORS if verdict.startswith(word)), "")


# --- shares of runs that diverge ------------------------------------------------------------------


def share_label(system: design.System, arm: str, rate: float, share: stability.Share | None) -> str:
  count = f"n = {stability.count(system, share)}" if share else "not run"
  return f"{arm}, rate {rate:g} ({system.slug.partition('_')[2]}): {count}"


def diverged(system: design.System, shares: Sequence[stability.Share], title: str = ""):
  """A line per rate and arm: share of runs that diverge with Wilson's interval, or "not run"."""
  made = {(s.arm, s.rate): s for s in shares}
  values = []
  for rate, arm in itertools.product(system.rates, (arm.name for arm in system.arms)):
    share = made.get((arm, rate))
    one: dict[str, Any] = {"row": share_label(system, arm, rate, share)}
    if share:
      of = share.diverged
      one |= {"share": 100 * of.estimate, "low": 100 * of.low, "high": 100 * of.high}
    values.append(one)
  names = [one["row"] for one in values]
  x = {"scale": alt.Scale(domain=[0, 100]), "title": "runs that diverge, %"}
  base = alt.Chart(alt.Data(values=values)).encode(
    y=alt.Y("row:N", sort=names, title=None, scale=alt.Scale(domain=names),
            axis=alt.Axis(labelLimit=560, grid=True)),
  ).transform_filter("isValid(datum.share)")  # fmt: skip
  return alt.layer(
    base.mark_rule(strokeWidth=2, color="#0072B2").encode(x=alt.X("low:Q", **x), x2="high:Q"),
    base.mark_circle(size=60, opacity=1, color="#0072B2").encode(x=alt.X("share:Q", **x)),
  ).properties(title=_titled(title), width=WIDTH, height=LINE * len(values))


# --- losses by learning rate ----------------------------------------------------------------------

# Panels of the last picture: what they say of a system whose arms visit rates.
RATES = {
  "2025_munit": "plain BF16, Adam",
  "2025_munit_rates": "µS in FP8, Lion",
  "2021_lns_madam_rates": "Madam, BF16 products",
}


def by_rate(curves: Sequence[Any]) -> alt.LayerChart:
  """A line per arm of one system over learning rates; a ring marks the best rate of each.

  Args:
    curves: of the ledger (ledger.Curve); a rate at which a run diverged has no point.
  """
  slug = curves[0].system
  (system,) = (s for s in runs_lib.SYSTEMS if s.slug == slug)
  # "width 64" of "bf16, width 64": the panel's title says the rest.
  arms = [curve.arm.rpartition(", ")[2] for curve in curves]
  values = [
    {"rate": rate, "loss": loss, "arm": arm} | ({"best": loss} if rate == curve.best else {})
    for arm, curve in zip(arms, curves, strict=True)
    for rate, loss in sorted(curve.losses.items())
    if math.isfinite(loss)
  ]
  rates = sorted({one["rate"] for one in values})
  seeds = {system.seeds(arm) for arm in system.arms}
  title = f"{RATES[slug]}: n = {'/'.join(map(str, sorted(seeds)))}, {system.steps} steps"
  colors = alt.Scale(domain=arms, range=list(_LINES[: len(arms)]))
  base = alt.Chart(alt.Data(values=values)).encode(
    x=alt.X("rate:Q", title="peak learning rate", scale=alt.Scale(type="log", nice=False),
            axis=alt.Axis(values=rates, format="~g", labelOverlap="greedy")),
    color=alt.Color("arm:N", title=None, sort=arms, scale=colors),
  )  # fmt: skip
  loss = {"title": "training loss after the warm-up", "scale": alt.Scale(zero=False)}
  return alt.layer(
    base.mark_line().encode(y=alt.Y("loss:Q", **loss)),
    base.mark_circle(size=30, opacity=1).encode(y=alt.Y("loss:Q", **loss)),
    base.transform_filter("isValid(datum.best)")
    .mark_point(size=160, strokeWidth=2).encode(y=alt.Y("best:Q", **loss)),
  ).properties(title=_titled(title), width=WIDTH * 2 // 3, height=WIDTH * 2 // 3)  # fmt: skip


def _beside(curves: Sequence[Any]) -> alt.HConcatChart:
  """The panels of RATES, with one axis of losses."""
  own = [[curve for curve in curves if curve.system == slug] for slug in RATES]
  panels = [by_rate(of) for of in own if of]
  return alt.hconcat(*panels).resolve_scale(color="independent", y="shared")


_LINES = ("#E69F00", "#009E73", "#0072B2", "#CC79A7")


# --- errors of the folders ------------------------------------------------------------------------

Points = list[tuple[str, str, float]]  # (line, kind, error in %)


def _quartet(found) -> Points:
  return [(rule, "x", 100 * math.sqrt(one["mse"])) for rule, one in found["results"].items()
          if "mse" in one]  # fmt: skip


def _clamped(found) -> Points:
  return [(name, "x", 100 * math.sqrt(one["error"])) for name, one in found["results"].items()]


def _requantized(found) -> Points:
  of = found["saved_tensors"]["results"]
  return [
    (f"E4M3, {tile}, {scale} scales", "x", 100 * error[key])
    for scale in ("f32", "pow2")
    for tile, key in (("1x128", "x once"), ("128x1", "x direct"), ("1x128, then 128x1", "x twice"))
    for error in of[f"requantized {scale}"].values()
  ]


def _gradient_tiles(found) -> Points:
  of = found["saved_tensors"]["results"]
  return [(f"E4M3, {tile}, {scale} scales", "g", 100 * error[f"{tile} all"])
          for scale in ("f32", "pow2") for tile in ("1x128", "128x128")
          for error in of[f"gradient_tiles {scale}"].values()]  # fmt: skip


def _nvfp4(found) -> Points:
  return [(rounding, "x", 100 * math.sqrt(one["normal"])) for rounding, one in
          found["results"].items() if "normal" in one]  # fmt: skip


def _logfmt(found) -> Points:
  rows = ((name.rpartition(" "), one) for name, one in found["logfmt"]["results"].items())
  return [(spelled, tensor, 100 * one["error"]) for (spelled, _, tensor), one in rows]


def _attention(found) -> Points:
  return [(name, "O", e) for name, by_seed in found["rmse"].items() for e in by_seed]


def _halo(found) -> Points:
  return [(arm, p, 100 * e) for arm, one in found["results"].items() for p, e in one.items()]


def _sage(found) -> Points:
  return [(row["arm"], product, 100 * e["error"]) for row in found["rows"]
          if row["norm"] == "QK-norm" for product, e in row["results"].items()
          if row["arm"] != "BF16 backward" or product == "O"]  # fmt: skip


# Folder, title with n, axis, points of its results.json.
Table = tuple[str, str, str, Callable[[Any], Points]]
ERRORS_OF_SCALES: tuple[Table, ...] = (
  ("2025_quartet", "MXFP4 by scale and clip, N(0, 1), n = 16 draws of 2^20", "error, % of RMS",
   _quartet),
  ("2025_nvfp4", "NVFP4 by rounding, N(0, 1), n = 16 draws of 2^18", "error, % of RMS", _nvfp4),
  ("2025_fp4", "E2M1 per token, clamped or not, SmolLM2's x, mean over n = 210 tensors",
   "error, % of RMS", _clamped),
  ("2024_deepseek_v3", "x of SmolLM2 by tile and scale, n = 7 sites (a dot each)",
   "error, % of the norm", _requantized),
  ("2024_deepseek_v3", "g of SmolLM2 by tile and scale, n = 7 sites (a dot each)",
   "error, % of the norm", _gradient_tiles),
  ("2024_deepseek_v3", "8 and 10 bits per 1x128, x and g of SmolLM2, n = 21 tensors",
   "error, % of the norm", _logfmt),
  ("2024_flash_attention_3", "attention in E4M3, random Q, K, V, n = 3 seeds (a dot each)",
   "RMSE", _attention),
)  # fmt: skip
ERRORS_OF_PRODUCTS: tuple[Table, ...] = (
  ("2025_halo", "y = x w, dx = g w', dw = x' g of SmolLM2, median over n = 70 layers",
   "error, % of the norm", _halo),
  ("2026_sage_bwd", "attention in INT8 with QK-norm, random Q, K, V, n = 3 seeds (a dot each)",
   "error, % of the norm", _sage),
)  # fmt: skip


def errors(table: Table, experiments: pathlib.Path) -> alt.Chart | None:
  """A panel of a folder's errors; None where it has no results yet."""
  folder, title, axis, read = table
  path = experiments / folder / "results.json"
  if not path.exists():
    return None
  points = read(json.loads(path.read_text()))
  names, kinds = (list(dict.fromkeys(p[i] for p in points)) for i in (0, 1))
  colors = alt.Scale(domain=kinds, range=list(_KINDS)[: len(kinds)])
  legend = alt.Legend() if len(kinds) > 1 else None
  return (
    alt.Chart(alt.Data(values=[dict(zip(("row", "of", "error"), p)) for p in points]))
    .mark_circle(size=55, opacity=0.75)
    .encode(
      x=alt.X("error:Q", title=axis, scale=alt.Scale(type="log", nice=True)),
      y=alt.Y("row:N", sort=names, title=None, axis=alt.Axis(labelLimit=560, grid=True)),
      color=alt.Color("of:N", title=None, scale=colors, legend=legend),
    )
    .properties(title=_titled(title), width=WIDTH, height=LINE * len(names))
  )  # fmt: skip


_KINDS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7")


# --- bytes ----------------------------------------------------------------------------------------


def nbytes(run: design.Run) -> tuple[float, float]:
  """(bytes per parameter of weight, master, gradient and moments; per token and layer of what the
  forward pass keeps), counted from the configuration (`--job=memory` compares them with a program).
  """
  spec = resolve.resolve(files.without_files(named.load(*run.trial)), 1, Device("cpu"))
  kept = sum(saved.nbytes for saved in saved_tensors.of_layers(spec))
  tokens = spec.microbatch * spec.data.seq_len
  return sum(spec.optim.bytes_per_parameter().values()), kept / tokens / spec.model.num_layers


def is_about_bytes(changes: design.Changes) -> bool:
  return any(key.endswith("_format") or key.startswith("memory.save_") for key, _ in changes)


def savings(rows: Sequence[Any], count: Callable[[design.Run], tuple[float, float]] = nbytes):
  """[(row, {"parameter": (own, baseline's), "token": likewise})] of rows that save bytes."""
  known = {(s.slug, arm.name): (s, arm) for s in runs_lib.SYSTEMS for arm in s.arms}
  made, counted = [], {}
  for row in rows:
    system, arm = known.get((row.system, row.candidate), (None, None))
    if system is None or arm is None or not is_about_bytes(arm.changes):
      continue
    arms = {arm.name: arm for arm in system.arms}
    pair = [system.first(arms[name]) for name in (row.candidate, row.baseline)]
    for run in pair:
      key = (run.size, run.recipe, run.changes)
      if key not in counted:
        counted[key] = count(run)
    own, base = (counted[run.size, run.recipe, run.changes] for run in pair)
    made.append((row, {"parameter": (own[0], base[0]), "token": (own[1], base[1])}))
  return made


def _saved(found) -> alt.HConcatChart:
  """Bytes of candidate and baseline, a line per row."""
  panels = []
  for i, (key, title) in enumerate((
    ("parameter", "bytes per parameter: weight, master, gradient, moments"),
    ("token", "bytes per token and layer, kept for the backward pass"),
  )):  # fmt: skip
    values = [
      {"row": label(row), "own": of[key][0], "base": of[key][1]} for row, of in found
    ]  # fmt: skip
    names = [label(row) for row, _ in found]
    y = alt.Y("row:N", sort=names, title=None,
              axis=None if i else alt.Axis(labelLimit=560, grid=True))  # fmt: skip
    base = alt.Chart(alt.Data(values=values)).encode(y=y)
    x = {"title": title, "scale": alt.Scale(zero=True)}
    panels.append(alt.layer(
      base.mark_rule(color="#999999").encode(x=alt.X("own:Q", **x), x2="base:Q"),
      base.mark_tick(color="#333333", thickness=2, height=12).encode(x=alt.X("base:Q", **x)),
      base.mark_circle(size=60, opacity=1, color="#0072B2").encode(x=alt.X("own:Q", **x)),
    ).properties(width=WIDTH // 2, height=LINE * max(len(found), 1)))  # fmt: skip
  return alt.hconcat(*panels)


# --- the pictures ---------------------------------------------------------------------------------

_LEGEND = ("grey bar: noise floor, the candidate against itself one ulp away; line: 95 % together "
           "within a system, cut off at ±100 %")  # fmt: skip
_RINGS = "ring: the least loss of a line; means over n seeds, no interval; diverged: no point"
_NO_FLOOR = "errors of single passes: no training, no floor, no verdict"


def _drawn(question: str, notes: Sequence[str], *panels) -> str:
  """SVG of panels below each other."""
  chart = alt.vconcat(*(p for p in panels if p is not None), spacing=22)
  chart = chart.resolve_scale(color="independent").properties(
    title=alt.TitleParams(question, subtitle=list(notes), fontSize=14, subtitleFontSize=11)
  )
  chart = charts.themed(chart).configure_legend(orient="bottom", labelFontSize=11)
  return vl_convert.vegalite_to_svg(charts.spec(chart))


def draw(
  rows: Sequence[Any],
  of_runs: stability.Index,
  curves: Sequence[Any],
  experiments: pathlib.Path = HERE.parent,
) -> dict[str, str]:
  """{name: SVG} of the questions.

  Args:
    rows, of_runs, curves: of the ledger (ledger.Row, ledger.Index, ledger.Curve).
    experiments: the folder of the folders.
  """
  masks = [
    diverged(s, stability.shares(s, stability.found(s, of_runs)),
             "runs that diverge, by mask and rate: share, Wilson's 95 %")
    for s in runs_lib.SYSTEMS if "divergence" in s.shows
  ]  # fmt: skip
  of = lambda chosen: [row for row in rows if chosen(row)]  # noqa: E731
  saved = savings(rows)
  tables = lambda of: [errors(table, experiments) for table in of]  # noqa: E731
  return {
    "trains": _drawn("Which formats train?", (_LEGEND,), effects(of(trains), "")),
    "scales": _drawn("Which scales matter?", (_LEGEND, _NO_FLOOR),
                     effects(of(scales), "on the loss"), *tables(ERRORS_OF_SCALES)),
    "breaks": _drawn("What breaks first?", (_LEGEND, _NO_FLOOR),
                     effects(of(breaks), "on the loss, by bits and masks"), *masks,
                     *tables(ERRORS_OF_PRODUCTS)),
    "saves": _drawn("What does each save?", (_LEGEND, "bytes: counted; tick: the baseline's"),
                    effects([row for row, _ in saved], "on the loss"), _saved(saved)),
    "rates": _drawn("Does the best rate move with the width?", (_RINGS,), _beside(curves)),
  }  # fmt: skip


def write(rows: Sequence[Any], of_runs: stability.Index, curves: Sequence[Any]):
  """FOLDER/trains.svg and so on."""
  FOLDER.mkdir(exist_ok=True)
  for name, svg in draw(rows, of_runs, curves).items():
    page.write(str(FOLDER / f"{name}.svg"), svg)
