"""The description that a run leaves at its start, and its summary at the end."""

from typing import Any

from fp8jax.run import evaluator, fp8_share, goodput
from fp8jax.run import provenance as provenance_lib
from fp8jax.step.run_spec import RunSpec


def describe(
  plan: RunSpec, workdir: str, start: int, changes: dict[str, Any], fingerprint: str,
  site_rows: list[dict[str, Any]], **more: Any,
):  # fmt: skip
  """Writes config.json, sites.json and provenance.json, once nothing can refuse the run any more.

  Args:
    start: the step that it goes on from.
    changes: identity.diff of its configuration and configs/base.py's.
    fingerprint: of the data.
    site_rows: startup.all_site_rows.
    more: for provenance.json.
  """
  flat, changed = dict(plan.flat), {k: new for k, (_, new) in changes.items()}
  provenance = provenance_lib.provenance(flat, fingerprint, plan.seed, plan.num_devices)
  provenance |= provenance_lib.history(workdir, start, flat) | more
  for name, value in (
    ("config.json", {"resolved": flat, "changed": changed}),
    ("sites.json", site_rows),
    ("provenance.json", provenance),
  ):
    provenance_lib.write_json(workdir, name, value)


def write(
  plan: RunSpec, workdir: str, step: int, train_loss: float | None, skipped: int,
  documents: dict[str, int], evaluations: dict[str, Any], seconds: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
  """Writes and returns summary.json after `step` steps.

  Args:
    documents: numbers of those passed over, by reason.
    evaluations: {step: Evaluator.run's}; none with eval.tokens=0.
    seconds: goodput.Clock's; of trials at once (sweeps/stacked.py) those of their group.
  """
  last = evaluations.get(str(step))
  summary = {
    "step": step,
    "tokens": step * plan.tokens_per_step,
    "train_loss": train_loss,
    "skipped_updates": skipped,
    "documents_passed_over": documents,
    **fp8_share.of_run(plan, step),
    "evaluations": evaluations,
    "objective": evaluator.objective(last) if last else None,
    **goodput.as_summary(seconds),
  }
  provenance_lib.write_json(workdir, "summary.json", summary)
  return summary
