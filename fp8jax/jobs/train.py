"""Training: the loop around the step."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax

from fp8jax import console as console_lib
from fp8jax.compiled import fp8_gemms
from fp8jax.config import identity
from fp8jax.data import batch_sharding, loader
from fp8jax.jobs import failure, restore, self_tests, steering
from fp8jax.jobs import start as start_lib
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.quantization import tensor_stats
from fp8jax.report import at_end
from fp8jax.run import alarms as run_alarms
from fp8jax.run import (
  calibration,
  checkpoint,
  control,
  drift,
  fp8_share,
  goodput,
  metrics,
  metrics_writer,
  numerics_image,
  preemption,
  profiler,
  startup,
  tracker,
)
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run import progress as progress_lib
from fp8jax.run import provenance as provenance_lib
from fp8jax.run import summary as summary_lib
from fp8jax.run import workdir as workdir_lib
from fp8jax.step import run_spec, train_step
from fp8jax.step.state import State


class NonFinite(RuntimeError):
  """The loss, the gradient or logits stopped being numbers."""


def run(
  plan: run_spec.RunSpec,
  workdir: str,
  base: dict[str, Any] | None = None,
  disturb: Callable[[State, Any, int], tuple[State, Any]] | None = None,
) -> dict[str, Any]:
  """Trains to the configured step, or resumes and does so.

  Args:
    plan: what to do.
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
    summary = workdir_lib.finished(workdir, dict(plan.flat), loader.fingerprint(plan.data))
    if summary is not None:
      console_lib.console().print(f"{workdir} is finished: step {summary['step']}")
      return summary
    return _Run(plan, workdir, base or {}, disturb).run()


class _Run:
  """One call of `run`: what its phases share."""

  def __init__(self, plan: run_spec.RunSpec, workdir: str, base: dict[str, Any], disturb):
    self.plan, self.workdir, self.disturb = plan, workdir, disturb
    self.clock = goodput.Clock()
    self.flat = dict(plan.flat)
    self.out = console_lib.console()
    self.fingerprint = loader.fingerprint(plan.data)
    os.makedirs(workdir, exist_ok=True)
    self.changes = identity.diff(self.flat, base)
    self.site_rows = startup.all_site_rows(plan)
    startup.print_start(self.out, plan, self.changes, self.fingerprint, self.site_rows)
    path = plan.calibration
    self.calibration = calibration.load(plan, os.path.expanduser(path)) if path else None
    self.identity = identity.identity(plan)  # now: the table may be edited during the run
    self.steering = steering.Steering(plan, self._tell)
    self.watch = run_alarms.AlarmMonitor(plan.log.alarms, {})  # of the present phase
    self.counts = loader.DocumentCounts()
    self.spread = batch_sharding.BatchSharder(
      plan.run.layout, plan.microbatch, plan.grad_accum_steps
    )
    self.readers = restore.readers(self.spread.shard.count, plan.data.workers)
    if plan.data.chat is not None:
      startup.print_chats(self.out, plan, plan.data.chat.samples_per_step)
    self.iterator = loader.train_batches(
      plan.data, self.spread.local_batch, self.spread.shard, self.counts
    )
    rolls_back = control.roll_back(plan.precision.policy) is not None
    every = plan.checkpoint.every if rolls_back else 0
    self.checkpoints = checkpoint.Checkpoints(workdir, plan.checkpoint.keep, every)
    self.weights_dtype = "bfloat16"
    self.evaluations: dict[str, Any] = {}
    self.sites: dict[bool, Any] = {}  # quiet and loud ones of the present phase
    self.has_memories = False  # of its checkpoint, for the phase that it is in
    self.shares: dict[str, float] = {}  # of FP8, in the present phase
    self.looks = drift.Looks(workdir)
    self.is_proven = not plan.verify_fp8_gemms
    self.profiler = profiler.Profiler(workdir, plan.log, self.out)
    self.compiled: set[Any] = set()  # (rules, whether loud) of steps taken here

  def run(self) -> dict[str, Any]:
    plan = self.plan
    state, start = self._start()
    if start < plan.steps:
      self.checkpoints.check_room(state)  # now, not after hours
    evaluator = evaluator_lib.Evaluator(plan)
    name = plan.log.tracker
    self.log = metrics_writer.Metrics(
      self.workdir, start, self.evaluations, plan.log.tensorboard,
      (lambda: tracker.Tracker(name, self.workdir, self.flat)) if name else None,
    )  # fmt: skip
    summary_lib.describe(plan, self.workdir, start, self.changes, self.fingerprint, self.site_rows)
    try:
      with preemption.Interrupts() as asked:
        if not self.evaluations:
          self._evaluate(evaluator, state, start)
        if control.roll_back(plan.precision.policy) and not self.checkpoints.steps():
          self._save(start, state)  # to go back to
        with self.clock.on("step"):
          state, reached, last = self._loop(state, start, evaluator, asked)
        self._save(reached, state)
        with self.clock.on("checkpoint"):
          self.checkpoints.wait()
        # All is saved: the last evaluation may be left, and made by the same command.
        finished = reached >= plan.steps
        if not finished or not self._evaluate(evaluator, state, reached, asked.requested):
          startup.print_interrupted(self.out, reached, asked.exit_code)
          return {"step": reached, "exit_code": asked.exit_code}
        return self._summarise(reached, last, state)
    finally:
      self.log.close()
      self.checkpoints.close()
      self.iterator.close()

  # -- beginnings

  def _start(self) -> tuple[State, int]:
    """A fresh state, the newest checkpoint's, or that of init.workdir."""
    steps, init = self.checkpoints.steps(), self.plan.init
    if steps:
      before = self.checkpoints.meta(steps[-1]).get("seconds", {})
      self.clock.go_on(before, metrics_writer.last_logged(self.workdir, "elapsed_seconds"))
      return self._restored(self.checkpoints, steps[-1])
    if not init.workdir:
      state, self.weights_dtype = start_lib.fresh(self.plan, self.workdir)
      return state, 0
    workdir = start_lib.source(init.workdir)
    if init.weights_only:
      state, self.weights_dtype = start_lib.stage(self.plan, workdir, self.workdir, self.out)
      return state, 0
    other = checkpoint.Checkpoints(workdir)
    try:
      restored = self._restored(other, other.find(init.step))
    finally:
      other.close()
    self.out.print(f"continuing the run in {init.workdir}")
    start_lib.take_source(self.plan, workdir, self.workdir)
    return restored

  def _restored(self, saved: checkpoint.Checkpoints, step: int) -> tuple[State, int]:
    """The state after `step` steps, and the data's position; raises where the run is another."""
    meta = saved.meta(step)
    changes = identity.diff(self.identity, meta["config"])
    for key, (old, new) in changes.items():
      self.out.print(f"config changed since the checkpoint: {key}: {old} -> {new}")
    accepted, read = self.plan.checkpoint.accept_changes, (self.fingerprint, self.readers)
    restore.check_same_run(changes, meta, step, *read, accepted)
    self._remember(meta)
    self.weights_dtype = meta["weights_dtype"]
    self.evaluations = meta["evaluations"]
    if jax.process_index() == 0:  # of all processes together
      self.counts.update(meta["documents"])
    abstract = train_step.abstract_state(self.plan, step)
    remembered = self._remembered(step)
    is_same = meta.get("remembered", remembered) == remembered
    has_new_table = bool(self.calibration) and "precision.calibration" in changes
    self.has_memories = is_same and not has_new_table
    if not self.has_memories:
      abstract = dataclasses.replace(abstract, scaling_states={})
    state = saved.restore(step, abstract, self.iterator, identity.refused_changes(changes, ()))
    self.out.print(f"resuming from step {step}")
    holes = metrics_writer.holes(self.workdir, provenance_lib.origin(self.workdir), step)
    for line in restore.lines_of_scales(step, is_same, has_new_table) + holes:
      self.out.print(line)
    if jax.device_get(state.halted):
      moved = " (some layers may have moved with it)" * self.plan.optim.in_backward
      self.out.print(f"step {step} met a non-finite value{moved}; going on with the batch after it")
      # False, on the devices where it was.
      state = dataclasses.replace(state, halted=state.halted ^ state.halted)
    return state, step

  # -- the loop

  def _loop(self, state, start: int, evaluator, asked: preemption.Interrupts):
    plan = self.plan
    # Recipes arrive with the sites, so that policies leave the function as it is.
    step_fn, phase = train_step.make_step(plan), -1
    tokens = plan.tokens_per_step
    flops = metrics.flops_per_token(plan.model, plan.data.seq_len)
    peak = metrics.peak_flops(jax.devices()[0].device_kind, plan.num_devices)
    speed = progress_lib.Throughput(tokens, tokens * flops, peak)
    progress = progress_lib.Progress(plan.steps, start, plan.log.every, self.out)
    pending, last, step = None, {}, start

    def settle():
      """Reads the metrics of the step before: by now the next one is under way."""
      nonlocal pending, last
      if pending is not None:
        last = self._report(*pending, speed, progress, state)
        pending = None

    try:
      while step < plan.steps and not asked.requested(step):
        with self.clock.on("data_wait"):
          host, number = self.steering.next_batch(self.iterator, step)
        if self.plan.phase(step) != phase:
          settle()
          phase = self.plan.phase(step)
          with self.clock.on("compile"):
            state = self._enter(phase, state, step, host)
            if not self.is_proven:
              self._prove(step_fn, state, host, phase)
        state = self.steering.refreshed(state, lambda: self.spread.place(host), step, phase)  # noqa: B023
        if self.disturb is not None:
          state, host = self.disturb(state, host, number)
        # Nothing may slip between host and device unasked: each such copy would stall the device.
        with jax.transfer_guard("disallow"):
          is_loud = metrics.is_due(step, plan.log.tensor_stats_every)
          state, values = self._take_step(step_fn, state, host, step, phase, is_loud)
          settle()
        step += 1
        pending = (step, values, host, self.iterator.get_state(), self.clock.waited)
        if self.steering.waits_for(is_loud):
          settle()
          to = self.steering.target(step, last["loss"], self.checkpoints)
          if to is not None:
            state = None  # before another one is read
            state, step, phase = self._roll_back(step, last["loss"], to), to, -1
            continue
          self._steer(step, is_loud)
        if metrics.is_due(step, plan.eval.every) and step < plan.steps:
          settle()
          self._evaluate(evaluator, state, step)
          speed.restart()
        if metrics.is_due(step, plan.checkpoint.every):
          settle()
          self._save(step, state)
      settle()
    finally:
      progress.close()
      self.profiler.close()
    return state, step, last

  def _take_step(self, step_fn, state: State, host, step: int, phase: int, is_loud: bool):
    program = (self.plan.precision.phases[phase].rules, is_loud)
    kind = "step" if program in self.compiled else "compile"
    self.compiled.add(program)
    with self.clock.on(kind), self.profiler.step(step, state):
      return step_fn(state, self.spread.place(host), self.sites[is_loud])

  def _enter(self, phase: int, state: State, step: int, host):
    """The state with which a phase of the precision schedule begins; sets the sites to train in.

    Scales that are not current begin from the calibration's table or the phase's own first batch,
    unless the state already belongs to the phase; interrupted or not, a run therefore takes the
    same steps.
    """
    self_tests.products(self.plan, phase, self.out)
    if not self.sites:  # once
      self_tests.optimizer(self.plan, self.out)
    here = self.plan.precision.phases[phase]
    is_first = step == here.start
    if step and is_first and not here.by_policy:
      self.out.print(f"step {step}: precision.schedule enters its phase {phase}")
    if self.has_memories and not is_first:
      pass  # resumed within the phase
    elif here.by_policy and is_first:
      with jax.transfer_guard("allow"):
        state = self.steering.begin_phase(state, self.spread.place(host), step, phase)
    elif self.calibration:
      scaling_states = self.calibration[self.steering.configured.phase(step)]
      state = dataclasses.replace(state, scaling_states=scaling_states)
    else:
      with jax.transfer_guard("allow"):
        state = train_step.calibrate(self.plan, state, self.spread.place(host), phase)
    self.sites = {
      is_loud: self.plan.sites(
        phase=phase, statistics=tensor_stats.LOUD if is_loud else tensor_stats.QUIET
      )
      for is_loud in (False, True)
    }
    self.shares = fp8_share.of_phase(self.plan, phase)
    recipes = site_lib.recipes_of(self.sites[False])
    self.watch = run_alarms.AlarmMonitor(self.plan.log.alarms, recipes)
    return state

  # -- policies

  def _remember(self, meta: dict[str, Any]):
    """Takes what policies remembered at a checkpoint."""
    if saved := meta.get("policy"):
      self.steering.set(control.Memory.from_json(saved))
    self._take_plan()

  def _take_plan(self):
    """Follows the recipes that policies gave."""
    if self.plan is not self.steering.plan:
      self.plan = self.steering.plan
      self.site_rows = startup.all_site_rows(self.plan)
      self.is_proven = not self.plan.verify_fp8_gemms

  def _tell(self, step: int, events: list[control.Event]):
    """Writes down what policies did."""
    if events:
      self.log.write_row(step, {"actions": [event.row for event in events]})
    for line in run_alarms.as_lines(step, [event.row for event in events]):
      self.out.print(line)

  def _steer(self, step: int, is_loud: bool):
    """Lets policies decide after a step."""
    if is_loud:
      self.steering.look(step, self.watch.rung)
      if self.plan is not self.steering.plan:
        self._take_plan()
        provenance_lib.write_json(self.workdir, "sites.json", self.site_rows)

  def _roll_back(self, step: int, loss: float, to: int) -> State:
    """The state of an older checkpoint; the rest of the run becomes as it was then."""
    self.checkpoints.drop_after(to)
    meta = self.checkpoints.meta(to)
    self.clock.lose_since(meta.get("seconds", {}))
    self.steering.roll_back(step, loss, to, meta.get("policy"))
    self._take_plan()
    self.evaluations, self.has_memories = meta["evaluations"], True
    abstract = train_step.abstract_state(self.plan, to)
    state = self.checkpoints.restore(to, abstract, self.iterator)
    self.counts.clear()
    if jax.process_index() == 0:
      self.counts.update(meta["documents"])
    self.log.forget(to, self.evaluations)
    self.looks.forget()
    self.steering.tell_undone(to)
    return state

  def _prove(self, step_fn, state: State, host, phase: int):
    """Stops before the first step unless every GEMM has the precision of its recipe."""
    with jax.transfer_guard("allow"):
      batch = self.spread.place(host)
    for title, rows in fp8_gemms.every_step(self.plan, step_fn, state, batch, phase):
      self.out.print(fp8_gemms.table(rows, title))
    self.is_proven = True

  def _report(self, step, values, host, position, waited, speed, progress, state):
    values = jax.device_get(values)
    stats, alignment = values.pop("tensor_stats", None), values.pop("alignment", None)
    values = {k: float(v) for k, v in values.items()}
    speed.tick()
    stops = False
    if not values.pop("is_finite"):
      stops = train_step.stops_on_nonfinite(self.plan, values.get("loss_scale"))
      if stops and not self.steering.can_undo(step, self.checkpoints):
        self._fail(step, values, host, position, state)
      self.out.print(f"step {step}: loss, gradient or a GEMM's operand not finite; update skipped")
      values["skipped"] = 1
    times = self.clock.metrics(metrics.is_due(step, self.plan.log.every) or step == self.plan.steps)
    times |= {"data_wait_seconds": waited, **self.shares, **speed.values()}
    self.log.write(step, {**values, **self.counts.metrics(), **times})
    if stats is not None:
      self._record_stats(step, stats, alignment)
    progress.update(step, values["loss"], speed)
    # Once a state has halted no update is applied: its loss counts as a jump, which is undone.
    return {**values, "loss": math.inf} if stops else values

  def _record_stats(self, step: int, stats, alignment):
    """Writes what every site saw in a loud step, and says what is alarming."""
    numerics = self.looks.add(run_alarms.summarise(self.sites[True], stats, alignment))
    self.log.write_nested(step, "numerics", numerics, lambda: numerics_image.draw(numerics))
    self.log.write_row(step, {"exponents": run_alarms.exponents(self.sites[True], stats)})
    if alarms := self.watch.new(numerics):
      self.log.write_row(step, {"alarms": alarms})
    for line in run_alarms.as_lines(step, alarms):
      self.out.print(line)

  def _fail(self, step: int, values, host, position, state):
    """Saves what reproduces the failure, finds its first site, stops."""
    failure.keep_batch(self.workdir, host)
    # No update is applied once a state has halted. The iterator may be a batch further.
    self.iterator.set_state(position)
    with jax.transfer_guard("allow"):
      self._save(step, state)
      self.checkpoints.wait()
      batch = self.spread.place(host)
      message = failure.report(self.plan, self.workdir, step, values, state.params, batch)
    self._draw()
    raise NonFinite(message)

  # -- checkpoints

  def _remembered(self, step: int) -> dict[str, str]:
    """Which sites' scaling states the state after `step` steps has, and for which recipes."""
    return scaling_lib.recipes(self.plan.sites(phase=self.plan.phase(step - 1))) if step else {}

  def _meta(self, step: int) -> dict[str, Any]:
    return {
      "remembered": self._remembered(step),
      **({"policy": self.steering.memory.to_json()} if self.plan.precision.policy else {}),
      "config": self.identity,
      "data_fingerprint": self.fingerprint,
      "readers": self.readers,
      "weights_dtype": self.weights_dtype,
      "documents": self.counts.summary_everywhere(),
      "evaluations": self.evaluations,
      "seconds": self.clock.seconds(),
    }

  def _save(self, step: int, state: State):
    with self.clock.on("checkpoint"):
      self.checkpoints.save(step, state, self.iterator, self._meta(step))

  def _evaluate(self, evaluator, state, step: int, stop=None) -> bool:
    """Whether there is an evaluation of this step now, if there shall be any."""
    if str(step) in self.evaluations or not self.plan.eval.tokens:
      return True
    phase = self.plan.phase(max(step - 1, 0))
    evaluator.follow(self.plan)
    scaling_states = (
      self.calibration[phase] if self.calibration and not step else state.scaling_states
    )
    with self.clock.on("evaluation"):
      results = evaluator.run(state.params, scaling_states, phase, stop)
    if not results:
      return False
    self.evaluations[str(step)] = results
    self.log.write(step, evaluator_lib.flat(results))
    startup.print_evaluation(self.out, step, results, evaluator.passed_over)
    return True

  def _summarise(self, step: int, last, state) -> dict[str, Any]:
    # A finished run that is started again takes no step.
    loss = last["loss"] if last else metrics_writer.last_logged(self.workdir, "loss")
    skipped, passed_over = int(jax.device_get(state.skipped)), self.counts.summary_everywhere()
    seconds = self.clock.seconds()
    summary = summary_lib.write(
      self.plan, self.workdir, step, loss, skipped, passed_over, self.evaluations, seconds
    )
    startup.print_end(self.out, summary, self.workdir)
    self._draw()
    return summary

  def _draw(self):
    """Writes WORKDIR/report.html; says why not, and the run goes on."""
    if self.plan.log.report and jax.process_index() == 0:
      self.out.print(at_end.attempt(self.workdir))
