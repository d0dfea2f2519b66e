"""Calibration tables: their amaxes, the scales that start from them, and refused tables."""

import dataclasses
import json
import types

import harness
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.errors import ConfigError, UserError
from fp8jax.jobs import calibrate, policy_runner, train
from fp8jax.ops import scaling
from fp8jax.run import calibration, evaluator
from fp8jax.run.settings import Calibrate
from fp8jax.step import distillation, train_step
from fp8jax.step.distillation import CROSS_ENTROPY

STATIC_LATE_LAYERS = {
  "precision.schedule": ((3, (("head", "bf16"), ("layers/.*", "e4m3_static"))),)
}
NAMES = [f"attn/{n}" for n in "qkvo"] + [f"mlp/{n}" for n in ("gate", "up", "down")]


def test_calibration_is_a_table_that_scales_start_from(tmp_path):
  rules = {"precision.rules": (("layers/.*/up", "e4m3_static"), (".*", "bf16"))}
  spec = harness.text_spec(**rules, job="calibrate")
  params = harness.init_params(spec.model)
  table = calibration.run(spec, params, harness.batches(spec, 2), step=7, fingerprint="abc")
  assert len(table["rows"]) == 3 * (7 * 3 + 1) and table["batches"] == 2
  assert table["tokens"] == spec.tokens_per_step and table["smooth_swiglu"] == "none"
  one = next(r for r in table["rows"] if (r["site"], r["tensor"]) == ("layers/1/mlp/up", "w"))
  assert (one["step"], one["data"], one["recipe"]) == (7, "abc", "e4m3_static")
  assert one["amax"] == np.abs(params["layers"]["mlp"]["up"][1]).max()
  assert one["scale"] == pytest.approx(one["amax"] / 448, rel=1e-6)
  one["amax"] = 7.5  # by hand
  path = tmp_path / "table.json"
  path.write_text(json.dumps(table))
  scaling_states = calibration.scaling_states_of(calibration.read(str(path)), spec.sites())
  assert float(scaling_states["layers/mlp/up"].amax_3[1, 1]) == 7.5
  changes = {"steps": 2, "eval.tokens": 0, "precision.calibration": str(path), **rules}
  # A step moves no state between devices: a mesh has to be given the table's.
  on_mesh = harness.tiny_spec(harness.text_config(**changes), (2, 1, 1))
  train.run(on_mesh, str(tmp_path / "run"))
  state = harness.saved_state(tmp_path / "run", spec, 2)
  harness.assert_trees_equal(state.scaling_states, scaling_states)  # static: never moved
  # Of another loss, or without a gradient: those begin from the first batch of the run.
  path.write_text(json.dumps(table | {"loss": "rl.loss=dpo"}))
  train.run(on_mesh, str(tmp_path / "other"))
  other = harness.saved_state(tmp_path / "other", spec, 2).scaling_states["layers/mlp/up"]
  mine = scaling_states["layers/mlp/up"]
  np.testing.assert_array_equal(other.amax_3[:, :2], mine.amax_3[:, :2])
  batches = train.texts(spec).open(spec)
  first = [batches.spread.place(next(batches.iterator))]
  batches.iterator.close()
  params = train_step.make_state(spec).params
  start = calibration.run(spec, params, first, step=0, fingerprint="")
  wanted = {r["site"]: r["amax"] for r in start["rows"] if r["tensor"] == "g"}
  wanted = [wanted[f"layers/{i}/mlp/up"] for i in range(3)]
  np.testing.assert_allclose(other.amax_3[:, 2], wanted, rtol=1e-5)  # sums over a mesh
  assert not np.any(np.isclose(wanted, mine.amax_3[:, 2], rtol=1e-3))


def test_gradients_are_those_of_the_teacher_s_loss():
  """A student like its teacher has none, and the forward pass is that of any loss."""
  changes = {"distill.weight": 1.0, "init.workdir": "of the teacher"}
  spec, plain = (
    dataclasses.replace(harness.one_layer_spec(**own), sections={Calibrate: Calibrate()})
    for own in (changes, {})
  )
  params = harness.init_params(spec.model)
  batch = harness.weighted_batch(np.random.default_rng(0))
  teacher = distillation.take(spec, params)
  of = {"step": 0, "fingerprint": ""}
  taught = calibration.run(spec, params, [batch], teacher=teacher, **of)
  untaught = calibration.run(plain, params, [batch], **of)
  for row, other in zip(taught["rows"], untaught["rows"], strict=True):
    if row["tensor"] == "g":
      assert row["amax"] < 1e-6 * other["amax"]
    else:
      assert row["amax"] == other["amax"]
  assert untaught["loss"] == "cross entropy"
  assert taught["loss"].startswith("cross entropy, distill.weight=1.0, temperature=1.0, sum ")


@pytest.mark.parametrize(
  "changes",
  [pytest.param({"precision.rules": harness.only_down("e4m3_static")}, marks=pytest.mark.slow),
   {"precision.rules": harness.only_down("halo_int8_2"),  # which rotates: another range
    "precision.schedule": ((2, harness.only_down("e4m3_static")),)}],
  ids=["at once", "in a later phase"],
)  # fmt: skip
def test_calibration_by_percentile_says_what_it_clips(changes):
  spec = harness.one_layer_spec(**changes)
  section = Calibrate(method="percentile", percentile=90.0)
  spec = dataclasses.replace(spec, sections={Calibrate: section})
  params = harness.init_params(spec.model)
  batch = harness.weighted_batch(np.random.default_rng(0))
  table = calibration.run(spec, params, [batch], step=0, fingerprint="abc")
  rows = {(r["site"], r["tensor"]): r for r in table["rows"]}
  w = np.abs(np.asarray(params["layers"]["mlp"]["down"][0], np.float64))
  row, wanted = rows["layers/0/mlp/down", "w"], np.quantile(w, 0.9, method="higher")
  assert wanted <= row["amax"] <= 1.0625 * wanted and row["largest"] == w.max()
  assert row["method"] == "percentile" and "method" not in rows["layers/0/mlp/up", "w"]
  assert row["scale"] == pytest.approx(row["amax"] / 448, rel=1e-6)
  assert ("snr_db" in row) == ("precision.schedule" not in changes)  # of the pass that was watched
  plain = dataclasses.replace(harness.one_layer_spec(), sections={Calibrate: section})
  with pytest.raises(UserError, match="calibrate.method='percentile' chooses .* is current"):
    calibration.run(plain, params, [batch], step=0, fingerprint="abc")


@pytest.mark.parametrize(
  "text, message",
  [
    ("{}", "t.json: it has no field 'format'; write a table with --job=calibrate"),
    ('{"format": "other", "rows": []}', "has the format 'other', expected 'fp8jax calibration 1'"),
    ([{"site": "a", "tensor": "x"}], r"field 'rows\[0\]' has no field 'amax'"),
    ([{"amax": 1, "tensor": "x"}], r"field 'rows\[0\]' has no field 'site'"),
    ([{"amax": 1, "site": "a", "tensor": "y"}], "row 0: tensor 'y' is none of x, w and g"),
    ([{"amax": a, "site": "a", "tensor": "x"} for a in (1, 1.0, 2)],
     "row 2: amax=2 of a, tensor x, which an earlier row gives as 1.0; leave one of them"),
    ([{"amax": 1, "site": s, "tensor": "x"} for s in "ab"], "row 1: this model has no site 'b'"),
  ],
)  # fmt: skip
def test_broken_table_is_refused(tmp_path, text, message):
  if isinstance(text, list):
    text = json.dumps({"format": calibration.FORMAT, "rows": text})
  (tmp_path / "t.json").write_text(text)
  with pytest.raises(UserError, match=message):
    calibration.read(str(tmp_path / "t.json"), {"a"})


def test_table_of_another_model_is_refused(tmp_path):
  rows = [{"site": f"layers/{i}/mlp/up", "tensor": "x", "amax": 1.0} for i in range(4)]
  (tmp_path / "t.json").write_text(json.dumps({"format": calibration.FORMAT, "rows": rows}))
  with pytest.raises(UserError, match="row 3: this model has no site 'layers/3/mlp/up'"):
    calibration.load(harness.text_spec("e4m3_static"), str(tmp_path / "t.json"))
  with pytest.raises(UserError, match="no row for site layers/0/attn"):
    calibration.scaling_states_of({("head", "x"): 1.0}, harness.text_spec("e4m3_static").sites())
  rows = {(f"layers/{i}/{m}", t): 1.0 for i in range(3) for m in NAMES for t in "xwg"}
  del rows["layers/1/mlp/up", "g"]
  with pytest.raises(UserError, match="no row for site layers/1/mlp/up, tensor g"):
    calibration.scaling_states_of(rows, harness.text_spec("e4m3_static").sites())


@pytest.mark.slow
def test_calibration_reaches_later_phases_and_is_refused_where_nothing_starts_from_it(tmp_path):
  path = tmp_path / "t.json"
  rows = [
    {"site": f"layers/{i}/{m}", "tensor": t, "amax": 2.0 + i}
    for i in range(3) for m in NAMES for t in "xwg"
  ]  # fmt: skip
  path.write_text(json.dumps({"format": calibration.FORMAT, "rows": rows}))
  late = harness.text_spec("bf16", **STATIC_LATE_LAYERS)
  amaxes = calibration.load(late, str(path))
  first, second = (calibration.scaling_states_of(amaxes, late.sites(phase=p)) for p in range(2))
  assert not first
  np.testing.assert_array_equal(second["layers/mlp/up"].amax_3, [[2] * 3, [3] * 3, [4] * 3])
  train.run(
    harness.text_spec("bf16", **STATIC_LATE_LAYERS, **{"precision.calibration": str(path)}),
    str(tmp_path),
  )
  harness.assert_trees_equal(harness.saved_state(tmp_path, late, 6).scaling_states, second)
  with pytest.raises(UserError, match="nothing starts from it"):
    calibration.load(harness.text_spec("block_128"), str(path))


def test_a_table_of_another_step_is_refused_where_its_ranges_are_others(tmp_path):
  """Gradients are of a mean over tokens, and Smooth-SwiGLU divides an input; a table made by
  hand says neither."""
  path = tmp_path / "t.json"
  rows = [{"site": f"layers/{i}/{m}", "tensor": t, "amax": 2.0}
          for i in range(3) for m in NAMES for t in "xwg"]  # fmt: skip

  def load(recipe, made, **changes):
    path.write_text(json.dumps({"format": calibration.FORMAT, "rows": rows} | made))
    return calibration.load(harness.text_spec(recipe, **changes), str(path), CROSS_ENTROPY)

  spec = harness.text_spec("e4m3_static")
  tokens, form = spec.tokens_per_step, spec.run.smooth_swiglu
  for made in ({}, {"tokens": tokens, "smooth_swiglu": form}):
    assert len(load("e4m3_static", made)) == len(rows)
  with pytest.raises(UserError, match=f"with {2 * tokens} tokens a step .* expected {tokens} here"):
    load("e4m3_static", {"tokens": 2 * tokens})
  assert calibration.load(spec, str(path))  # an evaluation's
  # The gradients of another loss are left out, whatever the tokens; older tables are of text.
  written, of_a_run = {"data": "abc", "batches": 2}, {"data": "abc", "batches": 0}
  for made, loss in (
    ({"loss": "another"}, CROSS_ENTROPY), (written, "rl.loss=dpo"), (of_a_run, CROSS_ENTROPY),
    ({"loss": "another", "tokens": 2 * tokens}, CROSS_ENTROPY),
  ):  # fmt: skip
    path.write_text(json.dumps({"format": calibration.FORMAT, "rows": rows} | made))
    amaxes = calibration.load(spec, str(path), loss)
    assert {tensor for _, tensor in amaxes} == {"x", "w"}
  assert len(load("e4m3_static", written)) == len(rows)
  # Forward passes have the table's scales; a step waits for those of gradients.
  states = calibration.scaling_states_of(amaxes, spec.sites())
  passes = scaling.states(evaluator.sites_of(spec, None, states))
  assert passes.keys() == states.keys() and len(scaling.unknown(spec.sites(), states)) == 21
  assert all(np.all(state.amax_3[:, :2] == 2.0) for state in passes.values())
  assert load("tensor_delayed", {"tokens": 2 * tokens})  # its first step measures its own
  with pytest.raises(UserError, match="made with 'token' as precision.smooth_swiglu.* 'none' here"):
    load("e4m3_static", {"tokens": tokens, "smooth_swiglu": "token"})


@dataclasses.dataclass(frozen=True)
class _Scales:
  """Of a state."""

  scaling_states: dict


def test_what_a_table_gave_stays_where_the_first_batch_has_no_gradient():
  spec = harness.text_spec("e4m3_static")

  def states(amax, tensors):
    rows = {(f"layers/{i}/{m}", t): amax for i in range(3) for m in NAMES for t in tensors}
    return calibration.scaling_states_of(rows, spec.sites())

  at_work, of_table = policy_runner.PolicyRunner(spec, lambda *_: None), _Scales(states(7.0, "xw"))
  at_work.calibrated = lambda *_: _Scales(states(2.0, "xwg"))
  at_work.await_scales(of_table, 0, 0)
  made = at_work.refreshed(of_table, lambda: None, 0, 0).scaling_states
  assert made.keys() == of_table.scaling_states.keys()
  for state in made.values():
    np.testing.assert_array_equal(state.amax_3, [[7.0, 7.0, 2.0]] * 3)


def test_the_passes_of_the_checkpoints_phase_are_watched(tmp_path, monkeypatch):
  taught = {"distill.weight": 0.5, "init.workdir": "of the teacher"}
  with pytest.raises(ConfigError, match="distill.weight=0.5 without a teacher"):
    harness.text_spec("bf16", job="calibrate", **{"distill.weight": 0.5})
  spec = harness.text_spec("bf16", job="calibrate", **STATIC_LATE_LAYERS, **taught)
  loaded = types.SimpleNamespace(spec=spec, params={}, phase=1, where={"step": 5})
  watched = []
  monkeypatch.setattr(calibrate, "load_or_init", lambda *_, **options: loaded)
  monkeypatch.setattr(calibrate.start, "teacher", lambda *_: {"w": jnp.ones(3)})
  monkeypatch.setattr(
    calibration.nonfinite, "stats_of_steps", lambda *of: watched.append((of[3], of[5])) or ()
  )
  made = calibrate.run(spec, str(tmp_path))
  ((phase, teacher),) = watched
  assert made["step"] == 5 and phase == 1 and teacher["w"].shape == (3,)
  with open(made["table"]) as f:
    assert json.load(f)["loss"].startswith(
      "cross entropy, distill.weight=0.5, temperature=1.0, sum"
    )


def test_scales_of_a_later_phase_begin_with_its_own_sites(rng):
  spec = harness.one_layer_spec(
    **{"precision.schedule": ((2, harness.only_down("tensor_delayed")),)}
  )
  state = train_step.make_state(spec)
  assert not train_step.calibrate(spec, state, harness.weighted_batch(rng), 0).scaling_states
  assert list(train_step.calibrate(spec, state, harness.weighted_batch(rng), 1).scaling_states) == [
    "layers/mlp/down"
  ]


def test_a_table_that_cannot_be_written_is_named_with_the_reason_alone(tmp_path):
  (tmp_path / "file").write_text("")
  (tmp_path / "folder").mkdir()
  for path, reason in ((tmp_path / "file/x/t.json", "Not a directory"),
                       (tmp_path / "folder", f"{tmp_path / 'folder'} is a folder")):  # fmt: skip
    with pytest.raises(UserError) as e:
      calibrate._check_writable(str(path), "--out")
    assert str(e.value) == f"--out: cannot write {path}: {reason}; name another file"
  calibrate._check_writable(str(tmp_path / "new" / "t.json"), "--out")
  assert (tmp_path / "new").is_dir()
