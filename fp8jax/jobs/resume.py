"""The checkpoints of a run: the state that it begins with, and what is remembered beside it."""

import contextlib
import dataclasses
from typing import Any

import jax
import rich.console

from fp8jax.config import identity
from fp8jax.errors import UserError
from fp8jax.jobs import run_state
from fp8jax.jobs import start as start_lib
from fp8jax.ops import scaling as scaling_lib
from fp8jax.phases import decide
from fp8jax.phases import policy as policy_lib
from fp8jax.run import checkpoint, goodput, metrics_writer, restore
from fp8jax.run import provenance as provenance_lib
from fp8jax.step import train_spec, train_step
from fp8jax.step.state import State


class Saver:
  """Saves a run and restores it.

  Attributes:
    checkpoints: of its workdir.
    evaluations: {step: Evaluator.run's}, part of every checkpoint.
  """

  def __init__(
    self, spec: train_spec.TrainSpec, workdir: str, fingerprint: str, now: run_state.RunState,
    clock: goodput.Clock, contents: dict[str, str], job: str,
  ):  # fmt: skip
    """Args: the configuration's spec, what a checkpoint remembers of the run, and sets, keys that
    are remembered by what their files hold, and the job that trains.
    """
    self._workdir, self._now, self._batches, self._clock = workdir, now, now.batches, clock
    self._spec, self._weights_dtype = spec, "bfloat16"
    every = spec.checkpoint.every if decide.has_roll_back(spec.precision.policy) else 0
    self.checkpoints = checkpoint.Checkpoints(workdir, spec.checkpoint.keep, every)
    self.evaluations: dict[str, Any] = {}
    spread, order = now.batches.spread, now.batches.spread.order
    # Of the run: it may go on where these are the same. Now: a table may be edited during the run.
    self._origin = {
      "config": {**identity.identity(spec), **contents},
      "job": job,
      "data_fingerprint": fingerprint,
      # The settings that the saved positions in the data depend on.
      "readers": {
        "processes": jax.process_count(),
        "shares": spread.shard.count,
        "in worker processes": spec.data.workers > 0,
        restore.ORDER: order,
      },
    }

  def begin(self, out: rich.console.Console) -> tuple[State, int]:
    """(a fresh state, the newest checkpoint's, or that of init.workdir; steps taken)."""
    self._out = out
    steps, spec = self.checkpoints.steps(), self._spec
    if steps:
      before = self.checkpoints.meta(steps[-1]).get("seconds", {})
      self._clock.go_on(before, metrics_writer.last_logged(self._workdir, "elapsed_seconds"))
      return self._restored(self.checkpoints, steps[-1], out)
    ends = self._batches.ends()
    if not spec.init.workdir:
      state, self._weights_dtype = start_lib.fresh(spec, self._workdir, out, ends)
      return state, 0
    workdir = start_lib.source(spec.init.workdir)
    if spec.init.weights_only:
      state, self._weights_dtype = start_lib.stage(spec, workdir, self._workdir, out, ends)
      return state, 0
    with contextlib.closing(checkpoint.Checkpoints(workdir)) as other:
      restored = self._restored(other, other.find(spec.init.step), out)
    out.print(f"continuing the run in {spec.init.workdir}")
    start_lib.take_source(spec, workdir, self._workdir, ends)
    return restored

  def _restored(self, saved: checkpoint.Checkpoints, step: int, out) -> tuple[State, int]:
    """The state after `step` steps, and the data's position; raises where the run is another."""
    now, meta = self._now, saved.meta(step)
    changes = self._changes(meta)
    for key, (old, new) in changes.items():
      out.print(f"config changed since the checkpoint: {key}: {old} -> {new}")
    accepted = self._spec.checkpoint.accept_changes
    data = (self._origin["data_fingerprint"], self._origin["readers"])
    read = policy_lib.keys_read(self._spec.precision.policy)
    restore.check_same_run(changes, meta, step, *data, accepted, read)
    if restore.ORDER not in meta["readers"] and self._origin["readers"]["shares"] > 1:
      out.print(f"held-out losses until step {step} are of other windows than those from here on")
    if step > self._spec.steps:
      raise UserError(
        f"the checkpoint is of step {step}, beyond steps={self._spec.steps}: set steps={step} or "
        "more, or take an earlier checkpoint into another --workdir, with init.workdir, init.step"
      )
    if policy := meta.get("policy"):
      now.policies.set(decide.PolicyState.from_json(policy))
    self._weights_dtype = meta["weights_dtype"]
    state = self._read(saved, step, meta)
    out.print(f"resuming from step {step}")
    for line in metrics_writer.holes(self._workdir, provenance_lib.origin(self._workdir), step):
      out.print(line)
    return state, step

  def _read(self, saved: checkpoint.Checkpoints, step: int, meta: dict[str, Any]) -> State:
    """The state of a checkpoint as this run goes on with it, whatever the run was that saved it.

    Scales of other recipes, or of another table than precision.calibration, are left out.
    """
    now, out = self._now, self._out
    changes = self._changes(meta)
    self._take(meta)
    abstract = train_step.abstract_state(now.spec, step)
    remembered = self._remembered(step)
    is_same = meta.get("remembered", remembered) == remembered
    has_new_table = now.calibration is not None and "precision.calibration" in changes
    now.has_scales = is_same and not has_new_table
    if not now.has_scales:
      abstract = dataclasses.replace(abstract, scaling_states={})
    read = policy_lib.keys_read(self._spec.precision.policy)
    # With other alarms or recipes nothing was said of the last snapshot.
    now.has_same_alarms = not any(key.startswith(("log.alarms", "precision.")) for key in changes)
    accepted = identity.refused_changes(changes, (), read)
    state = saved.restore(step, abstract, self._batches.iterator, accepted)
    if has_new_table:
      out.print(f"step {step}: scales are re-initialised from the table of precision.calibration")
    elif not is_same:
      out.print(
        f"scales of step {step} belong to other recipes; re-initialised from the next batch"
      )
    if jax.device_get(state.halted):
      moved = " (some layers may have moved with it)" * self._spec.optim.in_backward
      out.print(f"step {step} met a non-finite value{moved}; going on with the batch after it")
      # False, on the devices where it was.
      state = dataclasses.replace(state, halted=state.halted ^ state.halted)
    return state

  def _changes(self, meta: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{what differs from the run of a checkpoint: (then, now)}.

    Earlier checkpoints do not state the job; those of a search have its policy.
    """
    own = self._origin["job"]
    earlier = "search" if "search" in meta else "train" if own == "search" else own
    then = meta.get("job", earlier)
    changed = {"job": (then, own)} if then != own else {}
    return identity.diff(self._origin["config"], meta["config"]) | changed

  def roll_back(self, undo: decide.Undo) -> State:
    """The state of an older checkpoint; what is remembered becomes as it was then."""
    to = undo.to
    self.checkpoints.drop_after(to)
    meta = self.checkpoints.meta(to)
    self._clock.lose_since(meta.get("seconds", {}))
    self._now.policies.roll_back(undo, meta.get("policy"))
    self._now.phase, self._now.undo = -1, None
    return self._read(self.checkpoints, to, meta)

  def _take(self, meta: dict[str, Any]):
    """Goes on with what a checkpoint remembers beside the state."""
    self.evaluations = meta["evaluations"]
    self._now.recall(meta)
    self._batches.counts.clear()
    if jax.process_index() == 0:  # of all processes together
      self._batches.counts.update(meta["documents"])

  def _remembered(self, step: int) -> dict[str, str]:
    """Which sites' scaling states the state after `step` steps has, and for which recipes."""
    spec = self._now.spec
    return scaling_lib.recipes(spec.sites(phase=spec.phase(step - 1))) if step else {}

  def save(self, step: int, state: State):
    """Starts writing the checkpoint of `step` steps."""
    # Acts of policies stay, also where a resumed run has none any more.
    did = self._now.policies.policy_state
    is_kept = self._spec.precision.policy or did != decide.PolicyState()
    policy = {"policy": did.to_json()} if is_kept else {}
    with self._clock.on("checkpoint"):
      meta = {
        **self._origin,
        **policy,
        **self._now.remembered(),
        "remembered": self._remembered(step),
        "weights_dtype": self._weights_dtype,
        "documents": self._batches.counts.summary_everywhere(),
        "evaluations": self.evaluations,
        "seconds": self._clock.seconds(),
      }
      self.checkpoints.save(step, state, self._batches.iterator, meta)
