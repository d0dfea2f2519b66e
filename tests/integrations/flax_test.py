"""Flax layers with our dot: equal to plain ones on lattices, remembering, refusing."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from lattice import lattice

import fp8jax
from fp8jax.formats import E4M3
from fp8jax.integrations import flax as fp8
from fp8jax.ops import site as site_lib
from fp8jax.ops.dots import dot
from fp8jax.recipe.gemm import Gemm, Recipe
from fp8jax.recipe.quant import Delayed, Quant, Rounding

# A layer of linen and of nnx with one more argument or without it, shapes of its input and kernel.
LINEN = {
  "Dense": (
    lambda r: nn.Dense(32, **_hook(r, dot_general_cls=fp8.linen_dot_general)), (3, 16, 32), (32, 32)
  ),
  "DenseGeneral": (
    lambda r: nn.DenseGeneral(
      (2, 16), axis=(-2, -1), batch_dims=0, **_hook(r, dot_general_cls=fp8.linen_dot_general)
    ),
    (2, 16, 2, 16), (2, 2, 16, 2, 16),
  ),
  "Einsum": (
    lambda r: (fp8.Einsum if r else nn.Einsum)(
      (2, 16, 32), "...hd,hdf->...f", **({"recipe": r} if r else {})
    ),
    (3, 16, 2, 16), (2, 16, 32),
  ),
}  # fmt: skip
NNX = {
  "Linear": (
    lambda r: nnx.Linear(32, 32, rngs=nnx.Rngs(0), **_hook(r, dot_general=fp8.nnx_dot_general)),
    (3, 16, 32),
  ),
  "LinearGeneral": (
    lambda r: nnx.LinearGeneral(
      (2, 16), (2, 16), axis=(-2, -1), rngs=nnx.Rngs(0), **_hook(r, dot_general=fp8.nnx_dot_general)
    ),
    (16, 2, 16),
  ),
  "Einsum": (
    lambda r: nnx.Einsum(
      "...hd,hdf->...f", (2, 16, 32), (32,), rngs=nnx.Rngs(0), **_hook(r, einsum_op=fp8.nnx_einsum)
    ),
    (3, 16, 2, 16),
  ),
}  # fmt: skip
RECIPES = ["block_128", "tensor_delayed"]


def _by_turns(layers):
  """The first layer with every recipe, the others by turns; the rest is slow."""
  return [
    pytest.param(layer, recipe, marks=[pytest.mark.slow] * (i > 0 and (i + j) % 2 > 0))
    for i, layer in enumerate(layers)
    for j, recipe in enumerate(RECIPES)
  ]


WRT = nnx.DiffState(0, nnx.Any(nnx.Param, fp8.Fp8))


def _hook(recipe, **make):
  return {name: fn(recipe) for name, fn in make.items()} if recipe else {}


def _lattice(rng, *shape):
  """Every matrix here has 32 columns, however many axes they are spread over."""
  return lattice(rng, int(np.prod(shape)) // 32, 32).reshape(shape)


def _sites(tree) -> list[site_lib.Site]:
  leaves = jax.tree.leaves(tree, is_leaf=lambda s: isinstance(s, site_lib.Site))
  return [s for s in leaves if isinstance(s, site_lib.Site)]


# --- one layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layer, recipe", _by_turns(LINEN))
def test_linen_layer_equals_the_plain_one_on_lattices(rng, layer, recipe):
  make, shape, kernel_shape = LINEN[layer]
  x = _lattice(rng, *shape)
  plain, ours = make(None), make(recipe)
  variables = jax.jit(ours.init)(jax.random.key(0), x)
  params = variables["params"]
  assert params["kernel"].shape == kernel_shape
  params = params | {"kernel": _lattice(rng, *kernel_shape)}
  g = _lattice(rng, *jax.eval_shape(plain.apply, {"params": params}, x).shape)

  def loss(params, x, state, model):
    y = model.apply({"params": params} | state, x)
    return (y * g).sum(), y

  state = {k: v for k, v in variables.items() if k != "params"}
  if state:
    of = lambda sites: loss(params, x, {"fp8": sites}, ours)[0]  # noqa: E731
    state = {"fp8": jax.jit(lambda sites: site_lib.calibrate(sites, of))(state["fp8"])}
  run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=3)
  got, want = run(params, x, state, ours), run(params, x, {}, plain)
  assert "f8_e4m3fn" in str(jax.make_jaxpr(lambda x: ours.apply({"params": params} | state, x))(x))
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("layer, recipe", _by_turns(NNX))
def test_nnx_layer_equals_the_plain_one_on_lattices(rng, layer, recipe):
  make, shape = NNX[layer]
  x = _lattice(rng, *shape)
  plain, ours = make(None), make(recipe)
  kernel = _lattice(rng, *plain.kernel.shape)
  g = _lattice(rng, *plain(x).shape)

  def loss(model, x):
    y = model(x)
    return (y * g).sum(), y

  results = []
  for model in (ours, plain):
    model.kernel[...] = jnp.asarray(kernel)
    fp8.nnx_calibrate(model, nnx.jit(lambda m: loss(m, x)[0]))
    run = nnx.jit(nnx.value_and_grad(loss, argnums=(WRT, 1), has_aux=True))
    value, (gradient, dx) = run(model, x)
    gradient = fp8.nnx_update(model, gradient)
    results.append((value, nnx.to_pure_dict(gradient), dx))
  assert "f8_e4m3fn" in str(jax.make_jaxpr(ours)(x))
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_stateless_recipe_changes_nothing_but_the_layer(rng):
  """No collection, no argument, and per-example gradients under vmap, where nobody observes."""
  x = lattice(rng, 4, 16, 32)
  model = nn.Dense(16, dot_general_cls=fp8.linen_dot_general("block_128"))
  variables = model.init(jax.random.key(0), x[0])
  assert list(variables) == ["params"]

  def each(model):
    of_one = jax.grad(lambda v, x: 7 * model.apply(v, x).sum())
    return jax.jit(jax.vmap(of_one, (None, 0)))(variables, x)

  jax.tree.map(np.testing.assert_array_equal, each(model), each(nn.Dense(16)))
  assert model == nn.Dense(16, dot_general_cls=fp8.linen_dot_general("block_128"))


def test_master_kernel_is_rounded_once(rng):
  """In bfloat16 layers Flax casts the kernel before it asks us; keep_master does not."""
  x = rng.standard_normal((16, 32)).astype(jnp.bfloat16)
  w = rng.standard_normal((32, 8)).astype(np.float32)
  site = site_lib.single("block_128")

  @jax.jit
  def want(w):
    y, pull = jax.vjp(lambda w: dot("BD,DF->BF", x, w, site), w)
    return y, pull(jnp.ones_like(y))[0]

  hook = fp8.linen_dot_general("block_128")
  model = nn.Dense(
    8, False, jnp.bfloat16, promote_dtype=fp8.keep_master, dot_general_cls=hook
  )  # fmt: skip
  linen = jax.jit(jax.vjp, static_argnums=0)(lambda w: model.apply({"params": {"kernel": w}}, x), w)
  model = nnx.Linear(
    32, 8, dtype=jnp.bfloat16, promote_dtype=fp8.keep_master, use_bias=False, rngs=nnx.Rngs(0),
    dot_general=fp8.nnx_dot_general("block_128"),
  )  # fmt: skip
  model.kernel[...] = jnp.asarray(w)
  nnx_y = nnx.jit(lambda m: m(x))(model)
  y, dw = want(w)
  assert dw.dtype == jnp.float32 and y.dtype == jnp.bfloat16
  for got in (linen[0], nnx_y):
    np.testing.assert_array_equal(got, y)
  np.testing.assert_array_equal(linen[1](jnp.ones_like(y))[0], dw)


# --- what is remembered --------------------------------------------------------------------------


def _rounds(rng, number=4):
  """(x, g) of some steps, with ranges that move."""
  for step in range(number):
    factor = np.float32(1.5 ** (step % 3))
    yield tuple(factor * rng.standard_normal((16, n)).astype(np.float32) for n in (32, 8))


def _begun(sites):
  """As if calibrated with zeros: scales of 1."""
  return jax.tree.map(jnp.zeros_like, sites)


def test_linen_memory_is_of_the_amaxes_seen(rng):
  model = nn.Dense(8, use_bias=False, dot_general_cls=fp8.linen_dot_general("tensor_delayed"))
  params, sites = (lambda v: (v["params"], v["fp8"]))(
    model.init(jax.random.key(0), np.ones((1, 32)))
  )

  sites = _begun(sites)

  @jax.jit
  def step(params, sites, x, g):
    def loss(params, sites):
      return (model.apply({"params": params, "fp8": sites}, x) * g).sum()

    gradient, seen = jax.grad(loss, (0, 1))(params, sites)
    params = jax.tree.map(lambda p, d: p - 0.1 * d, params, gradient)
    return params, site_lib.update(sites, seen)

  want = []
  for x, g in _rounds(rng):
    want.insert(0, [np.abs(t).max() for t in (x, params["kernel"], g)])
    params, sites = step(params, sites, x, g)
  (site,) = _sites(sites)
  np.testing.assert_array_equal(site.scaling_state.history_3H[:, : len(want)], np.transpose(want))
  np.testing.assert_array_equal(site.scaling_state.history_3H[:, len(want) :], 0)
  np.testing.assert_array_equal(site.scaling_state.amax_3, np.max(want, 0))

  stored = serialization.to_bytes(sites)
  back = serialization.from_bytes(sites, stored)
  jax.tree.map(np.testing.assert_array_equal, back, sites)
  state = site.scaling_state
  for steps in (2, 9):  # fewer and more than there are
    (other,) = _sites(
      serialization.from_bytes(_like(sites, f"tensor_delayed(steps={steps})"), stored)
    )
    history = np.zeros((3, steps), np.float32)
    kept = min(steps, state.history_3H.shape[1])
    history[:, :kept] = state.history_3H[:, :kept]
    np.testing.assert_array_equal(other.scaling_state.history_3H, history)
    np.testing.assert_array_equal(other.scaling_state.amax_3, state.amax_3)
  stacked = jax.tree.map(lambda x: jnp.stack([x, x]), sites)
  with pytest.raises(
    ValueError, match=r"amaxes of shape \(2, 3\), and .* \(3,\): layers are stacked"
  ):
    serialization.from_bytes(stacked, stored)
  current = serialization.to_bytes(_like(sites, "tensor_current"))
  with pytest.raises(ValueError, match="remembers amaxes, and the state that is restored has none"):
    serialization.from_bytes(sites, current)


def _like(sites, recipe):
  return jax.tree.map(
    lambda site: site_lib.single(recipe, "auto", site.name),
    sites,
    is_leaf=lambda s: isinstance(s, site_lib.Site),
  )


def test_moments_are_serialized_with_their_format(rng):
  params = {"w": rng.standard_normal((64, 128)).astype(np.float32)}
  for name in ("coat", "bf16_sr", "fp8lm"):
    tx = fp8jax.scale_by_adam(moment_format=name)
    _, state = tx.update(params, tx.init(params))
    back = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
    jax.tree.map(np.testing.assert_array_equal, back, state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
  other = fp8jax.scale_by_adam(moment_format="tensor_e4m3_f16").init(params)
  with pytest.raises(ValueError, match="holds e4m3_tensor_e8m0, and e4m3_tensor_f32 is expected"):
    serialization.from_bytes(other, serialization.to_bytes(state))


@pytest.mark.parametrize(
  ("inner", "graph"),
  [
    (fp8jax.scale_by_adam(moment_format="coat"), True),
    (fp8jax.scale_by_adam(moment_format="bf16_sr"), False),
    (fp8jax.quantized_state(optax.sgd(1e-2, momentum=0.9), "e4m3_256"), True),
  ],
)
def test_nnx_optimizer_takes_narrow_moments(rng, inner, graph):
  """Three updates are those of the functional loop, to the bit: it knows no variables."""
  xs = rng.standard_normal((3, 16, 128)).astype(np.float32)
  tx = optax.chain(optax.clip_by_global_norm(1.0), inner, optax.scale(-1e-2))
  model = nnx.Linear(128, 64, rngs=nnx.Rngs(0))
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  optimizer, state = nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph), tx.init(params)

  @nnx.jit
  def step(model, optimizer, x):
    optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))

  @jax.jit
  def functional(params, state, x):
    loss = lambda p: ((x @ p["kernel"] + p["bias"]) ** 2).mean()  # noqa: E731
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  for x in xs:
    step(model, optimizer, x)
    params, state = functional(params, state, x)
  made = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  jax.tree.map(np.testing.assert_array_equal, made, params)
  for got, want in zip(jax.tree.leaves(optimizer.opt_state), jax.tree.leaves(state), strict=True):
    np.testing.assert_array_equal(got, want)


def test_nnx_memory_is_of_the_amaxes_seen(rng):
  model = nnx.Linear(
    32, 8, use_bias=False, rngs=nnx.Rngs(0),
    dot_general=fp8.nnx_dot_general("tensor_delayed_latest"),
  )  # fmt: skip

  nnx.update(model, _begun(nnx.state(model, fp8.Fp8)))

  @nnx.jit
  def step(model, x, g):
    gradient = nnx.grad(lambda m: (m(x) * g).sum(), argnums=WRT)(model)
    gradient = fp8.nnx_update(model, gradient)
    model.kernel[...] -= 0.1 * gradient["kernel"][...]

  for x, g in _rounds(rng):
    want = [np.abs(t).max() for t in (x, np.asarray(model.kernel[...]), g)]
    step(model, x, g)
    (site,) = _sites(nnx.state(model, fp8.Fp8))
    np.testing.assert_array_equal(site.scaling_state.amax_3, want)


def test_an_update_without_observations_is_refused():
  model = nnx.Linear(
    32, 8, rngs=nnx.Rngs(0), dot_general=fp8.nnx_dot_general("tensor_delayed_latest")
  )  # fmt: skip
  with pytest.raises(ValueError, match="no observations of the model's Fp8 sites.*nnx.DiffState"):
    fp8.nnx_update(model, nnx.state(model, nnx.Param))


def test_calibration_measures_with_current_scales(rng):
  """At scale 1 these x would saturate, and y and its gradient be wrong. Without a look: NaN."""
  x, w = 256 * lattice(rng, 32, 32), lattice(rng, 32, 32)
  want = [np.abs(t).max() for t in (x, w, x @ w)]
  model = nn.Dense(32, use_bias=False, dot_general_cls=fp8.linen_dot_general("tensor_delayed"))
  sites = model.init(jax.random.key(0), x)["fp8"]

  def loss(sites):
    return (model.apply({"params": {"kernel": w}, "fp8": sites}, x) ** 2).sum() / 2

  layer = nnx.Linear(
    32, 32, use_bias=False, rngs=nnx.Rngs(0), dot_general=fp8.nnx_dot_general("tensor_delayed")
  )
  layer.kernel[...] = jnp.asarray(w)
  assert np.isnan(loss(sites)) and np.isnan(layer(x)).all()
  fp8.nnx_calibrate(layer, nnx.jit(lambda m: (m(x) ** 2).sum() / 2))
  sites = jax.jit(lambda sites: site_lib.calibrate(sites, loss))(sites)
  for site in (*_sites(sites), *_sites(nnx.state(layer, fp8.Fp8))):
    np.testing.assert_array_equal(site.scaling_state.amax_3, want)
    np.testing.assert_array_equal(site.scaling_state.history_3H[:, 0], want)


def test_microbatches_combine_by_maximum(rng):
  model = nn.Dense(8, dot_general_cls=fp8.linen_dot_general("tensor_delayed"))
  variables = model.init(jax.random.key(0), np.ones((1, 32)))

  @jax.jit
  def look(sites, x, g):
    return jax.grad(lambda s: (model.apply(variables | {"fp8": s}, x) * g).sum())(sites)

  rounds = list(_rounds(rng, 2))
  (site,) = _sites(
    functools.reduce(site_lib.combine, [look(variables["fp8"], x, g) for x, g in rounds])
  )
  xs, gs = (np.abs(t).max() for t in zip(*rounds))
  np.testing.assert_array_equal(
    site.tap[:, 0], [xs, np.abs(variables["params"]["kernel"]).max(), gs]
  )


@pytest.mark.parametrize("over", [nn.scan, nn.vmap])
def test_stacked_layers_remember_apart(rng, over):
  """Layers under nn.scan and nn.vmap keep one site each with variable_axes={"fp8": 0}."""

  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, factor):
      y = nn.Dense(32, use_bias=False, dot_general_cls=fp8.linen_dot_general("tensor_delayed"))(
        x * factor
      )
      return (x, y) if over is nn.scan else y

  axes = {"variable_axes": {"params": 0, "fp8": 0}, "split_rngs": {"params": True}}
  axes |= {"length": 3} if over is nn.scan else {"axis_size": 3, "in_axes": (None, 0)}
  model = over(Layer, **axes)()
  x, factors = rng.standard_normal((16, 32)).astype(np.float32), np.float32([1, 2, 4])
  variables = jax.jit(model.init)(jax.random.key(0), x, factors)

  def loss(sites):
    y = model.apply(variables | {"fp8": sites}, x, factors)
    return (y[1] if over is nn.scan else y).sum()

  (site,) = _sites(jax.jit(lambda s: site_lib.update(s, jax.grad(loss)(s)))(variables["fp8"]))
  (kernel,) = jax.tree.leaves(variables["params"])
  want = [np.abs(x).max() * factors, np.abs(kernel).max((1, 2)), [1, 1, 1]]
  np.testing.assert_array_equal(site.scaling_state.amax_3, np.transpose(want))


def test_attention_has_a_site_for_each_of_its_products():
  hook = fp8.linen_dot_general("tensor_delayed")
  model = nn.MultiHeadDotProductAttention(4, qkv_dot_general_cls=hook, out_dot_general_cls=hook)
  variables = jax.eval_shape(model.init, jax.random.key(0), np.ones((2, 16, 32)))
  names = {s.name for s in _sites(variables["fp8"])}
  assert names == {"query", "key", "value", "out"}


# --- refusals ------------------------------------------------------------------------------------


class _Tied(nn.Module):
  recipe: str

  @nn.compact
  def __call__(self, x):
    layer = nn.Dense(32, dot_general_cls=fp8.linen_dot_general(self.recipe), name="tied")
    return layer(layer(x))


class _TiedNnx(nnx.Module):
  def __init__(self):
    shared = fp8.nnx_dot_general("tensor_delayed", name="tied")
    self.up, self.down = (nnx.Linear(32, 32, dot_general=shared, rngs=nnx.Rngs(i)) for i in (0, 1))

  def __call__(self, x):
    return self.down(self.up(x))


def test_a_layer_used_twice_is_refused_where_it_would_add_up():
  x = np.ones((16, 32), np.float32)
  variables = _Tied("tensor_delayed").init(jax.random.key(0), x)
  with pytest.raises(ValueError, match="'tied' is used by two products"):
    jax.jit(_Tied("tensor_delayed").apply)(variables, x)
  with pytest.raises(ValueError, match="'tied' is used by two products"):
    nnx.grad(lambda m: m(x).sum(), argnums=WRT)(_TiedNnx())
  # With current scales there is nothing to add up.
  jax.jit(_Tied("block_128").apply)({"params": variables["params"]}, x)


def test_a_memory_shared_under_vmap_is_refused():
  over = nn.vmap(
    nn.Dense, {"params": 0, "fp8": None}, {"params": True}, axis_size=3, in_axes=0
  )  # fmt: skip
  model = over(8, dot_general_cls=fp8.linen_dot_general("tensor_delayed"))
  x = np.ones((3, 16, 32), np.float32)
  variables = model.init(jax.random.key(0), x)
  with pytest.raises(ValueError, match="is used under vmap"):
    jax.jit(jax.grad(lambda v: model.apply(v, x).sum()))(variables)


@pytest.mark.parametrize(
  "make", [fp8.linen_dot_general, fp8.nnx_dot_general, fp8.nnx_einsum], ids=lambda f: f.__name__
)
def test_unknown_recipe_names_the_nearest(make):
  with pytest.raises(ValueError, match="did you mean 'block_128'"):
    make("block128")


def test_what_is_missing_or_ignored_is_refused():
  x = np.ones((16, 32), np.float32)
  model = nn.Dense(8, dot_general_cls=fp8.linen_dot_general("tensor_delayed"), name="up")
  variables = model.init(jax.random.key(0), x)
  with pytest.raises(ValueError, match="recipe 'tensor_delayed' remembers.*'fp8': variables"):
    model.apply({"params": variables["params"]}, x)
  model = nn.Dense(8, precision="highest", dot_general_cls=fp8.linen_dot_general("block_128"))
  with pytest.raises(ValueError, match="precision='highest'.*leave it out"):
    model.init(jax.random.key(0), x)
  with pytest.raises(TypeError, match="give it as dot_general_cls=, not as dot_general="):
    nn.Dense(8, dot_general=fp8.linen_dot_general("block_128")).init(jax.random.key(0), x)
  with pytest.raises(ValueError, match="rounds stochastically: give rngs"):
    fp8.nnx_dot_general("nvfp4_sr_rht")


def test_stochastic_rounding_draws_from_its_own_stream(rng):
  x = rng.standard_normal((32, 32)).astype(np.float32)
  quant = Quant(E4M3, source=Delayed(steps=1), rounding=Rounding.STOCHASTIC)
  recipe = Recipe("stochastic", fwd=Gemm(quant, quant))  # and it remembers
  model = nn.Dense(16, dot_general_cls=fp8.linen_dot_general(recipe))
  variables = model.init(jax.random.key(0), x)
  run = jax.jit(lambda seed: model.apply(variables, x, rngs={"fp8": jax.random.key(seed)}))
  np.testing.assert_array_equal(run(0), run(0))
  assert np.any(run(0) != run(1))

  layer = nnx.Linear(
    32, 16, rngs=nnx.Rngs(0), dot_general=fp8.nnx_dot_general(recipe, rngs=nnx.Rngs(1))
  )
  run = nnx.jit(lambda m: m(x))
  assert np.any(run(layer) != run(layer))
