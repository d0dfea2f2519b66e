"""Held-out loss and tasks of a checkpoint or a Hugging Face folder."""

from fp8jax.errors import UserError
from fp8jax.evaluation.settings import Tasks
from fp8jax.jobs import evaluate_tasks
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run import start
from fp8jax.run.restore import load_weights
from fp8jax.step import run_spec


def run(plan: run_spec.RunSpec, workdir: str):
  """Held-out loss (eval.tokens) and verifiable answers (eval.tasks) of a model.

  Raises:
    UserError: neither is asked for, or the checkpoint is another run's.
  """
  if not plan.eval.tokens and not plan.of(Tasks).tasks:
    raise UserError("eval.tokens=0 without eval.tasks leaves nothing to evaluate; set one of them")
  found = {"device": start.device_line(plan)}
  if plan.eval.tokens:
    found |= _heldout(plan, workdir)
  if plan.of(Tasks).tasks:
    found |= evaluate_tasks.run(plan, workdir)
  return found


def _heldout(plan: run_spec.RunSpec, workdir: str):
  loaded = load_weights(plan, workdir)
  evaluator = evaluator_lib.Evaluator(loaded.spec)
  heldout = evaluator.run(loaded.params, loaded.states, loaded.phase)
  return {**loaded.where, "heldout": heldout, "documents_passed_over": evaluator.passed_over}
