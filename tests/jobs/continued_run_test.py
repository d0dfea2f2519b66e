"""Runs that are interrupted, resumed, evaluated between steps or continued from another run."""

import contextlib
import dataclasses
import functools
import json
import types

import harness
import jax
import jax.experimental
import numpy as np
import pytest

from fp8jax.config import identity
from fp8jax.errors import ConfigError, UserError
from fp8jax.jobs import resume
from fp8jax.jobs import train as train_job
from fp8jax.ops import site as site_lib
from fp8jax.recipe.library import RECIPES
from fp8jax.run import calibration, preemption, restore

BF16_LATE = {"precision.schedule": ((4, ((".*", "bf16"),)),)}
STATIC_LATE = {"precision.schedule": ((3, ((".*", "e4m3_static"),)),)}
NAMES = [f"attn/{n}" for n in "qkvo"] + [f"mlp/{n}" for n in ("gate", "up", "down")]


PIECES = {r: (r, {}) for r, recipe in RECIPES.items() if recipe.is_quantized}


PIECES |= {"to bf16": ("tensor_delayed", BF16_LATE), "to static": ("tensor_delayed", STATIC_LATE)}


@pytest.mark.parametrize("recipe, changes", PIECES.values(), ids=PIECES)
@pytest.mark.slow  # a mixture of recipes, killed: jobs/resume_test.py
def test_run_is_the_same_interrupted_and_evaluated(tmp_path, recipe, changes, monkeypatch):
  """Six steps, and six with an evaluation after each, stopped after the third."""
  harness.train_on_text(tmp_path / "whole", recipe, **changes)
  spec = harness.text_spec(recipe, **changes)
  for stop in (3, 6):
    monkeypatch.setattr(preemption.Interrupts, "requested", lambda _, step, stop=stop: step >= stop)
    harness.train_on_text(tmp_path / "parts", recipe, **changes, **{"eval.every": 1})
  whole, parts = (harness.saved_state(tmp_path / name, spec, 6) for name in ("whole", "parts"))
  last = site_lib.flatten(spec.sites(phase=spec.phase(5))).values()
  assert bool(whole.scaling_states) == any(s.recipe.is_stateful for s in last)
  harness.assert_trees_equal(whole, parts)


def test_changes_that_start_another_state_are_refused_by_name(tmp_path, capsys, monkeypatch):
  """The checkpoint is as good as before: the run goes on from it without them."""
  train = functools.partial(harness.train_on_text, tmp_path, "bf16", **{"eval.tokens": 0})
  train()
  refused = {
    "optim.optimizer": ("lion", "rest.opt.* there and absent here"),
    "optim.moment_format": ("coat", "there and .* here"),
    "optim.master_format": ("bf16_remainder", "params.* there and .* here"),
    "optim.grad_format": ("e4m3", "rest.grad_autoscale.mu is absent there and float32.. here"),
  }
  size = "model.intermediate_size"
  of_model = (128, "params.layers.mlp.down is .* there and .* here")
  for key, (value, differs) in (refused | {size: of_model}).items():
    both = {key: value, "optim.peak_lr": 5e-4}
    begin = "begin in another --workdir: its weights are of another model"
    begin = begin if key == size else f"init.workdir={tmp_path} --config.ini"
    message = f"holds another state than this configuration's: .*{differs}. checkpoint.accept_c"
    message += rf"hanges cannot accept all of {key}, optim.peak_lr\. .*{begin}"
    with pytest.raises(ConfigError) as e:
      train(**both)
    assert f'accept_changes="{tuple(sorted(both))}"; or start again' in str(e.value)
    with pytest.raises(UserError, match=message):
      train(**both, **{"checkpoint.accept_changes": (*both,)})
  with pytest.raises(UserError, match="is of step 6, beyond steps=5: set steps=6 or more"):
    train(steps=5, **{"checkpoint.accept_changes": ("steps",)})
  changes = {"optim.peak_lr": 5e-4, "checkpoint.accept_changes": ("optim.peak_lr",)}
  # Records of two steps are lost.
  path = tmp_path / "metrics.jsonl"
  rows = [line for line in path.read_text().splitlines() if json.loads(line)["step"] not in (2, 3)]
  path.write_text("\n".join(rows) + "\n")
  capsys.readouterr()
  train(**changes)
  said = "".join(capsys.readouterr().out.split())
  assert "hasnorowofsteps2to3:thecurveshaveaholethere" in said and "resumingfromstep6" in said
  # Prolonged and interrupted, it is over no more: the same command goes on.
  spec = harness.text_spec("bf16", **{"eval.tokens": 0}, **changes)
  (tmp_path / "trial.json").write_text('{"status": "diverged", "why": ""}')
  assert train_job.run(spec, str(tmp_path))["step"] == 6  # finished: nothing was removed
  assert (tmp_path / "trial.json").exists()
  # No run of another job goes on with it.
  feed = dataclasses.replace(train_job.texts(spec), job="search")
  with pytest.raises(ConfigError, match="job was train at step 6 and is search now"):
    train_job.run(spec, str(tmp_path), feed=feed)
  longer = {"steps": 9, "optim.peak_lr": 5e-4, "eval.tokens": 0}
  longer["checkpoint.accept_changes"] = ("steps", "optim.peak_lr")
  monkeypatch.setattr(preemption.Interrupts, "requested", lambda *_: True)
  for _ in range(2):
    ended = train_job.run(harness.text_spec("bf16", **longer), str(tmp_path))
    assert ended["step"] == 6 and "exit_code" in ended
    assert not {"summary.json", "trial.json"} & {path.name for path in tmp_path.iterdir()}


def test_a_place_that_counts_other_steps_is_refused_whatever_is_accepted():
  key, meta = "data.samples_per_step", {"data_fingerprint": "a", "readers": {}}
  with pytest.raises(ConfigError) as e:
    restore.check_same_run({key: (4, 8), "seed": (0, 1)}, meta, 3, "b", {}, (key, "data"))
  assert f"{key} was 4 at step 3 and is 8 now, and the place in the data" in str(e.value)
  assert "seed was 0 at step 3 and is 1 now" in str(e.value) and "go on anyway" not in str(e.value)
  restore.check_same_run({key: (0, 8)}, meta, 3, "a", {}, (key,))  # of a run on documents


@pytest.mark.parametrize("meta, own, change", [
  ({}, "train", None), ({}, "rl", None), ({"search": {}}, "search", None),
  ({"search": {}}, "train", ("search", "train")), ({}, "search", ("train", "search")),
  ({"job": "rl"}, "train", ("rl", "train")),
])  # fmt: skip
def test_the_job_of_an_earlier_checkpoint_is_known_where_it_searched(meta, own, change):
  saver = types.SimpleNamespace(_origin={"job": own, "config": {}})
  changes = resume.Saver._changes(saver, {"config": {}, **meta})
  assert changes == ({"job": change} if change else {})


@pytest.mark.parametrize("workers, is_same", [((2, 2), True), ((2, 3), False), ((3, 1), False)])
def test_another_number_of_worker_processes_is_refused(workers, is_same):
  """Each has its own place in every so many documents: some would come again, others never."""
  then, now = workers
  readers = {"processes": 1, "shares": 1, "in worker processes": True}
  meta = {"data_fingerprint": "a", "readers": readers}
  changes = {} if then == now else {"data.workers": workers}
  ended = contextlib.nullcontext() if is_same else pytest.raises(ConfigError, match="differently")
  with ended as e:
    restore.check_same_run(changes, meta, 3, "a", readers, ("data.workers", "data"))
  if not is_same:
    text = str(e.value)
    assert f"'data.workers': {then}" in text and f"'data.workers': {now}" in text
    assert "data.workers as before" in text and "go on anyway" not in text


def test_processes_that_would_read_each_others_shares_are_refused_unless_none_is_known():
  older = {"processes": 4, "shares": 2}
  then, now = older | {restore.ORDER: [0, 1, 0, 1]}, older | {restore.ORDER: [0, 0, 1, 1]}
  for before, after, is_same in (
    (then, then, True), (then, now, False), (older, now, True), (older | {"shares": 1}, now, False),
  ):  # fmt: skip
    meta = {"data_fingerprint": "a", "readers": before}
    if is_same:
      restore.check_same_run({}, meta, 3, "a", after, ())
      continue
    with pytest.raises(ConfigError, match="the data were read differently until step 3"):
      restore.check_same_run({}, meta, 3, "a", after, ())


@pytest.mark.slow
@pytest.mark.parametrize("before", ["tensor_current", "tensor_delayed_latest"])
def test_resumed_with_another_recipe_begins_its_scales_anew(tmp_path, before, monkeypatch, capsys):
  """As many amaxes are remembered as there were steps since, and the first look."""
  with monkeypatch.context() as m:
    m.setattr(preemption.Interrupts, "requested", lambda _, step: step >= 4)
    harness.train_on_text(tmp_path, before)
  harness.train_on_text(tmp_path, **{"checkpoint.accept_changes": ("precision.rules",)})
  assert (
    "scales of step 4 belong to other recipes; re-initialised from the next batch"
    in capsys.readouterr().out
  )
  scaling_states = harness.saved_state(tmp_path, harness.text_spec(), 6).scaling_states
  assert scaling_states
  for scaling_state in scaling_states.values():
    counts = np.count_nonzero(scaling_state.history_3H, axis=-1)
    assert np.all(counts == 1 + 6 - 4)


@pytest.mark.slow
def test_decay_from_the_checkpoint_of_another_run_is_the_whole_run(tmp_path, monkeypatch, capsys):
  """A stable phase, then decay alone from its checkpoint: bit for bit warm-up, hold and decay."""
  shared = {
    "model.num_layers": 1,
    "eval.tokens": 0,
    "optim.schedule": "wsd",
    "optim.warmup_steps": 2,
  }
  harness.train_on_text(tmp_path / "whole", **shared, **{"optim.decay_steps": 2})
  stable = {"steps": 4, "optim.decay_steps": 0}
  harness.train_on_text(tmp_path / "stable", **shared, **stable)
  decay = shared | {
    "optim.warmup_steps": 0, "optim.decay_steps": 2, "init.workdir": str(tmp_path / "stable"),
  }  # fmt: skip
  with pytest.raises(ConfigError, match="optim.warmup_steps was 2 at step 4 and is 0 now"):
    harness.train_on_text(tmp_path / "decay", **decay)
  changes = ("steps", "optim.warmup_steps", "optim.decay_steps")
  decay["checkpoint.accept_changes"] = changes
  with pytest.raises(FileNotFoundError, match="no checkpoint of step 3; there are .4."):
    harness.train_on_text(tmp_path / "decay", **decay, **{"init.step": 3})
  harness.train_on_text(tmp_path / "decay", **decay)
  assert "continuing the run in" in capsys.readouterr().out
  spec = harness.text_spec(**shared)
  whole, parts = (harness.saved_state(tmp_path / name, spec, 6) for name in ("whole", "decay"))
  assert whole.scaling_states
  harness.assert_trees_equal(whole, parts)
  missing = {"init.workdir": str(tmp_path / "nowhere")}
  with pytest.raises(FileNotFoundError, match="nowhere' holds no checkpoint"):
    harness.train_on_text(tmp_path / "other", **shared, **missing)
  assert not (tmp_path / "nowhere").exists()


def _write_table(path, factor, layers=3):
  rows = [
    {"site": f"layers/{i}/{m}", "tensor": t, "amax": factor * (2.0 + i)}
    for i in range(layers) for m in NAMES for t in "xwg"
  ]  # fmt: skip
  rows += [{"site": "head", "tensor": t, "amax": factor} for t in "xwg"]
  path.write_text(json.dumps({"format": calibration.FORMAT, "rows": rows}))


@pytest.mark.slow
def test_another_table_on_resume_is_refused_and_applied_where_accepted(
  tmp_path, monkeypatch, capsys
):
  """Tables are compared by content: one that was edited under its name is another."""
  path = tmp_path / "t.json"
  _write_table(path, 1.0, layers=1)
  changes = {"model.num_layers": 1, "eval.tokens": 0, "precision.calibration": str(path)}
  run = functools.partial(harness.train_on_text, tmp_path / "run", "e4m3_static")
  last = [2]
  monkeypatch.setattr(preemption.Interrupts, "requested", lambda _, step: step >= last[0])
  run(**changes)
  spec = harness.text_spec("e4m3_static", **{"model.num_layers": 1})
  before = harness.saved_state(tmp_path / "run", spec, 2).scaling_states
  _write_table(path, 4.0, layers=1)
  with pytest.raises(ConfigError, match=r"precision.calibration was .* at step 2 and is .* now"):
    run(**changes)
  with pytest.raises(ConfigError, match=r"precision.calibration was .* at step 2 and is '' now"):
    run(**changes | {"precision.calibration": ""})
  changes |= {"checkpoint.accept_changes": ("precision.calibration",)}
  last[0] = 3
  capsys.readouterr()
  run(**changes)
  assert "step 2: scales are re-initialised from the table" in capsys.readouterr().out
  after = harness.saved_state(tmp_path / "run", spec, 3).scaling_states
  harness.assert_trees_equal(after, jax.tree.map(lambda x: 4 * x, before))
  unchanged = identity.identity(harness.text_spec("e4m3_static", **changes))
  path.rename(tmp_path / "moved.json")
  changes["precision.calibration"] = str(tmp_path / "moved.json")
  assert identity.identity(harness.text_spec("e4m3_static", **changes)) == unchanged
