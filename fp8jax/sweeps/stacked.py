"""--sweep --vmap: trials that differ in seed and schedule alone train at once, by jax.vmap.

One program trains all of them, so that a small model pays for one compilation and fills the device.
The mapped step is the step of a single run, differentiation inside: every trial has scales and
their history, random bits, tensor statistics, clipping and a learning rate of its own. There are no
checkpoints: a group of trials that was interrupted starts over.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.compiled import fp8_gemms
from fp8jax.config import identity, named, registry, resolve
from fp8jax.data import batch_sharding, loader
from fp8jax.errors import ConfigErrors, UserError
from fp8jax.kernels import choose
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site_tree
from fp8jax.optim import schedule as schedule_lib
from fp8jax.report import page
from fp8jax.run import end, fp8_share, goodput, metrics_writer, start
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run import workdir as workdir_lib
from fp8jax.step import train_spec, train_step
from fp8jax.sweeps import outcome as outcome_lib
from fp8jax.sweeps.outcome import Outcome
from fp8jax.sweeps.spec import Trial

# Keys in which the trials of a group may differ: the seed, and those of the learning rate.
VARYING = (
  "seed", "optim.peak_lr", "optim.min_lr", "optim.schedule", "optim.warmup_steps",
  "optim.warmup_fraction", "optim.decay_steps",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Member:
  """A trial of a group, resolved."""

  trial: Trial
  spec: train_spec.TrainSpec


def groups(trials: list[Trial], count: int = 0) -> list[list[Member]]:
  """Trials in groups that one program trains, at most `count` in each; 0: no limit.

  Raises:
    ConfigError: a trial needs a run of its own; every reason.
  """
  problems, by_program = ConfigErrors(), collections.defaultdict(list)
  here = jax.device_count(), choose.current_device()
  for trial in trials:
    c = problems.attempt(lambda trial=trial: named.load(trial.config, trial.changes))
    if c is None:
      continue
    if (job := trial.job) != "train":
      problems.extend(
        [f"{trial.config}: --vmap: trials of JOB={job!r} need runs of their own; leave --vmap out"]
      )
      continue
    spec = problems.attempt(lambda c=c: resolve.resolve(c, *here))
    if spec is None:
      continue
    # No kernel moves the parameters of several trials at once.
    kernels = dataclasses.replace(spec.kernels, optimizer="xla")
    spec = dataclasses.replace(spec, kernels=kernels)
    problems.extend([f"{trial.config}: --vmap: {reason}" for reason in reasons(spec)])
    place = os.path.join(trial.workdir, "checkpoints")
    problems.check(
      not os.path.exists(place),
      f"--vmap: {place} is of an interrupted run; leave --vmap out to go on with it",
    )
    key = repr(sorted((k, v) for k, v in spec.flat.items() if k not in VARYING))
    if (o := spec.optim).decay_by == "schedule":  # one program has one schedule of the decay
      share = f"{o.min_lr / max(o.peak_lr, 1e-30):.6g}"
      key += repr((o.schedule, o.warmup_steps, o.decay_steps, o.peak_lr > 0, share))
    by_program[key].append(Member(trial, spec))
  problems.found = list(dict.fromkeys(problems.found))
  problems.refuse()
  return [
    list(part)
    for members in by_program.values()
    for part in itertools.batched(members, count or len(members))
  ]


def reasons(spec: train_spec.TrainSpec) -> list[str]:
  """Why the trials of a spec need runs of their own; [] where vmap gives the same."""
  texts = [
    f"{key}={value!r} needs a run of its own; set {default!r}, or leave --vmap out"
    for key, (default, value) in _changes(spec).items()
    if not registry.is_mapped(key)
  ]
  if spec.kernels.optimizer == "mosaic_sm90":
    texts.append("kernels.optimizer='mosaic_sm90' moves the parameters of one trial; set 'auto'")
  if spec.run.layout.mesh is not None:
    texts.append("the mesh has several devices; one device trains a group")
  recipes = site_tree.recipes_of(spec.sites())
  if spec.device.platform != "cpu" and any(r.is_quantized for r in recipes.values()):
    texts.append("FP8 products of several trials at once have no kernel on this device")
  return texts


def _changes(spec: train_spec.TrainSpec):
  """{key: (default, value)} where they differ."""
  return identity.diff(dict(spec.flat), identity.flatten(registry.base()))


def run(
  members: list[Member], stop_above: float, tell: Callable[[str], None]
) -> list[tuple[Trial, Outcome]]:
  """Trains a group to its end and writes the files of every trial.

  Args:
    members: of one group.
    stop_above: nats above its first loss at which a trial has diverged.
    tell: takes a line for the reader of the sweep.
  """
  with contextlib.ExitStack() as held:
    for member in members:
      held.enter_context(workdir_lib.locked(member.trial.workdir))
    for member in members:
      workdir_lib.reopen(member.trial.workdir)
    group = _Group(members)
    try:
      group.train()
    finally:
      group.close()
    return [(m.trial, group.finish(i, stop_above, tell)) for i, m in enumerate(members)]


class _Group:
  """Trials that train at once. Their seconds are the group's: no trial has time of its own."""

  def __init__(self, members: list[Member]):
    self._members, self._clock = members, goodput.Clock()
    self._spec = members[0].spec
    self._shares = fp8_share.of_phase(self._spec)
    self._calibrate = train_step.make_calibration(self._spec, 0)
    tensorboard = self._spec.log.tensorboard
    self._logs = [metrics_writer.Metrics(m.trial.workdir, 0, {}, tensorboard) for m in members]
    self._results: list[dict[str, Any]] = [{} for _ in members]
    # Trials of one seed read the same batches.
    self._batches = {
      p.seed: batch_sharding.TrainBatches(p.data, p.run.layout, p.microbatch, p.grad_accum_steps)
      for p in (m.spec for m in members)
    }
    self._losses = []

  def train(self):
    """Takes all steps, between the evaluations."""
    evaluator = evaluator_lib.Evaluator(self._spec)
    states = [train_step.make_state(m.spec) for m in self._members]
    self._evaluate(evaluator, states, 0)
    state = self._take_steps(states)
    self._states = [jax.tree.map(lambda x, i=i: x[i], state) for i in range(len(self._members))]
    self._evaluate(evaluator, self._states, self._spec.steps)

  def _take_steps(self, states: list):
    """The stacked state after all steps. `states`, which it empties, are fresh."""
    spec, clock, step = self._spec, self._clock, mapped_step(self._members)
    place, state = self._batches[spec.seed].spread.place, None
    for number in range(1, spec.steps + 1):
      with clock.on("data_wait"):
        hosts = {seed: next(batches.iterator) for seed, batches in self._batches.items()}
      waited = clock.waited
      with clock.on("step" if number > 1 else "compile"):
        placed = [place(hosts[m.spec.seed]) for m in self._members]
        if state is None:
          states[:] = map(self._calibrated, self._members, states, placed)
          if spec.verify_fp8_gemms:
            rows = (spec, train_step.make_step(spec), states[0], placed[0], 0)
            list(fp8_gemms.every_step(*rows))
          state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
          states.clear()
        state, values = step(state, jax.tree.map(lambda *x: jnp.stack(x), *placed))
        values = jax.device_get(values)
      times = metrics_writer.times(spec, number, clock, waited, self._shares)
      self._losses.append(values["loss"])
      is_finite = values.pop("is_finite")
      for i, (member, log) in enumerate(zip(self._members, self._logs, strict=True)):
        row = {k: float(v[i]) for k, v in values.items()}
        batches = self._batches[member.spec.seed]
        log.write_step(number, row, is_finite[i], batches.counts, times | batches.metrics())
    return state

  def _calibrated(self, member: Member, state, batch):
    """A trial's first state, its delayed and static scales from its own first batch."""
    state = self._calibrate(state, batch)
    if scaling_lib.unknown(member.spec.sites(), state.scaling_states):
      raise UserError(
        f"{member.trial.workdir}: its first batch has amaxes that are 0 or not finite, and --vmap "
        "takes scales from no later batch; leave --vmap out"
      )
    return state

  def _evaluate(self, evaluator: evaluator_lib.Evaluator, states, step: int):
    """Adds the held-out losses of every trial to its results; one program for all."""
    if not self._spec.eval.tokens:
      return
    with self._clock.on("evaluation"):
      for state, results, log in zip(states, self._results, self._logs, strict=True):
        results[str(step)] = evaluator.run(state.params, state.scaling_states)
        log.write(step, evaluator_lib.flat(results[str(step)]))

  def close(self):
    """Closes the files of metrics, and the streams of data."""
    for opened in (*self._logs, *(batches.iterator for batches in self._batches.values())):
      opened.close()

  def finish(self, i: int, stop_above: float, tell: Callable[[str], None]) -> Outcome:
    """Writes the description and the end of a trial; its outcome."""
    trial, spec, state = self._members[i].trial, self._members[i].spec, self._states[i]
    losses = np.stack(self._losses)[:, i].tolist()
    rows, fingerprint = start.all_site_rows(spec), loader.fingerprint(spec.data)
    more: dict[str, Any] = {"shares": self._batches[spec.seed].shares, "job": trial.job}
    more["trials_at_once"] = len(self._members)
    start.describe(spec, trial.workdir, 0, _changes(spec), fingerprint, rows, **more)
    why = outcome_lib.ever_diverged(losses, stop_above)
    if bool(state.halted):
      why = "loss or gradient not finite, see metrics.jsonl"
    if why:
      outcome_lib.mark_diverged(trial, why)
      return Outcome("diverged")
    counts, seconds = self._batches[spec.seed].counts, self._clock.seconds()
    summary = end.summarise(
      spec, trial.workdir, spec.steps, losses[-1], state, counts, self._results[i], seconds
    )
    if spec.log.report:
      tell(page.attempt(trial.workdir))
    return outcome_lib.ended(summary["objective"])


def mapped_step(members: list[Member]):
  """(stacked state, stacked batch) -> (stacked state, {metric: [trials]}), jitted."""
  spec, schedules = members[0].spec, [schedule_lib.schedule(m.spec.optim) for m in members]
  sites = spec.sites()
  keys = jnp.stack([jax.random.key(m.spec.seed) for m in members])

  # A tap of its own for every trial: a site refuses to add up the observations of several.
  taps = jax.tree.map(lambda x: jnp.zeros((len(members), *x.shape), x.dtype), site_tree.taps(sites))

  def one(state, batch, rate, key, taps):
    own = site_tree.with_taps(sites, taps)
    return train_step.take_step(spec, state, batch, own, rate, key)

  @jax.jit
  def rates(steps):
    # One step number per trial, and one learning rate: schedules are functions of numbers.
    return jnp.stack([schedule(steps[i]) for i, schedule in enumerate(schedules)])

  options = choose.compiler_options(spec.device)
  step = jax.jit(jax.vmap(one), donate_argnums=0, compiler_options=options)
  # Rates and keys are arguments, so that groups that differ in them share a program.
  return lambda state, batch: step(state, batch, rates(state.step), keys, taps)
