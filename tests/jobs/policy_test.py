"""precision.policy in runs: refreshes, recipes and roll-backs, each resumed bit for bit."""

import itertools
import json
import math
import re
import shutil

import debug_runs
import harness
import jax
import numpy as np
import pytest
from policy_runs import (
  LOUD,
  ROLL_BACK,
  actions,
  blown_up,
  losses,
  policy_memory,
  rows,
  run,
  run_until,
)

from fp8jax.config import resolve
from fp8jax.jobs import policy_runner
from fp8jax.ops import scaling, site_tree
from fp8jax.ops import site as site_lib
from fp8jax.phases import decide
from fp8jax.report import files
from fp8jax.run import calibration, restore
from fp8jax.run import evaluator as evaluator_lib

MARGIN = "tensor_delayed(margin=1)"


POLICIES = {
  "refresh": {
    **LOUD, "precision.policy": ("refresh(every=3, sites='layers/0/.*')",
                                  "refresh(alarm='snr_db', sites='layers/1/.*')"),
  },
  "switch and back, and widen": {
    **LOUD, "steps": 8, "precision.policy": (
      "switch_recipe(alarm='snr_db', k=1, looks=1, back_after=1, most=1, sites='layers/1/.*')",
      {"kind": "widen_margin", "alarm": "snr_db", "most": 1, "sites": "layers/2/.*"},
    ),
  },
  "roll back": ROLL_BACK,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_stopped_around_an_action_a_run_goes_on_bit_for_bit(tmp_path, monkeypatch, name):
  changes, steps = POLICIES[name], POLICIES[name].get("steps", 6)
  disturb = blown_up if name == "roll back" else None
  if disturb:  # the interruption's checkpoint is the newest when the loss jumps
    changes = {**changes, "checkpoint.every": 6}
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  run(whole, disturb, **changes)
  for step in (2, 3) if name == "roll back" else (1, 3):
    run_until(step, monkeypatch, broken, disturb, **changes)
  run(broken, disturb, **changes)
  assert losses(whole) == losses(broken)
  assert actions(whole) == actions(broken)
  assert len(actions(whole)) > (0 if name == "roll back" else 2)
  assert policy_memory(whole, steps) == policy_memory(broken, steps)
  spec = harness.text_spec(**changes)
  changed = restore.as_trained(spec, {"policy": policy_memory(whole, steps)})
  harness.assert_trees_equal(
    harness.saved_state(whole, changed, steps), harness.saved_state(broken, changed, steps)
  )


def test_evaluations_lower_the_rate_and_switch_recipes_stopped_or_not(tmp_path, monkeypatch):
  """No loss falls by 90 %, so that every evaluation but the first halves the rate."""
  changes = {
    **LOUD, "steps": 7, "eval.every": 2, "eval.tokens": 64, "log.tensor_stats_every": 0,
    "eval.precisions": ("bf16",), "precision.policy": (
      "lower_rate(patience=1, rtol=0.9)", "switch_recipe(metric='heldout', worse_by=0.0)",
    ), "optim.peak_lr": 3.0, "optim.min_lr": 3.0, "optim.warmup_steps": 0,
  }  # fmt: skip
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  run(whole, **changes)
  run_until(3, monkeypatch, broken, **changes)
  run(broken, **changes)
  assert losses(whole) == losses(broken) and actions(whole) == actions(broken)
  other = {**changes, "steps": 9, "eval.every": 3, "log.every": 1}
  with pytest.raises(resolve.ConfigError, match="eval.every was 2 at step 7 and is 3 now") as e:
    run(broken, **other)
  assert "log.every" not in str(e.value) and "steps was 7" in str(e.value)
  lr = {r["step"]: r["learning_rate"] for r in rows(whole) if "learning_rate" in r}
  assert [lr[step] for step in range(1, 8)] == pytest.approx(
    [3.0, 3.0, 1.5, 1.5, 0.75, 0.75, 0.375]
  )
  said = [text for step, _, text in actions(whole) if step == 2]
  assert any("lower_rate" in text and "rate times 0.5" in text for text in said)
  # A rate of 3 makes the loss worse, and matrices of FP8 go to BF16 at once.
  assert sum("recipe bf16 from here on" in text for text in said) == 3
  changed = restore.as_trained(harness.text_spec(**changes), {"policy": policy_memory(whole, 7)})
  recipes = site_tree.recipes_of(changed.sites(phase=changed.phase(6)))
  assert {recipe.name for recipe in recipes.values()} == {"bf16"}


@pytest.mark.slow
@pytest.mark.parametrize("worse_at", [4, 6])
def test_a_prolonged_run_judges_what_its_last_step_left(tmp_path, monkeypatch, worse_at):
  """The evaluation that a shorter run ended with, at once and again after a roll-back to it."""
  changes = {
    **LOUD, "steps": 7, "eval.every": 2, "eval.tokens": 64, "eval.precisions": ("bf16",),
    "optim.peak_lr": 0.1, "optim.min_lr": 0.1, "optim.warmup_steps": 0, "checkpoint.every": 2,
    "checkpoint.keep": 9, "checkpoint.accept_changes": ("steps",), "log.tensor_stats_every": 3,
    "precision.policy": (
      "roll_back(metric='heldout', worse_by=1.0)", "lower_rate(patience=2)",
      "widen_margin(alarm='snr_db', k=2, looks=2, most=1)",
    ),
  }  # fmt: skip
  judge, judged = policy_runner.PolicyRunner.evaluated, []

  def scripted(self, step, values, saved):
    judged.append(step)
    worse = step == worse_at and judged.count(step) == 1
    return judge(self, step, {"heldout": 9.0 if worse else 3.0}, saved)

  monkeypatch.setattr(policy_runner.PolicyRunner, "evaluated", scripted)
  whole, longer = tmp_path / "whole", tmp_path / "longer"
  run(whole, **changes)
  assert judged == {4: [0, 2, 4, 4, 6], 6: [0, 2, 4, 6, 6]}[worse_at]
  texts = [text for *_, text in actions(whole)]
  back = f"step {worse_at - 2}, batches {worse_at - 2}, {worse_at - 1} are left out"
  assert sum(back in text for text in texts) == 1
  assert any("rate times 0.5" in text for text in texts) and any("margin=1" in t for t in texts)
  judged.clear()
  run(longer, **{**changes, "steps": 4})
  assert judged == [0, 2]
  run(longer, **changes)
  assert judged == {4: [0, 2, 4, 4, 6], 6: [0, 2, 4, 6, 4, 6]}[worse_at]
  assert losses(longer) == losses(whole) and sorted(actions(longer)) == sorted(actions(whole))
  assert policy_memory(longer, 7) == policy_memory(whole, 7)


E5M2 = "tensor_current_e5m2"


RUNS_IN_E5M2 = {
  "rules": {"precision.rules": (("layers/.*/mlp/down", E5M2), (".*", "bf16"))},
  "a switch": {
    "precision.rules": (("layers/.*/mlp/down", "tensor_current"), (".*", "bf16")),
    "precision.policy": (f"switch_recipe(to='{E5M2}', alarm='snr_db', k=1, looks=1)",),
  },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", RUNS_IN_E5M2)
def test_activations_are_in_e5m2_from_the_step_that_says_so(tmp_path, how):
  """Rounding to 2 bits of mantissa has four times the noise of 3: 25.5 dB instead of 31.5."""
  own = {"model.num_layers": 2, "steps": 3, "log.tensor_stats_every": 1}
  run(tmp_path, **LOUD | own | RUNS_IN_E5M2[how])
  snapshots = {r["step"]: r["numerics"] for r in rows(tmp_path) if "numerics" in r}
  assert snapshots.keys() == {1, 2, 3} and all(
    math.isfinite(loss) for _, loss, _ in losses(tmp_path)
  )
  for step, snapshot in snapshots.items():
    wide = {"x", "g"} if how == "rules" or step > 1 else {"g"}
    for i in range(2):
      for tensor, row in snapshot[f"layers/{i}/mlp/down"].items():
        wanted = 25.5 if tensor in wide else 31.5
        assert row["snr_db"] == pytest.approx(wanted, abs=1.5), (step, i, tensor)


def test_an_evaluation_does_not_take_back_what_an_alarm_gave_in_its_step():
  policies = ("switch_recipe(k=1, looks=1)", "widen_margin(metric='heldout', worse_by=0.0)")
  spec = harness.text_spec(**{**LOUD, "precision.policy": policies, "eval.every": 2,
                              "eval.tokens": 64})  # fmt: skip
  at_work = policy_runner.PolicyRunner(spec, lambda *_: None)
  site, other = "layers/0/mlp/down", "layers/1/mlp/down"
  for step, loss in ((2, 3.0), (4, 3.5)):
    at_work.measured(step, {(site, "snr_db")} if step == 4 else set())
    assert at_work.evaluated(step, {"heldout": loss}, None) is None
  given = at_work.policy_state.overrides
  assert given[site] == "bf16" and "margin=1" in given[other]


def test_a_decision_is_about_the_recipes_of_the_step_that_comes():
  """A site that an alarm's policy gave back is switched by an evaluation of the same step; a phase
  without past scales has no margin to widen."""
  site, alarm = "layers/0/mlp/down", {("layers/0/mlp/down", "snr_db")}
  policies = (
    "switch_recipe(k=1, looks=1, back_after=1)",
    f"switch_recipe(metric='heldout', worse_by=0.0, sites='{site}')",
  )
  of_evaluations = {"eval.every": 2, "eval.tokens": 64, "precision.policy": policies}
  at_work = policy_runner.PolicyRunner(
    harness.text_spec(**{**LOUD, **of_evaluations}), lambda *_: None
  )
  for step, loss, given in ((2, 3.0, {site: "bf16"}), (4, 3.5, {})):
    at_work.measured(step, alarm if step == 2 else set())
    assert at_work.policy_state.overrides == given
    at_work.evaluated(step, {"heldout": loss}, None)
  assert at_work.policy_state.overrides == {site: "bf16"}

  late = {"precision.schedule": ((4, ((".*", "bf16"),)),), "steps": 8,
          "precision.policy": ("widen_margin(alarm='snr_db')",)}  # fmt: skip
  at_work = policy_runner.PolicyRunner(harness.text_spec(**{**LOUD, **late}), lambda *_: None)
  at_work.measured(4, alarm)
  assert at_work.policy_state.overrides == {}
  at_work.measured(2, alarm)
  assert at_work.policy_state.overrides == {site: "tensor_delayed(steps=4, margin=1)"}
  assert {
    r.name for r in site_tree.recipes_of(at_work.spec.sites(phase=at_work.spec.phase(4))).values()
  } == {"bf16"}
  before = at_work.policy_state.recipes
  at_work.measured(4, alarm)  # no margin is left to widen, and nothing is written down
  assert at_work.policy_state.recipes == before


@pytest.mark.slow
def test_policies_act_on_eight_devices_as_on_one(tmp_path):
  """A switch, a wider margin, refreshes, and a roll-back that undoes a part of them."""
  kinds = ("refresh", "switch and back, and widen", "roll back")
  changes = {
    **POLICIES["roll back"], **LOUD, "global_batch": 8, "eval.batch": 8,
    "precision.policy": sum((POLICIES[kind]["precision.policy"] for kind in kinds), ()),
  }  # fmt: skip
  one, eight = tmp_path / "one", tmp_path / "eight"
  run(one, blown_up, **changes)
  run(eight, blown_up, devices=8, **changes, **{"mesh.data": 4, "mesh.fsdp": 2})

  def without_z(workdir):  # which sums in another order change
    return [
      (*a[:2], re.sub(r"is [0-9.]+ standard", "is z standard", a[2])) for a in actions(workdir)
    ]

  assert without_z(one) == without_z(eight)
  kinds = {kind for *_, text in actions(one) for kind in re.findall(r"^\w+", text)}
  assert kinds == {"refresh", "switch_recipe", "widen_margin", "roll_back"}
  for (step, loss, _), (other, got, _) in zip(losses(one), losses(eight), strict=True):
    assert (step, got) == (other, pytest.approx(loss, rel=1e-3))


def test_a_table_gives_scales_to_sites_as_policies_have_split_them():
  changes = {"precision.policy": ("widen_margin()",), "log.tensor_stats_every": 2}
  spec = harness.text_spec("e4m3_static", **changes)
  names = site_tree.recipes_of(spec.sites())
  amaxes = {(name, t): 1.0 + i / 7 for i, name in enumerate(names) for t in "xwg"}
  at_work = policy_runner.PolicyRunner(spec, lambda *_: None)
  at_work.set(decide.PolicyState(recipes=((2, {"layers/1/mlp/up": "e4m3_static(margin=1)"}),)))
  sites = at_work.spec.sites(phase=at_work.spec.phase(3))
  states = calibration.scaling_states_of(amaxes, sites)
  layers = {}
  for name, site in site_lib.flatten(sites).items():
    rows = np.asarray(states[name].amax_3).reshape(-1, 3) if name in states else ()
    layers |= dict(zip(site.layer_names, rows))
  assert len(states) > len(calibration.scaling_states_of(amaxes, spec.sites()))
  for name, row in layers.items():
    np.testing.assert_array_equal(row, np.float32([amaxes[name, t] for t in "xwg"]), name)


@pytest.mark.slow
def test_what_policies_did_stays_in_checkpoints_of_a_run_without_them(tmp_path):
  alarms = {"log.alarms": (("amax", ">", 0.0, "layers/1/mlp/up/x"),), "log.tensor_stats_every": 2}
  changes = {**alarms, "precision.rules": ((".*", "tensor_delayed"),), "checkpoint.every": 2,
             "checkpoint.keep": 9, "eval.tokens": 0}  # fmt: skip
  switch = "switch_recipe(alarm='amax', k=1, looks=1, sites='layers/1/mlp/up')"
  run(tmp_path / "a", steps=4, **changes, **{"precision.policy": (switch,)})
  shutil.copytree(tmp_path / "a", tmp_path / "b")
  without = {"checkpoint.accept_changes": ("precision.policy", "steps")}
  run(tmp_path / "a", steps=8, **changes, **without)
  for steps in (6, 8):
    run(tmp_path / "b", steps=steps, **changes, **without)
  assert policy_memory(tmp_path / "b", 6)["recipes"][-1][1] == {"layers/1/mlp/up": "bf16"}
  assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.slow
def test_tables_of_a_refresh_bring_the_scales_before_back(tmp_path, monkeypatch):
  """Stopped around it, a run writes the same tables once; what the state held is in them."""
  changes = {**POLICIES["refresh"], "precision.policy": ("refresh(every=3, sites='layers/0/.*')",),
             "precision.rules": (("head", "bf16"), (".*", MARGIN)),
             "log.tensor_stats_every": 0}  # fmt: skip
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  seen = {}

  def keep(state, host, number):
    seen[number] = jax.device_get(state.scaling_states)
    return state, host

  run(whole, keep, **{**changes, "checkpoint.every": 3})
  run_until(3, monkeypatch, broken, **changes)
  run_until(4, monkeypatch, broken, **changes)
  run(broken, **changes)
  tables = {p.name: p.read_text() for p in (whole / "refresh").iterdir()}
  assert tables.keys() == {"step_3_before.json", "step_3_after.json"}
  assert tables == {p.name: p.read_text() for p in (broken / "refresh").iterdir()}
  named = [row["refresh"] for row in debug_runs.rows(broken) if "refresh" in row]
  assert named == [{k: f"refresh/step_3_{k}.json" for k in ("before", "after")}]

  spec = harness.text_spec(**changes)
  before = harness.saved_state(whole, spec, 3).scaling_states
  loaded = {}
  for name, wanted in (("before", before), ("after", seen[3])):
    path = str(whole / f"refresh/step_3_{name}.json")
    loaded[name] = calibration.scaling_states_of(calibration.load(spec, path), spec.sites())
    for site, state in loaded[name].items():
      np.testing.assert_array_equal(state.amax_3, wanted[site].amax_3, err_msg=site)
  table = json.loads(tables["step_3_before.json"])
  assert (table["tokens"], table["smooth_swiglu"]) == (spec.tokens_per_step, "none")
  one = {(r["site"], r["tensor"]): r for r in table["rows"]}
  amax = before["layers/mlp/up"].amax_3[0, 1]
  row = one["layers/0/mlp/up", "w"]
  assert row["amax"] == amax and row["scale"] == pytest.approx(2 * amax / 448, rel=1e-6)
  after = seen[3]["layers/mlp/up"].amax_3
  assert np.all(after[1:] == before["layers/mlp/up"].amax_3[1:])  # another site's: kept
  assert not np.array_equal(after[0], before["layers/mlp/up"].amax_3[0])
  # The report names the table; other scales of the same step leave it as it is.
  ((refresh),) = files.read(str(whole)).refreshes
  assert refresh.step == 4 and refresh.table == str(whole / "refresh/step_3_before.json")
  assert {name.split("/")[1] for name, *_ in refresh.scales} == {"0"}
  found = {name: (old, new) for name, old, new in refresh.scales}
  scale = float(np.float32(after[0, 1]) * 2 / 448)
  assert found["layers/0/mlp/up/w"] == (row["scale"], pytest.approx(scale, rel=1e-6))
  other = json.loads(tables["step_3_after.json"])
  assert calibration.keep_refresh(str(whole), 3, other, other) == {
    k: f"refresh/step_3_2_{k}.json" for k in ("before", "after")
  }
  assert (whole / "refresh/step_3_before.json").read_text() == tables["step_3_before.json"]


@pytest.mark.slow
def test_scales_come_from_the_batch_after_one_that_is_not_finite(tmp_path, monkeypatch, capsys):
  """At the beginning of the run, of a phase, and at a refresh, also where the run is stopped
  between the two batches; the loss scale halves once for each."""

  def rules(down, up):
    return (("layers/.*/down", down), ("layers/.*/up", up), (".*", "bf16"))

  delayed = "tensor_delayed(steps=8)"
  changes = {
    "precision.rules": rules(delayed, "e4m3_static"), "precision.verify_fp8_gemms": False,
    "precision.schedule": ((2, rules("e4m3_static", delayed)),), "eval.tokens": 0, "steps": 6,
    "precision.policy": ("refresh(every=4)",), "model.num_layers": 1,
    "optim.on_nonfinite": "skip", "loss_scale.kind": "dynamic",
  }  # fmt: skip
  real, states = policy_runner.PolicyRunner.next_batch, {}

  def next_batch(self, iterator, step):
    host, number = real(self, iterator, step)
    weights = np.where(step in (0, 2, 4), np.inf, host["weights_BL"])
    return dict(host, weights_BL=weights.astype(np.float32)), number

  def keep(state, host, number):
    states[number] = jax.device_get(state)
    return state, host

  monkeypatch.setattr(policy_runner.PolicyRunner, "next_batch", next_batch)
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  run(whole, keep, **changes)
  logged = [row for row in rows(whole) if "loss" in row]
  assert [row.get("skipped", 0) for row in logged] == [1, 0] * 3
  assert [row["loss_scale"] for row in logged] == [256, 128, 128, 64, 64, 32]
  said = [(step, text) for step, place, text in actions(whole) if place == "scales"]
  assert [step for step, _ in said] == [1, 3, 5] and all("of 2 sites" in text for _, text in said)
  for bad, name in itertools.product((0, 2, 4), ("down", "up")):
    first, second = (states[bad + i].scaling_states[f"layers/mlp/{name}"] for i in range(2))
    assert np.isfinite(first.history_3H).all()
    assert np.isfinite(first.amax_3[0, 2]) == (bad == 4)  # a refresh keeps what it has
    assert np.isfinite(second.amax_3).all() and second.amax_3[0, 2] != first.amax_3[0, 2]
    weight = np.asarray(states[bad + 1].params["layers"]["mlp"][name], np.float64)
    assert second.amax_3[0, 1] == np.abs(weight).max()
  spec = harness.text_spec(**changes)
  for step, is_known in {3: False, 5: True}.items():
    run_until(step, monkeypatch, broken, **changes)
    # A job that reads the checkpoint has the scales of inputs and weights.
    capsys.readouterr()
    read = restore.restore_scaling_states(spec, str(broken), step, {}, 1)
    assert not capsys.readouterr().err and len(read) == 2
    for one in read.values():
      assert np.isfinite(one.amax_3[0]).tolist() == [True, True, is_known]
  for number in (1, 3):  # as has an evaluation of the run
    kept = states[number - 1].scaling_states, states[number].scaling_states
    trees = [evaluator_lib.sites_of(spec, None, one, number // 2) for one in kept]
    assert all(len(scaling.states(tree)) == 2 for tree in trees)
  run(broken, **changes)
  assert losses(whole) == losses(broken) and actions(whole) == actions(broken)
