"""precision.policy of a configuration: read as values, refused with the reason and the remedy."""

import harness
import pytest

from fp8jax import patterns
from fp8jax.config import policy as policy_config
from fp8jax.errors import ConfigError
from fp8jax.phases import policy as policy_lib
from fp8jax.phases import schedule
from fp8jax.recipe import rules


def test_texts_and_mappings_make_the_same_values():
  wanted = policy_lib.SwitchRecipe(to="block_128", k=2, sites="layers/0/.*")
  text = "switch_recipe(to='block_128', k=2, sites='layers/0/.*')"
  mapping = {"kind": "switch_recipe", "to": "block_128", "k": 2, "sites": "layers/0/.*"}
  assert policy_config.read((text,)) == policy_config.read((mapping,)) == (wanted,)
  assert policy_config.read((policy_lib.name_of(wanted), "roll_back")) == (
    wanted, policy_lib.RollBack(),
  )  # fmt: skip


REFUSED = {
  "refresh(evry=5)": "refresh has no 'evry'; it has every, alarm, sites",
  "refresh()": "never refreshes anything",
  "refresh(every=5.0)": "every=5.0 must be of type int",
  "refresh(every=True)": "every=True must be of type int",
  "refresh(every=1e3)": "every=1000.0 must be of type int; write every=1000",
  "refresh(every=5, worse_by=False)": "worse_by=False must be of type float",
  "refresh(every=016)": "016 begins with 0; write 16",
  "refresh(every=5, sites='(')": "is no regular expression",
  "rewind(z=2)": "'rewind' is no policy; there are refresh, widen_margin, switch_recipe, roll_back",
  "lower_rate(metric='heldout/')": "metric='heldout/' is none of",
  "refresh(every=2, metric='loss')": "metric='loss' is none of",
  "switch_recipe(k=1, metric='heldout')": "metric='heldout' takes the place of k",
  "switch_recipe(worse_by=0.1)": "worse_by and patience are of a metric",
  "lower_rate(factor=1.0)": "factor=1.0 must be between 0 and 1",
  "switch_recipe(k=6, looks=5)": "need 1 <= k <= looks",
  "widen_margin(by=4, most=3)": "need 1 <= by <= most",
  "roll_back(z=0)": "z=0 must be positive",
  "roll_back(z=nan)": "is no policy of finite numbers and texts",
  "refresh(every=10**30)": "is no policy of finite numbers and texts",
  f"refresh(every={10**30})": "must be below 2^31",
  f"roll_back(window={2**31})": "must be below 2^31",
  "roll_back(window=1)": "window=1 must be at least 2",
  "__import__('os').system('true')": "is no policy of finite numbers and texts; write",
  "refresh(5)": "is no policy of finite numbers and texts; write",
}


@pytest.mark.parametrize("text", REFUSED)
def test_policy_that_makes_no_sense_is_refused(text):
  with pytest.raises(ValueError) as e:
    policy_config.read((text,))
  assert REFUSED[text] in str(e.value) and "precision.policy[0]" in str(e.value)


def test_what_policies_need_and_lack_is_said_together():
  with pytest.raises(ConfigError) as e:
    harness.one_layer_spec(**{
      "precision.policy": (
        "refresh(alarm='underflw')", "switch_recipe(to='block_12', alarm='amax')", "roll_back()",
        "switch_recipe(to='block_128', sites='layers/7/.*')", "lower_rate()",
      ),
      "optim.decay_by": "schedule", "optim.weight_decay": 1e-4,
    })  # fmt: skip
  for text in (
    "did you mean 'underflow'?", "log.tensor_stats_every=0 takes none", "did you mean 'block_128'",
    "log.alarms has no rule about it", "checkpoint.every=0 leaves no checkpoint",
    "optim.decay_by='schedule' takes no notice of a lower rate",
  ):  # fmt: skip
    assert text in str(e.value)
  with pytest.raises(ConfigError, match=r"sites='layers/7/\.\*' matches none of"):
    changes = {
      "log.tensor_stats_every": 1,
      "precision.policy": ("switch_recipe(sites='layers/7/.*')",),
    }
    harness.one_layer_spec(**changes)


@pytest.mark.parametrize("policy", ["refresh(every=2)", "widen_margin(alarm='amax')"])
def test_policy_about_scales_that_no_site_keeps_is_refused(policy):
  changes = {
    "precision.policy": (policy,), "log.tensor_stats_every": 1, "log.alarms": (("amax", ">", 1.0),)
  }  # fmt: skip
  with pytest.raises(ConfigError, match=r"never does anything: no site that it names \(sites='"):
    harness.one_layer_spec("block_128", **changes)
  # A site, or a policy, that brings such scales: in a later phase, after a switch.
  delayed = (("layers/.*/mlp/down", "tensor_delayed"), (".*", "bf16"))
  harness.one_layer_spec("block_128", **changes, **{"precision.schedule": ((3, delayed),)})
  changes["precision.policy"] += ("switch_recipe(to='tensor_delayed', alarm='amax')",)
  harness.one_layer_spec("block_128", **changes)


@pytest.mark.parametrize("changes, words", [
  ({"precision.rules": ((".*", f"block_128(accumulate={10**30})"),)}, "at least 1 and below 2^31"),
  ({"precision.schedule": ((True, ((".*", "bf16"),)),)}, "is no pair of a first step and rules"),
  ({"data.workers": 10**6}, "data.workers=1000000, each a process, must be at most 1024"),
])  # fmt: skip
def test_number_beyond_any_run_is_refused(changes, words):
  with pytest.raises(ConfigError) as e:
    harness.one_layer_spec(**changes)
  assert words in str(e.value)


@pytest.mark.parametrize("key, value", [
  ("optim.clip_groups", ("((.+)+)+X", 1.0)),
  ("optim.lr_multipliers", ("((.+)+)+X", 2.0)),
  ("log.alarms: saturation", ("saturation", ">", 0.1, "layers/0/mlp/up/x((.+)+)+X|((.+)+)+/Y")),
  ("precision.policy: switch_recipe", "switch_recipe(to='bf16', sites='((.+)+)+X')"),
  ("precision.policy: refresh", "refresh(every=2, sites='((.+)+)+X')"),
])  # fmt: skip
def test_a_pattern_that_tries_for_ever_is_refused_with_its_key(key, value, monkeypatch):
  monkeypatch.setattr(patterns, "SECONDS", 0.2)
  changes = {"log.tensor_stats_every": 1, "log.alarms": (("amax", ">", 1.0),)}
  changes |= {"optim.grad_clip_norm": 0.0, key.partition(":")[0]: (value,)}
  with pytest.raises(ConfigError) as e:
    harness.one_layer_spec("tensor_delayed", **changes)
  (problem,) = e.value.problems
  assert problem.startswith(key) and "takes longer than 0.2 s to match" in problem
  assert "((.+)+)+" in problem and "write each repeat once" in problem


@pytest.mark.parametrize("sites", ["layers/.*/mlp/down", "layers/7/.*"])
def test_an_alarm_that_no_tensor_can_ring_is_refused(sites):
  """Without the tensor behind the site's name, or of a layer that is not there."""
  with pytest.raises(ConfigError) as e:
    harness.one_layer_spec("block_128", **{"log.alarms": (("amax", ">", 1.0, sites),)})
  (problem,) = e.value.problems
  assert problem.startswith(f"log.alarms: amax: {sites!r} matches none of head/x, head/w, ")
  harness.one_layer_spec("block_128", **{"log.alarms": (("amax", ">", 1.0, f"{sites}|head/x"),)})


def test_changes_of_policies_hold_through_the_phases_of_the_configuration():
  names = [f"layers/{i}/mlp/{site}" for i in range(2) for site in ("up", "down")]
  phases = (
    schedule.Phase(0, ((".*/down", "mxfp8"), (".*", "block_128"))),
    schedule.Phase(10, ((".*", "mxfp8_ste"),)),
  )
  changes = [(4, {names[1]: "rowwise"}), (7, {names[1]: "rowwise", names[3]: "rowwise"}), (12, {})]
  changed = schedule.Precision(phases).with_changes(names, changes)
  assert [(p.start, p.by_policy) for p in changed.phases] == [
    (0, False), (4, True), (7, True), (10, False), (12, True),
  ]  # fmt: skip
  for step, expected in {
    3: ("block_128", "mxfp8", "block_128", "mxfp8"),
    4: ("block_128", "rowwise", "block_128", "mxfp8"),
    9: ("block_128", "rowwise", "block_128", "rowwise"),
    11: ("mxfp8_ste", "rowwise", "mxfp8_ste", "rowwise"), 13: ("mxfp8_ste",) * 4,
  }.items():  # fmt: skip
    chosen = rules.match(names, changed.phases[changed.at(step)].rules)  # no rule decides nothing
    assert tuple(chosen[name] for name in names) == expected


def test_a_phase_of_the_configuration_ends_what_policies_gave_where_it_is_wide():
  """The last steps in BF16 are in BF16; a margin is of its recipe, and ends with it."""
  delayed, wider = "tensor_delayed(steps=4)", "tensor_delayed(steps=4, margin=1)"
  phases = (
    schedule.Phase(0, (("a", delayed), ("e", "bf16"), (".*", "tensor_delayed"))),
    schedule.Phase(4, (("c", delayed), ("e", "bf16"), (".*", "block_128"))),
    schedule.Phase(6, ((".*", "bf16"),)),
    schedule.Phase(9, ((".*", delayed),)),
  )
  first = {"a": wider, "b": "rowwise", "c": "tensor_delayed(margin=2)"}
  changes = [
    (2, first),
    (5, {**first, "d": "rowwise"}),
    (7, {**first, "a": "mxfp8", "d": "rowwise"}),
  ]
  precision = schedule.Precision(phases)
  assert precision.held(changes, 3) == first
  assert precision.held(changes, 4) == {"b": "rowwise"}
  assert precision.held(changes, 5) == {"b": "rowwise", "d": "rowwise"}
  assert precision.held(changes, 6) == {}
  # Given within a phase, it holds in it, whatever the phase has.
  assert precision.held(changes, 7) == {"a": "mxfp8"}
  assert precision.held([(2, {"e": "mxfp8"})], 4) == {"e": "mxfp8"}  # which that phase leaves alone
  assert precision.held(changes, 9) == {"a": "mxfp8"}  # the others have ended for good
  chosen = precision.with_changes("abcd", changes)
  assert rules.match("abcd", chosen.phases[chosen.at(6)].rules) == dict.fromkeys("abcd", "bf16")
