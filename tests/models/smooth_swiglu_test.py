"""Smooth-SwiGLU: plain SwiGLU to the bit without quantization, another operand with it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import tolerances

from configs import base
from fp8jax import axes, mesh
from fp8jax.config import alarms as config_alarms
from fp8jax.models import mlp_swiglu, smooth_swiglu
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.mixer import LayerContext
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.quantization import amax_history, tensor_stats
from fp8jax.run import alarms as run_alarms

B, L, D, F = 8, 4, 16, 32
CFG = ModelConfig(
  architecture="llama", vocab_size=32, hidden_size=D, intermediate_size=F, num_layers=1,
  num_heads=1, num_kv_heads=1, head_dim=16, max_positions=8,
)  # fmt: skip
CONTEXT = LayerContext(None, None, None)
SMOOTH = ("channel", "token")
NAMES = ("gate", "up", "down")
# Compiling is what takes time here.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
# As tolerances.difference: room for values so near to a rounding boundary that float32 and float64
# fall on different sides.
EMULATION = 1e-6


def _layer(rng):
  """(parameters, x, gradient): up is small in some channels and in odd rows of x, or zero."""
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
  p = {"norm": 1 + normal(D) / 8, "gate": normal(D, F), "up": normal(D, F), "down": normal(F, D)}
  p["up"] *= np.exp2(rng.integers(-12, 12, F))
  p["up"][0] *= 2.0**12
  p["up"][:, :2] = 0
  x = normal(B, L, D)
  x[1::2, :, 0] = 0
  x[0, :2] = 0
  return p, x, normal(B, L, D)


def _sites(recipe, layout=axes.LOCAL):
  return {n: dataclasses.replace(site_lib.single(recipe, name=n), layout=layout) for n in NAMES}


def _run(form="none"):
  return ComputeConfig(smooth_swiglu=form)


def _apply(form, sites):
  """(parameters, x) -> the layer."""
  return lambda p, x: mlp_swiglu.apply(p, sites, x, CONTEXT, CFG, _run(form))[0]


def _both_ways(p, x, g, forms, sites):
  """{form: (output, gradients of parameters and input)}, in one program."""

  @jax.jit
  def run(p, x, g):
    pairs = {form: jax.vjp(_apply(form, sites), p, x) for form in forms}
    return {form: (y, pull(g)) for form, (y, pull) in pairs.items()}

  return run(p, x, g)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_smooth_without_quantization_is_plain_swiglu(rng, dtype):
  """Bit for bit, gradients too: a power of two more here and less there."""
  p, x, g = _layer(rng)
  found = _both_ways(p, x.astype(dtype), g.astype(dtype), mlp_swiglu.FORMS, _sites("bf16"))
  for form in SMOOTH:
    for got, want in zip(*map(jax.tree.leaves, (found[form], found["none"])), strict=True):
      assert np.isfinite(np.float32(want)).all() and np.any(want)
      np.testing.assert_array_equal(got, want)


def test_scales_are_the_next_powers_of_two():
  """Of a column's largest magnitude; zeros, NaN, infinity and what is tiny give a usable one."""
  big = np.finfo(np.float32).max
  up = np.float32(
    [[1, 1.0000001, -3, 0.3, 0, np.nan, np.inf, big, 1e-30], [0, 0, 2, 0, 0, 5] + [0] * 3]
  )
  want = [1, 2, 4, 0.5, 2.0**-24, 8, 2.0**126, 2.0**126, 2.0**-24]
  np.testing.assert_array_equal(smooth_swiglu.channel_scales(up), np.float32(want))


def _numpy(p, x, form):
  """The layer in float64, its three products of E4M3 per tensor."""
  narrow = functools.partial(oracle.fake_quantize, fmt="e4m3", tile=(0, 0), rule="f32")
  x = np.float64(x).reshape(-1, D)
  h = narrow(x / np.sqrt((x**2).mean(-1, keepdims=True) + CFG.norm_eps) * p["norm"])
  gate, up = h @ narrow(p["gate"]), h @ narrow(p["up"])
  axis = {"channel": 0, "token": 1, "none": ()}[form]
  s = np.exp2(np.ceil(np.log2(np.maximum(np.abs(up).max(axis, keepdims=True), 2.0**-24))))
  s = np.ones((1, 1)) if form == "none" else s
  act = narrow(gate / (1 + np.exp(-gate)) * up / s)
  if form == "channel":
    return x + act @ narrow(p["down"] * s.T)
  return x + act @ narrow(p["down"]) * s


def test_smooth_with_quantization_equals_float64(rng):
  p, x, _ = _layer(rng)
  small = {form: _numpy(p, x, form).reshape(x.shape)[1::2] for form in mlp_swiglu.FORMS}
  for form in SMOOTH:
    got = jit(_apply(form, _sites("tensor_current")))(p, x)[1::2]
    assert tolerances.difference(got, small[form]) < EMULATION
    assert tolerances.difference(small["none"], small[form]) > 100 * EMULATION


def test_folded_weights_multiply_what_per_channel_does(rng):
  """Bit for bit where weights have a scale per produced channel, as up's then only moves."""
  p, x, _ = _layer(rng)
  sites = _sites("rowwise")

  @jit
  def run(p, x):
    context = LayerContext(None, None, None, {"mlp": None})
    s_F = mlp_swiglu.apply(p, sites, x, context, CFG, _run("channel"))[1].states["mlp"]
    merged = _apply("none", sites)(smooth_swiglu.fold(p, s_F), x)
    return s_F, merged, _apply("channel", sites)(p, x), _apply("none", sites)(p, x)

  s_F, merged, trained, plain = run(p, x)
  assert len(np.unique(s_F)) > 8 and np.any(plain != trained)
  np.testing.assert_array_equal(merged, trained)


def test_a_weight_that_holds_scales_of_its_batch_is_not_scaled_by_the_past(rng):
  p, x, _ = _layer(rng)
  sites = _sites("tensor_delayed")

  @jit
  def run(p, x, amax):
    scaling_state = amax_history.calibrated(sites["down"].recipe, jnp.stack([1.0, amax, 1.0]))
    down = dataclasses.replace(sites["down"], scaling_state=scaling_state)
    return [_apply(form, {**sites, "down": down})(p, x) for form in ("channel", "token")]

  (channel, token), (channel_too, token_too) = run(p, x, 1e-3), run(p, x, 1e3)
  np.testing.assert_array_equal(channel, channel_too)
  assert np.any(token != token_too)


def test_smooth_on_a_mesh_equals_one_device(rng):
  """Tokens and channels split: shards have amaxes of their own, of which none is taken."""
  p, x, _ = _layer(rng)
  layout = axes.Layout(
    mesh.make((2, 2, 2)),
    axes.as_rules(dict(D="fsdp", F="tensor")),
    axes.as_rules(dict(B=("data", "fsdp"), F="tensor")),
  )
  letters = {"norm": "D", "gate": "DF", "up": "DF", "down": "FD"}
  placed = {n: jax.device_put(p[n], layout.weight_sharding(letters[n])) for n in p}
  on_mesh = jax.device_put(x, layout.act_sharding("BLD"))
  for form in SMOOTH:
    got = jit(_apply(form, _sites("tensor_current", layout)))(placed, on_mesh)
    want = jit(_apply(form, _sites("tensor_current")))(p, x)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerances.FLOAT32_SUM * np.abs(want).max())


def test_products_are_not_repeated_where_linears_are_kept(rng):
  p, x, g = _layer(rng)

  def products(form):
    apply = jax.checkpoint(
      _apply(form, _sites("bf16")),
      policy=jax.checkpoint_policies.save_only_these_names("linear"),
    )
    program = jax.make_jaxpr(lambda p, x, g: jax.vjp(apply, p, x)[1](g))(p, x, g)
    return str(program).count("dot_general[")

  assert [products(form) for form in SMOOTH] == [products("none")] * 2


# --- an outlier channel that grows ---------------------------------------------------------------

STEPS, TOKENS, SPIKE_EVERY = 60, 64, 5


def _train(form, recipe, statistics=tensor_stats.QUIET):
  """A layer learns from another one while channel 0 of both aligns and grows.

  Its gate and up weights are random but for one input feature, from which both read the same weight
  a, 0.1 at first and 1000 in the end. That feature is 0 but in one token of every fifth batch,
  which then holds nothing else.

  Returns:
    Per step: mean squared error relative to each token's size, smooth.alignment, what sites saw.
  """
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
  teacher = {"gate": normal(D, F), "up": normal(D, F), "down": normal(F, D)}
  teacher = {name: w / np.sqrt(len(w)) for name, w in teacher.items()} | {"norm": jnp.ones(D)}
  student = {n: w + 0.3 * jnp.std(w) * normal(*w.shape) for n, w in teacher.items()}
  student["down"] = student["down"].at[0].set(teacher["down"][0])
  x_SLD = normal(STEPS, TOKENS, D).at[..., 0].set(0)
  x_SLD = x_SLD.at[SPIKE_EVERY - 1 :: SPIKE_EVERY, 0].set(100 * jnp.eye(D)[0])
  sites, plain = _sites(recipe), _sites("bf16")
  taps = {n: jnp.zeros((3, statistics if n == "down" else tensor_stats.QUIET)) for n in NAMES}
  tx = optax.adam(1e-2, 0.9, 0.95)

  def aligned(p, step):
    for n in ("gate", "up"):
      column = teacher[n][:, 0].at[0].set(0.1 * 1e4 ** (step / (STEPS - 1)))
      p = {**p, n: p[n].at[:, 0].set(column)}
    return p

  def loss(p, taps, scaling_states, x, y):
    used = {
      n: dataclasses.replace(s, scaling_state=scaling_states.get(n)) for n, s in sites.items()
    }
    out, _ = mlp_swiglu.apply(p, site_tree.with_taps(used, taps), x, CONTEXT, CFG, _run(form))
    error = out - y
    return jnp.mean(jnp.sum(error**2, -1) / (1 + jnp.sum(y**2, -1)))

  def step(carry, at):
    (p, opt, scaling_states), (i, x_LD) = carry, at
    p, x = aligned(p, i), x_LD[None]
    y, _ = mlp_swiglu.apply(aligned(teacher, i), plain, x, CONTEXT, CFG, _run())
    value, (gradient, seen) = jax.value_and_grad(loss, (0, 1))(p, taps, scaling_states, x, y)
    updates, opt = tx.update(gradient, opt)
    new = {
      n: amax_history.update(m, seen[n][..., 0], sites[n].recipe) for n, m in scaling_states.items()
    }
    alignment = smooth_swiglu.alignment(p)["down"]
    return (optax.apply_updates(p, updates), opt, new), (value, alignment, seen)

  # Of zeros: the scales of the first step are 1.
  scaling_states = {n: s.scaling_state for n, s in sites.items() if s.scaling_state is not None}
  scaling_states = jax.tree.map(jnp.zeros_like, scaling_states)
  start = (student, tx.init(student), scaling_states)
  run = jit(lambda c, xs: jax.lax.scan(step, c, xs)[1])
  return jax.device_get(run(start, (jnp.arange(STEPS), x_SLD)))


@pytest.mark.slow  # training dynamics
def test_smooth_outlives_an_aligned_channel_and_alarms_come_before_plain_diverges():
  """Delayed scales of whole tensors; the same in float32 is the oracle."""
  exact, *_ = _train("none", "bf16")
  plain, alignment, seen = _train("none", "tensor_delayed", tensor_stats.LOUD)
  end = slice(-2 * SPIKE_EVERY, None)
  assert plain[end].mean() > 100 * exact[end].mean() and plain[-1] > 2 * plain[0]
  for form in SMOOTH:
    value, *_ = _train(form, "tensor_delayed")
    assert value[end].mean() < 10 * exact[end].mean() and value[-1] < 0.1 * value[0]

  diverged = np.nonzero(plain < 10 * exact)[0].max() + 1
  # The default rules; kurtosis is at most the number of elements, here 2048.
  rules = (*base.get_config().log.alarms, ("kurtosis", ">", 1e3))
  site = dataclasses.replace(_sites("tensor_delayed")["down"], name="layers/0/mlp/down")
  monitor = run_alarms.AlarmMonitor(
    config_alarms.read_alarms(rules), site_tree.recipes_of({"down": site})
  )
  rings = {}
  for i in range(STEPS):
    numerics = run_alarms.summarise(
      {"down": site}, {site.name: seen["down"][i]}, {"layers/mlp/down": alignment[i : i + 1]}
    )
    for line in run_alarms.as_lines(i, monitor.new(numerics)):
      rings.setdefault(line.split()[3], i)
  assert max(rings["alignment"], rings["kurtosis"]) < diverged - 20
