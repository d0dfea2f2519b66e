"""Decisions of policies: by hand-made observations, the same after a way through JSON."""

import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from fp8jax.config import policy as policy_config
from fp8jax.phases import decide

SITES = ("layers/0/mlp/up", "layers/1/mlp/up", "layers/0/mlp/down")
RECIPES = dict.fromkeys(SITES, "tensor_delayed(steps=16)")


def decided(policies, *rung_at):
  """[(events, policy_state)] of snapshots at steps 10, 20, …, through JSON between any two."""
  policies, found, policy_state = policy_config.read(policies), [], decide.PolicyState()
  for i, firing in enumerate(rung_at, 1):
    policy_state, events = decide.after_statistics(policies, policy_state, 10 * i, firing, RECIPES)
    found.append(([(e.step, e.place) for e in events], policy_state))
    again = decide.PolicyState.from_json(json.loads(json.dumps(policy_state.to_json())))
    assert again == policy_state
    policy_state = again
  return found


UP = ("layers/1/mlp/up", "saturation")


def test_switch_waits_for_k_alarms_in_n_snapshots_and_goes_back_after_quiet_ones():
  text = "switch_recipe(to='bf16', alarm='saturation', k=2, looks=3, back_after=2, most=1)"
  other = ("layers/1/mlp/up", "underflow")
  firing = [{UP}, set(), {other}, {UP}, {UP}, set(), set(), {UP}, {UP}]
  found = decided((text,), *firing)
  # Two of three snapshots at step 50 alone: those of 10 and 40 are too far apart.
  given = [policy_state.overrides for _, policy_state in found]
  assert given == [{}] * 4 + [{UP[0]: "bf16"}] * 2 + [{}] * 3
  assert [events for events, _ in found if events] == [[(50, UP[0])], [(70, UP[0])]]
  assert [step for step, _ in found[-1][1].recipes] == [50, 70]


def test_margin_widens_to_its_most_and_no_further():
  found = decided(("widen_margin(by=2, most=3, sites='.*/up')",), *[{UP, (SITES[2], UP[1])}] * 3)
  names = [policy_state.overrides.get(UP[0]) for _, policy_state in found]
  assert names == [f"tensor_delayed(steps=16, margin={m})" for m in (2, 3, 3)]
  assert set(found[-1][1].overrides) == {UP[0]} and not found[-1][0]


def test_site_that_was_widened_and_then_switched_comes_back_widened():
  policies = (
    "widen_margin(alarm='saturation', by=2, sites='.*/up')",
    "switch_recipe(alarm='underflow', k=1, looks=1, back_after=2, sites='.*/up')",
  )
  found = decided(policies, {UP}, {(UP[0], "underflow")}, set(), set())
  wide = "tensor_delayed(steps=16, margin=2)"
  assert [m.overrides[UP[0]] for _, m in found] == [wide, "bf16", "bf16", wide]


def test_a_decision_sees_those_before_it_in_the_same_snapshot():
  switch = "switch_recipe(k=1, looks=1, sites='.*/up')"
  for others in ("widen_margin(sites='.*/up')", "refresh(alarm='any', sites='.*/up')"):
    for policies in ((switch, others), (others, switch)):
      ((events, state),) = decided(policies, {UP})
      assert state.overrides == {UP[0]: "bf16"} and not state.refresh
      widens_first = policies[0].startswith("widen")  # and then comes back with that margin
      assert len(events) == 1 + widens_first
      assert [had for away in state.away.values() for had, _ in away.values()] == [
        "tensor_delayed(steps=16, margin=1)" * widens_first
      ]


def test_a_site_that_two_policies_switched_comes_back_in_whichever_order():
  policies = (
    "switch_recipe(to='block_128', alarm='saturation', k=1, looks=1, back_after=2, sites='.*/up')",
    "switch_recipe(to='bf16', alarm='underflow', k=1, looks=1, back_after=2, sites='.*/up')",
  )
  one, two, none = {UP}, {(UP[0], "underflow")}, set()
  for firing, wanted in (
    ((one, two, none, none, none), ["block_128", "bf16", "bf16", "", ""]),
    ((one, {UP, *two}, one, none, none), ["block_128", "bf16", "bf16", "block_128", ""]),
  ):
    given = [state.overrides.get(UP[0], "") for _, state in decided(policies, *firing)]
    assert given == wanted


def test_refresh_on_alarm_takes_the_site_that_rang():
  ((events, policy_state),) = decided(
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


def evaluations(policies, *values):
  """[(state, events' places, roll-backs)] of values at steps 10, 20, …, through JSON."""
  policies, found, state = policy_config.read(policies), [], decide.PolicyState()
  for i, value in enumerate(values, 1):
    losses = {"heldout": value, "heldout/b": value + 1, "accuracy": value, "accuracy/q": value}
    state, events, back = decide.after_evaluation(policies, state, 10 * i, losses, RECIPES)
    found.append((state, [e.place for e in events], back))
    state = decide.PolicyState.from_json(json.loads(json.dumps(state.to_json())))
    assert state == found[-1][0]
  return found


def test_successive_evaluations_beyond_the_bound_switch_a_recipe_and_better_ones_bring_it_back():
  text = "switch_recipe(to='bf16', back_after=1, sites='.*/up', metric='heldout', worse_by=0.25, "
  # 3.25 is at the bound of the best one, 3.0, and not worse; a worse one alone does nothing.
  found = evaluations((text + "patience=2)",), 3.0, 3.25, 3.26, 3.25, 3.26, float("nan"), 3.0)
  assert [places for _, places, _ in found] == [[]] * 5 + [list(SITES[:2])] * 2
  assert set(found[5][0].overrides.values()) == {"bf16"} and not found[6][0].overrides


def test_a_metric_replaces_alarms_and_rolls_back_to_before_it_got_worse():
  policies = (
    "roll_back(metric='heldout/b', patience=2)", "refresh(metric='heldout', worse_by=0.0)",
    "widen_margin(alarm='saturation')",
  )  # fmt: skip
  found = evaluations(policies, 3.0, 2.5, 2.6, 2.7)
  assert [len(back) for *_, back in found] == [0, 0, 0, 1]
  ((policy, good, why),) = found[3][2]
  assert (policy.metric, good) == ("heldout/b", 20) and "3.7000, best 3.5000" in why
  # Both worse ones refresh every stateful site; nothing widens without an alarm.
  assert [len(places) for _, places, _ in found] == [0, 0, 3, 3]
  undo = decide.Undo(policy, 40, 40 - good, why, 20)
  after = decide.rolled_back(undo, found[3][0], found[1][0])
  assert after.skipped == tuple(range(20, 40)) and after.trends == found[1][0].trends
  (other,) = policy_config.read(("roll_back()",))
  for left in (True, True, False):  # at most three
    assert decide.may_undo(policy, after) == left and decide.may_undo(other, after)
    after = decide.rolled_back(undo, after, after)


def test_an_accuracy_is_worse_below_the_best_one_and_improves_above_it():
  """By the definition: worse is a < best - worse_by, better is a > best * (1 + rtol) + atol."""
  text = "switch_recipe(sites='.*/up', metric='accuracy/q', worse_by=0.25)"
  values = (0.25, 0.75, 0.5, 0.5 - 2**-20)  # the third is at the bound
  found = evaluations((text,), *values)
  assert [bool(places) for _, places, _ in found] == [False, False, False, True]
  (trend,) = found[-1][0].trends.values()
  assert trend.best == -0.75 and trend.good == 30
  (back,) = evaluations(("roll_back(metric='accuracy')",), 0.75, 0.5)[-1][2]
  assert back[1:] == (10, "is 0.5000, best 0.7500: worse in 1 evaluations")

  # 0.5 -> 0.625 is at rtol=0.25, -> 0.65625 at atol; nothing right becomes better with any answer.
  numbers = "patience=1, rtol=0.25, atol=0.03125, metric='accuracy'"
  scales = [s.rate_scale for s, *_ in evaluations((f"lower_rate({numbers})",), 0.5, 0.65625, 0.657)]
  assert scales == [1.0, 0.5, 0.5]
  found = evaluations(("lower_rate(patience=1, rtol=0.5, metric='accuracy')",), 0.0, 0.0, 0.125)
  assert [s.rate_scale for s, *_ in found] == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize(
  "text", ["lower_rate(patience={})", "roll_back(metric='heldout', patience={})"]
)
def test_a_first_evaluation_that_is_no_number_counts(text, patience):
  (policy,) = policy_config.read((text.format(patience),))
  trend, first = decide.Trend().after(policy, 0, math.nan)
  trend, second = trend.after(policy, 2, math.nan)
  assert (first, second) == (patience == 1, True)
  assert (trend.best, trend.failed, trend.good) == (None, 0, -1)


@pytest.mark.parametrize("questions, by", [(50, 1), (30, 3), (1319, 13), (50, 7)])
def test_answers_are_counted_at_the_bound(questions, by):
  """Whole numbers decide: `by` answers fewer are not worse, one fewer than that is."""
  worse_by = by / questions
  (switch,) = policy_config.read((f"switch_recipe(metric='accuracy', worse_by={worse_by!r})",))
  (lower,) = policy_config.read(
    (f"lower_rate(metric='accuracy', atol={worse_by!r}, rtol=0.0, patience=1)",)
  )

  def acts(policy, before, after):
    trend, _ = decide.Trend().after(policy, 0, -before / questions)
    return trend.after(policy, 10, -after / questions)[1]

  for least in range(questions - by):
    most = least + by
    assert [acts(switch, right, least) for right in (most, most + 1)] == [False, True], least
    assert [acts(lower, least, right) for right in (most, most + 1)] == [True, False], least


@pytest.mark.parametrize("cooldown", [0, 2])
def test_the_rate_is_lowered_as_optax_lowers_it(cooldown):
  numbers = dict(factor=0.5, patience=2, rtol=0.125, cooldown=cooldown, min_scale=0.3)
  losses = [4.0, 3.5, 3.5, 3.4, 3.0625, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0]
  theirs = optax.contrib.reduce_on_plateau(**numbers)
  state, scales = theirs.init(None), []
  for loss in losses:
    _, state = theirs.update(None, state, value=jnp.float32(loss))
    scales.append(float(state.scale))
  assert len(set(scales)) == 3 and scales[-1] == pytest.approx(0.3)
  text = f"lower_rate({', '.join(f'{k}={v}' for k, v in numbers.items())})"
  found = evaluations((text,), *losses)
  np.testing.assert_allclose([state.rate_scale for state, *_ in found], scales, rtol=1e-6)
  changes = [i for i, (_, places, _) in enumerate(found) if places]
  assert changes == [i for i in range(1, len(scales)) if scales[i] != scales[i - 1]]


@pytest.mark.parametrize("own, back", [
  ("tensor_delayed(steps=16)", "tensor_delayed(steps=16, margin=1)"),
  ("block_128", ""),  # the margin was of another recipe
  ("bf16", ""),  # the schedule has made the site wide
])  # fmt: skip
def test_a_switch_back_gives_no_margin_that_a_phase_has_ended(own, back):
  (policy,) = policies = policy_config.read(("switch_recipe(k=1, looks=1, back_after=1)",))
  site, key = SITES[1], policy_config.policy_lib.name_of(policy)
  before = decide.PolicyState(
    recipes=((2, {site: "tensor_delayed(steps=16, margin=1)"}), (4, {site: "bf16"})),
    away={key: {site: ("tensor_delayed(steps=16, margin=1)", 0)}}, counts={key: {site: 1}},
  )  # fmt: skip
  now = dict.fromkeys(SITES, own)
  after, _ = decide.after_statistics(policies, before, 10, set(), now, {site: "bf16"})
  assert after.overrides == ({site: back} if back else {}) and not after.away[key]
  # An override that a phase has ended is none to go back from, and may be given again.
  ended, events = decide.after_statistics(policies, before, 10, set(), now, {})
  assert ended.recipes == before.recipes and not ended.away[key] and not events
  again, events = decide.after_statistics(policies, ended, 12, {UP}, now, {})
  assert len(events) == (own != "bf16")
  assert again.recipes[2:] == (((12, {site: "bf16"}),) if own != "bf16" else ())
