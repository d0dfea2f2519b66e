"""Decisions of policies: by hand-made observations, the same after a way through JSON."""

import json

import numpy as np
import pytest

from fp8jax.config import policy as policy_config
from fp8jax.phases import decide

SITES = ("layers/0/mlp/up", "layers/1/mlp/up", "layers/0/mlp/down")
RECIPES = dict.fromkeys(SITES, "tensor_delayed(steps=16)")


def looks(policies, *rung_at):
  """[(events, policy_state)] of looks at steps 10, 20, …, through JSON between any two."""
  policies, found, policy_state = policy_config.read(policies), [], decide.PolicyState()
  for i, firing in enumerate(rung_at, 1):
    recipe_of = {**RECIPES, **policy_state.overrides}
    policy_state, events = decide.after_statistics(
      policies, policy_state, 10 * i, firing, recipe_of
    )
    found.append(([(e.step, e.place) for e in events], policy_state))
    again = decide.PolicyState.from_json(json.loads(json.dumps(policy_state.to_json())))
    assert again == policy_state
    policy_state = again
  return found


UP = ("layers/1/mlp/up", "saturation")


def test_switch_waits_for_k_alarms_in_n_looks_and_goes_back_after_quiet_ones():
  text = "switch_recipe(to='bf16', alarm='saturation', k=2, looks=3, back_after=2, most=1)"
  other = ("layers/1/mlp/up", "underflow")
  firing = [{UP}, set(), {other}, {UP}, {UP}, set(), set(), {UP}, {UP}]
  found = looks((text,), *firing)
  # Two of three looks at step 50 alone: those of 10 and 40 are too far apart.
  given = [policy_state.overrides for _, policy_state in found]
  assert given == [{}] * 4 + [{UP[0]: "bf16"}] * 2 + [{}] * 3
  assert [events for events, _ in found if events] == [[(50, UP[0])], [(70, UP[0])]]
  assert [step for step, _ in found[-1][1].recipes] == [50, 70]


def test_margin_widens_to_its_most_and_no_further():
  found = looks(("widen_margin(by=2, most=3, sites='.*/up')",), *[{UP, (SITES[2], UP[1])}] * 3)
  names = [policy_state.overrides.get(UP[0]) for _, policy_state in found]
  assert names == [f"tensor_delayed(steps=16, margin={m})" for m in (2, 3, 3)]
  assert set(found[-1][1].overrides) == {UP[0]} and not found[-1][0]


def test_site_that_was_widened_and_then_switched_comes_back_widened():
  policies = (
    "widen_margin(alarm='saturation', by=2, sites='.*/up')",
    "switch_recipe(alarm='underflow', k=1, looks=1, back_after=2, sites='.*/up')",
  )
  found = looks(policies, {UP}, {(UP[0], "underflow")}, set(), set())
  wide = "tensor_delayed(steps=16, margin=2)"
  assert [m.overrides[UP[0]] for _, m in found] == [wide, "bf16", "bf16", wide]


def test_refresh_on_alarm_takes_the_site_that_rang():
  ((events, policy_state),) = looks(
    ("refresh(alarm='any', sites='.*/mlp/up')",), {UP, (SITES[2], "amax")}
  )
  assert policy_state.refresh == (UP[0],) and events == [(10, UP[0])]


def test_refresh_is_due_every_so_many_steps_and_not_before_the_first():
  policies = policy_config.read(("refresh(every=5)", "refresh(alarm='underflow')"))
  assert [step for step in range(16) if decide.due(policies, step)] == [5, 10, 15]


def test_loss_is_judged_by_the_window_before_it():
  (policy,) = policies = policy_config.read(("roll_back(z=5.0, window=8)",))
  rng, policy_state, seen = np.random.default_rng(0), decide.PolicyState(), []
  for loss in 3.0 + 0.1 * rng.standard_normal(20):
    expected = 0.0 if len(seen) < 8 else (loss - np.mean(seen[-8:])) / np.std(seen[-8:])
    assert decide.z_score(policy, policy_state, loss) == pytest.approx(expected, rel=1e-12)
    policy_state, seen = decide.with_loss(policies, policy_state, loss), [*seen, loss]
  assert decide.z_score(policy, policy_state, float("nan")) == np.inf
  assert decide.with_loss(policies, policy_state, float("nan")) == policy_state
  flat = decide.PolicyState(losses=(2.0,) * 8)
  assert decide.z_score(policy, flat, 2.001) == pytest.approx(0.5)  # 1e-3 of the mean is no jump


def test_batches_of_a_roll_back_are_left_out_however_often():
  """Against a list of batches from which they are deleted."""
  (policy,) = policy_config.read(("roll_back(skip=2)",))
  then, now, left = decide.PolicyState(), decide.PolicyState(), list(range(40))
  for at, to in ((9, 5), (11, 10), (12, 10), (3, 0)):
    now = decide.rolled_back(decide.Undo(policy, at, 2, decide.why_jump(7.0), to), now, then)
    del left[at - 2 : at]
    assert [decide.num_batches_read(step + 1, now.skipped) - 1 for step in range(20)] == left[:20]
  assert len(now.undone) == 4 and now.undone[0].step == 6 and "batches 7, 8" in now.undone[0].text
