"""Where the parts join: loss weights, random keys, skipped steps, resumed state, shards, windows.

Every test here was written against a fault that the rest of the suite let through. Fixtures differ
from element to element, so that a mean over the wrong number, or a key used twice, shows.
"""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from configs import base
from fp8jax import axes, mesh
from fp8jax.config import alarms as config_alarms
from fp8jax.config import resolve
from fp8jax.data import loader
from fp8jax.jobs import train
from fp8jax.kernels.choose import Device
from fp8jax.models import transformer
from fp8jax.ops import collectives
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.optim import adam, storage
from fp8jax.optim import update as update_lib
from fp8jax.quantization import amax_history
from fp8jax.recipe.quant import WHOLE, Delayed
from fp8jax.run import alarms as run_alarms
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run import preemption
from fp8jax.step import train_step

MODEL = dict(
  num_layers=1, hidden_size=32, intermediate_size=64, num_heads=1, num_kv_heads=1, head_dim=32,
  vocab_size=320,
)  # fmt: skip
LENGTH, BATCH = 32, 4


def _plan(recipe="bf16", devices=1, **changes):
  c = base.get_config(recipe)
  c.model.update(MODEL)
  c.update_from_flattened_dict({
    "steps": 6, "global_batch": BATCH, "seq_len": LENGTH, "eval.tokens": 4 * LENGTH,
    "eval.batch": BATCH,
    "optim.warmup_steps": 1, "optim.decay_steps": 1, "checkpoint.every": 0, "memory.loss_chunk": 16,
    "log.tensorboard": False, "precision.verify_fp8_gemms": False, "data.shuffle_windows": 0,
    **changes,
  })  # fmt: skip
  return resolve.resolve(c, devices, Device("cpu"))


def _only_down(recipe):
  """One site is enough, and one compiles quickly."""
  return (("layers/.*/mlp/down", recipe), (".*", "bf16"))


def _batch(rng, lead=()):
  """Tokens whose loss weights differ, zeros among them, more so in later microbatches."""
  shape = (*lead, BATCH // (lead[0] if lead else 1), LENGTH)
  weights = rng.random(shape) < np.linspace(0.9, 0.2, shape[-2])[:, None]
  if lead:
    weights &= rng.random(shape) < np.linspace(1.0, 0.3, lead[0])[:, None, None]
  return {
    "tokens_BL": rng.integers(0, 256, shape).astype(np.int32),
    "targets_BL": rng.integers(0, 256, shape).astype(np.int32),
    "weights_BL": weights.astype(np.float32),
    "segments_BL": np.ones(shape, np.int32),
    "positions_BL": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
  }


def _poisoned(plan):
  """A state with an infinite weight that FP8 hides: the products of its layer stay finite."""
  state = train_step.make_state(plan)
  down = state.params["layers"]["mlp"]["down"].at[0, 0, 0].set(jnp.inf)
  layers = {**state.params["layers"], "mlp": {**state.params["layers"]["mlp"], "down": down}}
  return dataclasses.replace(state, params={**state.params, "layers": layers})


@pytest.mark.parametrize("accumulation", [1, 2])
def test_loss_and_gradient_are_means_over_the_tokens_that_count(rng, accumulation):
  plan = _plan(grad_accum_steps=accumulation)
  batch = _batch(rng, (2,) if accumulation == 2 else ())
  params = train_step.make_state(plan).params
  whole = {k: v.reshape(BATCH, LENGTH) for k, v in batch.items()}

  def of_logits(params):
    logits = transformer.logits(params, plan.sites(), whole, plan.model, plan.run)
    logits = jax.nn.log_softmax(logits.astype(jnp.float32))
    losses = -jnp.take_along_axis(logits, whole["targets_BL"][..., None], -1)[..., 0]
    return (losses * whole["weights_BL"]).sum() / whole["weights_BL"].sum()

  want, of_params = jax.value_and_grad(of_logits)(params)
  loss, gradient, *_ = train_step.gradients(plan, params, plan.sites(), batch)
  assert 0 < whole["weights_BL"].sum() < whole["weights_BL"].size
  assert float(loss) == pytest.approx(float(want), rel=1e-5)
  for got, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(of_params), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-6)


def test_stochastic_rounding_draws_anew_in_every_step(rng):
  plan, batch = _plan(**{"precision.rules": _only_down("nvfp4_sr_rht")}), _batch(rng)
  step, norms = train_step.make_step(plan), []
  for number in (1, 1, 2):
    state = dataclasses.replace(train_step.make_state(plan), step=jnp.int32(number))
    norms.append(float(step(state, batch, plan.sites())[1]["grad_norm"]))
  assert norms[0] == norms[1] != norms[2]


def test_rounding_of_gradients_draws_anew_in_every_microbatch_and_step():
  leaf = types.SimpleNamespace(gradient="any", seed=0, lead=0)
  keys = [
    train_step._weight(leaf, jnp.ones(4), None, step=step, micro=micro, grad_autoscale=None).key  # noqa: SLF001
    for step in (0, 1)
    for micro in (0, 1)
  ]
  assert len({jax.random.key_data(key).tobytes() for key in keys}) == 4


def test_no_two_roundings_of_a_parameter_draw_the_same_bits(monkeypatch):
  """Gradient, master and moments: three keys in every step, or their errors would be the same."""
  plan = _plan(**{
    "optim.moment_format": "coat", "optim.master_format": "bf16_sr", "optim.grad_format": "bf16_sr",
  })  # fmt: skip
  leaf, keys = plan.leaves["layers"]["mlp"]["down"], []
  leaf = dataclasses.replace(leaf, lead=0)  # a single key for the gradient
  keep, key_of = storage.store_master, adam._key  # noqa: SLF001
  monkeypatch.setattr(
    storage, "store_master", lambda *a, **k: keys.append(k["key"]) or keep(*a, **k)
  )
  monkeypatch.setattr(adam, "_key", lambda *a: keys.append(key_of(*a)) or keys[-1])
  param = jnp.ones((1, 64, 32))
  state, kept = update_lib.init(leaf, param)
  keys.clear()
  for step in (0, 1):
    weight = train_step._weight(leaf, kept, None, step=step, micro=0, grad_autoscale=None)  # noqa: SLF001
    keys.append(weight.key)
    state, kept, _ = update_lib.update_param(
      leaf, param, state, kept, update_lib.UpdateArgs(step, 1e-3)
    )
  assert len(keys) == len({jax.random.key_data(key).tobytes() for key in keys}) == 6


def test_an_infinity_that_fp8_hides_skips_the_step_with_all_that_it_would_change(rng):
  plan = _plan(**{
    "precision.rules": _only_down("tensor_delayed"), "optim.on_nonfinite": "skip",
    "optim.grad_format": "e4m3",
  })  # fmt: skip
  batch = _batch(rng)
  state = train_step.calibrate(plan, train_step.make_state(plan), batch, 0)
  state = dataclasses.replace(_poisoned(plan), scaling_states=state.scaling_states)
  before = jax.tree.map(np.array, (state.params, state.scaling_states, state.grad_autoscale))
  state, values = train_step.make_step(plan)(state, batch, plan.sites())
  # Neither says anything.
  assert np.isfinite(values["loss"]) and np.isfinite(values["grad_norm"])
  assert not values["is_finite"] and int(state.skipped) == 1
  after = (state.params, state.scaling_states, state.grad_autoscale)
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    np.testing.assert_array_equal(old, new)


def test_norms_of_a_step_are_those_of_its_parameters(rng):
  plan = _plan(**{"optim.warmup_steps": 0, "optim.schedule": "constant"})
  state = train_step.make_state(plan)
  before = jax.tree.map(lambda x: np.array(x, np.float64), state.params)
  state, values = train_step.make_step(plan)(state, _batch(rng), plan.sites())
  after = jax.tree.map(lambda x: np.array(x, np.float64), state.params)

  def norm(tree):
    return np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))

  update = jax.tree.map(np.subtract, after, before)
  assert float(values["update_norm"]) == pytest.approx(norm(update), rel=1e-3)
  assert float(values["param_norm"]) == pytest.approx(norm(before), rel=1e-3)
  assert norm(update) < norm(before) / 10


def test_evaluation_uses_the_scales_of_training():
  """With static scales so large that all codes are 0, layers are those whose weights are 0."""
  plan = _plan("e4m3_static")
  params = train_step.make_state(plan).params
  scaling_states = {
    name: dataclasses.replace(m, amax_3=jnp.full_like(m.amax_3, 2.0**40))
    for name, m in scaling_lib.states(plan.sites()).items()
  }
  mlp, attn = params["layers"]["mlp"], params["layers"]["attn"]
  without = {
    **params,
    "layers": {
      **params["layers"],
      "mlp": {**mlp, **{k: 0 * mlp[k] for k in ("gate", "up", "down")}},
      "attn": {**attn, **{k: 0 * attn[k] for k in "qkvo"}},
    },
  }
  evaluator = evaluator_lib.Evaluator(plan)
  (found,) = evaluator.run(params, scaling_states).values()
  (want,) = evaluator.run(without, scaling_states).values()
  assert found["e4m3_static"]["loss"] == pytest.approx(want["bf16"]["loss"], rel=1e-6)
  assert abs(found["bf16"]["loss"] - want["bf16"]["loss"]) > 1e-4


def test_a_resumed_run_goes_on_with_its_loss_scale(tmp_path, monkeypatch):
  changes = {"loss_scale.kind": "dynamic", "loss_scale.growth_interval": 1}
  with monkeypatch.context() as m:
    m.setattr(preemption.Interrupts, "requested", lambda _, step: step >= 3)
    train.run(_plan(**changes), str(tmp_path))
  train.run(_plan(**changes), str(tmp_path))
  rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
  scales = [row["loss_scale"] for row in rows if "loss_scale" in row]
  assert scales == [256.0 * 2**step for step in range(6)]


def test_a_weight_split_over_an_axis_that_splits_no_tokens_gets_its_own_part(rng):
  layout = axes.Layout(mesh.make((2, 4, 1)), (("D", ("fsdp",)),), (("B", ("data",)),))
  dw_DF = rng.standard_normal((8, 6)).astype(np.float32)

  def local(dw_DF):
    half = dw_DF * jnp.where(jax.lax.axis_index("data") == 0, 0.25, 0.75)
    return collectives.scatter_gradient(half, "DF", "B", layout)

  run = collectives.on_mesh(local, layout, PartitionSpec(), PartitionSpec("fsdp"))
  np.testing.assert_allclose(jax.jit(run)(dw_DF), dw_DF, rtol=1e-6)


@pytest.mark.parametrize(
  "contracted, sizes, tile, fits",
  [
    ("D", {"D": 96}, 32, True),
    ("D", {"D": 96}, 128, False),
    ("D", {"D": 96}, WHOLE, True),
    ("D", {"D": 96}, 1, True),
    ("F", {"F": 96}, 128, True),  # nothing is split
    ("DF", {"D": 4, "F": 32}, 128, True),
    ("FD", {"F": 32, "D": 4}, 128, False),  # shards of the faster letter are not contiguous
    ("FD", {"F": 32, "D": 4}, WHOLE, False),
  ],
)
def test_scales_are_made_before_gathering_where_shards_hold_whole_tiles(
  contracted, sizes, tile, fits
):
  layout = axes.Layout(mesh.make((2, 4, 1)), (("D", ("fsdp",)),), (("B", ("data",)),))
  quant = types.SimpleNamespace(tile=(1, tile))
  assert collectives.tiles_fit({"V": 8, **sizes}, "V", contracted, quant, layout) == fits


def test_scales_of_a_later_phase_begin_with_its_own_sites(rng):
  plan = _plan(**{"precision.schedule": ((2, _only_down("tensor_delayed")),)})
  state = train_step.make_state(plan)
  assert not train_step.calibrate(plan, state, _batch(rng), 0).scaling_states
  assert list(train_step.calibrate(plan, state, _batch(rng), 1).scaling_states) == [
    "layers/mlp/down"
  ]


def test_windows_of_delayed_scales_have_their_own_lengths():
  windows = {"x": 2, "w": 4, "g": 1}
  uses = {t: [types.SimpleNamespace(source=Delayed(steps=n))] for t, n in windows.items()}
  recipe = types.SimpleNamespace(uses=lambda: uses, history=4)
  scaling_state = amax_history.ScalingState(jnp.zeros(3), jnp.zeros((3, 4)))
  for seen in (8.0, 4.0, 2.0):
    scaling_state = amax_history.update(scaling_state, jnp.full(3, seen), recipe)
  assert scaling_state.amax_3.tolist() == [4.0, 8.0, 2.0]


# --- data ----------------------------------------------------------------------------------------


def _first(plan, **changes):
  iterator = loader.train_batches(dataclasses.replace(plan.data, **changes), 8)
  batch = next(iterator)["tokens_BL"]
  iterator.close()
  return batch.tobytes()


def test_sources_of_equal_length_have_different_orders():
  plan = _plan()
  (source,) = plan.data.sources.values()
  a, b, again = (_first(plan, sources={name: source}) for name in ("a", "b", "a"))
  assert a == again != b


def test_shards_of_held_out_documents_are_disjoint_and_complete():
  plan = _plan()

  def rows(shard, num):
    batches = loader.heldout_batches(plan.data, "main", 1, num, shard)
    return [b["tokens_BL"].tobytes() for b in batches if b["weights_BL"].any()]

  first, second = (set(rows(loader.Shard(i, 2), 6)) for i in (0, 1))
  assert len(first) == len(second) == 6 and not first & second
  assert rows(loader.Shard(), 1)[0] in first | second


def test_undifferentiated_loss_is_summed_over_the_mesh(rng):
  batch, losses = _batch(rng), []
  for devices in (1, 2):
    plan = _plan(devices=devices)
    params = train_step.make_state(plan).params
    loss = jax.jit(
      lambda p, b, plan=plan: transformer.loss(p, plan.sites(), b, plan.model, plan.run)
    )
    losses.append(float(loss(params, batch)))
  assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_outliers_raise_an_alarm_where_one_scale_covers_them():
  alarms = config_alarms.read_alarms((("kurtosis", ">", 1e4),))
  numerics = {"layers/0/mlp/down": {"x": {"kurtosis": 2e4}}}
  for recipe, expected in (("tensor_current", 1), ("block_128", 0)):
    recipes = site_lib.recipes_of(_plan(recipe).sites())
    assert len(run_alarms.AlarmMonitor(alarms, recipes).lines(7, numerics)) == expected
