"""Files of a comparison: compare.html, .json, .svg and .png, intervals.svg and .png; its tables."""

import dataclasses
import json
import math
import os
from typing import Any

from fp8jax import records
from fp8jax.report import charts, compare_charts, page
from fp8jax.report.compare import Comparison, EqualLoss, Row
from fp8jax.report.page import Section
from fp8jax.statistics import BAR, CONFIDENCE

_QUANTITIES = (
  "training: loss of the recipe's forward pass, mean of the differences after the warm-up. "
  "served: held out, the recipe's forward pass against the baseline's BF16 forward pass. "
  "rounding: held out, the recipe's forward pass against the BF16 forward pass of the same "
  "weights. weights: held out, the BF16 forward pass of both runs."
)


def write(c: Comparison, folder: str) -> str:
  """Writes the files of a comparison into a folder; returns the path of compare.html."""
  records.make_folder(folder, "--workdir")
  with charts.unchecked():
    drawn = charts.specs(**compare_charts.drawn(c))
  path = os.path.join(folder, "compare.html")
  title = f"comparison with {c.baseline}: {len(c.members)} runs"
  page.write(path, page.render(title, _sections(c, drawn), page.vega()))
  page.write(os.path.join(folder, "compare.json"), records.to_json(as_json(c)) + "\n")
  page.pictures(os.path.join(folder, "compare"), drawn.get("rates") or next(iter(drawn.values())))
  if "intervals" in drawn:
    page.pictures(os.path.join(folder, "intervals"), drawn["intervals"])
  return path


def as_json(c: Comparison) -> dict[str, Any]:
  """The tables, for other programs."""
  return {
    "baseline": c.baseline,
    "bar_percent": BAR,
    "confidence": CONFIDENCE,
    "runs": [
      {"workdir": m.run.workdir, "arm": m.arm, "setting": m.setting, "seed": m.seed,
       "step": m.run.step, "final_loss": m.final_loss} for m in c.members
    ],
    "differences": [
      {"arm": r.arm, "setting": r.setting, "quantity": r.quantity, "verdict": r.estimate.verdict,
       **dataclasses.asdict(r.estimate),
       "together": {"low": r.together.low, "high": r.together.high, "verdict": r.together.verdict}}
      for r in c.rows
    ],
    "equal_loss": [dataclasses.asdict(e) for e in c.equal_loss],
    "config": c.config,
    "notes": list(c.notes),
  }  # fmt: skip


def _sections(c: Comparison, drawn: dict[str, Any]) -> list[Section]:
  window = max((d.window for d in c.differences), default=0)
  note = f"Running means of {window} steps. {_QUANTITIES} Colours are arms, here and in reports."
  tables = [(COLUMNS, [cells(r) for r in c.rows])]
  costs = [(COST_COLUMNS, [_cost_cells(e) for e in c.equal_loss])]
  cost_note = (
    "Until the running mean reaches that of the baseline at the last step of both, as multiples "
    "of the baseline's own; seconds are those of steps, without compilation and evaluation."
  )
  runs = [
    (m.run.name, m.arm, m.setting, m.seed, m.run.step, f"{m.final_loss:.4f}", m.run.device_line)
    for m in c.members
  ]
  names = {m.run.workdir: m.run.name for m in c.members}
  config = [
    (key, *(json.dumps(values.get(workdir)) for workdir in names))
    for key, values in c.config.items()
  ]
  columns = ("run", "arm", "setting", "seed", "step", "final loss", "devices")
  return [
    Section("Differences", note, drawn, tables),
    Section("Cost of equal loss", cost_note, tables=costs),
    Section("Runs", "; ".join(c.notes), tables=[(columns, runs)]),
    Section("Configurations, where they differ", tables=[(("key", *names.values()), config)]),
  ]


COLUMNS = ("arm", "setting", "quantity", "by seed, %", "mean, 95 % interval", f"bar {BAR} %",
           "95 % of all intervals together", f"bar {BAR} %")  # fmt: skip
COST_COLUMNS = ("arm", "setting", "target loss", "tokens", "seconds", "seeds that reach it")


def cells(row: Row) -> tuple[str, ...]:
  """A row of the table as text."""
  e = row.estimate
  has_width = math.isfinite(e.low)
  shown = f"{e.mean:+.3f} ± {e.high - e.mean:.3f}" if has_width else f"{e.mean:+.3f}, no interval"
  by_seed = ", ".join(f"{v:+.3f}" for v in e.by_seed)
  together = f"± {row.together.high - e.mean:.3f}" if has_width else "no interval"
  verdicts = e.verdict, together, row.together.verdict
  return row.arm, row.setting, row.quantity, by_seed, shown, *verdicts


def _cost_cells(e: EqualLoss) -> tuple[str, ...]:
  def times(x: float | None) -> str:
    return "never" if not e.reached else "not logged" if x is None else f"× {x:.3f}"

  reached = f"{e.reached} of {e.seeds}"
  return e.arm, e.setting, f"{e.target:.4f}", times(e.tokens), times(e.seconds), reached


def text(c: Comparison) -> str:
  """The tables as Markdown, which the job prints."""
  parts = []
  for columns, rows in (
    (COLUMNS, [cells(r) for r in c.rows]),
    (COST_COLUMNS, [_cost_cells(e) for e in c.equal_loss]),
  ):
    lines = [columns, ("---",) * len(columns), *(map(_cell, row) for row in rows)]
    parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
  return "\n\n".join([*parts, *map(page.visible, c.notes)])


def _cell(text: str) -> str:
  """A cell of a Markdown table, which neither a bar nor a line break ends."""
  return page.visible(" ".join(text.splitlines())).replace("\\", "\\\\").replace("|", "\\|")
