"""Evaluation in training: held-out losses, and eval.tasks where policies decide by the answers."""

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from fp8jax.errors import ConfigErrors
from fp8jax.evaluation import catalog, store
from fp8jax.evaluation import run as run_lib
from fp8jax.evaluation.settings import Tasks
from fp8jax.evaluation.tasks import Task
from fp8jax.generation import api
from fp8jax.generation.completion import ERROR
from fp8jax.generation.settings import Generate
from fp8jax.generation.stoppable import AskedToStop, Stoppable
from fp8jax.jobs import evaluate_tasks, resume, run_state
from fp8jax.jobs import generator as generator_lib
from fp8jax.models.config import ComputeConfig
from fp8jax.phases import policy
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.step import train_spec
from fp8jax.step.state import State


class TaskAccuracy:
  """The tasks of a run that are asked at its evaluations: where its policies decide by them, or its
  job asks. A resumed run must have the same identity again, {"eval.tasks": the tasks by content}.
  """

  def __init__(
    self, spec: train_spec.TrainSpec, workdir: str, say: Callable[[str], None], asks: bool = False
  ):  # fmt: skip
    """
    Raises:
      UserError, FileNotFoundError: a task cannot be read, or a metric names none of them.
    """
    self._workdir, self._say, self.identity = workdir, say, {}
    self._tasks: tuple[Task, ...] = ()
    self._generator: api.Generator | None = None
    self._run: ComputeConfig | None = None
    policies = spec.precision.policy
    if not policy.asks_tasks(policies) and not (asks and spec.of(Tasks).tasks):
      return
    self._tasks, problems = catalog.load(spec.of(Tasks)), ConfigErrors()
    catalog.check_packages(self._tasks)
    metrics = {policy.ACCURACY, *(f"{policy.ACCURACY}/{task.name}" for task in self._tasks)}
    for one in policies:
      if policy.is_accuracy(one.metric):
        name = f"precision.policy: {policy.name_of(one)}: metric"
        problems.one_of(name, one.metric, tuple(sorted(metrics)))
    self._ask = evaluate_tasks.asker(
      spec, spec.data.tokenizer, any(task.chat for task in self._tasks)
    )
    problems.extend(self._too_long(spec))
    problems.refuse()
    prints = (f"{task.name} {task.fingerprint[:16]}" for task in self._tasks)
    self.identity = {"eval.tasks": ", ".join(prints)}

  def __bool__(self) -> bool:
    return bool(self._tasks)

  def _too_long(self, spec: train_spec.TrainSpec) -> list[str]:
    """The first prompt of every task that leaves no room for an answer, in words."""
    room = spec.of(Generate).max_length or spec.model.max_positions
    texts = []
    for task in self._tasks:
      sizes = ((item.name, len(self._ask(task, item)[1])) for item in task.items)
      if long := next((pair for pair in sizes if pair[1] >= room), None):
        texts.append(f"eval.tasks: {task.name}, {long[0]} has {long[1]} tokens and "
                     f"generate.max_length leaves {room} for it and the answer; raise it, or leave "
                     "the question out")  # fmt: skip
    return texts

  def run(
    self, spec: train_spec.TrainSpec, params, scaling_states: Mapping[str, Any], phase: int,
    step: int, stop: Callable[[], bool],
  ) -> dict[str, float] | None:  # fmt: skip
    """Asks every task, all of its questions, in the first forward pass of eval.precisions.

    Nothing of an earlier evaluation of the step is used again: after a roll-back its parameters are
    others. Prompts, outputs and verdicts go to WORKDIR/evaluation/training_step_N. `stop` is asked
    at every piece of text whether to leave.

    Returns:
      {"accuracy/TASK": share of right answers, ..., "accuracy": their mean}; {} without tasks, None
      if stopped.
    """
    if not self._tasks:
      return {}
    label, recipe = next(iter(evaluator_lib.precisions(spec, phase).items()))
    sites = evaluator_lib.sites_of(spec, recipe, scaling_states, phase)
    run = evaluator_lib.run_of(spec, recipe, sites)
    if self._generator is None or run != self._run:
      self._run = run  # invariant as soon as no scale is chosen from a batch
      self._generator = generator_lib.make(spec, self._workdir, params, sites, run)
    else:
      self._generator.take(params, sites)
    precision = label if label == evaluator_lib.BF16 else evaluator_lib.RECIPE
    rules = spec.precision.phases[phase].rules
    settings = {"step": step, **evaluate_tasks.how_asked(spec, precision, rules)}
    try:
      return self._answered(spec, Stoppable(self._generator, stop), settings, label)
    except AskedToStop:
      return None
    finally:
      self._generator.release()

  def _answered(self, spec, generator: Stoppable, settings, label: str):
    step, own, shares = settings["step"], spec.of(Tasks), {}
    folder = os.path.join(self._workdir, store.FOLDER, f"training_step_{step}")
    shutil.rmtree(folder, ignore_errors=True)
    for task in self._tasks:
      asked = {**settings, "chat": own.chat or task.chat}
      done = run_lib.evaluate(task, generator, self._ask, folder, asked, own.seed, lambda _: None)
      shares[f"{policy.ACCURACY}/{task.name}"] = share = float(done.scores_IJ.mean())
      bad = done.summary["finish_reasons"].get(ERROR, 0)
      noted = f", {bad} outputs ended at logits that are not finite" if bad else ""
      size = f"{len(task.items)} x {task.protocol.samples}"
      self._say(f"step {step}  accuracy on {task.name}, {label}: {share:.4f} of {size}{noted}")
    return {**shares, policy.ACCURACY: sum(shares.values()) / len(shares)}


class RunEvaluation:
  """Evaluates a run, writes the results down, and lets policies decide by them."""

  def __init__(self, tasks: TaskAccuracy, now: run_state.RunState, saver: resume.Saver, reports):
    self._tasks, self._now, self._saver, self._reports = tasks, now, saver, reports
    self._evaluator = now.evaluator()

  def run(self, state: State, step: int) -> bool:
    """Whether the evaluation of this step is there, made now or before; True where there are none.

    A run that is asked to stop meanwhile leaves it unmade. The resumed run makes it.
    """
    now, done, reports = self._now, self._saver.evaluations, self._reports
    if str(step) in done or not (now.spec.eval.tokens or self._tasks):
      return True
    phase, scaling_states = now.spec.phase(max(step - 1, 0)), state.scaling_states
    if not step and (known := now.of_table(step, phase)) is not None:
      scaling_states = known
    self._evaluator.spec, stop = now.spec, lambda: now.requested(step)
    with reports.clock.on("evaluation"):
      results, is_text = {}, bool(now.spec.eval.tokens)
      if is_text:
        results = self._evaluator.run(state.params, scaling_states, phase, stop)
      asked = (now.spec, state.params, scaling_states, phase, step, stop)
      right = self._tasks.run(*asked) if results or not is_text else None
    if right is None:
      return False
    done[str(step)] = results
    reports.log.write(step, evaluator_lib.flat(results) | right)
    for line in self._evaluator.lines(step, results):
      reports.out.print(line)
    if step < now.spec.steps:  # nothing is left to decide after the last one
      with reports.steering(now):
        values = (evaluator_lib.metrics(results) if results else {}) | right
        now.undo = now.policies.evaluated(step, values, self._saver.checkpoints)
    return True
