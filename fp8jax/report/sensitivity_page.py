"""The page and the pictures of --job=sensitivity."""

import os
from collections.abc import Mapping
from typing import Any

import altair as alt

from fp8jax.report import charts, page, sensitivity_charts
from fp8jax.report.page import Section


def sections(result: Mapping[str, Any]) -> list[Section]:
  """Parts of a page, its own or a run's."""
  tokens, where = result["tokens"], result["weights"]
  source = " ".join(f"{k} {v}" for k, v in where.items())
  note = (
    f"Weights: {source}. {tokens['choose']:,} held-out tokens to choose on, {tokens['report']:,} "
    "of other documents to report on. Estimates are of the first, groups and sites of both."
  )
  drawn: dict[str, Any] = {"sensitivity": sensitivity_charts.heat_map(result)}
  drawn["sensitivity_agreement"] = sensitivity_charts.agreement(result)
  for group in ("kinds", "layers", "tensors"):
    drawn[f"sensitivity_{group}"] = sensitivity_charts.groups(result, group)
  found = [Section("Sensitivity of sites", note, _specs(drawn))]
  for i, budget in enumerate(result["budgets"]):
    rows = [
      (a["arm"], f"{100 * a['bf16_flops']:.1f} %", _interval(a["report"]["loss_percent"]),
       f"{a['report']['kl'][0]:.3g}", a["runs_of_layers"])
      for a in budget["arms"]
    ]  # fmt: skip
    columns = ("rules", "FLOPs in BF16", "loss, %", "KL", "runs of layers")
    text = f"precision.rules = {tuple(map(tuple, budget['arms'][0]['rules']))}"
    charted = _specs(
      {
        f"sensitivity_budget_{i}_{of}": sensitivity_charts.arms(budget, of)
        for of in ("kl", "loss_percent")
      }
    )
    found.append(
      Section(f"Rules: {budget['budget']}", "", charted, tables=[(columns, rows)], text=text)
    )
  return found


def _interval(values) -> str:
  return f"{values[0]:+.3f} [{values[1]:+.3f}, {values[2]:+.3f}]"


def _specs(named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  with charts.unchecked():
    return {
      k: charts.spec(charts.themed(c), checked=False) for k, c in named.items() if c is not None
    }


def write(folder: str, result: Mapping[str, Any]) -> list[str]:
  """Writes sensitivity.html, .svg and .png; returns their paths."""
  stem = os.path.join(folder, "sensitivity")
  page.write(f"{stem}.html", page.render("Sensitivity", sections(result), page.vega()))
  spec = _specs({"picture": picture(result)})["picture"]
  return [f"{stem}.html", *page.pictures(stem, spec)]


def picture(result: Mapping[str, Any]) -> alt.TopLevelMixin:
  """The heat map beside the KL of rules, above the measured kinds and the loss of rules."""
  budgets = result["budgets"][:1]
  above = [sensitivity_charts.heat_map(result)]
  above += [sensitivity_charts.arms(budget, "kl") for budget in budgets]
  below = [sensitivity_charts.groups(result, "kinds")]
  below += [sensitivity_charts.arms(budget) for budget in budgets]
  rows = [
    alt.hconcat(*some) for row in (above, below) if (some := [c for c in row if c is not None])
  ]
  return alt.vconcat(*rows).resolve_scale(color="independent")
