"""One page: every figure beside its prediction. Predictions are read from experiments/LOG.md."""

import collections
import dataclasses
import re
from typing import Any

from gpu_check import plan, records

LOG = records.ROOT / "experiments" / "LOG.md"
TITLE = "*prediction* Every kernel on an H200"  # of the first section, and how later ones begin
COLUMNS = ["figure", "field", "predicted", "low", "high", "unit"]
# Lines that are divided by the copy's bandwidth.
OF_A_COPY = ("quantize/", "prologue/", "adam/")
# Shown of each line; other values are in results.jsonl.
FIELDS = ("tb_per_s", "share_of_copy", "tflops", "share_of_bf16", "ms", "spread_ms", "how",
          "x_bf16", "x_copied", "operands_ms", "busy_ms", "launches", "lattice_wrong",
          "norm_error", "sum_error", "error",
          "setmaxnreg", "registers", "spilled_bytes", "works",
          "held_out", "held_out_bf16", "step_ms", "tokens_per_second", "mfu", "memory_gib",
          "fp8_share", "seconds_to_step_1", "steps")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Prediction:
  """A row of the table in LOG.md: what a field of a line was expected to be."""

  line: str
  field: str
  predicted: float
  low: float
  high: float
  unit: str

  def verdict(self, measured: float) -> str:
    if measured < self.low:
      return "below"
    return "above" if measured > self.high else "within"


def predictions(text: str | None = None) -> list[Prediction]:
  """The tables of the sections of LOG.md that TITLE begins. Of two rows of one field the newer, by
  the section, counts; the older stays in the notebook.

  Raises:
    ValueError: the sections, a table or a number is missing.
  """
  text = LOG.read_text() if text is None else text
  sections = text.split("\n## ")[1:]  # the table of contents names TITLE before them
  found: dict[tuple[str, str], Prediction] = {}
  for section in (s for s in reversed(sections) if TITLE in s.partition("\n")[0]):
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in section.splitlines() if line.startswith("|")]  # fmt: skip
    if not rows or rows[0] != COLUMNS:
      raise ValueError(f"a section {TITLE!r} of {LOG} has no table of columns {COLUMNS}")
    found |= {(r[0], r[1]): Prediction(r[0], r[1], *map(float, r[2:5]), r[5]) for r in rows[2:]}
  if not found:
    raise ValueError(f"{LOG} has no section {TITLE!r} with a table of columns {COLUMNS}")
  return list(found.values())


def derived(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """Line -> values, with ratios between lines: share_of_copy, share_of_bf16, x_bf16, x_copied."""
  values = {name: dict(r["values"]) for name, r in found.items() if r.get("status") == "ok"}
  copies = [v["tb_per_s"] for name in ("copy", "memcpy") if (v := values.get(f"ceiling/{name}"))]
  copy = max(copies, default=None)  # the faster is the ceiling
  bf16 = values.get("ceiling/bf16", {}).get("tflops")
  for name, v in values.items():
    if copy and name.startswith(OF_A_COPY):
      v["share_of_copy"] = v["tb_per_s"] / copy
    if bf16 and "tflops" in v and name.startswith(("gemm/", "rival/")):
      v["share_of_bf16"] = v["tflops"] / bf16
    if name.startswith("layer/") and "layer/bf16" in values:
      v["x_bf16"] = values["layer/bf16"]["ms"] / v["ms"]
    if name.startswith("train/"):  # of as many tokens
      is_micro = name.endswith(("_micro", "_once"))
      if base := values.get("train/7b/bf16" + "_micro" * is_micro):
        v["x_bf16"] = base["step_ms"] / v["step_ms"]
    if name.startswith("stack/") and (copied := values.get(f"{name.rpartition('/')[0]}/copied")):
      v["x_copied"] = copied["ms"] / v["ms"]
  return values


def summary(families: list[plan.Family], found: dict[str, dict[str, Any]]) -> str:
  """ "97 ok, 1 wrong, 3 not run"."""
  names = [name for f in families for name in f.lines]
  counts = collections.Counter(found.get(n, {}).get("status", "not run") for n in names)
  return ", ".join(f"{n} {_said(s)}" for s, n in counts.most_common())


def _said(status: str) -> str:
  return {"begun": "ended their process"}.get(status, status)


def page(families: list[plan.Family], found: dict[str, dict[str, Any]], key: dict[str, Any]) -> str:
  """Markdown: provenance, figures beside predictions, what is wrong or missing, all lines."""
  values = derived(found)
  parts = [f"# GPU check: {key['device']}", ""]
  if key["dry"]:
    parts += ["**Dry run on a CPU: kernels are interpreted, shapes tiny, times mean nothing.**", ""]
  parts += [f"commit {key['commit']}, sources {key['sources']}, jax {key['jax']}; "
            f"{summary(families, found)}.", ""]  # fmt: skip
  names = {name for f in families for name in f.lines}
  parts += _against_predictions(values, names, key["dry"])
  parts += _missing(families, found)
  if machine := values.get("environment/versions"):
    parts += ["## machine", "", *(f"- {k}: {_flat(v)}" for k, v in machine.items()), ""]
  for stage in plan.STAGES:
    lines = [name for f in families if f.stage == stage for name in f.lines if name in values]
    parts += _table(stage, {name: values[name] for name in lines}) if lines else []
  return "\n".join(parts) + "\n"


def _against_predictions(values, names, is_dry: bool) -> list[str]:
  rows = ["## Against the predictions of experiments/LOG.md", "",
          "| figure | field | measured | predicted | range | unit | verdict |",
          "|---|---|---|---|---|---|---|"]  # fmt: skip
  for p in predictions():
    if p.line not in names:
      continue
    measured = values.get(p.line, {}).get(p.field)
    shown = "not measured" if measured is None else _show(measured)
    verdict = "" if measured is None else "dry" if is_dry else p.verdict(measured)
    cells = (
      p.line,
      p.field,
      shown,
      f"{p.predicted:g}",
      f"{p.low:g} to {p.high:g}",
      p.unit,
      verdict,
    )
    rows.append(f"| {' | '.join(cells)} |")
  return [*rows, ""]


def _missing(families, found) -> list[str]:
  """Lines without a figure, each with the reason."""
  rows = []
  for family in families:
    for name in family.lines:
      record = found.get(name, {"status": "not run", "why": "time did not reach it"})
      why = record.get("why", f"its process ended in this line: {family.name}.log")
      if record["status"] != "ok":
        rows.append(f"| {name} | {_said(record['status'])} | {re.sub(r'[|\n]', ' ', why)} |")
  if not rows:
    return ["Every line was measured.", ""]
  return ["## Wrong, failed, absent or not run", "", "| line | status | reason |", "|---|---|---|",
          *rows, ""]  # fmt: skip


def _table(stage: str, lines: dict[str, dict[str, Any]]) -> list[str]:
  fields = [f for f in FIELDS if any(f in v for v in lines.values())]
  rows = [f"## {stage}", "", f"| line | {' | '.join(fields)} |", "|---" * (len(fields) + 1) + "|"]
  rows += [f"| {name} | {' | '.join(_show(v.get(f, '')) for f in fields)} |"
           for name, v in lines.items()]  # fmt: skip
  return [*rows, ""]


def _flat(value) -> str:
  if isinstance(value, dict):
    return ", ".join(f"{k} {v}" for k, v in value.items())
  return str(value)


def _show(value) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)
