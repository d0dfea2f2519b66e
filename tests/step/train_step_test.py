"""The step: the same training on every mesh and for every split into microbatches; resharding."""

import dataclasses
import functools

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances

from fp8jax import params as params_lib
from fp8jax.data import loader
from fp8jax.errors import UserError
from fp8jax.models import transformer
from fp8jax.ops import site_tree
from fp8jax.run import checkpoint, nonfinite
from fp8jax.step import train_step

MESHES = [(8, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2)]


@functools.cache
def _one_device(recipe):
  """Per step: (state before it on the host, its metrics)."""
  runner = harness.tiny_runner(recipe)
  state, found = harness.make_state(runner.spec), []
  for host in harness.host_batches():
    before = jax.tree.map(np.array, state)
    state, values = runner.step(state, host)
    found.append((before, values))
  return found


@pytest.mark.parametrize(
  "shape, recipe",
  [(s, r) for r in ("block_128", "bf16") for s in MESHES],
)
# One step: invariance_test.py; ten, in two processes: run/multiprocess_test.py.
@pytest.mark.slow
def test_twenty_steps_on_a_mesh_equal_one_device(shape, recipe):
  """Each step from the state that one device had there, and then the run left to itself.

  Summation order differs by mesh, by 1e-7, and FP8 amplifies it from step to step: a weight that
  near to a rounding boundary flips by a whole step. For this model, any two initial states 1e-7
  apart give block_128 losses with a standard deviation of 3e-5 per step and 6e-6 for their mean,
  on one device as well.
  """
  runner = harness.tiny_runner(recipe, shape)
  shardings = jax.tree.map(lambda x: x.sharding, train_step.abstract_state(runner.spec))
  for host, (before, want) in zip(harness.host_batches(), _one_device(recipe), strict=True):
    _, got = runner.step(jax.device_put(before, shardings), host)
    assert got["loss"] == pytest.approx(want["loss"], rel=tolerances.MESH_LOSS)
    assert got["grad_norm"] == pytest.approx(
      want["grad_norm"], rel=tolerances.MESH_GRADIENT[recipe]
    )
  losses, _ = runner.run(harness.host_batches())
  want = np.array([values["loss"] for _, values in _one_device(recipe)])
  assert want[-1] < want[0] - 0.1  # something was learnt
  assert losses.mean() == pytest.approx(want.mean(), rel=tolerances.MESH_MEAN[recipe])
  np.testing.assert_allclose(losses, want, rtol=tolerances.MESH_STEP[recipe])


@pytest.mark.slow  # a step: invariance_test.py
def test_accumulation_equals_the_whole_batch():
  want = [values["loss"] for _, values in _one_device("bf16")[:5]]
  for accumulation in (2, 8):
    runner = harness.tiny_runner("bf16", grad_accum_steps=accumulation)
    losses, _ = runner.run(harness.host_batches()[:5])
    np.testing.assert_allclose(losses, want, rtol=1e-6)


def _one_layer_on(shape):
  """One layer on a mesh (data, fsdp, tensor)."""
  mesh = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), shape))
  heads = {"model.num_heads": 4, "model.num_kv_heads": 4}
  return harness.one_layer_spec(devices=int(np.prod(shape)), **mesh, **heads)


def test_checkpoint_restores_onto_another_mesh(rng, tmp_path):
  first = harness.Runner(_one_layer_on((2, 2, 2)))
  hosts = [harness.weighted_batch(rng) for _ in range(4)]
  _, state = first.run(hosts[:2])
  saved = checkpoint.Checkpoints(str(tmp_path))
  iterator = loader.train_batches(first.spec.data, harness.ONE_LAYER_BATCH)
  saved.save(2, state, iterator, {})
  saved.wait()
  want, _ = first.run(hosts[2:], state)
  second = harness.Runner(_one_layer_on((1, 2, 4)))
  abstract = train_step.abstract_state(second.spec)
  restored = saved.restore(2, abstract)
  for got, exact in zip(jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True):
    assert got.sharding.is_equivalent_to(exact.sharding, got.ndim)
  losses, _ = second.run(hosts[2:], restored)
  np.testing.assert_allclose(losses, want, rtol=tolerances.MESH_LOSS)
  saved.close()
  iterator.close()


def test_a_restored_state_takes_the_program_of_a_fresh_one(rng, tmp_path):
  """On one device: the cache of compiled programs then serves a run that goes on."""
  spec, step = _scheduled("stop").spec, _scheduled("stop").step_fn
  state = harness.make_state(spec)
  batch = _scheduled("stop").spread.place(harness.weighted_batch(rng))
  saved = checkpoint.Checkpoints(str(tmp_path))
  iterator = loader.train_batches(spec.data, harness.ONE_LAYER_BATCH)
  saved.save(2, state, iterator, {})
  saved.wait()
  restored = saved.restore(2, train_step.abstract_state(spec))
  saved.close()
  iterator.close()
  fresh, again = (step.lower(s, batch, spec.sites()).as_text() for s in (state, restored))
  assert fresh == again


def test_state_is_sharded_at_birth_and_abstractly_known():
  spec = harness.tiny_spec(harness.tiny_config(), (1, 4, 2))
  abstract, state = train_step.abstract_state(spec), train_step.make_state(spec)
  for want, got in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
    assert (want.shape, want.dtype) == (got.shape, got.dtype)
    assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
  up = state.params["layers"]["mlp"]["up"]
  assert up.addressable_shards[0].data.shape == (2, 128 // 4, 512 // 2)


# In one program: op by op each shape compiles its own.
_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
_narrowed = jax.jit(lambda tree: jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7), tree))


def test_a_twin_starts_one_ulp_above(rng):
  """Every parameter, drawn or given; its moments and its step are untouched."""
  spec = harness.one_layer_spec()
  twin = dataclasses.replace(spec, init=dataclasses.replace(spec.init, nudge=True))
  drawn, other = (train_step.make_state(s) for s in (spec, twin))
  # Those of a checkpoint, say: a state uses up what it is given.
  given = train_step.make_state(twin, _copied(drawn.params))
  for moved in (other, given):
    for new, old in zip(jax.tree.leaves(moved.params), jax.tree.leaves(drawn.params), strict=True):
      np.testing.assert_array_equal(new, np.nextafter(np.asarray(old), np.float32(np.inf)))
    jax.tree.map(np.testing.assert_array_equal, moved.opt, drawn.opt)


def test_weights_without_ties_round_to_those_of_bfloat16():
  """In float32, every number of bfloat16: next to none lies half way between codes of E4M3 under a
  power of two afterwards."""
  x = np.concatenate([np.arange(0x80, 0x7F80), np.arange(0x8080, 0xFF80), [0, 0x7F80]]) << 16
  x = np.append(x, 0x3F800001).astype(np.uint32).view(np.float32)  # the last between two
  got = np.asarray(jax.jit(params_lib.between)(x, jax.random.key(3)))
  np.testing.assert_array_equal(got[-3:], x[-3:])
  np.testing.assert_array_equal(got.astype(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16))
  new, old = (np.abs(v[:-3].astype(np.float64)) for v in (got, x))
  step = (new - old) / np.ldexp(1.0, np.frexp(old)[1] - 8)
  assert np.mean(step > 0) == pytest.approx(0.5, abs=0.01) and np.mean(got != x) > 0.999
  assert np.abs(step).max() < 0.5 and np.std(step) == pytest.approx(12**-0.5, rel=0.01)
  is_tie = lambda x: x.view(np.uint32) & 0xFFFFF == 0x80000  # noqa: E731
  assert is_tie(x).mean() == pytest.approx(1 / 16, rel=0.01) and is_tie(got).mean() < 1e-4


@pytest.mark.slow
def test_weights_are_moved_off_ties_alike_on_a_mesh_and_nothing_else_is():
  placed = {}
  for shape in (None, (2, 2, 2)):
    c = harness.tiny_config("block_128_pow2", **{"model.num_layers": 2})
    drawn = harness.tiny_spec(c, shape)
    spec = dataclasses.replace(drawn, init=dataclasses.replace(drawn.init, untie=True))
    given = train_step.make_state(drawn).params
    harness.assert_trees_equal(train_step.make_state(spec).params, given)  # drawn, without ties
    with pytest.raises(UserError, match="init.untie=True moves 0% of a weight's numbers"):
      train_step.make_state(spec, _copied(given))
    narrow = _narrowed(given)
    before = jax.tree.map(np.array, narrow)
    placed[shape] = jax.device_get(train_step.make_state(spec, narrow).params)
    for path, old in params_lib.flatten(before).items():
      new = params_lib.flatten(placed[shape])[path]
      is_weight = path.startswith("layers/") and path in site_tree.find_sites(spec.declaration)
      assert np.mean(new != old) > 0.99 if is_weight else (new == old).all(), path
      np.testing.assert_array_equal(new.astype(ml_dtypes.bfloat16), old.astype(ml_dtypes.bfloat16))
    up = placed[shape]["layers"]["mlp"]["up"] - before["layers"]["mlp"]["up"]
    assert (up[0] != up[1]).mean() > 0.99
  harness.assert_trees_equal(*placed.values())


# Of five tests, whose step is one program.
SCHEDULE = {
  "steps": 20, "optim.warmup_steps": 4, "optim.decay_steps": 4, "optim.peak_lr": 1e-4,
  "optim.min_lr": 1e-5,
}  # fmt: skip


@functools.cache
def _scheduled(policy):
  """Traced once for all tests."""
  return harness.Runner(harness.one_layer_spec(**SCHEDULE, **{"optim.on_nonfinite": policy}))


def test_decay_and_moments_follow_the_declarations(rng):
  """Steps without gradients shrink matrices and leave norms alone; moments stay float32."""
  runner = _scheduled("stop")
  state = harness.make_state(runner.spec)
  before = jax.tree.map(np.array, state.params)
  batch = harness.weighted_batch(rng)
  silent, rates = dict(batch, weights_BL=np.zeros_like(batch["weights_BL"])), []
  for _ in range(5):
    state, values = runner.step(state, silent)
    assert values["grad_norm"] == 0
    rates.append(values["learning_rate"])
  after, mlp = state.params["layers"]["mlp"], before["layers"]["mlp"]
  np.testing.assert_array_equal(state.params["norm"], before["norm"])
  np.testing.assert_array_equal(after["norm"], mlp["norm"])
  old, new = (np.float64(x) for x in (mlp["up"], after["up"]))
  # By 3e-5, of which float32 rounds one part in 200 in an element, and less in all of them.
  shrunk = 1 - (old * new).sum() / (old * old).sum()
  assert shrunk == pytest.approx(0.1 * np.sum(rates), rel=5e-3)
  ulp = np.spacing(np.float32(np.abs(old).max()))  # of five steps, each rounded by half of one
  assert np.abs(old - new - shrunk * old).max() <= 3 * ulp
  assert all(x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves(state.opt))


def test_learning_rate_follows_the_schedule(rng):
  """Warm up over 4 steps, hold, cosine to min_lr over the last 4 (InfiR2's WSD)."""
  peak, low = 1e-4, 1e-5
  runner, rates = _scheduled("stop"), []
  state = harness.make_state(runner.spec)
  for _ in range(20):
    state, values = runner.step(state, harness.weighted_batch(rng))
    rates.append(values["learning_rate"])
  np.testing.assert_allclose(rates[:4], peak * np.arange(4) / 4, rtol=1e-6)
  np.testing.assert_allclose(rates[4:17], peak, rtol=1e-6)
  tail = [low + (peak - low) * 0.5 * (1 + np.cos(np.pi * k / 4)) for k in range(4)]
  np.testing.assert_allclose(rates[16:], tail, rtol=1e-6)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_non_finite_step_changes_nothing_and_halts_or_counts(rng, policy):
  runner, host = _scheduled(policy), harness.weighted_batch(rng)
  _, state = runner.run([host] * 2)
  good = jax.tree.map(np.array, (state.params, state.opt))
  bad = dict(host, weights_BL=np.full_like(host["weights_BL"], np.nan))
  state, values = runner.step(state, bad)
  assert not values["is_finite"]
  assert int(state.skipped) == 1 and bool(state.halted) == (policy == "stop")
  for a, b in zip(jax.tree.leaves(good), jax.tree.leaves((state.params, state.opt))):
    np.testing.assert_array_equal(a, b)
  state, values = runner.step(state, host)
  assert values["is_finite"]
  moved = np.any(np.asarray(state.params["norm"]) != good[0]["norm"])
  assert moved == (policy == "skip")


@pytest.mark.parametrize(
  "path, layer, message",
  [
    ("layers/mlp/up", 1, "layers/1/mlp/up: its weight is not finite"),
    pytest.param("layers/attn/norm", 1, "layers/1/attn/q: its input is not finite",
                 marks=pytest.mark.slow),
    pytest.param("layers/mlp/norm", 0, "layers/0/mlp/gate: its input is not finite",
                 marks=pytest.mark.slow),
    ("norm", 3, "head: its input is not finite"),
  ],
)  # fmt: skip
def test_first_bad_site_is_named(rng, path, layer, message):
  spec = harness.one_layer_spec(**{"model.num_layers": 2, "grad_accum_steps": 2})
  flat = params_lib.flatten(jax.tree.map(np.array, harness.init_params(spec.model)))
  flat[path][layer] = np.nan
  poisoned = jax.tree.map(jnp.asarray, params_lib.unflatten(flat))
  found = nonfinite.report(spec, poisoned, harness.weighted_batch(rng, (2,)))
  assert found["first_bad_site"].startswith(message)


def test_first_bad_site_of_the_backward_pass_is_the_last_layer_with_a_bad_gradient():
  names = ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down")
  seen = {f"layers/{i}/{n}": np.ones((3, 1)) for n in names for i in range(2)}
  seen["head"] = np.ones((3, 1))
  for name in ("layers/0/attn/q", "layers/1/attn/q", "layers/0/mlp/down"):
    seen[name][2] = np.inf
  found = nonfinite.first_bad(harness.TINY, seen, {}, 1.0)
  assert found == "layers/1/attn/q: its incoming gradient is not finite (backward)"
  assert "embed" in nonfinite.first_bad(
    harness.TINY, {k: np.ones_like(v) for k, v in seen.items()}, {"embed": False}, 1.0
  )


@pytest.mark.parametrize(
  "accumulation, scaling", [pytest.param(1, "none", marks=pytest.mark.slow), (2, "loss")]
)
def test_loss_and_gradient_are_means_over_the_tokens_that_count(rng, accumulation, scaling):
  """Or gradients of the sum, times a constant of the vocabulary (model.unit_scaling)."""
  changes = {"model.unit_scaling": scaling, "optim.grad_clip_norm": 0.0}
  spec = harness.one_layer_spec(grad_accum_steps=accumulation, **changes)
  batch = harness.weighted_batch(rng, (2,) if accumulation == 2 else ())
  params = harness.init_params(spec.model)
  whole = {
    k: v.reshape(harness.ONE_LAYER_BATCH, harness.ONE_LAYER_LENGTH) for k, v in batch.items()
  }

  def of_logits(params):
    logits = transformer.logits(params, spec.sites(), whole, spec.model, spec.run)
    logits = jax.nn.log_softmax(logits.astype(jnp.float32))
    losses = -jnp.take_along_axis(logits, whole["targets_BL"][..., None], -1)[..., 0]
    return (losses * whole["weights_BL"]).sum() / whole["weights_BL"].sum()

  want, of_params = jax.jit(jax.value_and_grad(of_logits))(params)
  ours = jax.jit(functools.partial(train_step.gradients, spec))
  loss, gradient, *_ = ours(params, spec.sites(), batch)
  assert 0 < whole["weights_BL"].sum() < whole["weights_BL"].size
  assert float(loss) == pytest.approx(float(want), rel=1e-5)
  of_sum = whole["weights_BL"].sum() * spec.model.vocab_size / (spec.model.vocab_size - 1) ** 0.5
  factor = 1 if scaling == "none" else of_sum
  for got, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(of_params), strict=True):
    np.testing.assert_allclose(got / factor, expected, rtol=1e-3, atol=1e-6)


def _poisoned(spec):
  """A state with an infinite weight that FP8 hides: the products of its layer stay finite."""
  state = harness.make_state(spec)
  down = state.params["layers"]["mlp"]["down"].at[0, 0, 0].set(jnp.inf)
  layers = {**state.params["layers"], "mlp": {**state.params["layers"]["mlp"], "down": down}}
  return dataclasses.replace(state, params={**state.params, "layers": layers})


def test_an_infinity_that_fp8_hides_skips_the_step_with_all_that_it_would_change(rng):
  spec = harness.one_layer_spec(**{
    "precision.rules": harness.only_down("tensor_delayed"), "optim.on_nonfinite": "skip",
    "optim.grad_format": "e4m3",
  })  # fmt: skip
  batch = harness.weighted_batch(rng)
  state = train_step.calibrate(spec, harness.make_state(spec), batch, 0)
  state = dataclasses.replace(_poisoned(spec), scaling_states=state.scaling_states)
  before = jax.tree.map(np.array, (state.params, state.scaling_states, state.grad_autoscale))
  state, values = train_step.make_step(spec)(state, batch, spec.sites())
  # Neither says anything.
  assert np.isfinite(values["loss"]) and np.isfinite(values["grad_norm"])
  assert not values["is_finite"] and int(state.skipped) == 1
  after = (state.params, state.scaling_states, state.grad_autoscale)
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    np.testing.assert_array_equal(old, new)


def test_norms_of_a_step_are_those_of_its_parameters(rng):
  runner, host = _scheduled("stop"), harness.weighted_batch(rng)
  _, state = runner.run([host] * 4)  # the rate is then the highest
  before = jax.tree.map(lambda x: np.array(x, np.float64), state.params)
  state, values = runner.step(state, host)
  after = jax.tree.map(lambda x: np.array(x, np.float64), state.params)

  def norm(tree):
    return np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))

  update = jax.tree.map(np.subtract, after, before)
  assert float(values["update_norm"]) == pytest.approx(norm(update), rel=1e-3)
  assert float(values["param_norm"]) == pytest.approx(norm(before), rel=1e-3)
  assert norm(update) < norm(before) / 10


def test_undifferentiated_loss_is_summed_over_the_mesh(rng):
  batch, losses = harness.weighted_batch(rng), []
  for devices in (1, 2):
    spec = harness.one_layer_spec(devices=devices)
    params = harness.init_params(spec.model)
    loss = jax.jit(
      lambda p, b, spec=spec: transformer.loss(p, spec.sites(), b, spec.model, spec.run)
    )
    losses.append(float(loss(params, batch)))
  assert losses[1] == pytest.approx(losses[0], rel=1e-5)
