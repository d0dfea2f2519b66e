"""roll_back in runs: the checkpoints that it takes, and what is undone with it."""

import dataclasses
import json
import math
import types

import debug_runs
import harness
import jax
import numpy as np
import pytest
from policy_runs import LOUD, ROLL_BACK, actions, blown_up, policy_memory, rows, run

from fp8jax.config import resolve
from fp8jax.data import loader
from fp8jax.jobs import policy_runner, run_reports, train
from fp8jax.phases import decide
from fp8jax.run import calibration, restore
from fp8jax.run import evaluator as evaluator_lib


@pytest.mark.slow
def test_what_a_roll_back_after_a_switch_restores(tmp_path):
  """Scales, counts, drift and evaluation beside what they must be, not beside another run."""
  changes = {
    **LOUD, **ROLL_BACK, "log.tensor_stats_every": 1,
    "precision.policy": (
      "roll_back(z=40.0, window=4)", "switch_recipe(k=1, looks=1, most=1, sites='layers/1/.*')",
    ),
    "model.num_layers": 2, "checkpoint.keep": 9, "eval.tokens": 64, "data.on_malformed": "skip",
    "data.prefetch": 0, "data.shuffle_windows": 0,
    **debug_runs.write_corpus(tmp_path / "corpus.jsonl", [f"{i} " * 9 for i in range(400)]),
  }  # fmt: skip
  corpus = (tmp_path / "corpus.jsonl").read_text().splitlines()
  (tmp_path / "corpus.jsonl").write_text("\n{broken}\n".join(corpus))
  went_on_with = []

  def disturb(state, host, number):
    if number == 6:  # the first batch after the roll-back
      went_on_with.append(jax.device_get(state.scaling_states))
    return blown_up(state, host, number)

  workdir = tmp_path / "run"
  run(workdir, disturb, **changes)
  texts = [text for *_, text in actions(workdir)]
  assert "switch_recipe" in texts[0] and "back to the checkpoint of step 4" in texts[1]
  spec = harness.text_spec(**changes)
  spec = restore.as_trained(spec, {"policy": policy_memory(workdir, 9)})
  # Maxima of several steps: those of the batch alone would be smaller.
  harness.assert_trees_equal(went_on_with[0], harness.saved_state(workdir, spec, 4).scaling_states)
  once, counted = loader.DocumentCounts(), []
  stream = loader.train_batches(spec.data, 2, counts=once)
  for _ in range(11):  # 9 steps, and the 2 batches left out
    next(stream)
    counted.append(once["malformed"])
  assert counted[3] < counted[5] < counted[6] and counted[:4] + counted[6:] == [
    r["documents/malformed"] for r in rows(workdir) if "loss" in r
  ]
  skipped = [r.get("batches_skipped", 0) for r in rows(workdir) if "loss" in r]
  assert skipped == 4 * [0] + 5 * [2]
  snapshots = [
    row["numerics"]["layers/0/mlp/down"]["x"] for row in rows(workdir) if "numerics" in row
  ]
  for before, now in zip(snapshots[:-1], snapshots[1:], strict=True):
    assert now["amax_drift"] == pytest.approx(math.log2(now["amax"] / before["amax"]), abs=1e-6)
  state = harness.saved_state(workdir, spec, 9)
  # Nine steps, the last in the phase that the switch began.
  wanted = evaluator_lib.Evaluator(spec).run(state.params, state.scaling_states, spec.phase(8))
  found = [row for row in rows(workdir) if any(key.startswith("heldout/") for key in row)][-1]
  for key, value in evaluator_lib.flat(wanted).items():
    assert found[key] == pytest.approx(value, rel=1e-6)


def test_recipes_that_a_roll_back_undoes_leave_the_table_of_sites(tmp_path):
  was, switched = (harness.text_spec(recipe) for recipe in ("tensor_delayed", "bf16"))
  policies = types.SimpleNamespace(configured=was, tell_undone=lambda step: None)
  now = types.SimpleNamespace(undo=types.SimpleNamespace(to=4), spec=switched, policies=policies)

  def roll_back(undo):
    now.spec, now.undo = was, None

  saver = types.SimpleNamespace(roll_back=roll_back, evaluations={})
  reports = types.SimpleNamespace(workdir=str(tmp_path), forget=lambda *_: None)
  reports.steering = lambda now: run_reports.RunReports.steering(reports, now)
  assert train._caught_up(now, saver, reports, None, None, 6) == (None, 4)
  rows = debug_runs.read_json(tmp_path / "sites.json")
  assert {row["recipe"] for row in rows if row["site"] != "head"} == {"tensor_delayed"}


@pytest.mark.slow
def test_a_gradient_that_overflows_is_undone_though_its_loss_is_no_jump(tmp_path):
  """The state has halted: were it not undone, no later step would apply an update."""

  def disturb(state, host, number):  # the same logits, squares of gradients beyond float32
    if number == 5:
      layers = state.params["layers"]
      attn = layers["attn"]
      attn = {**attn, "v": attn["v"] * 1e-25, "o": attn["o"] * 1e25}
      params = {**state.params, "layers": {**layers, "attn": attn}}
      state = dataclasses.replace(state, params=params)
    return state, host

  changes = ROLL_BACK
  run(tmp_path, disturb, **changes)
  ((_, place, text),) = actions(tmp_path)
  assert place == "loss" and "operand is not finite; back to the checkpoint of" in text
  state = harness.saved_state(tmp_path, harness.text_spec(**changes), 9)
  assert (int(state.step), bool(state.halted)) == (9, False)
  # Which checkpoints there are decides how far a roll-back goes.
  others = {**changes, "steps": 11, "checkpoint.every": 3, "checkpoint.keep": 4}
  with pytest.raises(resolve.ConfigError, match="checkpoint.every was 2 at step 9 and is 3") as e:
    run(tmp_path, disturb, **others)
  assert "checkpoint.keep was 2 at step 9 and is 4" in str(e.value)


def test_a_roll_back_to_a_step_that_halted_trains_on(tmp_path):
  """As a resume does: the policy came with a run that went on after a NaN."""

  def broken(state, host, number):
    if number == 3:
      host = {**host, "weights_BL": host["weights_BL"] * np.nan}
    return state, host

  def jumping(state, host, number):
    return state, {**host, "targets_BL": host["targets_BL"] * 0 + 255} if number == 6 else host

  changes = {"precision.rules": ((".*", "bf16"),), "checkpoint.every": 2, "eval.tokens": 0,
             "checkpoint.keep": 4, "optim.peak_lr": 1e-3, "optim.schedule": "constant",
             "steps": 8}  # fmt: skip
  with pytest.raises(train.NonFinite):
    run(tmp_path, broken, **changes)
  changes |= {"precision.policy": ("roll_back(z=3.0, window=2, skip=3, most=1)",),
              "checkpoint.accept_changes": ("precision.policy",)}  # fmt: skip
  run(tmp_path, jumping, **changes)
  assert any("back to the checkpoint of step 4" in text for _, _, text in actions(tmp_path))
  state = harness.saved_state(tmp_path, harness.text_spec(**changes), 8)
  assert int(state.step) == 8 and int(state.skipped) == 1 and not state.halted
  before = harness.saved_state(tmp_path, harness.text_spec(**changes), 6)
  assert not np.array_equal(before.params["embed"], state.params["embed"])


_UNDONE = {"checkpoint.every": 2, "checkpoint.keep": 9, "eval.tokens": 0, "optim.peak_lr": 1e-4,
           "precision.policy": ("roll_back(z=3.0, window=2, skip=3)",)}  # fmt: skip


def _jump(seen):
  def disturb(state, host, number):
    seen.append((number, jax.device_get(dict(state.scaling_states))))
    return blown_up(state, host, number)

  return disturb


@pytest.mark.slow
def test_a_roll_back_takes_no_scales_of_other_recipes_or_another_table(tmp_path):
  """Those of a checkpoint that an accepted change made useless for the resumed run."""
  recipes = {
    name: {"precision.rules": ((".*", name),)} for name in ("tensor_current", "tensor_delayed")
  }
  run(tmp_path / "a", steps=4, **_UNDONE, **recipes["tensor_current"])
  keys = ("precision.rules", "precision.calibration", "steps")
  accepted = {"checkpoint.accept_changes": keys}
  run(
    tmp_path / "a", _jump(seen := []), steps=8, **_UNDONE, **recipes["tensor_delayed"], **accepted
  )
  assert any("back to the checkpoint of step 4" in text for _, _, text in actions(tmp_path / "a"))
  assert all(states for _, states in seen)

  static = {"precision.rules": (("head", "bf16"), (".*", "e4m3_static"))}
  spec = harness.text_spec(steps=4, **_UNDONE, **static)
  state, _ = harness.calibrated_batches(spec, 1)
  first = calibration.of_states(
    spec, spec.sites(), state.scaling_states, step=0, fingerprint="", loss="cross entropy"
  )
  second = {**first, "rows": [{**row, "amax": row["amax"] * 4} for row in first["rows"]]}
  tables = {}
  for name, table in (("first", first), ("second", second)):
    (tmp_path / name).write_text(json.dumps(table))
    tables[name] = {"precision.calibration": str(tmp_path / name)}
  run(tmp_path / "b", steps=4, **_UNDONE, **static, **tables["first"])
  run(
    tmp_path / "b", _jump(seen := []), steps=8, **_UNDONE, **static, **tables["second"], **accepted
  )
  assert any("back to the checkpoint of step 4" in text for _, _, text in actions(tmp_path / "b"))
  wanted = calibration.scaling_states_of(
    calibration.load(spec, str(tmp_path / "second")), spec.sites()
  )
  assert len(seen) > 4
  for _, states in seen:
    harness.assert_trees_equal(states, wanted)


def test_roll_back_to_a_checkpoint_from_before_policies_leaves_batches_out():
  said, spec = [], harness.text_spec(**ROLL_BACK)
  at_work = policy_runner.PolicyRunner(spec, lambda step, events: said.append((step, *events)))
  at_work.set(decide.PolicyState(losses=(3.0,) * 4, skipped=(1,)))
  (policy,) = spec.precision.policy
  at_work.roll_back(decide.Undo(policy, 5, 2, decide.why_jump(9.0), 2), None)
  assert at_work.policy_state.losses == () and at_work.spec.precision == spec.precision
  # The five steps took batches 0, 2, 3, 4 and 5; the last two go. The checkpoint has drawn 0 to 2.
  stream = iter(range(3, 9))
  assert [at_work.next_batch(stream, step) for step in (2, 3, 4)] == [(3, 3), (6, 6), (7, 7)]
  at_work.tell_undone(2)
  ((step, event),) = said
  assert step == 3 and "back to the checkpoint of step 2, batches 4, 5 are left out" in event.text


def test_roll_back_passes_over_the_checkpoint_of_an_interruption():
  spec = harness.text_spec(**ROLL_BACK)  # every 2 steps
  at_work, saved = policy_runner.PolicyRunner(spec, lambda *_: None), types.SimpleNamespace()
  saved.steps = lambda: [0, 2, 3]
  assert at_work.target(5, float("inf"), saved).to == 2
  saved.steps = lambda: [2, 4]  # the newest has trained on batch 3, which is left out
  assert at_work.target(5, float("inf"), saved).to == 2
