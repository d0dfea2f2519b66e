"""optim.in_backward=True: the steps of the other order, with one layer's gradient at a time."""

import dataclasses

import aot_harness
import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8jax import errors
from fp8jax import params as params_lib
from fp8jax.compiled import aot, fp8_gemms, memory
from fp8jax.config import resolve
from fp8jax.models import presets, transformer
from fp8jax.ops import stored_params
from fp8jax.optim import optimizers
from fp8jax.params import Param
from fp8jax.quantization import tensor_stats
from fp8jax.step import layerwise, train_step

OURS = {
  "optim.in_backward": True, "optim.grad_clip_norm": 0.0, "memory.remat_policy": "full",
  "optim.schedule": "constant", "optim.warmup_steps": 0, "model.num_layers": 4,
}  # fmt: skip
OTHER = {**OURS, "optim.in_backward": False}


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch):
  untied = dataclasses.replace(harness.TINY, tie_embeddings=False)
  monkeypatch.setitem(presets.PRESETS, "untied", untied)


def _begin(runner):
  """A state whose scales are those of the first batch."""
  state = harness.make_state(runner.spec)
  return train_step.calibrate(runner.spec, state, runner.spread.place(harness.host_batches()[0]), 0)


@pytest.mark.parametrize(
  "recipe, changes",
  [
    ("bf16", {"optim.weight_decay": 0.0}),
    # Two loops, one of sites that remember; a head of its own.
    pytest.param("tensor_delayed", {"precision.first_bf16": 1, "optim.moment_format": "fp8lm",
                        "model.preset": "untied"},
                 marks=pytest.mark.slow),
    pytest.param("block_128", {"optim.moment_format": "coat",
                               "optim.master_format": "bf16_remainder",
                               "memory.save_layer_inputs": "e4m3_16"}, marks=pytest.mark.slow),
    pytest.param("nvfp4_sr_rht", {"optim.optimizer": "lion", "optim.moment_format": "bf16"},
                 marks=pytest.mark.slow),
    pytest.param("bf16", {"model.unit_scaling": "loss"}, marks=pytest.mark.slow),
  ],
)  # fmt: skip
def test_both_orders_take_the_same_step(recipe, changes):
  """Only the last bit of a sum differs: XLA contracts multiplications and additions otherwise."""
  found = []
  for order in (OURS, OTHER):
    runner = harness.tiny_runner(recipe, **order, **changes)
    state, host = _begin(runner), harness.host_batches()[0]
    placed = runner.spread.place(host)
    assert fp8_gemms.strict(runner.spec, runner.step_fn, state, placed, runner.sites)
    state, values = runner.step(state, host)
    found.append(jax.device_get((state, values)))
  (ours, got), (other, wanted) = found
  assert got == pytest.approx(wanted, rel=1e-5)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(other), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    # Codes and halves on a tie of their rounding are the exception.
    assert np.mean(~np.isclose(a, b, rtol=1e-5, atol=1e-9)) < 1e-3


@pytest.mark.slow
def test_a_loud_step_sees_the_same():
  found = []
  for order in (OURS, OTHER):
    runner = harness.tiny_runner("block_128", **order)
    state = harness.make_state(runner.spec)
    before = transformer.alignment(state.params, runner.spec.model)
    sites = runner.spec.sites(statistics=tensor_stats.LOUD)
    placed = runner.spread.place(harness.host_batches()[0])
    values = runner.step_fn(state, placed, sites)[1]
    (path,) = before
    np.testing.assert_allclose(values["alignment"][path], before[path], rtol=1e-6)
    found.append(values["tensor_stats"])
  assert found[0].keys() == found[1].keys()
  for name, seen in found[0].items():
    np.testing.assert_allclose(seen, found[1][name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_narrow_states_on_a_mesh():
  """Codes, scales and halves that lie on several devices are cut and put like the weights."""
  changes = {**OURS, "optim.moment_format": "coat", "optim.master_format": "bf16_remainder"}
  batches = harness.host_batches()[:2]
  wanted, one = harness.tiny_runner("block_128", **changes).run(batches)
  losses, state = harness.tiny_runner("block_128", (2, 2, 2), **changes).run(batches)
  np.testing.assert_allclose(losses, wanted, rtol=1e-3)
  for a, b in zip(
    *(jax.tree.leaves(stored_params.dequantize_tree(s.params)) for s in (state, one)), strict=True
  ):
    # A gradient of nearly 0 moves either way at first.
    assert np.mean(~np.isclose(a, b, rtol=0.01, atol=2.5e-4)) < 1e-3


@pytest.mark.slow  # narrow states on a mesh are the default suite's
def test_layerwise_losses_and_parameters_on_a_mesh_equal_one_device():
  batches = harness.host_batches()[:3]
  wanted, one = harness.tiny_runner("bf16", **OURS).run(batches)
  for shape in [(1, 8, 1), (2, 2, 2)]:
    losses, state = harness.tiny_runner("bf16", shape, **OURS).run(batches)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(one.params)):
      np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)


def small_on_h200(in_backward: bool) -> dict:
  changes = {
    "eval.batch": 1,
    "optim.in_backward": in_backward,
    "optim.grad_clip_norm": 0.0,
    "memory.remat_policy": "full",
  }
  changes |= {
    "optim.moment_format": "coat",
    "optim.master_format": "bf16_remainder",
    "kernels.optimizer": "auto",
  }
  c = aot_harness.load("configs/base.py", aot_harness.SMALL | changes | {"model.num_layers": 8})
  spec, devices = aot.resolve(c, "h200:1")
  rows, summary = memory.compiled(spec, aot.lower(spec, devices))
  layers = params_lib.count(spec.declaration["layers"], spec.model.dims)
  return {"rows": {r.kind: (r.declared, r.compiled) for r in rows}, "layers": layers, **summary}


@pytest.mark.aot
def test_gradients_of_all_layers_are_never_there():
  """In the program for an H200: and what is declared is what there is."""
  ours = aot_harness.elsewhere("small_on_h200(True)", __file__)
  assert ours["rows"]["gradients of layers"][1] < 0.05 * ours["layers"]
  assert ours["outputs_not_aliased"] < 2**20  # moved in place
  assert ours["declared"] == pytest.approx(ours["peak"], rel=0.05)


@pytest.mark.aot
@pytest.mark.slow
def test_the_other_order_has_gradients_of_all_layers():
  ours, other = (
    aot_harness.elsewhere(f"small_on_h200({in_backward})", __file__)
    for in_backward in (True, False)
  )
  assert other["rows"]["gradients of layers"][1] >= 4 * other["layers"]
  assert ours["temporaries_compiled"] < other["temporaries_compiled"] - 0.7 * 4 * ours["layers"]


def test_a_bad_gradient_stops_what_comes_after_it():
  """Layer 1's overflows: what is behind it has moved, the rest has not, nor does it ever."""
  runner = harness.tiny_runner("bf16", **OURS, **{"optim.weight_decay": 0.0})
  state = harness.make_state(runner.spec)
  host = jax.tree.map(np.array, state.params)
  # Channel 0 of what gate and up read is enormous, and multiplied by 0.
  host["layers"]["mlp"]["norm"][1, 0] = 1e30
  for name in ("gate", "up"):
    host["layers"]["mlp"][name][1, 0] = 0
  poisoned = train_step.make_state(runner.spec, jax.tree.map(jax.numpy.asarray, host))
  state, values = runner.step(poisoned, harness.host_batches()[0])
  assert np.isfinite(values["loss"]) and not values["is_finite"] and state.halted

  def moved(path):
    old, new = (params_lib.flatten(t)[path] for t in (host, jax.device_get(state.params)))
    per_layer = zip(old, new) if path.startswith("layers/") else [(old, new)]
    return [bool(np.any(a != b)) for a, b in per_layer]

  for path in params_lib.flatten(host["layers"]):
    assert moved(f"layers/{path}") == [False, False, True, True]
  assert moved("norm") == [True] and moved("embed") == [False]
  halted = jax.device_get(state)
  state, _ = runner.step(state, harness.host_batches()[1])
  for a, b in zip(jax.tree.leaves(halted.params), jax.tree.leaves(state.params)):
    np.testing.assert_array_equal(a, b)


def test_what_needs_all_gradients_is_refused():
  c = harness.tiny_config(
    "bf16",
    **{
      "optim.in_backward": True, "optim.on_nonfinite": "skip", "optim.grad_format": "bf16_sr",
      "grad_accum_steps": 2, "loss_scale.kind": "dynamic",
    },
  )  # fmt: skip
  with pytest.raises(errors.ConfigError) as e:
    harness.tiny_spec(c)
  for key in (
    "optim.grad_clip_norm=1.0", "grad_accum_steps=2", "memory.remat_policy='none'",
    "optim.grad_format='bf16_sr'",
    "optim.on_nonfinite='skip'", "loss_scale.kind='dynamic'",
  ):  # fmt: skip
    assert f"{key} with optim.in_backward=True" in str(e.value)


def test_layers_that_share_a_scale_are_refused():
  declaration = {"layers": {"small": Param("NDF")}}
  optim = dataclasses.replace(
    optimizers.OptimizerConfig("adam", "e4m3_256", "float32", "float32", "constant", 1e-3, 0.0, 0,
                               0, 1, 0.9, 0.95, 1e-8, 0.0, 0.0),
    in_backward=True,
  )  # fmt: skip
  leaves = optimizers.leaves(optim, declaration)
  for dims, is_refused in (({"N": 3, "D": 8, "F": 16}, True), ({"N": 3, "D": 16, "F": 16}, False)):
    params = params_lib.abstract(declaration, dims)
    if is_refused:
      with pytest.raises(ValueError, match="layers/small is so small that layers share scales"):
        layerwise.check(leaves, params)
    else:
      layerwise.check(leaves, params)


def test_layers_split_over_devices_are_refused():
  c = harness.tiny_config("bf16", **OURS)
  c.sharding.weights.N, c.sharding.weights.D = "fsdp", ()
  with pytest.raises(resolve.ConfigError, match="optim.in_backward=True with sharding.weights.N"):
    harness.tiny_spec(c, (1, 4, 1))


def test_a_multiplicative_update_is_applied_layer_by_layer(monkeypatch):
  """w exp(-rate sign(g)): every weight that has a gradient is multiplied by e^rate or e^-rate."""
  row = optimizers.Optimizer(
    lambda o: optax.scale_by_lion(0.0, o.b2), {"mu": "b2"},
    apply=lambda value, update, rate: value * jnp.exp(-rate * update),
  )  # fmt: skip
  monkeypatch.setitem(optimizers.OPTIMIZERS, "multiplied", row)
  changes = {**OURS, "optim.weight_decay": 0.0, "model.num_layers": 2, "optim.peak_lr": 0.01}
  spec = harness.tiny_spec(harness.tiny_config("bf16", **changes))
  optim = dataclasses.replace(spec.optim, optimizer="multiplied")
  runner = harness.Runner(dataclasses.replace(spec, optim=optim))
  state = _begin(runner)
  before = jax.device_get(state.params)
  after = jax.device_get(runner.step(state, harness.host_batches()[0])[0].params)
  for path, old in params_lib.flatten(before).items():
    exponents = np.log(params_lib.flatten(after)[path] / old)
    nearest = 0.01 * np.round(exponents / 0.01)
    np.testing.assert_allclose(exponents, nearest, atol=1e-6)
    assert set(np.unique(np.round(nearest / 0.01))) <= {-1, 0, 1}
    assert 0.2 < np.mean(nearest > 0) < 0.8 and 0.2 < np.mean(nearest < 0), path
