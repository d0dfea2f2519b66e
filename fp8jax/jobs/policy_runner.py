"""The policies of a run at work: phases/decide.py decides, this changes the training state."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from fp8jax import patterns
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site_tree
from fp8jax.phases import decide
from fp8jax.phases import policy as policy_lib
from fp8jax.quantization import amax_history
from fp8jax.run import checkpoint, restore
from fp8jax.step import train_spec, train_step
from fp8jax.step.state import State

# So many steps of a phase are calibrated where tensors are zero.
_STEPS_OF_ZEROS = 16


class PolicyRunner:
  """The policies of a run: their state, and the spec that they have changed.

  Attributes:
    spec: the configuration's, with the phases that policies began.
    policy_state: of the policies; part of every checkpoint.
    metrics: of evaluations, that policies judge.
    teacher: of step/distillation.py.
  """

  def __init__(
    self, spec: train_spec.TrainSpec, say: Callable[[int, list[decide.Event]], None],
    keep: Callable[[int, Any, Any, Any], None] = lambda *_: None, teacher: Any = None,
  ):  # fmt: skip
    """Args: the configuration's spec, and what writes down events under a step, and a refresh:
    (steps taken, sites, their scaling states before, and after)
    """
    self.teacher = teacher
    self.configured, self._say, self._keep = spec, say, keep
    self.policies = spec.precision.policy
    self._undo = decide.roll_back(self.policies)
    self._has_alarms = any(map(policy_lib.alarm_of, self.policies))
    self.metrics = sorted({policy.metric for policy in self.policies if policy.metric})
    self._calibrations: dict[Any, Callable] = {}
    self._rate_scale: Any = None
    self.set(decide.PolicyState())

  def set(self, policy_state: decide.PolicyState):
    """Takes another state of the policies, and with it the recipes that it gives."""
    self.policy_state = policy_state
    self.spec = restore.with_changes(self.configured, policy_state.recipes)

  # -- batches

  def next_batch(self, iterator, step: int):
    """(the batch of the step after `step` steps, its number); batches left out are passed over."""
    number = decide.num_batches_read(step, self.policy_state.skipped)
    while number in self.policy_state.skipped:
      next(iterator)
      number += 1
    return next(iterator), number

  def rate_scale(self) -> jax.Array | None:
    """The factor on the learning rate, everywhere; None where no policy changes it."""
    if not any(isinstance(policy, policy_lib.LowerRate) for policy in self.policies):
      return None
    if self._rate_scale is None or self._rate_scale[0] != self.policy_state.rate_scale:
      place, scale = self.spec.run.layout.everywhere, self.policy_state.rate_scale
      # Once per change: with several processes, device_put synchronizes them.
      self._rate_scale = (scale, jax.device_put(np.float32(scale), place))
    return self._rate_scale[1]

  # -- scales

  def begin_phase(self, state: State, batch, step: int, phase: int) -> State:
    """The state for a phase that a policy began: sites that keep their recipe keep their scales."""
    fresh = self.calibrated(state, batch, phase)
    kept = scaling_lib.carried(
      self.spec.sites(phase=self.spec.phase(step - 1)), state.scaling_states,
      self.spec.sites(phase=phase), fresh.scaling_states,
    )  # fmt: skip
    return dataclasses.replace(fresh, scaling_states=kept)

  def await_scales(self, state: State, step: int, phase: int):
    """Has sites of which no batch gave all amaxes calibrated before the step after `step` steps.

    Zeros are awaited in the first steps of a phase; then they keep scale 1 in the step that first
    has others (amax_history.update): a tensor may be zero for ever.
    """
    names = self._unknown(state.scaling_states, step, phase)
    self._await({*self.policy_state.refresh, *names})

  def _unknown(self, scaling_states, step: int, phase: int) -> list[str]:
    is_early = step - self.spec.precision.phases[phase].start < _STEPS_OF_ZEROS
    is_known = amax_history.is_known if is_early else np.isfinite
    return scaling_lib.unknown(self.spec.sites(phase=phase), scaling_states, is_known=is_known)

  def _await(self, names: Collection[str]):
    self.policy_state = dataclasses.replace(self.policy_state, refresh=tuple(sorted(names)))

  def refreshed(self, state: State, place: Callable[[], Any], step: int, phase: int) -> State:
    """The state for the step after `step` steps, with the scales that are due made again.

    A site is due before the next step, too, if the batch, which `place` makes, gives amaxes that
    are not finite, or if some are missing still, see `await_scales`.
    """
    due, sites = decide.due(self.policies, step), self.spec.sites(phase=phase)
    stateful = [s for s, r in site_tree.recipes_of(sites).items() if r.is_stateful]
    chosen, asked, events = {*self.policy_state.refresh} & {*stateful}, set(), []
    for policy in due:
      matched = patterns.matches(policy.sites, stateful)
      asked |= set(matched)
      text = f"scales of {len(matched)} sites are re-initialised from a batch"
      text = f"{policy_lib.name_of(policy)}: {text}"
      events.append(decide.Event(step + 1, policy.sites, text))
    chosen |= asked
    self._await(())
    if not chosen:
      return state
    with jax.transfer_guard("allow"):
      fresh = self.calibrated(state, place(), phase)
      own = (sites, state.scaling_states, sites, fresh.scaling_states)
      # Awaited and not refreshed: what a table or an earlier batch gave stays.
      fill = chosen.intersection(scaling_lib.unknown(*own[:2])) - asked
      states = scaling_lib.carried(*own, reset=chosen - fill, fill=fill)
      again = chosen.intersection(
        scaling_lib.unknown(sites, fresh.scaling_states, is_known=np.isfinite)
      )
      again |= chosen.intersection(self._unknown(states, step, phase))
    if again:
      self._await(again)
      text = f"the batch has no finite amaxes above 0 for the scales of {len(again)} sites; the"
      events.append(decide.Event(step + 1, "scales", f"{text} next one is taken for them"))
    self._say(step + 1, events)
    if chosen - again:
      self._keep(step, sites, state.scaling_states, states)
    return dataclasses.replace(fresh, scaling_states=states)

  def calibrated(self, state: State, batch, phase: int) -> State:
    """See train_step.make_calibration; compiled once per recipes."""
    rules = self.spec.precision.phases[phase].rules
    if rules not in self._calibrations:
      self._calibrations[rules] = train_step.make_calibration(self.spec, phase)
    return self._calibrations[rules](state, batch, self.teacher)

  # -- decisions

  def waits_for(self, is_loud: bool) -> bool:
    """Whether a step must be read before the next one begins, for a policy to judge it."""
    return self._undo is not None or (is_loud and self._has_alarms)

  def measured(self, step: int, firing: Collection[tuple[str, str]]):
    """Decides after a snapshot of the tensor statistics; new recipes hold from the next step on.

    After the last step, too: the run may be prolonged.

    Args:
      firing: (layer's site, statistic) of all alarms that ring.
    """
    if not self._has_alarms:
      return
    policy_state, events = decide.after_statistics(
      self.policies, self.policy_state, step, firing, *self._recipes(step)
    )
    self.set(policy_state)
    self._say(step, events)

  def evaluated(
    self, step: int, values: Mapping[str, float], saved: checkpoint.Checkpoints
  ) -> decide.Undo | None:
    """Decides after an evaluation by the values of `metrics`; a roll-back, or None to go on."""
    if not self.metrics:
      return None
    policy_state, events, back = decide.after_evaluation(
      self.policies, self.policy_state, step, values, *self._recipes(step)
    )
    self.set(policy_state)
    self._say(step, events)
    undo = [self._undone(policy, step, step - good, why, saved) for policy, good, why in back]
    return next(filter(None, undo), None)

  def _recipes(self, step: int) -> tuple[dict[str, str], dict[str, str]]:
    """{layer's site: recipe name} of the step after `step` steps: by the configuration, and those
    of policies that hold."""
    sites = self.configured.sites(phase=self.configured.phase(step))
    own = {name: recipe.name for name, recipe in site_tree.recipes_of(sites).items()}
    return own, self.configured.precision.held(self.policy_state.recipes, step)

  def target(self, step: int, loss: float, saved: checkpoint.Checkpoints) -> decide.Undo | None:
    """The roll-back after a loss that jumped; None to go on."""
    if (policy := self._undo) is None:
      return None
    z = decide.z_score(policy, self.policy_state, loss)
    if z > policy.z and (
      undo := self._undone(policy, step, policy.skip, decide.why_jump(z), saved)
    ):
      return undo
    self.policy_state = decide.with_loss(self.policies, self.policy_state, loss)
    return None

  def can_undo(self, step: int, saved: checkpoint.Checkpoints) -> bool:
    """Whether a step that is not finite will be undone."""
    return (
      self._undo is not None and self._good(self._undo, step - self._undo.skip, saved) is not None
    )

  def _undone(
    self, policy: policy_lib.RollBack, step: int, skip: int, why: str,
    saved: checkpoint.Checkpoints,
  ) -> decide.Undo | None:  # fmt: skip
    """The roll-back without the last `skip` batches; one that cannot be is an event, too."""
    to = self._good(policy, step - skip, saved)
    if to is not None:
      return decide.Undo(policy, step, skip, why, to)
    what = policy.metric or "loss"
    text = f"the {what} of step {step} {why}, and nothing is left to go back to"
    self._say(step, [decide.Event(step, "loss", f"{policy_lib.name_of(policy)}: {text}")])
    return None

  def _good(
    self, policy: policy_lib.RollBack, step: int, saved: checkpoint.Checkpoints
  ) -> int | None:
    """The newest checkpoint of a step up to this one, if one may be taken.

    Those of interruptions are passed over: a run that was not interrupted has none.
    """
    every = self.spec.checkpoint.every
    good = [s for s in saved.steps() if s <= step and s % every == 0]
    return good[-1] if good and decide.may_undo(policy, self.policy_state) else None

  def roll_back(self, undo: decide.Undo, saved: dict[str, Any] | None):
    """Takes the policies' state of the checkpoint's meta, and what a roll-back keeps; it is None of
    a checkpoint from before policies existed."""
    then = decide.PolicyState() if saved is None else decide.PolicyState.from_json(saved)
    self.set(decide.rolled_back(undo, self.policy_state, then))

  def tell_undone(self, after: int):
    """Writes the events of roll-backs to a step again, whose rows were taken back."""
    events = [event for event in self.policy_state.undone if event.step > after]
    for step in sorted({event.step for event in events}):
      self._say(step, [event for event in events if event.step == step])
