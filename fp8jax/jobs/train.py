"""Training: the loop around the step."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import rich.console

from fp8jax import console as console_lib
from fp8jax.config import identity
from fp8jax.data import batch_sharding, loader
from fp8jax.jobs import accuracy, failure, policy_runner, resume, run_reports, run_state
from fp8jax.jobs import start as start_lib
from fp8jax.phases import decide
from fp8jax.run import calibration, metrics, preemption, start
from fp8jax.run import workdir as workdir_lib
from fp8jax.step import distillation, train_spec, train_step
from fp8jax.step.state import State


@dataclasses.dataclass(frozen=True)
class Feed:
  """The data of a run.

  Attributes:
    fingerprint: changes whenever a run would see other data.
    open: spec -> batches, as batch_sharding.TrainBatches.
    contents: {key: of what its files hold}, which a resumed run must have again.
    asks: whether eval.tasks are asked at every evaluation, also without a policy that reads them.
    is_of_sources: whether it is what data.sources names.
    loss: that gradients are of, in words; "" is that of texts.
    job: whose run it is; no other job's run goes on with it.
  """

  fingerprint: str
  open: Callable[[train_spec.TrainSpec], Any]
  contents: dict[str, str] = dataclasses.field(default_factory=dict)
  asks: bool = False
  is_of_sources: bool = False
  loss: str = ""
  job: str = "train"


def texts(spec: train_spec.TrainSpec) -> Feed:
  """The feed of `data`."""
  return Feed(
    loader.fingerprint(spec.data),
    lambda spec: batch_sharding.TrainBatches(
      spec.data, spec.run.layout, spec.microbatch, spec.grad_accum_steps
    ),
    is_of_sources=True,
  )


class NonFinite(RuntimeError):
  """The loss, the gradient or logits stopped being numbers."""


def run(
  spec: train_spec.TrainSpec, workdir: str, base: dict[str, Any] | None = None,
  disturb: Callable[[State, Any, int], tuple[State, Any]] | None = None,
  make_state: Callable[..., run_state.RunState] = run_state.RunState, feed: Feed | None = None,
) -> dict[str, Any]:  # fmt: skip
  """Trains to the configured step, or resumes and does so.

  Args:
    workdir: where checkpoints, metrics and provenance go.
    base: flat base configuration, to print what differs from it.
    disturb: a fault for drills of precision.policy: (state, host batch, number of the batch) ->
      (state, host batch), called before every step.
    make_state: of the run beside its parameters; another job's takes other steps.
    feed: another job's data; None for `texts`.

  Returns:
    The summary that is also written to WORKDIR/summary.json; of an interrupted run {"step",
    "exit_code"} (preemption.EXIT_CODES).

  Raises:
    config.ConfigError: the checkpoint in workdir belongs to another configuration.
    NonFinite: see optim.on_nonfinite.
  """
  with workdir_lib.locked(workdir):
    flat, feed = dict(spec.flat), feed or texts(spec)
    summary = workdir_lib.finished(workdir, flat, feed.fingerprint, feed.job)
    if summary is not None:
      console_lib.console().print(f"{workdir} is finished: step {summary['step']}")
      return summary
    make = functools.partial(make_state, disturb=disturb)
    return _train(spec, workdir, identity.diff(flat, base or {}), feed, make)


def _train(
  spec: train_spec.TrainSpec, workdir: str, changes: dict[str, Any], feed: Feed, make_state
) -> dict[str, Any]:
  """As `run`. Args: identity.diff of the configuration and base's."""
  out, fingerprint = console_lib.console(), feed.fingerprint
  reports = run_reports.RunReports(spec, workdir, fingerprint, out)
  os.makedirs(workdir, exist_ok=True)
  rows = start.all_site_rows(spec)
  start.print_start(out, spec, changes, fingerprint, rows)
  tasks = accuracy.TaskAccuracy(spec, workdir, out.print, feed.asks)
  path, teacher = spec.calibration, start_lib.teacher(spec, out)
  of_teacher = distillation.identity(teacher)
  loss = feed.loss or distillation.loss_of(spec, of_teacher)
  table = calibration.load(spec, os.path.expanduser(path), loss) if path else None
  refresh = functools.partial(reports.refresh, loss)
  policies = policy_runner.PolicyRunner(spec, reports.actions, refresh, teacher)
  if feed.is_of_sources and spec.data.chat is not None:
    start.print_chats(out, spec, spec.data.chat.samples_per_step)
  batches = feed.open(spec)
  now = make_state(policies, table, batches, out)
  contents = tasks.identity | of_teacher | feed.contents
  saver = resume.Saver(spec, workdir, fingerprint, now, reports.clock, contents, feed.job)
  state, first = saver.begin(out)
  if first < spec.steps:
    saver.checkpoints.check_room(state)  # now, not after hours
  evaluation = accuracy.RunEvaluation(tasks, now, saver, reports)
  reports.open(first, saver.evaluations)
  if now.spec is not spec:
    rows = start.all_site_rows(now.spec)
  of_run = {"shares": batches.shares, "job": feed.job}
  start.describe(spec, workdir, first, changes, fingerprint, rows, **of_run)
  try:
    with preemption.Interrupts() as asked:
      now.requested = asked.requested
      if not saver.evaluations and not evaluation.run(state, first):
        return _interrupted(out, asked, first, "before a step of its own, nothing to save")
      if decide.has_roll_back(spec.precision.policy) and not saver.checkpoints.steps():
        saver.save(first, state)  # to go back to
      state, first = _caught_up(now, saver, reports, evaluation, state, first)
      with reports.clock.on("step"), reports.steps(first):
        state, reached, last = _loop(now, saver, reports, evaluation, asked, state, first)
      saver.save(reached, state)
      with reports.clock.on("checkpoint"):
        saver.checkpoints.wait()
      # All is saved: the last evaluation may be left, and made by the same command.
      if reached >= spec.steps and evaluation.run(state, reached):
        return reports.end(now, reached, last, state, saver.evaluations)
      return _interrupted(out, asked, reached, f"saved step {reached}")
  finally:
    reports.log.close()
    saver.checkpoints.close()
    batches.iterator.close()


def _interrupted(
  out: rich.console.Console, asked: preemption.Interrupts, step: int, what: str
) -> dict[str, Any]:
  """The result of a run that stops because it was asked to."""
  then = f"the same command goes on from there (exit code {asked.exit_code})"
  out.print(f"interrupted: {what}; {then}")
  return {"step": step, "exit_code": asked.exit_code}


def _loop(
  now: run_state.RunState, saver: resume.Saver, reports: run_reports.RunReports,
  evaluation: accuracy.RunEvaluation, asked: preemption.Interrupts, state: Any, step: int,
):  # fmt: skip
  """(state, steps taken, metrics of the last one)."""
  spec, batches, clock = now.policies.configured, now.batches, reports.clock
  place, pending, last = now.place, None, {}

  def settle():
    """Reads the metrics of the step before: by now the next one is under way."""
    nonlocal pending, last
    if pending is not None:
      last = _settled(now, saver, reports, pending, state)
      pending = None

  while step < spec.steps and not asked.requested(step):
    if (feeds_by := now.feeds_by(step)) != "data_wait":
      settle()
    with clock.on(feeds_by):
      host, number = now.next_batch(state, step)
    if host is None:
      break
    if feeds_by != "data_wait":
      reports.speed.restart(is_next=bool(last))
    if now.spec.phase(step) != now.phase:
      settle()
      with clock.on("compile"):
        state = now.enter(state, step, place(host))
    state = now.policies.refreshed(state, lambda: place(host), step, now.phase)  # noqa: B023
    if now.disturb is not None:
      state, host = now.disturb(state, host, number)
    # Nothing may slip between host and device unasked: each such copy would stall the device.
    with jax.transfer_guard("disallow"):
      is_loud = metrics.is_due(step, spec.log.tensor_stats_every)
      with clock.on(now.kind_of_step(is_loud)), reports.profiler.step(step, state):
        state, values = now.take_step(state, place(host), is_loud)
      settle()
    step += 1
    position, read = batches.iterator.get_state(), batches.metrics()
    if passed_over := number + 1 - step:
      read = {**read, "batches_skipped": passed_over}
    pending = run_reports.Taken(step, values, host, position, read, clock.waited)
    if now.policies.waits_for(is_loud):
      settle()
      now.undo = now.policies.target(step, last["loss"], saver.checkpoints)
      if is_loud and now.undo is None:
        with reports.steering(now):
          now.policies.measured(step, now.watch.firing)
    if metrics.is_due(step, spec.eval.every) and step < spec.steps and now.undo is None:
      settle()
      evaluation.run(state, step)
      reports.speed.restart()
    if now.undo is not None:
      state = None  # before another one is read
      state, step = _caught_up(now, saver, reports, evaluation, state, step)
    elif metrics.is_due(step, spec.checkpoint.every):
      settle()
      saver.save(step, state)
  settle()
  return state, step, last


def _caught_up(now, saver, reports, evaluation, state, step: int) -> tuple[State, int]:
  """(state, step) to go on from, after roll-backs and with the evaluation that is due there.

  A run does not judge its last evaluation, and the checkpoint before lacks it: a prolonged one
  makes it there.
  """
  spec = now.policies.configured
  while True:
    if (undo := now.undo) is not None:
      state = None
      with reports.steering(now):  # as far as recipes are undone
        state, step = saver.roll_back(undo), undo.to
      reports.forget(step, saver.evaluations)
      now.policies.tell_undone(step)
    if metrics.is_due(step, spec.eval.every) and step < spec.steps:
      evaluation.run(state, step)
    if now.undo is None:
      return state, step


def _settled(now, saver, reports, taken: run_reports.Taken, state) -> dict[str, float]:
  """Reports a step, and stops the run after one that is not finite; its metrics."""
  values = jax.device_get(taken.values)
  keys = ("tensor_stats", "alignment", "param_stats", "by_source")
  nested = {key: values.pop(key, None) for key in keys}
  is_finite = values.pop("is_finite")
  values = {k: float(v) for k, v in values.items()}
  reports.speed.tick()
  stops = not is_finite and train_step.stops_on_nonfinite(now.spec, values.get("loss_scale"))
  if stops and not now.policies.can_undo(taken.step, saver.checkpoints):
    with jax.transfer_guard("allow"):
      message = failure.report(now, saver, reports.workdir, taken, values, state)
    reports.draw()
    raise NonFinite(message)
  reports.step(now, taken, values, nested, is_finite)
  # Once a state has halted no update is applied: its loss counts as a jump, which is undone.
  return {**values, "loss": math.inf} if stops else values
