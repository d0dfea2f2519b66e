"""Held-out loss and tasks of a checkpoint or a Hugging Face folder."""

import os

from fp8jax.config import identity
from fp8jax.errors import UserError
from fp8jax.jobs import evaluate_tasks
from fp8jax.jobs.restore import as_trained, restore_params, restore_scaling_states
from fp8jax.models.hf import peft
from fp8jax.models.hf import weights as hf_weights
from fp8jax.run import (
  calibration,
  start,
)
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.step import run_spec


def run(plan: run_spec.RunSpec, workdir: str):
  """Held-out loss (eval.tokens) and verifiable answers (eval.tasks) of a model.

  Raises:
    UserError: neither is asked for, or the checkpoint is another run's.
  """
  if not plan.eval.tokens and not plan.eval.tasks:
    raise UserError("eval.tokens=0 without eval.tasks leaves nothing to evaluate; set one of them")
  found = {"device": start.device_line(plan)}
  if plan.eval.tokens:
    found |= _heldout(plan, workdir)
  if plan.eval.tasks:
    found |= evaluate_tasks.run(plan, workdir)
  return found


def _heldout(plan: run_spec.RunSpec, workdir: str):
  if plan.eval.hf:
    params, _ = hf_weights.load_params(plan.eval.hf, plan.model, plan.run.layout)
    params = peft.added(params, plan.init.adapters, plan.model, plan.run.layout)
    path = os.path.expanduser(plan.calibration)
    scaling_states = calibration.load(plan, path)[0] if path else {}
    phase, where = 0, {"hf": plan.eval.hf}
  else:
    params, step, meta = restore_params(plan, workdir)
    table, trained = (
      x.get("precision.calibration") for x in (identity.identity(plan), meta["config"])
    )
    if table and table != trained:
      raise UserError(
        f"precision.calibration={plan.calibration!r} is not the table that the "
        f"checkpoint of step {step} was trained with, and evaluation takes the scales of the "
        "checkpoint; set precision.calibration=''"
      )
    plan = as_trained(plan, meta)
    phase, where = plan.phase(max(step - 1, 0)), {"workdir": workdir, "step": step}
    scaling_states = restore_scaling_states(plan, workdir, step, meta, phase)
  evaluator = evaluator_lib.Evaluator(plan)
  heldout = evaluator.run(params, scaling_states, phase)
  counted = {"heldout": heldout, "documents_passed_over": evaluator.passed_over}
  return {**where, **counted}
