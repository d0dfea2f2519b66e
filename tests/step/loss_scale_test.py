"""Loss scales: growth, overflow; gradients, scales and parameters do not depend on them."""

import dataclasses
import functools

import debug_runs
import harness
import jax
import jax.experimental
import numpy as np
import pytest

from fp8jax.data import batch_sharding
from fp8jax.jobs import train
from fp8jax.run import preemption
from fp8jax.step import loss_scale, train_step

DYNAMIC = {"loss_scale.kind": "dynamic"}
# Of three tests, whose step is one program. Clipping divides by the norm, and would hide a factor.
PLAIN = {"model.num_layers": 1, "optim.grad_clip_norm": 0.0, "eval.tokens": 0}


def _scaled(spec, **changes):
  return dataclasses.replace(spec, loss_scale=dataclasses.replace(spec.loss_scale, **changes))


def _growing(**changes):
  """The loss scale doubles after two finite steps."""
  return _scaled(harness.text_spec("bf16", **PLAIN, **DYNAMIC, **changes), growth_interval=2)


@functools.cache
def _growing_step(policy):
  """(spec, its step), traced once for all tests."""
  spec = _growing(**{"optim.on_nonfinite": policy})
  return spec, train_step.make_step(spec)


def _overflowing(host):
  return dict(host, weights_BL=np.full_like(host["weights_BL"], np.inf))


def test_loss_scale_halves_at_overflow_and_doubles_after_growth():
  spec, step = _growing_step("stop")
  (host,) = harness.batches(spec, 1)
  bad = _overflowing(host)
  state, scales = harness.make_state(spec), []
  for batch in (host, host, host, bad, host):
    state, values = step(state, batch, spec.sites())
    scales.append(float(values["loss_scale"]))
  assert scales == [256, 256, 512, 512, 256] and int(state.skipped) == 1
  assert not bool(state.halted)


def test_a_run_goes_on_after_its_loss_scale_met_an_overflow(tmp_path, monkeypatch, capsys):
  place, calls = batch_sharding.BatchSharder.place, []

  def poisoned(self, host):
    calls.append(host)
    # The second step's, after the calibration's.
    return place(self, _overflowing(host) if len(calls) == 3 else host)

  monkeypatch.setattr(batch_sharding.BatchSharder, "place", poisoned)
  summary = train.run(_growing(), str(tmp_path))
  assert summary["step"] == 6 and summary["skipped_updates"] == 1
  assert "update skipped" in capsys.readouterr().out


# Every source of scales; the head's gradient is made narrow before any factor on the loss.
ALL_SOURCES = {
  "precision.rules": (
    (".*/up", "tensor_delayed_latest"), ("head", "e4m3_static"), (".*/down", "tensor_current"),
    (".*", "bf16"),
  ),
  "model.num_layers": 1, "optim.grad_clip_norm": 0.0,
}  # fmt: skip


def _steps(spec, hosts):
  """The state after these batches, the first of which calibrates, and the loss scales."""
  state, step, scales = harness.make_state(spec), train_step.make_step(spec), []
  for i, host in enumerate(hosts):
    if i == 0:
      state = train_step.calibrate(spec, state, host, 0)
    state, values = step(state, host, spec.sites())
    scales.append(float(values.get("loss_scale", 1.0)))
  return jax.device_get(state), scales


def test_past_and_static_scales_follow_the_loss_scale_exactly():
  """Powers of two: a run under a loss scale that grows and halves is the run without one."""
  plain = harness.text_spec(**ALL_SOURCES, **{"optim.on_nonfinite": "skip"})
  scaled = _scaled(harness.text_spec(**ALL_SOURCES, **DYNAMIC), growth_interval=1)
  hosts = harness.batches(plain, 6)
  hosts = [*hosts[:3], _overflowing(hosts[3]), *hosts[3:]]
  (a, _), (b, scales) = _steps(plain, hosts), _steps(scaled, hosts)
  assert scales == [256, 512, 1024, 2048, 1024, 2048, 4096]
  assert int(a.skipped) == int(b.skipped) == 1
  for part in ("params", "opt", "scaling_states"):
    harness.assert_trees_equal(getattr(a, part), getattr(b, part))


def _small_layers(state):
  """The state with weights of layers so small that gradients inside them leave float16."""

  def smaller(path, x):
    return x * 0.05 if path[0].key == "layers" else x

  return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(smaller, state.params))


@pytest.mark.slow
def test_float16_trains_under_a_loss_scale_where_gradients_underflow_without():
  """Four steps against float32's: losses, and how far the first weight of the MLP came."""
  losses, moved = {}, {}
  for dtype, kind in (("float32", "none"), ("float16", "none"), ("float16", "dynamic")):
    scaling = {"loss_scale.kind": kind, "model.num_layers": 1, "optim.warmup_steps": 0}
    spec = _scaled(harness.text_spec("bf16", **scaling), start=2.0**15)
    # float16 without a loss scale is refused in a configuration.
    spec = dataclasses.replace(spec, run=dataclasses.replace(spec.run, dtype=np.dtype(dtype)))
    _, hosts = harness.calibrated_batches(spec, 4)
    state, step = _small_layers(harness.make_state(spec)), train_step.make_step(spec)
    before = np.asarray(state.params["layers"]["mlp"]["gate"])
    each = []
    for host in hosts:
      state, values = step(state, host, spec.sites())
      each.append(float(values["loss"]))
    assert int(state.skipped) == 0
    losses[dtype, kind] = np.asarray(each)
    moved[dtype, kind] = np.asarray(state.params["layers"]["mlp"]["gate"]) - before
  want = ("float32", "none")
  errors = {
    k: np.linalg.norm(v - moved[want]) / np.linalg.norm(moved[want]) for k, v in moved.items()
  }
  # Adam divides by the gradients' own size, so that each weighs as much, however far it rounds.
  assert errors["float16", "dynamic"] < 0.15 and errors["float16", "none"] > 0.6
  np.testing.assert_allclose(losses["float16", "dynamic"], losses[want], rtol=1e-4)


def test_float16_starts_from_the_largest_loss_scale_that_does_not_overflow():
  """Calibration halves it; scales are then those of the gradients, as float32 has them."""
  found = {}
  for dtype in ("float32", "float16"):
    spec = harness.text_spec(**ALL_SOURCES, **DYNAMIC, **{"precision.compute_dtype": dtype})
    state, _ = harness.calibrated_batches(_scaled(spec, start=2.0**24), 1)
    found[dtype] = jax.device_get(state)
  assert float(found["float32"].loss_scale["scale"]) == 2.0**24
  assert 2.0**8 < float(found["float16"].loss_scale["scale"]) < 2.0**24
  for name, scaling_state in found["float16"].scaling_states.items():
    np.testing.assert_allclose(
      scaling_state.amax_3, found["float32"].scaling_states[name].amax_3, rtol=0.02
    )


@pytest.mark.parametrize(
  "policy, is_last",
  [("stop", True), ("stop", False), pytest.param("skip", True, marks=pytest.mark.slow)],
)
def test_overflow_at_the_smallest_loss_scale_ends_a_run(policy, is_last):
  """No smaller scale would help, and skipping for ever looks like training."""
  spec, step = _growing_step(policy)
  state, hosts = harness.make_state(spec), harness.batches(spec, 1)
  # Placed as the state's, so that the program is the one that is there.
  scale = np.float32(loss_scale.SMALLEST * (1 if is_last else 2))
  scale = jax.device_put(scale, state.loss_scale["scale"].sharding)
  state = dataclasses.replace(state, loss_scale={**state.loss_scale, "scale": scale})
  state, values = step(state, _overflowing(hosts[0]), spec.sites())
  assert not values["is_finite"] and int(state.skipped) == 1
  assert bool(state.halted) == (policy == "stop" and is_last)


@pytest.mark.parametrize("where", ["gradient", "forward"])
def test_a_calibration_that_stays_non_finite_leaves_the_loss_scale(where):
  """Nothing of the batch is remembered but what was finite: the next one calibrates."""
  rules = harness.only_down("tensor_delayed(steps=4)")
  spec = harness.one_layer_spec(**DYNAMIC, **{"precision.rules": rules})
  state, (host,) = harness.make_state(spec), harness.batches(spec, 1)
  bad = host if where == "forward" else _overflowing(host)
  params = {**state.params, "embed": state.params["embed"] * (np.inf if where == "forward" else 1)}
  after = train_step.calibrate(spec, dataclasses.replace(state, params=params), bad, 0)
  assert float(after.loss_scale["scale"]) == 256
  for name, made in after.scaling_states.items():
    amax_3, history_3H = np.asarray(made.amax_3), np.asarray(made.history_3H)
    assert np.isnan(amax_3[..., 2]).all() and not np.isinf(amax_3).any(), name
    assert np.isfinite(amax_3[..., 1]).all() and np.isfinite(history_3H).all(), name
    np.testing.assert_array_equal(history_3H[..., 0], np.nan_to_num(amax_3))


def test_a_resumed_run_goes_on_with_its_loss_scale(tmp_path, monkeypatch):
  """And with the steps since it grew, of which it stops after one."""
  spec = _growing()
  with monkeypatch.context() as m:
    m.setattr(preemption.Interrupts, "requested", lambda _, step: step >= 3)
    train.run(spec, str(tmp_path))
  train.run(spec, str(tmp_path))
  scales = [row["loss_scale"] for row in debug_runs.rows(tmp_path) if "loss_scale" in row]
  assert scales == [256, 256, 512, 512, 1024, 1024]
