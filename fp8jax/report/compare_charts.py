"""Charts of a comparison of runs, as Vega-Lite specifications."""

import math
from collections.abc import Callable
from typing import Any

import altair as alt

from fp8jax.report import charts, thin
from fp8jax.report.compare import Comparison, Member, smoothed
from fp8jax.statistics import BAR

_WIDTH, _HEIGHT = 520, 260
RATE = "optim.peak_lr"


def drawn(c: Comparison) -> dict[str, Any]:
  """{name: chart}, None where there is nothing to draw."""
  return {
    "differences": differences(c), "intervals": intervals(c), "rates": rates(c),
    "losses": losses(c),
  }  # fmt: skip


def _color(c: Comparison) -> alt.Color:
  arms = [m.arm for m in c.members]
  return charts.arm_color("arm", arms, "arm", legend=alt.Legend(symbolOpacity=1))


def _backdrop(axis: str) -> list[alt.Chart]:
  """The bar of a difference that counts, and the baseline, along "x" or "y"."""
  bar = alt.Chart(charts.rows(low=[-BAR], high=[BAR])).mark_rect(opacity=0.12, color="gray")
  zero = alt.Chart(charts.rows(zero=[0])).mark_rule(strokeWidth=1.2)
  ends = {axis: "low:Q", f"{axis}2": "high:Q"}
  return [bar.encode(**ends), zero.encode(**{axis: "zero:Q"})]


def differences(c: Comparison) -> Any | None:
  """Paired difference of the training loss over tokens, with the band of the seeds."""
  points = [
    (d.tokens[i], d.arm, d.setting, d.mean[i], d.low[i], d.high[i], d.seeds)
    for d in c.differences for i in thin.lasts(len(d.tokens))
  ]  # fmt: skip
  if not points:
    return None
  base = alt.Chart(charts.table("tokens arm setting mean low high seeds", points)).encode(
    x=alt.X("tokens:Q", title="tokens seen", axis=alt.Axis(format="~s")), color=_color(c)
  )
  has_settings = len({m.setting for m in c.members}) > 1
  dash = alt.StrokeDash("setting:N", title="setting") if has_settings else alt.Undefined
  y = alt.Y("mean:Q", title=f"% of {c.baseline}'s loss")
  band = base.mark_area(opacity=0.2).encode(
    y=alt.Y("low:Q"), y2="high:Q", detail="setting:N", color=_color(c)
  )
  line = base.mark_line(strokeWidth=1.6).encode(
    y=y, strokeDash=dash, detail="setting:N",
    tooltip=["arm:N", "setting:N", "tokens:Q", "mean:Q", "low:Q", "high:Q", "seeds:Q"],
  )  # fmt: skip
  title = f"training loss relative to {c.baseline} with the same seed: mean and range of the seeds"
  return alt.layer(*_backdrop("y"), band, line).properties(
    title=title, width=_WIDTH, height=_HEIGHT
  )


def intervals(c: Comparison) -> Any | None:
  """Every quantity of every arm: the mean, its interval, every seed, and the bar."""
  rows = [r for r in c.rows if math.isfinite(r.estimate.mean)]
  if not rows:
    return None
  names = [f"{r.quantity}{', ' * bool(r.setting)}{r.setting}" for r in rows]
  points, seeds = [], []
  for name, r in zip(names, rows):
    e = r.estimate
    ends = (e.low, e.high) if math.isfinite(e.low) else (e.mean, e.mean)
    points.append((r.arm, name, e.mean, *ends, e.verdict))
    seeds += [(r.arm, name, value) for value in e.by_seed]
  y = alt.Y(
    "quantity:N", title=None, sort=list(dict.fromkeys(names)), axis=alt.Axis(labelLimit=320)
  )
  where: dict[str, Any] = dict(y=y, yOffset=alt.YOffset("arm:N"), color=_color(c))
  base = alt.Chart(charts.table("arm quantity mean low high verdict", points)).encode(**where)
  rule = base.mark_rule(strokeWidth=2).encode(
    x=alt.X("low:Q", title=f"% of {c.baseline}: mean, 95 % interval, seeds"), x2="high:Q"
  )
  point = base.mark_point(filled=True, size=60, opacity=1).encode(
    x="mean:Q", tooltip=["arm:N", "quantity:N", "mean:Q", "low:Q", "high:Q", "verdict:N"]
  )
  ticks = alt.Chart(charts.table("arm quantity value", seeds)).mark_tick(thickness=1.5, size=9)
  title = f"differences to {c.baseline}; grey: the bar of {BAR} %"
  layers = (*_backdrop("x"), rule, ticks.encode(x="value:Q", **where), point)
  return alt.layer(*layers).properties(title=title, width=_WIDTH, height=alt.Step(14))


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
    (m.run.resolved.get(RATE, math.nan), m.arm, ", ".join(others(m)), m.seed, m.final_loss)
    for m in c.members
    if math.isfinite(m.final_loss)
  ]
  if RATE not in c.config or not points:
    return None
  base = alt.Chart(charts.table("rate arm setting seed loss", points)).encode(
    detail="setting:N",  # a line each: no mean over different settings
    x=alt.X("rate:Q", scale=alt.Scale(type="log"), title="peak learning rate",
            axis=alt.Axis(format=".0e", values=sorted({rate for rate, *_ in points}))),
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
  points = []
  for m in c.members:
    steps, means = smoothed(m.run)
    for i in thin.lasts(len(steps)):
      points.append((float(steps[i]) * m.run.tokens_per_step, m.arm, m.run.name, means[i]))
  return (
    alt.Chart(charts.table("tokens arm run loss", points))
    .mark_line(strokeWidth=1.2, opacity=0.8, invalid="break-paths-show-domains")
    .encode(
      x=alt.X("tokens:Q", title="tokens seen", axis=alt.Axis(format="~s")),
      y=alt.Y("loss:Q", title="nats per token", scale=alt.Scale(zero=False)),
      color=_color(c), detail="run:N", tooltip=["run:N", "arm:N", "tokens:Q", "loss:Q"],
    )
    .properties(title="training loss, running mean, every run", width=_WIDTH, height=_HEIGHT)
  )  # fmt: skip
