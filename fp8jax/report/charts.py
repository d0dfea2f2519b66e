"""Charts of a run as Vega-Lite specifications, made with Altair."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
from altair.utils import schemapi

from fp8jax.phases import policy
from fp8jax.report import thin
from fp8jax.report.files import UNQUANTIZED, Cell, RunFiles, Snapshots
from fp8jax.run import palette

# Heat maps: statistic, title, kind of colour scale, whether small values are what to look at.
STATISTICS = (
  ("snr_db", "signal-to-noise ratio, dB", "linear", True),
  ("underflow", "underflow, share of nonzero elements", "symlog", False),
  ("saturation", "saturation, share of elements", "symlog", False),
  ("amax", "amax", "log", False),
  ("kurtosis", "kurtosis", "log", False),
  ("mean", "mean", "signed", False),
  ("variance", "variance", "log", False),
  ("amax_drift", "drift of amax since the look before, powers of two", "linear", False),
  ("snr_drift", "drift of signal-to-noise ratio since the look before, dB", "linear", True),
)
# Of parameters, as STATISTICS.
PARAM_STATISTICS = (
  ("grad_norm", "gradient norm", "log", False),
  ("update_norm", "update norm", "log", False),
  ("param_norm", "parameter norm", "log", False),
  ("update_ratio", "update norm over parameter norm", "log", False),
  ("nonfinite", "elements of the gradient that are not finite", "linear", False),
)
# Below this share a symlog scale is linear; a scale of shares ends no earlier than _LEAST_SHARE.
_SMALL_SHARE, _LEAST_SHARE = 1e-5, 1e-3
# A scale of signed numbers is linear below this part of the largest magnitude.
_SMALL_SIGNED = 1e-6
CELL = 13  # pixels of a heat map
_WIDTH, _HEIGHT = 380, 190
# With gaps, so that a curve that was not finite is broken there.
_LINE: dict[str, Any] = dict(strokeWidth=1.5, invalid="break-paths-show-domains")


def unchecked():
  """A context in which charts are made without comparing each number with a schema.

  The comparison takes a minute for 100 snapshots of 633 tensors; tests make the charts with it.
  """
  return schemapi.debug_mode(False)


def spec(chart: Any, checked: bool = True) -> dict[str, Any]:
  """The specification of a chart, which is compared with Vega-Lite's schema where `checked`."""
  with alt.data_transformers.enable(consolidate_datasets=False):
    return chart.to_dict(validate=checked)


def themed(chart):
  """A finished chart in the look of all of them."""
  return chart.configure_axis(
    labelFontSize=11, titleFontSize=11, titleFontWeight="normal", gridOpacity=0.4
  ).configure_title(fontSize=12, anchor="start", fontWeight="normal")


def specs(**named: Any) -> dict[str, dict[str, Any]]:
  """{name: specification} of charts of trusted code, without those that are None."""
  return {k: spec(themed(c), checked=False) for k, c in named.items() if c is not None}


def table(names: str, values: Iterable[tuple[Any, ...]]) -> alt.Data:
  """`rows` of tuples, of which there is at least one; names as "step source loss"."""
  return rows(**dict(zip(names.split(), zip(*values, strict=True), strict=True)))


def rows(**columns: Sequence[Any] | np.ndarray) -> alt.Data:
  """Columns as the rows of a chart; numbers with few digits."""
  names = list(columns)

  def plain(value):
    if isinstance(value, (int, np.integer)):
      return int(value)
    return thin.number(float(value)) if isinstance(value, (float, np.floating)) else value

  return alt.Data(
    values=[dict(zip(names, map(plain, row))) for row in zip(*columns.values(), strict=True)]
  )


def metric(
  run: RunFiles, name: str, title: str, scale: str = "linear", digits: str = "~s",
  factor: float = 1.0, band: Sequence[str] = (),
) -> Any | None:  # fmt: skip
  """A metric over steps: means, smallest and largest; None where the run has not got it.

  Args:
    band: of two metrics that bound it, in place of its smallest and largest.
  """
  if name not in run.curves:
    return None
  c = thin.curve(run.curves[name])
  if scale == "log" and not np.nanmin([*c.low, math.inf]) > 0:
    scale = "symlog"
  low, high = (thin.curve(run.curves[n]).mean for n in band) if band else (c.low, c.high)
  data = rows(step=c.steps, mean=factor * c.mean, low=factor * low, high=factor * high)
  color = palette.of_arms([run.recipe])[run.recipe]
  scales: dict[str, Any] = dict(type=scale) if scale == "log" else dict(type=scale, zero=False)
  y = alt.Y("mean:Q", title=None, axis=alt.Axis(format=digits), scale=alt.Scale(**scales))
  base = alt.Chart(data).encode(x=alt.X("step:Q", title="step"))
  area = base.mark_area(opacity=0.2, color=color).encode(y=alt.Y("low:Q"), y2="high:Q")
  line = base.mark_line(color=color, **_LINE).encode(
    y=y, tooltip=[alt.Tooltip(f"{n}:Q") for n in ("step", "mean", "low", "high")]
  )
  layers = [area, line] if c.per_point > 1 or band else [line]
  return alt.layer(*layers).properties(title=title, width=_WIDTH, height=_HEIGHT)


def loss(run: RunFiles) -> Any | None:
  """The training loss, and held-out losses as points: colour is the forward pass's precision."""
  layers = [chart] if (chart := metric(run, "loss", "")) else []
  if run.heldout:
    layers.append(_heldout_points(run))
  if not layers:
    return None
  title = "loss, nats per token: training (line), held-out (points)"
  return alt.layer(*layers).properties(title=title, width=_WIDTH, height=_HEIGHT)


def by_source(run: RunFiles, what: str) -> Any | None:
  """The "share" of the tokens of each source over steps, its weight dashed, or its mean "loss";
  None of one source.
  """
  pattern = re.compile(f"sources/(.+)/{what}")
  curves = {m[1]: c for name, c in run.curves.items() if (m := pattern.fullmatch(name))}
  if len(curves) < 2:
    return None
  thinned = {name: thin.curve(c) for name, c in curves.items()}
  points = [(s, name, v) for name, c in thinned.items() for s, v in zip(c.steps, c.mean)]
  line, y, color = _over_steps("source", what, points, list(curves))
  if what == "loss":
    return line.properties(title="loss by source", width=_WIDTH, height=_HEIGHT)
  weights = {name: run.resolved.get(f"data.sources.{name}.weight", 1.0) for name in curves}
  wanted = [(name, w / sum(weights.values())) for name, w in weights.items()]
  rule = alt.Chart(table("source share", wanted)).mark_rule(strokeDash=[4, 3]).encode(
    y=y, color=color
  )  # fmt: skip
  title = "share of tokens by source; dashed: the weight"
  return alt.layer(rule, line).properties(title=title, width=_WIDTH, height=_HEIGHT)


def accuracies(run: RunFiles) -> Any | None:
  """The share of right answers to each task, and their mean, over steps; None without tasks."""
  curves = {
    n.partition("/")[2] or "mean": c for n, c in run.curves.items() if policy.is_accuracy(n)
  }
  points = [(int(s), name, v) for name, c in curves.items() for s, v in zip(c.steps, c.values)]
  if not points:
    return None
  line, *_ = _over_steps("task", "accuracy", points, list(curves), point=True)
  title = "accuracy of tasks: share of right answers"
  return line.properties(title=title, width=_WIDTH, height=_HEIGHT)


def _over_steps(of: str, what: str, points, names: Sequence[str], **mark: Any):
  """(lines over steps of (step, name, value) points, a colour per name; their y; their color)."""
  color = alt.Color(f"{of}:N", sort=names, title=of)
  shares: dict[str, Any] = dict(axis=alt.Axis(format=".0%"), scale=alt.Scale(domain=[0, 1]))
  losses: dict[str, Any] = dict(scale=alt.Scale(zero=False))
  y = alt.Y(f"{what}:Q", title=None, **(losses if what == "loss" else shares))
  line = alt.Chart(table(f"step {of} {what}", points)).mark_line(**_LINE, **mark).encode(
    x=alt.X("step:Q", title="step"), y=y, color=color, tooltip=["step:Q", f"{of}:N", f"{what}:Q"]
  )  # fmt: skip
  return line, y, color


def _heldout_points(run: RunFiles) -> alt.Chart:
  points = [(h.step, h.loss, h.precision, h.source) for h in run.heldout]
  return (
    alt.Chart(table("step loss forward source", points))
    .mark_point(size=35, filled=True)
    .encode(
      x="step:Q",
      y=alt.Y("loss:Q", scale=alt.Scale(zero=False)),
      color=arm_color("forward", [h.precision for h in run.heldout], "forward pass"),
      shape=alt.Shape("source:N", title="held-out source"),
      tooltip=["step:Q", "source:N", "forward:N", "loss:Q"],
    )
  )


def arm_color(field: str, names: Iterable[str], title: str, **more: Any) -> alt.Color:
  """Colours by the name of an arm, see palette.of_arms."""
  return _color(field, palette.of_arms(names), title, **more)


def _color(field: str, colors: Mapping[str, str], title: str, **more: Any) -> alt.Color:
  scale = alt.Scale(domain=list(colors), range=list(colors.values()))
  return alt.Color(f"{field}:N", title=title, scale=scale, **more)


def gaps(run: RunFiles) -> list[tuple[int, str, str, float]]:
  """(step, source, precision, percent) by which a forward pass's held-out loss exceeds BF16's."""
  losses = {(h.step, h.source, h.precision): h.loss for h in run.heldout}
  base = {(h.step, h.source): h.loss for h in run.heldout if h.precision == UNQUANTIZED}
  return [
    (step, source, precision, 100 * (value / base[step, source] - 1))
    for (step, source, precision), value in losses.items()
    if precision != UNQUANTIZED and base.get((step, source))
  ]


def gap(run: RunFiles) -> Any | None:
  """Held-out loss of the recipe's forward pass relative to that of the BF16 forward pass."""
  values = gaps(run)
  if not values:
    return None
  base = alt.Chart(table("step source forward percent", values)).encode(
    x=alt.X("step:Q", title="step"),
    y=alt.Y("percent:Q", title=None, axis=alt.Axis(format="+.2f")),
    color=arm_color("forward", [row[2] for row in values], "forward pass"),
  )
  line = base.mark_line(strokeWidth=1.5).encode(strokeDash=alt.StrokeDash("source:N", title=None))
  points = base.mark_point(filled=True, size=35).encode(
    tooltip=["step:Q", "source:N", "forward:N", alt.Tooltip("percent:Q", format="+.3f")]
  )
  zero = alt.Chart(rows(percent=[0])).mark_rule(strokeWidth=1.2).encode(y="percent:Q")
  title = "held-out loss of the forward pass relative to BF16's, %"
  return alt.layer(zero, line, points).properties(title=title, width=_WIDTH, height=_HEIGHT)


# --- tensor statistics ---------------------------------------------------------------------------


def row_label(cell: Cell) -> str:
  """The row of a heat map that a cell is in."""
  return f"{cell.site} {cell.tensor}".rstrip()


def column_label(cell: Cell) -> str:
  """The column: its layer, or a dash."""
  return "–" if cell.layer is None else str(cell.layer)


def column_axis(field: str, columns: Sequence[str]) -> alt.X:
  """The horizontal axis of a heat map."""
  axis = alt.Axis(labelAngle=0, labelOverlap=True)
  return alt.X(f"{field}:N", sort=columns, title=field, axis=axis, scale=alt.Scale(domain=columns))


def column_width(columns: Sequence[str]) -> int:
  """Pixels of a heat map: enough for its title too."""
  return max(CELL * len(columns), 120)


def domain(values: np.ndarray, kind: str) -> list[float]:
  """Ends of a colour scale over all snapshots, so that the slider changes no colour's meaning."""
  finite = values[np.isfinite(values)]
  if kind == "log":
    finite = finite[finite > 0]
  if not finite.size:
    return [1e-6, 1.0] if kind == "log" else [0.0, 1.0]
  low, high = float(finite.min()), float(finite.max())
  if kind == "signed":
    most = float(f"{max(-low, high) or 1.0:.3g}")
    return [-most, 0.0, most]
  if kind == "symlog":
    return [0.0, max(high, _LEAST_SHARE)]
  if low == high:
    return [low / 2, high * 2] if kind == "log" else [low - 1, high + 1]
  return [float(f"{low:.3g}"), float(f"{high:.3g}")]


def heat_maps(snapshots: Snapshots, statistics=STATISTICS) -> alt.ConcatChart:
  """Layer × (site, tensor) of every statistic, with a slider over snapshots.

  Its data are the data set "looks" of the specification, see `snapshot_values`.
  """
  picked = thin.chosen(snapshots)
  slider = alt.param(
    name="look",
    value=len(picked) - 1,
    bind=alt.binding_range(min=0, max=len(picked) - 1, step=1, name="look "),
  )
  panels = [_panel(snapshots, picked, *of) for of in statistics if of[0] in snapshots.values]
  return (
    # One level of concatenation: an inner one would share its colours between statistics.
    alt.concat(*panels, columns=2, data=alt.NamedData("looks"))
    .add_params(slider)
    .resolve_scale(color="independent", x="independent", y="independent")
  )


def snapshot_values(snapshots: Snapshots, statistics=STATISTICS) -> list[dict[str, Any]]:
  """Rows of the data set "looks": one per snapshot, its cells as arrays for the chart.

  A snapshot of 633 tensors costs 9 numbers a tensor and no keys.
  """
  names = [s for s, *_ in statistics if s in snapshots.values]
  return [
    {
      "look": at,
      "step": int(snapshots.steps[i]),
      **{s: [thin.number(v) for v in snapshots.values[s][i]] for s in names},
    }
    for at, i in enumerate(thin.chosen(snapshots))
  ]


def _panel(
  snapshots: Snapshots, picked, name: str, title: str, kind: str, is_reversed: bool
) -> alt.Chart:
  layers = sorted({c.layer for c in snapshots.cells if c.layer is not None})
  columns = [str(i) for i in layers] + ["–"] * any(c.layer is None for c in snapshots.cells)
  labels = list(dict.fromkeys(row_label(c) for c in snapshots.cells))
  cells = rows(
    cell=range(1, len(snapshots.cells) + 1),
    tensor=[row_label(c) for c in snapshots.cells],
    layer=[column_label(c) for c in snapshots.cells],
  )
  ends = domain(snapshots.values[name][picked], kind)
  scale: dict[str, Any] = dict(type=kind, domain=ends, range=list(palette.RAMP))
  if kind == "symlog":
    scale["constant"] = _SMALL_SHARE
  if kind == "signed":
    scale |= dict(type="symlog", constant=_SMALL_SIGNED * ends[-1], range=list(palette.SIGNED))
  if is_reversed:
    scale["reverse"] = True
  form = ".2~p" if kind == "symlog" else ".3~s"
  steps = ", ".join(str(s) for s in snapshots.steps[picked])
  missing = f"datum['{name}'] === null || !isValid(datum['{name}'])"
  return (
    alt.Chart()
    .transform_filter("datum.look === look")
    .transform_flatten([name])
    .transform_window(cell="row_number()")
    .transform_lookup("cell", alt.LookupData(cells, "cell", ["tensor", "layer"]))
    .mark_rect(invalid="show")
    .encode(
      x=column_axis("layer", columns),
      y=alt.Y("tensor:N", sort=labels, title=None, scale=alt.Scale(domain=labels)),
      color=alt.condition(
        missing, alt.value(palette.MISSING),
        alt.Color(f"{name}:Q", title=None, scale=alt.Scale(**scale),
                  legend=alt.Legend(format=form, gradientLength=150)),
      ),
      tooltip=["step:Q", "tensor:N", "layer:N", alt.Tooltip(f"{name}:Q", format=".4~g")],
    )
    .properties(
      width=column_width(columns), height=CELL * len(labels),
      title=alt.TitleParams(text=alt.expr(f"'{title}, step ' + [{steps}][look]")),
    )
  )  # fmt: skip


def memory(run: RunFiles) -> Any | None:
  """Bytes per device by kind, declared beside compiled, where --job=memory wrote them."""
  if run.memory is None:
    return None
  bars = [
    (row["kind"].strip(), side, row[side] / 2**30)
    for row in run.memory["rows"]
    if not row["kind"].startswith(" ")  # these say what another row is made of
    for side in ("declared", "compiled")
    if row[side]
  ]
  bars += [("peak", side, run.memory[key] / 2**30)
           for side, key in (("declared", "declared"), ("compiled", "peak"))]  # fmt: skip
  kinds = list(dict.fromkeys(kind for kind, *_ in bars))
  colors = {"declared": "#bbbbbb", "compiled": "#666666"}  # none of a recipe's
  return (
    alt.Chart(table("kind side gib", bars))
    .mark_bar()
    .encode(
      y=alt.Y("kind:N", sort=kinds, title=None),
      yOffset=alt.YOffset("side:N", sort=list(colors)),
      x=alt.X("gib:Q", title="GiB per device"),
      color=_color("side", colors, ""),
      tooltip=["kind:N", "side:N", "gib:Q"],
    )
    .properties(width=_WIDTH, title="memory per device")
  )
