"""Charts of ranges: counts by exponent as heat maps, and the scales of a site over steps."""

import math
from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np

from fp8jax.report import charts, thin
from fp8jax.report.files import Snapshots, cell_of, cell_order
from fp8jax.run import palette

# {step: {layer's site: {tensor: tensor_stats.exponents}}}
Exponents = Mapping[int, Mapping[str, Any]]
_ROW = 9  # pixels
# The darkest share; a sample has about 2^16 elements.
_LEAST_SHARE = 1e-5


def chosen(exponents: Exponents) -> list[int]:
  """Steps of snapshots with at most thin.MAX_COUNTS counts, evenly spread."""
  steps = sorted(exponents)
  last = exponents[steps[-1]]
  counts = sum(len(of["shares"]) for tensors in last.values() for of in tensors.values())
  return [steps[i] for i in thin.spread(len(steps), thin.MAX_COUNTS // max(counts, 1))]


def heat_maps(exponents: Exponents) -> alt.ConcatChart | None:
  """Exponent by layer in a snapshot, and by snapshot of a layer, of one tensor of a site.

  Menus pick the tensor, the snapshot and the layer. Its data are the data set "exponents" of the
  specification, see `values`. None where nothing was counted.
  """
  rows = values(exponents)
  if not rows:
    return None
  steps = [str(step) for step in chosen(exponents)]
  labels = list(dict.fromkeys(row["tensor"] for row in rows))
  numbers = {layer for row in rows for layer in row["layer"]} - {"–"}
  layers = sorted(numbers, key=int) + ["–"] * any("–" in row["layer"] for row in rows)
  low = min(first for row in rows for first in row["first"])
  high = max(
    first + len(levels) - 1
    for row in rows
    for first, levels in zip(row["first"], row["level"], strict=True)
  )
  tensor = alt.param(
    name="tensor", value=labels[0], bind=alt.binding_select(options=labels, name="tensor ")
  )
  snapshot = alt.param(
    name="look", value=len(steps) - 1,
    bind=alt.binding_range(min=0, max=len(steps) - 1, step=1, name="look "),
  )  # fmt: skip
  layer = alt.param(
    name="of_layer", value=layers[0], bind=alt.binding_select(options=layers, name="layer ")
  )
  at_step = f"[{', '.join(steps)}][look]"
  panels = [
    _panel("layer", layers, "datum.look === look", f"'by layer, step ' + {at_step}", low, high),
    _panel(
      "step", steps, "datum.layer === of_layer || datum.layer === '–'",
      "'by look, layer ' + of_layer", low, high,
    ),
  ]  # fmt: skip
  return (
    alt.concat(*panels, columns=2, data=alt.NamedData("exponents"))
    .add_params(tensor, snapshot, layer)
    .resolve_scale(x="independent")
  )


def values(exponents: Exponents) -> list[dict[str, Any]]:
  """Rows of the data set "exponents": one per snapshot, site and tensor.

  Of every layer they have the first exponent and levels, the shares of this exponent and the next
  ones in decibels below the whole, None for no element. A level is a short number.
  """
  rows = []
  for i, step in enumerate(chosen(exponents) if exponents else ()):
    cells = {
      cell_of(name, tensor): of
      for name, tensors in exponents[step].items()
      for tensor, of in tensors.items()
      if of["shares"]
    }
    of_label: dict[str, list[Any]] = {}
    for cell in sorted(cells, key=cell_order):
      of_label.setdefault(charts.row_label(cell), []).append(cell)
    for label, members in of_label.items():
      rows.append(
        {
          "look": i,
          "step": str(step),
          "tensor": label,
          "layer": [charts.column_label(cell) for cell in members],
          "first": [cells[cell]["first_exponent"] for cell in members],
          "level": [
            [round(-10 * math.log10(s)) if s > 0 else None for s in cells[cell]["shares"]]
            for cell in members
          ],
        }
      )
  return rows


def _panel(by: str, columns: list[str], shown: str, title: str, low: int, high: int) -> alt.Chart:
  """Args: the field of columns, a condition on rows, and the ends of the exponents' axis."""
  exponents = list(range(high, low - 1, -1))
  scale = alt.Scale(type="log", domain=[_LEAST_SHARE, 1], range=list(palette.RAMP), clamp=True)
  return (
    alt.Chart()
    .transform_filter("datum.tensor === tensor")
    .transform_flatten(["layer", "first", "level"])
    .transform_filter(shown)
    .transform_flatten(["level"])
    .transform_window(place="row_number()", groupby=["look", "layer"])
    .transform_filter("isValid(datum.level)")
    .transform_calculate(
      exponent="datum.first + datum.place - 1", share="pow(10, -datum.level / 10)"
    )
    .mark_rect()
    .encode(
      x=charts.column_axis(by, columns),
      y=alt.Y("exponent:O", sort=exponents, scale=alt.Scale(domain=exponents),
              title="exponent", axis=alt.Axis(labelOverlap=True)),
      color=alt.Color("share:Q", title="share", scale=scale, legend=alt.Legend(format=".0e")),
      tooltip=["step:N", "layer:N", "exponent:O", alt.Tooltip("share:Q", format=".2~g")],
    )
    .properties(
      width=charts.column_width(columns), height=_ROW * len(exponents),
      title=alt.TitleParams(text=alt.expr(f"tensor + ', ' + {title}")),
    )
  )  # fmt: skip


def scale_ranges(snapshots: Snapshots) -> Any | None:
  """Smallest and largest scale over a site's layers, over snapshots; quantized tensors alone."""
  if not {"smallest_scale", "largest_scale", "snr_db"} <= snapshots.values.keys():
    return None
  ranges: dict[str, list[tuple[int, str, float, float]]] = {}
  low, high = snapshots.values["smallest_scale"], snapshots.values["largest_scale"]
  groups: dict[tuple[str, str], list[int]] = {}
  for j, cell in enumerate(snapshots.cells):
    if np.isfinite(snapshots.values["snr_db"][:, j]).any():
      groups.setdefault((cell.tensor, cell.site), []).append(j)
  for (tensor, site), columns in groups.items():
    for i in thin.chosen(snapshots):
      ends = float(np.nanmin(low[i, columns])), float(np.nanmax(high[i, columns]))
      ranges.setdefault(tensor, []).append((int(snapshots.steps[i]), site, *ends))
  if not ranges:
    return None
  sites = sorted({cell.site for cell in snapshots.cells})
  panels = []
  for tensor, items in ranges.items():
    picked = alt.selection_point(fields=["site"], bind="legend", name=f"site_{tensor}")
    base = alt.Chart(charts.table("step site smallest largest", items)).encode(
      x=alt.X("step:Q", title="step"),
      color=alt.Color("site:N", scale=alt.Scale(domain=sites, scheme="tableau10"), title="site"),
      opacity=alt.condition(picked, alt.value(0.8), alt.value(0.05)),
    )
    y: dict[str, Any] = dict(scale=alt.Scale(type="log"), title=None, axis=alt.Axis(format=".0e"))
    tooltip = ["step:Q", "site:N", "smallest:Q", "largest:Q"]
    ends = [
      base.mark_line(strokeWidth=1.2, strokeDash=dash, point=alt.OverlayMarkDef(size=8)).encode(
        y=alt.Y(f"{end}:Q", **y), tooltip=tooltip
      )
      for end, dash in (("smallest", [3, 2]), ("largest", [1, 0]))
    ]
    title = f"scales of {tensor}: largest (solid), smallest (dashed)"
    panels.append(alt.layer(*ends).add_params(picked).properties(title=title, width=240))
  return alt.hconcat(*panels).resolve_scale(y="independent")
