"""Charts of a comparison of runs, as Vega-Lite specifications."""

import math
from collections.abc import Callable
from typing import Any

import altair as alt
import numpy as np

from fp8jax.report import charts, thin
from fp8jax.report.compare import Comparison, Member
from fp8jax.run import palette
from fp8jax.statistics import BAR

_WIDTH, _HEIGHT = 520, 260
RATE = "optim.peak_lr"


def _color(c: Comparison) -> alt.Color:
  colors = palette.of_arms([m.arm for m in c.members])
  scale = alt.Scale(domain=list(colors), range=list(colors.values()))
  return alt.Color("arm:N", title="arm", scale=scale, legend=alt.Legend(symbolOpacity=1))


def _has_settings(c: Comparison) -> bool:
  return len({m.setting for m in c.members}) > 1


def differences(c: Comparison) -> Any | None:
  """Paired difference of the training loss over tokens, with the band of the seeds."""
  if not c.differences:
    return None
  columns: dict[str, list[Any]] = {k: [] for k in ("tokens", "arm", "setting", "mean", "low",
                                                   "high", "seeds")}  # fmt: skip
  for d in c.differences:
    size = max(1, math.ceil(len(d.tokens) / thin.MAX_POINTS))
    for i in range(size - 1, len(d.tokens), size):
      row = (d.tokens[i], d.arm, d.setting, d.mean[i], d.low[i], d.high[i], d.seeds)
      for column, value in zip(columns.values(), row):
        column.append(value)
  base = alt.Chart(charts.rows(**columns)).encode(
    x=alt.X("tokens:Q", title="tokens seen", axis=alt.Axis(format="~s")), color=_color(c)
  )
  dash = alt.StrokeDash("setting:N", title="setting") if _has_settings(c) else alt.Undefined
  y = alt.Y("mean:Q", title=f"% of {c.baseline}'s loss")
  band = base.mark_area(opacity=0.2).encode(
    y=alt.Y("low:Q"), y2="high:Q", detail="setting:N", color=_color(c)
  )
  line = base.mark_line(strokeWidth=1.6).encode(
    y=y, strokeDash=dash, detail="setting:N",
    tooltip=["arm:N", "setting:N", "tokens:Q", "mean:Q", "low:Q", "high:Q", "seeds:Q"],
  )  # fmt: skip
  bar = alt.Chart(charts.rows(low=[-BAR], high=[BAR])).mark_rect(opacity=0.12, color="gray")
  title = f"training loss relative to {c.baseline} with the same seed: mean and range of the seeds"
  return alt.layer(bar.encode(y="low:Q", y2="high:Q"), _zero("y"), band, line).properties(
    title=title, width=_WIDTH, height=_HEIGHT
  )


def _zero(axis: str) -> alt.Chart:
  """The baseline."""
  rule = alt.Chart(charts.rows(zero=[0])).mark_rule(strokeWidth=1.2)
  return rule.encode(y="zero:Q") if axis == "y" else rule.encode(x="zero:Q")


def intervals(c: Comparison) -> Any | None:
  """Every quantity of every arm: the mean, its interval, every seed, and the bar."""
  rows = [r for r in c.rows if math.isfinite(r.estimate.mean)]
  if not rows:
    return None
  names = [f"{r.quantity}{', ' * bool(r.setting)}{r.setting}" for r in rows]
  has_width = [math.isfinite(r.estimate.low) for r in rows]
  data = charts.rows(
    arm=[r.arm for r in rows],
    quantity=names,
    mean=[r.estimate.mean for r in rows],
    low=[r.estimate.low if w else r.estimate.mean for r, w in zip(rows, has_width)],
    high=[r.estimate.high if w else r.estimate.mean for r, w in zip(rows, has_width)],
    verdict=[r.estimate.verdict for r in rows],
  )
  seeds = [(r.arm, n, v) for r, n in zip(rows, names) for v in r.estimate.by_seed]
  arm, quantity, value = zip(*seeds)
  y = alt.Y(
    "quantity:N", title=None, sort=list(dict.fromkeys(names)), axis=alt.Axis(labelLimit=320)
  )
  offset = alt.YOffset("arm:N")
  base = alt.Chart(data).encode(y=y, yOffset=offset, color=_color(c))
  rule = base.mark_rule(strokeWidth=2).encode(
    x=alt.X("low:Q", title=f"% of {c.baseline}: mean, 95 % interval, seeds"), x2="high:Q"
  )
  point = base.mark_point(filled=True, size=60, opacity=1).encode(
    x="mean:Q", tooltip=["arm:N", "quantity:N", "mean:Q", "low:Q", "high:Q", "verdict:N"]
  )
  ticks = (
    alt.Chart(charts.rows(arm=arm, quantity=quantity, value=value))
    .mark_tick(thickness=1.5, size=9)
    .encode(y=y, yOffset=offset, x="value:Q", color=_color(c))
  )
  bar = alt.Chart(charts.rows(low=[-BAR], high=[BAR])).mark_rect(opacity=0.12, color="gray")
  title = f"differences to {c.baseline}; grey: the bar of {BAR} %"
  return alt.layer(bar.encode(x="low:Q", x2="high:Q"), _zero("x"), rule, ticks, point).properties(
    title=title, width=_WIDTH, height=alt.Step(14)
  )


def _apart_from_rate(c: Comparison) -> Callable[[Member], list[str]]:
  """A member's settings that its learning rate does not decide, as "steps=60"."""
  of_rate: dict[tuple[Any, str], set[str]] = {}
  for m in c.members:
    for said in m.setting.split(", "):
      of_rate.setdefault((m.run.resolved.get(RATE), said.partition("=")[0]), set()).add(said)
  free = {key for (_, key), values in of_rate.items() if len(values) > 1}
  return lambda m: [s for s in m.setting.split(", ") if s.partition("=")[0] in free]


def rates(c: Comparison) -> Any | None:
  """Final loss against the peak learning rate; None where all runs have the same."""
  others = _apart_from_rate(c)
  points = [
    (m.run.resolved.get(RATE), m.arm, ", ".join(others(m)), m.seed, m.final_loss)
    for m in c.members
    if math.isfinite(m.final_loss)
  ]
  if RATE not in c.config or not points:
    return None
  rate, arm, setting, seed, loss = zip(*points)
  table = charts.rows(rate=rate, arm=arm, setting=setting, seed=seed, loss=loss)
  base = alt.Chart(table).encode(
    detail="setting:N",  # a line each: no mean over different settings
    x=alt.X("rate:Q", scale=alt.Scale(type="log"), title="peak learning rate",
            axis=alt.Axis(format=".0e", values=sorted(set(rate)))),
    color=_color(c),
  )  # fmt: skip
  y = alt.Y("loss:Q", title="nats per token", scale=alt.Scale(zero=False))
  points_ = base.mark_point(filled=True, size=30).encode(
    y=y, tooltip=["arm:N", "setting:N", "rate:Q", "seed:Q", "loss:Q"]
  )
  mean = base.mark_line(strokeWidth=1.6).encode(
    y=alt.Y("mean(loss):Q", scale=alt.Scale(zero=False))
  )
  diverged = sum(not math.isfinite(m.final_loss) for m in c.members)
  lost = f"; {diverged} diverged, not shown" * bool(diverged)
  return alt.layer(mean, points_).properties(
    title=f"final loss by learning rate: seeds and their mean{lost}", width=_WIDTH, height=_HEIGHT
  )


def losses(c: Comparison) -> Any:
  """Smoothed training loss of every run over tokens."""
  from fp8jax.report.compare import smoothed

  columns: dict[str, list[Any]] = {k: [] for k in ("tokens", "arm", "run", "loss")}
  for m in c.members:
    steps, means = smoothed(m.run)
    size = max(1, math.ceil(len(steps) / thin.MAX_POINTS))
    for step, value in zip(steps[size - 1 :: size], means[size - 1 :: size]):
      row = (float(np.float64(step) * m.run.tokens_per_step), m.arm, m.run.name, value)
      for column, item in zip(columns.values(), row):
        column.append(item)
  return (
    alt.Chart(charts.rows(**columns))
    .mark_line(strokeWidth=1.2, opacity=0.8, invalid="break-paths-show-domains")
    .encode(
      x=alt.X("tokens:Q", title="tokens seen", axis=alt.Axis(format="~s")),
      y=alt.Y("loss:Q", title="nats per token", scale=alt.Scale(zero=False)),
      color=_color(c), detail="run:N", tooltip=["run:N", "arm:N", "tokens:Q", "loss:Q"],
    )
    .properties(title="training loss, running mean, every run", width=_WIDTH, height=_HEIGHT)
  )  # fmt: skip
