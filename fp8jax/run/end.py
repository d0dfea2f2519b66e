"""The end of a run: its summary, and the closing messages."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import rich.console

from fp8jax import console as console_lib
from fp8jax.data import loader
from fp8jax.run import evaluator, fp8_share, goodput, metrics_writer
from fp8jax.run import provenance as provenance_lib
from fp8jax.step.state import State
from fp8jax.step.train_spec import TrainSpec


def summarise(
  spec: TrainSpec, workdir: str, step: int, train_loss: float | None, state: State,
  counts: loader.DocumentCounts, evaluations: dict[str, Any], seconds: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
  """Writes and returns summary.json after `step` steps.

  Args:
    counts: of documents; all processes ask for them.
    evaluations: {step: Evaluator.run's}; none with eval.tokens=0.
    seconds: goodput.Clock's; of trials at once (sweeps/stacked.py) those of their group.
  """
  last, accuracies = evaluations.get(str(step)), metrics_writer.accuracies(workdir)
  summary = {
    "step": step,
    "steps": spec.steps,
    "tokens": step * spec.tokens_per_step,
    "train_loss": train_loss,
    "skipped_updates": int(jax.device_get(state.skipped)),
    "documents_passed_over": counts.summary_everywhere(),
    **fp8_share.of_run(spec, step),
    "evaluations": evaluations,
    **({"accuracies": accuracies} if accuracies else {}),
    "objective": evaluator.objective(last) if last else None,
    **goodput.as_summary(seconds),
  }
  provenance_lib.write_json(workdir, "summary.json", summary)
  return summary


def print_end(out: rich.console.Console, summary: dict[str, Any], workdir: str):
  """The closing table: tokens, training loss, held-out loss before and after in every precision."""
  evaluations = summary["evaluations"]
  steps = sorted(evaluations, key=int)
  first, last = (evaluations[steps[i]] if steps else {} for i in (0, -1))
  rows = []
  for source, by_precision in last.items():
    for precision, after in by_precision.items():
      before = first.get(source, {}).get(precision)
      # Another recipe, source or number of tokens since: nothing to compare with.
      if before is not None and before["tokens"] != after["tokens"]:
        before = None
      earlier = ("-", "-")
      if before is not None:
        earlier = (f"{before['loss']:.4f}", f"{after['loss'] - before['loss']:+.4f}")
      rows.append([
        f"{source}, {precision} forward", f"{after['tokens']:,.0f}", earlier[0],
        f"{after['loss']:.4f}", earlier[1], f"{math.exp(min(after['loss'], 700)):.3f}",
      ])  # fmt: skip
  train = f"{summary['train_loss']:.4f}" if summary["train_loss"] is not None else "-"
  out.print(f"{summary['step']} steps, {summary['tokens']:,} tokens seen, last train loss {train}")
  columns = ["held-out", "tokens", "loss before", "after", "change", "perplexity after"]
  if rows:
    out.print(console_lib.table("held-out loss in nats per token", columns, rows))
  if summary["documents_passed_over"]:
    out.print(f"documents passed over: {summary['documents_passed_over']}")
  if summary["skipped_updates"]:
    out.print(f"updates skipped for non-finite values: {summary['skipped_updates']}")
  out.print(goodput.line(summary["seconds"]))
  out.print(f"written to {workdir}")
