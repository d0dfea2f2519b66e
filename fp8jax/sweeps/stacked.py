"""--sweep --vmap: trials that differ in seed and learning rate alone train at once, by jax.vmap.

One program trains all of them, so that a small model pays for one compilation and fills the device.
The mapped step is the step of a single run, differentiation inside: every trial has scales, tensor
statistics, clipping and a learning rate of its own. There are no checkpoints: a group of trials
that was interrupted begins anew.
"""

import collections
import dataclasses
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import axes
from fp8jax.compiled import fp8_gemms
from fp8jax.config import named, resolve
from fp8jax.data import batch_sharding, loader
from fp8jax.errors import ConfigErrors
from fp8jax.kernels import choose
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.optim import factory
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run import metrics_writer, startup
from fp8jax.run import provenance as provenance_lib
from fp8jax.step import run_spec, train_step
from fp8jax.sweeps import outcome as outcome_lib
from fp8jax.sweeps.outcome import Outcome
from fp8jax.sweeps.spec import Trial

# Keys in which the trials of a group may differ.
VARYING = ("seed", "optim.peak_lr", "optim.min_lr")
# Keys whose other values need a separate run, each with the value that is allowed.
_PLAIN = {
  "optim.moment_format": "float32", "optim.master_format": "float32",
  "optim.grad_format": "float32", "optim.in_backward": False, "loss_scale.kind": "none",
  "kernels.optimizer": "xla", "precision.calibration": "", "init.workdir": "", "log.tracker": "",
  "log.tensor_stats_every": 0, "eval.every": 0, "data.samples_per_step": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Member:
  """A trial of a group, resolved."""

  trial: Trial
  plan: run_spec.RunSpec


def groups(trials: list[Trial], count: int = 0) -> list[list[Member]]:
  """Trials in groups that one program trains, at most `count` in each; 0: no limit.

  Raises:
    ConfigError: a trial needs a run of its own; every reason.
  """
  problems, found = ConfigErrors(), collections.defaultdict(list)
  for trial in trials:
    c = problems.attempt(lambda trial=trial: named.load(trial.config, trial.changes))
    plan = problems.attempt(lambda c=c: _resolved(c)) if c is not None else None
    if plan is None:
      continue
    problems.extend([f"{trial.config}: --vmap: {reason}" for reason in reasons(plan)])
    place = os.path.join(trial.workdir, "checkpoints")
    problems.check(
      not os.path.exists(place),
      f"--vmap: {place} is of an interrupted run; leave --vmap out to go on with it",
    )
    key = repr(sorted((k, v) for k, v in plan.flat.items() if k not in VARYING))
    found[key].append(Member(trial, plan))
  problems.found = list(dict.fromkeys(problems.found))
  problems.refuse()
  return [
    list(part)
    for members in found.values()
    for part in itertools.batched(members, count or len(members))
  ]


def _resolved(c) -> run_spec.RunSpec:
  return resolve.resolve(c, jax.device_count(), choose.current_device())


def reasons(plan: run_spec.RunSpec) -> list[str]:
  """Why the trials of a plan need runs of their own; [] where vmap gives the same."""
  found = [
    f"{key}={plan.flat[key]!r} needs a run of its own; set {value!r}, or leave --vmap out"
    for key, value in _PLAIN.items()
    if plan.flat.get(key, value) != value
  ]
  if plan.run.layout != axes.LOCAL:
    found.append("the mesh has several devices; one device trains a group")
  if len(plan.precision.phases) > 1:
    found.append("precision.schedule changes recipes within a run")
  sites = plan.sites()
  if states := scaling_lib.states(sites):
    found.append(
      f"the recipe of {next(iter(states))} has delayed or static scales, which are a state"
    )
  recipes = site_lib.recipes_of(sites)
  drawn = sorted({r.name for r in recipes.values() if r.is_random})
  if drawn:
    found.append(f"recipe {', '.join(drawn)} rounds stochastically")
  if plan.device.platform != "cpu" and any(r.is_quantized for r in recipes.values()):
    found.append("FP8 products of several trials at once have no kernel on this device")
  return found


def run(members: list[Member], stop_above: float) -> list[tuple[Trial, Outcome]]:
  """Trains a group to its end and writes the files of every trial.

  Args:
    members: of one group.
    stop_above: nats above its first loss at which a trial has diverged.
  """
  plan = members[0].plan
  for member in members:
    os.makedirs(member.trial.workdir, exist_ok=True)
  logs = [metrics_writer.Metrics(m.trial.workdir, 0, {}, False) for m in members]
  evaluator = evaluator_lib.Evaluator(plan)
  states = [train_step.make_state(m.plan) for m in members]
  results = [{} for _ in members]
  try:
    _evaluate(evaluator, states, 0, results, logs, plan)
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    del states
    state, losses = _train(members, state, logs)
    states = [jax.tree.map(lambda x, i=i: x[i], state) for i in range(len(members))]
    _evaluate(evaluator, states, plan.steps, results, logs, plan)
  finally:
    for log in logs:
      log.close()
  return [
    (m.trial, _finish(m, losses[:, i], results[i], states[i], stop_above))
    for i, m in enumerate(members)
  ]


def _train(members: list[Member], state, logs):
  """(the stacked state after all steps, losses [steps, trials])."""
  plan, step = members[0].plan, mapped_step(members)
  spread = batch_sharding.BatchSharder(plan.run.layout, plan.microbatch, plan.grad_accum_steps)
  # Trials of one seed read the same batches.
  streams = {
    m.plan.seed: loader.train_batches(m.plan.data, spread.local_batch, spread.shard)
    for m in members
  }
  losses = []
  try:
    for number in range(plan.steps):
      hosts = {seed: next(stream) for seed, stream in streams.items()}
      if plan.verify_fp8_gemms and number == 0:
        first, one = next(iter(hosts.values())), jax.tree.map(lambda x: x[0], state)
        rows = (plan, train_step.make_step(plan), one, spread.place(first), 0)
        list(fp8_gemms.every_step(*rows))
      placed = [spread.place(hosts[m.plan.seed]) for m in members]
      state, values = step(state, jax.tree.map(lambda *x: jnp.stack(x), *placed))
      values = jax.device_get(values)
      for i, log in enumerate(logs):
        log.write(number + 1, {k: float(v[i]) for k, v in values.items() if k != "is_finite"})
      losses.append(values["loss"])
  finally:
    for stream in streams.values():
      stream.close()
  return state, np.stack(losses)


def mapped_step(members: list[Member]):
  """(stacked state, stacked batch) -> (stacked state, {metric: [trials]}), jitted."""
  plan = members[0].plan
  sites, schedules = plan.sites(), [factory.schedule(m.plan.optim) for m in members]
  keys = jnp.stack([jax.random.key(m.plan.seed) for m in members])

  def one(state, batch, rate, key):
    return train_step.take_step(plan, state, batch, sites, rate, key)

  def step(state, batch):
    # One step number per trial, and one learning rate: schedules are functions of numbers.
    rates = jnp.stack([schedule(state.step[i]) for i, schedule in enumerate(schedules)])
    return jax.vmap(one)(state, batch, rates, keys)

  return jax.jit(step, donate_argnums=0, compiler_options=choose.compiler_options(plan.device))


def _evaluate(evaluator, states, step: int, results, logs, plan):
  """Adds the held-out losses of every trial to its results; one program for all."""
  if not plan.eval.tokens:
    return
  for state, found, log in zip(states, results, logs, strict=True):
    found[str(step)] = evaluator.run(state.params, {})
    log.write(step, evaluator_lib.flat(found[str(step)]))


def _finish(member: Member, losses, evaluations, state, stop_above: float) -> Outcome:
  """Writes the description and the end of a trial; its outcome."""
  plan, workdir = member.plan, member.trial.workdir
  flat = dict(plan.flat)
  provenance = provenance_lib.provenance(flat, loader.fingerprint(plan.data), plan.seed, 1)
  provenance |= {"from_step": 0, "earlier": [], "vmap": True}
  for name, value in (
    ("config.json", {"resolved": flat, "changed": dict(member.trial.changes)}),
    ("sites.json", startup.all_site_rows(plan)),
    ("provenance.json", provenance),
  ):
    provenance_lib.write_json(workdir, name, value)
  why = outcome_lib.ever_diverged(losses.tolist(), stop_above)
  if bool(state.halted):
    why = "loss or gradient not finite, see metrics.jsonl"
  if why:
    outcome_lib.mark_diverged(member.trial, why)
    return Outcome("diverged")
  last = evaluations.get(str(plan.steps))
  summary: dict[str, Any] = {
    "step": plan.steps,
    "tokens": plan.steps * plan.tokens_per_step,
    "train_loss": float(losses[-1]),
    "skipped_updates": int(state.skipped),
    "documents_passed_over": {},
    "evaluations": evaluations,
    "objective": evaluator_lib.objective(last) if last else None,
  }
  provenance_lib.write_json(workdir, "summary.json", summary)
  return Outcome("finished", summary["objective"])
