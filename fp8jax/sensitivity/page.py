"""The page, the pictures and the charts of --job=sensitivity; charts are Vega-Lite's."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from fp8jax.report import charts, page
from fp8jax.report.files import RunFiles
from fp8jax.report.page import Section
from fp8jax.run import palette

_WIDTH = 420  # pixels
Result = Mapping[str, Any]


def of_run(run: RunFiles) -> list[Section]:
  """Parts of a run's report."""
  return sections(run.sensitivity) if run.sensitivity else []


def sections(result: Mapping[str, Any]) -> list[Section]:
  """Parts of a page, its own or a run's."""
  tokens, where = result["tokens"], result["weights"]
  source = " ".join(f"{k} {v}" for k, v in where.items())
  note = (
    f"Weights: {source}. {tokens['choose']:,} held-out tokens to choose on, {tokens['report']:,} "
    "of other documents to report on. Estimates are of the first, groups and sites of both."
  )
  drawn: dict[str, Any] = {"sensitivity": heat_map(result)}
  drawn["sensitivity_agreement"] = agreement(result)
  for group in ("kinds", "layers", "tensors"):
    drawn[f"sensitivity_{group}"] = groups(result, group)
  parts = [Section("Sensitivity of sites", note, _specs(drawn))]
  for i, budget in enumerate(result["budgets"]):
    rows = [
      (a["arm"], f"{100 * a['bf16_flops']:.1f} %", _interval(a["report"]["loss_percent"]),
       f"{a['report']['kl'][0]:.3g}", a["runs_of_layers"])
      for a in budget["arms"]
    ]  # fmt: skip
    note = f"On the other half of the text: {budget['verdict']}." if "verdict" in budget else ""
    columns = ("rules", "FLOPs in BF16", "loss, %", "KL", "runs of layers")
    text = f"precision.rules = {tuple(map(tuple, budget['arms'][0]['rules']))}"
    charted = _specs(
      {f"sensitivity_budget_{i}_{of}": arms(budget, of) for of in ("kl", "loss_percent")}
    )
    parts.append(
      Section(f"Rules: {budget['budget']}", note, charted, tables=[(columns, rows)], text=text)
    )
  return parts


def _interval(values) -> str:
  return f"{values[0]:+.3f} [{values[1]:+.3f}, {values[2]:+.3f}]"


def _specs(named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  with charts.unchecked():
    return charts.specs(**named)


def write(folder: str, result: Mapping[str, Any]) -> list[str]:
  """Writes sensitivity.html, .svg and .png; returns their paths."""
  stem = os.path.join(folder, "sensitivity")
  page.write(f"{stem}.html", page.render("Sensitivity", sections(result), page.vega()))
  spec = _specs({"picture": picture(result)})["picture"]
  return [f"{stem}.html", *page.pictures(stem, spec)]


def picture(result: Mapping[str, Any]) -> alt.TopLevelMixin:
  """The heat map beside the KL of rules, above the measured kinds and the loss of rules."""
  budgets = result["budgets"][:1]
  above = [heat_map(result)]
  above += [arms(budget, "kl") for budget in budgets]
  below = [groups(result, "kinds")]
  below += [arms(budget) for budget in budgets]
  rows = [
    alt.hconcat(*some) for row in (above, below) if (some := [c for c in row if c is not None])
  ]
  return alt.vconcat(*rows).resolve_scale(color="independent")


# --- charts --------------------------------------------------------------------------------------


def heat_map(result: Result) -> alt.Chart:
  """Estimated KL of every site and tensor alone: layer by kind and tensor."""
  cells = [
    (f"{s['kind']} {tensor}", "–" if s["layer"] is None else str(s["layer"]), s["name"],
     s["estimated"][tensor]["kl"][0], s["estimated"][tensor]["loss_percent"][0])
    for s in result["sites"] for tensor in ("x", "w")
  ]  # fmt: skip
  tensor, layer, site, kl, loss = zip(*cells)
  columns = sorted({c for c in layer if c != "–"}, key=int) + ["–"] * ("–" in layer)
  labels = list(dict.fromkeys(tensor))
  scale = alt.Scale(type="log", domain=charts.domain(np.array(kl), "log"), range=[*palette.RAMP])
  missing = "datum.kl === null || datum.kl <= 0"
  return (
    alt.Chart(charts.rows(tensor=tensor, layer=layer, site=site, kl=kl, loss=loss))
    .mark_rect()
    .encode(
      x=alt.X("layer:N", sort=columns, title="layer",
              axis=alt.Axis(labelAngle=0, labelOverlap=True)),
      y=alt.Y("tensor:N", sort=labels, title=None),
      color=alt.condition(
        missing, alt.value(palette.MISSING),
        alt.Color("kl:Q", title=None, scale=scale, legend=alt.Legend(format=".0e")),
      ),
      tooltip=["site:N", "tensor:N", alt.Tooltip("kl:Q", format=".3e"),
               alt.Tooltip("loss:Q", format="+.4f")],
    )
    .properties(
      width=charts.column_width(columns), height=charts.CELL * len(labels),
      title="estimated KL from BF16, nats per token, one tensor of one site quantized",
    )
  )  # fmt: skip


def groups(result: Result, group: str) -> Any | None:
  """Measured change of the loss of every member of a group alone, with its interval."""
  members = [g for g in result["groups"] if g["group"] == group]
  if not members:
    return None
  order = [g["name"] for g in members]
  title = {"kinds": "kind", "layers": "layer", "tensors": "tensor"}[group]
  return _intervals(
    order, [g["loss_percent"] for g in members], [g["kl"] for g in members], title
  ).properties(title=f"loss relative to BF16, %: one {title} quantized, 95 % intervals")


def arms(budget: Mapping[str, Any], of: str = "loss_percent") -> Any:
  """ "loss_percent" or "kl" of the chosen rules and others, on the half they were not chosen on."""
  rows = budget["arms"]
  names = [f"{a['arm']} ({100 * a['bf16_flops']:.0f} % BF16)" for a in rows]
  values, kls = ([a["report"][key] for a in rows] for key in (of, "kl"))
  what = {"loss_percent": "loss relative to BF16, %", "kl": "KL from BF16, nats per token"}[of]
  title = f"{budget['budget']}: {what}, on the other half"
  return _intervals(names, values, kls, None, "~g" if of == "kl" else "+.2f").properties(
    title=title
  )


def _intervals(names: Sequence[str], losses, kls, title: str | None, digits="+.2f") -> Any:
  mean, low, high = zip(*losses)
  data = charts.rows(name=names, mean=mean, low=low, high=high, kl=[k[0] for k in kls])
  base = alt.Chart(data).encode(y=alt.Y("name:N", sort=list(names), title=title))
  tooltip = [alt.Tooltip(f"{n}:Q", format="+.4f") for n in ("mean", "low", "high")]
  x = alt.X("low:Q", title=None, axis=alt.Axis(format=digits))
  rule = base.mark_rule(strokeWidth=1.5, color=palette.TENSORS["x"]).encode(x=x, x2="high:Q")
  point = base.mark_point(filled=True, size=45, color=palette.TENSORS["x"]).encode(
    x="mean:Q", tooltip=["name:N", *tooltip, alt.Tooltip("kl:Q", format=".3e")]
  )
  zero = alt.Chart(charts.rows(zero=[0])).mark_rule(color="#888888").encode(x="zero:Q")
  return alt.layer(zero, rule, point).properties(width=_WIDTH, height=max(14 * len(names), 60))


def agreement(result: Result) -> Any | None:
  """Estimated against measured KL: sites alone, and sums over the members of groups."""
  by_site = {s["name"]: s["estimated"]["both"]["kl"][0] for s in result["sites"]}
  rows = [
    ("site", s["name"], by_site[s["name"]], s["measured"]["kl"][0])
    for s in result["sites"] if s["measured"]
  ]  # fmt: skip
  keys = {"kinds": "kind", "layers": "layer"}
  for g in result["groups"]:
    if key := keys.get(g["group"]):
      total = sum(by_site[s["name"]] for s in result["sites"] if str(s[key]) == g["name"])
      rows.append((key, f"{key} {g['name']}", total, g["kl"][0]))
  rows = [row for row in rows if row[2] > 0 and row[3] > 0]
  if not rows:
    return None
  what, name, estimated, measured = zip(*rows)
  ends = [min(*estimated, *measured), max(*estimated, *measured)]
  scale = alt.Scale(type="log", domain=ends)
  axis: dict[str, Any] = dict(scale=scale, axis=alt.Axis(format=".0e", tickCount=5))
  points = (
    alt.Chart(charts.rows(what=what, name=name, estimated=estimated, measured=measured))
    .mark_point(size=30)
    .encode(
      x=alt.X("estimated:Q", title="estimated", **axis),
      y=alt.Y("measured:Q", title="measured", **axis),
      color=alt.Color("what:N", title=None, scale=alt.Scale(scheme="tableau10")),
      tooltip=["name:N", "estimated:Q", "measured:Q"],
    )
  )
  line = alt.Chart(charts.rows(estimated=ends, measured=ends)).mark_line(
    color="#888888", strokeWidth=1
  )
  return alt.layer(line.encode(x="estimated:Q", y="measured:Q"), points).properties(
    title="KL from BF16, nats per token", width=240, height=240
  )
