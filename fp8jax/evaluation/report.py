"""Tables of evaluations, as rows of text."""

from collections.abc import Mapping
from typing import Any

from fp8jax.evaluation.run import Evaluated
from fp8jax.statistics import Comparison

COLUMNS = ["task", "items x n", "avg@n, % [95 %]", "pass@n, % [95 %]", "tokens", "cut", "seconds"]
COMPARED = ["task", "difference, points [95 %]", "margin", "seeds x items", "verdict"]


def rows(evaluated: list[Evaluated]) -> list[list[str]]:
  """Rows of COLUMNS; "cut" is the share of outputs that reached their longest length."""
  cells = []
  for one in evaluated:
    s = one.summary
    outputs = sum(s["finish_reasons"].values())
    cut = s["finish_reasons"].get("length", 0) / outputs
    passed = percent(s["pass"][str(s["samples"])]) if s["samples"] > 1 else ""
    cells.append([
      one.task.name, f"{s['items']} x {s['samples']}", percent(s["avg"]), passed,
      f"{s['mean_tokens']:.0f}", f"{cut:.0%}", f"{s['seconds']:.0f}",
    ])  # fmt: skip
  return cells


def compared_rows(comparisons: Mapping[str, Comparison]) -> list[list[str]]:
  """Rows of COMPARED."""
  return [
    [name, points(c), f"-{c.margin:g}", f"{c.seeds} x {c.items}", c.sentence]
    for name, c in comparisons.items()
  ]


def percent(interval: Mapping[str, Any]) -> str:
  """ "41.5 [34.9, 48.4]"."""
  estimate, low, high = (100 * interval[k] for k in ("estimate", "low", "high"))
  return f"{estimate:.1f} [{low:.1f}, {high:.1f}]"


def points(c: Comparison) -> str:
  """ "+0.3 [-1.2, +1.9]"."""
  return f"{c.difference:+.1f} [{c.low:+.1f}, {c.high:+.1f}]"
