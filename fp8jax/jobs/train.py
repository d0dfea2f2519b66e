"""Training: the loop around the step."""

import contextlib
import math
import os
from collections.abc import Callable
from typing import Any

import jax

from fp8jax import console as console_lib
from fp8jax.config import identity
from fp8jax.data import batch_sharding, loader
from fp8jax.jobs import accuracy, failure, policy_runner, report, resume, run_state
from fp8jax.optim import param_stats
from fp8jax.phases import decide
from fp8jax.report import page
from fp8jax.run import alarms as run_alarms
from fp8jax.run import (
  calibration,
  end,
  goodput,
  metrics,
  metrics_writer,
  numerics_image,
  preemption,
  profiler,
  start,
  tracker,
)
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run import progress as progress_lib
from fp8jax.run import provenance as provenance_lib
from fp8jax.run import workdir as workdir_lib
from fp8jax.step import train_spec, train_step
from fp8jax.step.state import State


class NonFinite(RuntimeError):
  """The loss, the gradient or logits stopped being numbers."""


def run(
  spec: train_spec.TrainSpec,
  workdir: str,
  base: dict[str, Any] | None = None,
  disturb: Callable[[State, Any, int], tuple[State, Any]] | None = None,
) -> dict[str, Any]:
  """Trains to the configured step, or resumes and does so.

  Args:
    spec: what to do.
    workdir: where checkpoints, metrics and provenance go.
    base: flat base configuration, to print what differs from it.
    disturb: a fault for drills of precision.policy: (state, host batch, number of the batch) ->
      (state, host batch), called before every step.

  Returns:
    The summary that is also written to WORKDIR/summary.json; of an interrupted run {"step",
    "exit_code"} (preemption.EXIT_CODES).

  Raises:
    config.ConfigError: the checkpoint in workdir belongs to another configuration.
    NonFinite: see optim.on_nonfinite.
  """
  with workdir_lib.locked(workdir):
    flat, fingerprint = dict(spec.flat), loader.fingerprint(spec.data)
    summary = workdir_lib.finished(workdir, flat, fingerprint)
    if summary is not None:
      console_lib.console().print(f"{workdir} is finished: step {summary['step']}")
      return summary
    return _Run(spec, workdir, disturb).run(identity.diff(flat, base or {}), fingerprint)


class _Run:
  """The loop of one call of `run`, and the reports of its steps."""

  def __init__(self, spec: train_spec.TrainSpec, workdir: str, disturb):
    self.spec, self.workdir, self.disturb = spec, workdir, disturb
    self.clock, self.out = goodput.Clock(), console_lib.console()
    self.looks = run_alarms.Looks(workdir)
    self.profiler = profiler.Profiler(workdir, spec.log, self.out)
    self.undo: decide.Undo | None = None  # that the last evaluation asks for

  def run(self, changes: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    """Args: identity.diff of the configuration and base's, loader.fingerprint of the data."""
    spec, workdir = self.spec, self.workdir
    os.makedirs(workdir, exist_ok=True)
    rows = start.all_site_rows(spec)
    start.print_start(self.out, spec, changes, fingerprint, rows)
    self.accuracy = accuracy.TaskAccuracy(spec, workdir, self.out.print)
    path = spec.calibration
    table = calibration.load(spec, os.path.expanduser(path)) if path else None
    policies = policy_runner.PolicyRunner(spec, self._tell, self._keep_scales)
    self.now, self.fingerprint = run_state.RunState(policies, table, self.out), fingerprint
    if spec.data.chat is not None:
      start.print_chats(self.out, spec, spec.data.chat.samples_per_step)
    self.batches = batch_sharding.TrainBatches(
      spec.data, spec.run.layout, spec.microbatch, spec.grad_accum_steps
    )
    self.saver = resume.Saver(
      spec, workdir, fingerprint, self.now, self.batches, self.clock, self.accuracy.identity
    )
    state, first = self.saver.begin(self.out)
    if first < spec.steps:
      self.saver.checkpoints.check_room(state)  # now, not after hours
    self.evaluator, name = evaluator_lib.Evaluator(spec), spec.log.tracker
    self.log = metrics_writer.Metrics(
      workdir, first, self.saver.evaluations, spec.log.tensorboard,
      (lambda: tracker.Tracker(name, workdir, spec.flat)) if name else None,
    )  # fmt: skip
    if self.now.spec is not spec:
      rows = start.all_site_rows(self.now.spec)
    start.describe(spec, workdir, first, changes, fingerprint, rows)
    try:
      with preemption.Interrupts() as asked:
        if not self.saver.evaluations:
          self._evaluate(state, first)
        if decide.has_roll_back(spec.precision.policy) and not self.saver.checkpoints.steps():
          self.saver.save(first, state)  # to go back to
        state, first = self._caught_up(state, first)
        with self.clock.on("step"):
          state, reached, last = self._loop(state, first, asked)
        self.saver.save(reached, state)
        with self.clock.on("checkpoint"):
          self.saver.checkpoints.wait()
        # All is saved: the last evaluation may be left, and made by the same command.
        finished = reached >= spec.steps
        if not finished or not self._evaluate(state, reached, asked.requested):
          then = f"the same command goes on from there (exit code {asked.exit_code})"
          self.out.print(f"interrupted: saved step {reached}; {then}")
          return {"step": reached, "exit_code": asked.exit_code}
        return self._summarise(reached, last, state)
    finally:
      self.log.close()
      self.saver.checkpoints.close()
      self.batches.iterator.close()

  def _loop(self, state, step: int, asked: preemption.Interrupts):
    """(state, steps taken, metrics of the last one)."""
    spec, now, place = self.spec, self.now, self.batches.spread.place
    tokens = spec.tokens_per_step
    flops = metrics.flops_per_token(spec.model, spec.data.seq_len)
    peak = metrics.peak_flops(jax.devices()[0].device_kind, spec.num_devices)
    speed = progress_lib.Throughput(tokens, tokens * flops, peak)
    progress = progress_lib.Progress(spec.steps, step, spec.log.every, self.out)
    pending, last = None, {}

    def settle():
      """Reads the metrics of the step before: by now the next one is under way."""
      nonlocal pending, last
      if pending is not None:
        last = self._report(*pending, speed, progress, state)
        pending = None

    try:
      while step < spec.steps and not asked.requested(step):
        with self.clock.on("data_wait"):
          host, number = now.policies.next_batch(self.batches.iterator, step)
        if now.spec.phase(step) != now.phase:
          settle()
          with self.clock.on("compile"):
            state = now.enter(state, step, place(host))
        state = now.policies.refreshed(state, lambda: place(host), step, now.phase)  # noqa: B023
        if self.disturb is not None:
          state, host = self.disturb(state, host, number)
        # Nothing may slip between host and device unasked: each such copy would stall the device.
        with jax.transfer_guard("disallow"):
          is_loud = metrics.is_due(step, spec.log.tensor_stats_every)
          with self.clock.on(now.kind_of_step(is_loud)), self.profiler.step(step, state):
            state, values = now.take_step(state, place(host), is_loud)
          settle()
        step += 1
        position, read = self.batches.iterator.get_state(), self.batches.metrics()
        pending = (step, values, host, position, read, self.clock.waited)
        if now.policies.waits_for(is_loud):
          settle()
          self.undo = now.policies.target(step, last["loss"], self.saver.checkpoints)
          if is_loud and self.undo is None:
            with self._steering():
              now.policies.look(step, now.watch.firing)
        if metrics.is_due(step, spec.eval.every) and step < spec.steps and self.undo is None:
          settle()
          self._evaluate(state, step)
          speed.restart()
        if self.undo is not None:
          state = None  # before another one is read
          state, step = self._caught_up(state, step)
          continue
        if metrics.is_due(step, spec.checkpoint.every):
          settle()
          self.saver.save(step, state)
      settle()
    finally:
      progress.close()
      self.profiler.close()
    return state, step, last

  # -- policies

  def _tell(self, step: int, events: list[decide.Event]):
    """Writes down what policies did."""
    self._record_events(step, "actions", [event.row for event in events])

  def _keep_scales(self, step: int, sites, before, after):
    """Writes all scales before and after a refresh, for precision.calibration."""
    if jax.process_index() == 0:
      tables = (
        calibration.of_states(sites, states, step=step, fingerprint=self.fingerprint)
        for states in (before, after)
      )
      names = calibration.keep_refresh(self.workdir, step, *tables)
      self.log.write_row(step + 1, {"refresh": names})

  @contextlib.contextmanager
  def _steering(self):
    """Inside, policies decide; sites.json then has the recipes that they gave."""
    before = self.now.spec
    yield
    if self.now.spec is not before:
      rows = start.all_site_rows(self.now.spec)
      provenance_lib.write_json(self.workdir, "sites.json", rows)

  def _roll_back(self, undo: decide.Undo) -> State:
    """The state of an older checkpoint; the rest of the run becomes as it was then."""
    state, self.undo = self.saver.roll_back(undo), None
    self.log.forget(undo.to, self.saver.evaluations)
    self.looks.forget()
    self.now.policies.tell_undone(undo.to)
    return state

  def _caught_up(self, state: Any, step: int) -> tuple[State, int]:
    """(state, step) to go on from, after roll-backs and with the evaluation that is due there.

    A run does not judge its last evaluation, and the checkpoint before lacks it: a prolonged one
    makes it there.
    """
    while True:
      if (undo := self.undo) is not None:
        state = None
        state, step = self._roll_back(undo), undo.to
      if metrics.is_due(step, self.spec.eval.every) and step < self.spec.steps:
        self._evaluate(state, step)
      if self.undo is None:
        return state, step

  # -- reports

  def _report(self, step, values, host, position, read, waited, speed, progress, state):
    """Writes down a step, and stops the run after one that is not finite; its metrics."""
    values = jax.device_get(values)
    stats, alignment = values.pop("tensor_stats", None), values.pop("alignment", None)
    by_param, by_source = values.pop("param_stats", None), values.pop("by_source", None)
    is_finite = values.pop("is_finite")
    values = {k: float(v) for k, v in values.items()}
    speed.tick()
    stops = False
    if not is_finite:
      stops = train_step.stops_on_nonfinite(self.now.spec, values.get("loss_scale"))
      if stops and not self.now.policies.can_undo(step, self.saver.checkpoints):
        self._fail(step, values, host, position, state)
      self.out.print(f"step {step}: loss, gradient or a GEMM's operand not finite; update skipped")
    times = metrics_writer.times(self.spec, step, self.clock, waited, self.now.shares)
    times |= speed.values() | read | self.batches.losses(by_source)
    self.log.write_step(step, values, is_finite, self.batches.counts, times)
    if stats is not None:
      self._record_stats(step, stats, alignment, by_param)
    progress.update(step, values["loss"], speed)
    # Once a state has halted no update is applied: its loss counts as a jump, which is undone.
    return {**values, "loss": math.inf} if stops else values

  def _record_stats(self, step: int, stats, alignment, by_param):
    """Writes what every site saw in a loud step, and says what is alarming."""
    sites = self.now.sites[True]
    numerics = self.looks.add(run_alarms.summarise(sites, stats, alignment))
    self.log.write_nested(step, "numerics", numerics, lambda: numerics_image.draw(numerics))
    self.log.write_row(step, {"exponents": run_alarms.exponents(sites, stats)})
    if by_param is not None:
      spec = self.now.spec
      of = param_stats.summary(by_param, spec.log.param_stats, spec.optim, spec.declaration)
      self.log.write_row(step, {"param_stats": of})
    self._record_events(step, "alarms", self.now.watch.new(numerics))

  def _record_events(self, step: int, kind: str, events: list[dict[str, str]]):
    """Writes alarms or actions down, and says them."""
    if events:
      self.log.write_row(step, {kind: events})
    for line in run_alarms.as_lines(step, events):
      self.out.print(line)

  def _evaluate(self, state: State, step: int, stop=None) -> bool:
    """Whether there is an evaluation of this step now, if there shall be any."""
    if str(step) in self.saver.evaluations or not self.spec.eval.tokens:
      return True
    now, scaling_states = self.now, state.scaling_states
    phase = now.spec.phase(max(step - 1, 0))
    if now.calibration and not step:
      scaling_states = now.calibration[phase]
    self.evaluator.spec = now.spec
    with self.clock.on("evaluation"):
      results = self.evaluator.run(state.params, scaling_states, phase, stop)
      asked = (now.spec, state.params, scaling_states, phase, step, stop)
      right = self.accuracy.run(*asked) if results else None
    if right is None:
      return False
    self.saver.evaluations[str(step)] = results
    self.log.write(step, evaluator_lib.flat(results) | right)
    for line in self.evaluator.lines(step, results):
      self.out.print(line)
    if step < self.spec.steps:  # nothing is left to decide after the last one
      with self._steering():
        values = evaluator_lib.metrics(results) | right
        self.undo = now.policies.evaluated(step, values, self.saver.checkpoints)
    return True

  def _fail(self, step: int, values, host, position, state):
    """Saves what reproduces the failure, finds its first site, stops."""
    failure.keep_batch(self.workdir, host)
    # No update is applied once a state has halted. The iterator may be a batch further.
    self.batches.iterator.set_state(position)
    with jax.transfer_guard("allow"):
      self.saver.save(step, state)
      self.saver.checkpoints.wait()
      batch = self.batches.spread.place(host)
      message = failure.report(self.now.spec, self.workdir, step, values, state.params, batch)
    self._draw()
    raise NonFinite(message)

  def _summarise(self, step: int, last, state: State) -> dict[str, Any]:
    # A finished run that is started again takes no step.
    loss = last["loss"] if last else metrics_writer.last_logged(self.workdir, "loss")
    summary = end.summarise(
      self.now.spec, self.workdir, step, loss, state, self.batches.counts,
      self.saver.evaluations, self.clock.seconds(),
    )  # fmt: skip
    end.print_end(self.out, summary, self.workdir)
    self._draw()
    return summary

  def _draw(self):
    """Writes WORKDIR/report.html; says why not, and the run goes on."""
    if self.spec.log.report and jax.process_index() == 0:
      self.out.print(page.attempt(self.workdir, report.others))
