"""Held-out loss and tasks of a checkpoint or a Hugging Face folder."""

from fp8jax.errors import UserError
from fp8jax.evaluation.settings import Tasks
from fp8jax.jobs import evaluate_tasks
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run import start
from fp8jax.run.restore import load_weights
from fp8jax.step import train_spec


def run(spec: train_spec.TrainSpec, workdir: str):
  """Held-out loss (eval.tokens) and verifiable answers (eval.tasks) of a model.

  Raises:
    UserError: neither is asked for, or the checkpoint is another run's.
  """
  if not spec.eval.tokens and not spec.of(Tasks).tasks:
    raise UserError("eval.tokens=0 without eval.tasks leaves nothing to evaluate; set one of them")
  result = {"device": start.device_line(spec)}
  if spec.eval.tokens:
    result |= _heldout(spec, workdir)
  if spec.of(Tasks).tasks:
    result |= evaluate_tasks.run(spec, workdir)
  return result


def _heldout(spec: train_spec.TrainSpec, workdir: str):
  loaded = load_weights(spec, workdir)
  evaluator = evaluator_lib.Evaluator(loaded.spec)
  heldout = evaluator.run(loaded.params, loaded.states, loaded.phase)
  return {**loaded.where, "heldout": heldout, "documents_passed_over": evaluator.passed_over}
