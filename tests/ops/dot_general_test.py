"""dot_general against jax.lax.dot_general, exactly, under every transformation of JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from lattice import lattice

from fp8jax import axes, mesh
from fp8jax.formats import E4M3
from fp8jax.ops import api
from fp8jax.ops import site as site_lib
from fp8jax.ops.dots import dot, dot_general
from fp8jax.quantization import amax_history, quantize
from fp8jax.recipe.quant import Delayed, Hadamard, Quant

BATCHED = (((2,), (1,)), ((0,), (0,)))
PLAIN = (((1,), (0,)), ((), ()))
P = PartitionSpec


def _site(recipe, largest=(7.0, 7.0, 7.0)):
  """A site whose memory, if it has one, is of these amaxes of (x, w, g)."""
  site = site_lib.single(recipe)
  if site.scaling_state is None:
    return site
  return dataclasses.replace(
    site, scaling_state=amax_history.calibrated(site.recipe, jnp.asarray(largest))
  )


def _stack(sites):
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *sites)


def _compare(ours, theirs, x, w, g, site):
  """Results and gradients agree to the bit; returns what the site saw."""

  @jax.jit
  def run(x, w, site, g):
    y, pull = jax.vjp(ours, x, w, site)
    return y, *pull(g)

  @jax.jit
  def run_plain(x, w, g):
    y, pull = jax.vjp(theirs, x, w)
    return y, *pull(g)

  y, dx, dw, seen = run(x, w, site, g)
  for got, want in zip((y, dx, dw), run_plain(x, w, g)):
    np.testing.assert_array_equal(got, want)
  np.testing.assert_allclose(seen.roots, np.sqrt(seen.tap[..., 0]), rtol=1e-6)
  return np.asarray(seen.tap)


def _by_turns(transforms: dict):
  """Each recipe and each transform once; the other pairs are slow."""
  return [
    pytest.param(recipe, transform, id=f"{name}-{recipe}", marks=[pytest.mark.slow] * (i != j))
    for i, (name, transform) in enumerate(transforms.items())
    for j, recipe in enumerate(("tensor_delayed", "block_128"))
  ]


@pytest.mark.parametrize(
  "recipe, transform", _by_turns({"jit": lambda f: f, "remat": jax.checkpoint})
)
def test_dot_general_with_batch_dimensions(rng, recipe, transform):
  x, w, g = (lattice(rng, 2, 16, 16) for _ in range(3))
  x, g = 2 * x, g / 2  # powers of two keep a lattice one
  seen = _compare(
    transform(lambda x, w, site: dot_general(x, w, BATCHED, site)),
    transform(lambda x, w: jax.lax.dot_general(x, w, BATCHED)),
    x, w, g, _site(recipe, (14.0, 7.0, 3.5)),
  )  # fmt: skip
  np.testing.assert_array_equal(seen[:, 0], [14, 7, 3.5])


def _scan(product):
  return lambda *operands: jax.lax.scan(lambda _, each: (None, product(*each)), None, operands)[1]


@pytest.mark.parametrize("recipe, over", _by_turns({"scan": _scan, "vmap": jax.vmap}))
def test_stacked_sites_see_their_own_element(rng, recipe, over):
  """One site per element, as for the layers of a model: exact, and nothing is added up."""
  factors = 2.0 ** np.arange(3, dtype=np.float32)
  x, w, g = (lattice(rng, 3, 16, 16) * factors[:, None, None] for _ in range(3))
  # The first two elements have room to spare; the third saturates at 14, half of its largest.
  sites = [_site(recipe, (limit, 7.0 * f, 7.0 * f)) for f, limit in zip(factors, (14, 28, 14))]
  remembers = sites[0].scaling_state is not None

  def theirs(x, w):
    limits = np.asarray([14, 28, 14])[:, None, None] if remembers else np.inf
    # The straight-through estimate: what saturates still has a gradient.
    x = x + jax.lax.stop_gradient(jnp.clip(x, -limits, limits) - x)
    return over(lambda x, w: jax.lax.dot_general(x, w, PLAIN))(x, w)

  ours = over(lambda x, w, site: dot_general(x, w, PLAIN, site))
  seen = _compare(ours, theirs, x, w, g, _stack(sites))
  np.testing.assert_array_equal(seen[..., 0], 7 * factors[:, None] * np.ones(3))


REFUSED = {
  "precision": ({"precision": jax.lax.Precision.HIGHEST}, "leave it out; the site's recipe"),
  "out_sharding": ({"out_sharding": P("data")}, "out_sharding=P.*leave it out; dot"),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_what_only_jax_takes_is_refused(options, message):
  x = jnp.ones((16, 16))
  with pytest.raises(ValueError, match=message):
    dot_general(x, x, PLAIN, site_lib.single("block_128"), **options)


@pytest.mark.parametrize("fourth", [None, jax.lax.Precision.HIGHEST])
def test_a_fourth_argument_that_is_no_recipe_is_refused(fourth):
  """JAX has precision there."""
  x = jnp.ones((16, 16))
  with pytest.raises(TypeError, match="expected a recipe's name"):
    dot_general(x, x, PLAIN, fourth)


def test_vmap_over_an_observed_site_is_refused(rng):
  x, w = lattice(rng, 3, 16, 16), lattice(rng, 16, 16)

  def loss(w, tap):
    site = dataclasses.replace(site_lib.single("block_128", name="mlp/up"), tap=tap)
    return jax.vmap(lambda x: dot_general(x, w, PLAIN, site))(x).sum()

  with pytest.raises(ValueError, match="'mlp/up' is used under vmap.*one site per element"):
    jax.jit(jax.grad(loss, argnums=1))(w, jnp.zeros((3, 1)))
  # Where nobody asks what the site sees, nothing can be added up.
  site = site_lib.single("block_128")
  y = jax.jit(jax.vmap(lambda x: dot_general(x, w, PLAIN, site)))(x)
  np.testing.assert_array_equal(y, x @ w)


def test_a_site_used_twice_in_one_trace_is_refused(rng):
  x, w = lattice(rng, 16, 16), lattice(rng, 16, 16)

  def twice(x, site):
    return dot_general(dot_general(x, w, PLAIN, site), w, PLAIN, site)

  site = site_lib.single("block_128", name="tied")
  for run in (jax.jit(twice), jax.grad(lambda x, site: twice(x, site).sum(), argnums=1)):
    with pytest.raises(ValueError, match="'tied' is used by two products"):
      run(x, site)
  assert twice(x, site).shape == (16, 16)  # eagerly nobody observes


def _in_a_loop(x, w, site):
  return jax.lax.scan(lambda x, _: (dot_general(x, w, PLAIN, site), None), x, None, length=3)[0]


def _rematerialized_thrice(x, w, site):
  for _ in range(3):
    x = jax.checkpoint(lambda x, site: dot_general(x, w, PLAIN, site))(x, site)
  return x


def _on_three_devices(x, w, site):
  one = lambda x, site: dot_general(x, w, PLAIN, site)  # noqa: E731
  of = jax.sharding.Mesh(jax.devices()[:3], "d")
  return jax.shard_map(one, mesh=of, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=False)(
    jnp.concatenate([x] * 3), site
  )


@pytest.mark.parametrize("use", [_in_a_loop, _rematerialized_thrice, _on_three_devices])
def test_amaxes_that_were_added_up_are_no_scale(use):
  """No trace shows that three products share the site: its observations say so."""
  x, w = jnp.ones((16, 16)), jnp.eye(16)
  loss = lambda site: use(x, w, site).sum()  # noqa: E731
  site = _site("tensor_delayed", (1.0, 1.0, 1.0))
  seen = jax.jit(jax.grad(loss))(site)
  np.testing.assert_allclose(seen.tap.ravel(), 3 * np.ones(3), rtol=1e-6)
  with pytest.raises(
    ValueError, match="'dot': its amaxes are not those of one product.*Stack one site"
  ):
    site_lib.update(site, seen)
  state = jax.jit(site_lib.update)(site, seen).scaling_state
  assert np.isnan(state.amax_3).all() and np.isnan(state.history_3H).all()
  with pytest.raises(ValueError, match="'dot': its amaxes are not those"):
    site_lib.calibrate(site_lib.single("tensor_delayed"), loss)


OTHERS = {
  "a sum": lambda *parts: jax.tree.map(jnp.add, *parts),
  "an average": lambda *parts: jax.tree.map(lambda a, b: (a + b) / 2, *parts),
  "of a scaled loss": lambda part, _: jax.tree.map(lambda a: a / 1024, part),
}


@pytest.mark.parametrize("how", OTHERS.values(), ids=OTHERS)
def test_microbatches_are_combined_and_nothing_else(rng, how):
  """Two gradients of one site: `combine` has the larger amaxes."""
  w = lattice(rng, 16, 16)
  site = _site("tensor_delayed")
  of = jax.grad(lambda site, x: dot_general(x, w, PLAIN, site).sum())
  parts = [of(site, jnp.full((16, 16), amax)) for amax in (2.0, 5.0)]
  state = site_lib.update(site, site_lib.combine(*parts)).scaling_state
  assert state.history_3H[0, :2].tolist() == [5.0, 7.0]
  with pytest.raises(ValueError, match="site.combine and devices by jax.lax.pmax; leave sites out"):
    site_lib.update(site, how(*parts))
  # A nonfinite amax is that of one product: the history waits for another.
  seen = site_lib.combine(parts[0], of(site, jnp.full((16, 16), jnp.inf)))
  assert site_lib.update(site, seen).scaling_state.history_3H[0, :2].tolist() == [0.0, 7.0]


# Specs of x [128, 128], w and y, and what each of eight devices holds of x and w.
SPLITS = {
  "tokens": (P("data"), P(), P("data"), lambda t: np.split(t, 8), lambda t: [t] * 8),
  "contracted": (
    P(None, "data"), P("data"), P(), lambda t: np.split(t, 8, 1), lambda t: np.split(t, 8)
  ),
}  # fmt: skip


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
  "recipe, check_vma",
  [
    ("block_128", True),
    pytest.param("tensor_delayed", True, marks=pytest.mark.slow),
    ("tensor_delayed", False),
  ],
)
def test_dot_general_inside_shard_map(rng, recipe, split, check_vma):
  """Each device multiplies what it holds, with a tap of its own; partial sums are the caller's."""
  x_spec, w_spec, y_spec, x_parts, w_parts = SPLITS[split]
  x, g = lattice(rng, 128, 128), lattice(rng, 128, 16)
  w = lattice(rng, 128, 16)
  one = _site(recipe)
  site = dataclasses.replace(one, tap=jnp.zeros((8, 3, 1)), roots=jnp.zeros((8, 3)))
  site_spec = dataclasses.replace(jax.tree.map(lambda _: P(), site), tap=P("data"), roots=P("data"))

  def on_devices(product, *specs):
    def local(x, w, *site):
      y = product(x, w, *site)
      return jax.lax.psum(y, "data") if split == "contracted" else y

    return jax.shard_map(
      local, mesh=mesh.make((8, 1, 1)), in_specs=(x_spec, w_spec, *specs), out_specs=y_spec,
      check_vma=check_vma,
    )  # fmt: skip

  def ours(x, w, site):
    own = dataclasses.replace(site, tap=site.tap[0], roots=site.roots[0])
    return dot_general(x, w, PLAIN, own)

  seen = _compare(
    on_devices(ours, site_spec),
    on_devices(lambda x, w: jax.lax.dot_general(x, w, PLAIN)),
    x, w, g, site,
  )  # fmt: skip
  held = zip(x_parts(x), w_parts(w), strict=True)
  np.testing.assert_array_equal(
    seen[:, :2, 0], [[np.abs(part).max() for part in parts] for parts in held]
  )


def test_a_tap_shared_by_devices_is_refused(rng):
  x, w = lattice(rng, 128, 16), lattice(rng, 16, 16)
  site = site_lib.single("block_128", name="mlp/up")

  @jax.shard_map(mesh=mesh.make((8, 1, 1)), in_specs=(P("data"), P(), P()), out_specs=P("data"))
  def product(x, w, tap):
    return dot_general(x, w, PLAIN, dataclasses.replace(site, tap=tap))

  with pytest.raises(ValueError, match="'mlp/up' is shared by devices along data"):
    jax.jit(jax.grad(lambda tap: product(x, w, tap).sum()))(site.tap)

  @jax.shard_map(
    mesh=mesh.make((8, 1, 1)), in_specs=(P("data"), P(), P("data"), P()), out_specs=P("data")
  )
  def with_taps(x, w, taps, roots):
    return dot_general(x, w, PLAIN, dataclasses.replace(site, tap=taps[0], roots=roots))

  loss = lambda *seen: with_taps(x, w, *seen).sum()  # noqa: E731
  with pytest.raises(ValueError, match="shared by devices along data.* stack tap and roots"):
    jax.jit(jax.grad(loss, (0, 1)))(jnp.zeros((8, 3, 1)), site.roots)


def test_a_manual_layout_scales_by_the_whole_tensor(rng):
  """Rows that one device holds are small: with a scale of their own they would lose less."""
  x = lattice(rng, 128, 16) * 1.1
  x[:16] /= 1000
  w = lattice(rng, 16, 16)
  site = site_lib.single("tensor_current")
  want = dot_general(x, w, PLAIN, site)
  on_mesh = mesh.make((8, 1, 1))
  layout = axes.Layout(on_mesh, acts=axes.as_rules({"B": "data"})).manual()

  def run(product):
    local = jax.shard_map(product, mesh=on_mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    return jax.jit(local)(x, w)

  whole = run(lambda x, w: dot("BD,DF->BF", x, w, dataclasses.replace(site, layout=layout)))
  np.testing.assert_array_equal(whole, want)
  assert np.any(run(lambda x, w: dot_general(x, w, PLAIN, site)) != want)
  # jit alone splits the program and leaves its meaning: no layout is needed.
  placed = jax.device_put(x, jax.NamedSharding(on_mesh, P("data")))
  got = jax.jit(lambda x, w: dot_general(x, w, PLAIN, site))(placed, w)
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  "lhs, rhs, numbers, message",
  [
    ((4, 16), (8, 16), (((1,), (0,)), ((), ())), "two sizes"),
    ((4,), (8,), (((), ()), ((), ())), "contracts nothing"),
    ((4, 16), (16, 8), (((2,), (0,)), ((), ())), "different axes, in pairs, of lhs with 2 dim"),
    ((4, 16), (16, 8), (((1,), (-3,)), ((), ())), "expected different axes"),
    ((4, 16), (16, 8), (((1, 1), (0, 1)), ((), ())), "expected different axes"),
    ((4, 16), (16, 8), (((1, 0), (0,)), ((), ())), "expected different axes, in pairs"),
  ],
)
def test_dot_general_refuses_by_name(lhs, rhs, numbers, message):
  with pytest.raises(ValueError, match=message):
    dot_general(jnp.zeros(lhs), jnp.zeros(rhs), numbers, site_lib.single("block_128"))


def test_a_gradient_of_rounding_is_refused_and_one_of_the_compute_dtype_exact(rng):
  """Of a gradient penalty: with y = x w and the loss sum(c y), it is |c w'|^2, and 2 w c'c."""
  x, w, c = lattice(rng, 16, 8), lattice(rng, 8, 4), lattice(rng, 16, 4)

  def penalty(w, recipe):
    loss = lambda x: (c * dot("TD,DF->TF", x, w, recipe)).sum()  # noqa: E731
    return (jax.grad(loss)(jnp.asarray(x)) ** 2).sum()

  np.testing.assert_array_equal(jax.grad(penalty)(jnp.asarray(w), "bf16"), 2 * w @ c.T @ c)
  for recipe in ("block_128", "mxfp8"):
    with pytest.raises(TypeError, match="'dot': its gradients are differentiated.*recipe 'bf16'"):
      jax.jit(jax.grad(penalty), static_argnums=1)(w, recipe)

  def through(x):
    return api.dequantize(api.quantize(x, Quant(E4M3, tile=(1, 8)))).sum()

  with pytest.raises(TypeError, match="x is differentiated .* give it jax.lax.stop_gradient"):
    jax.grad(through)(jnp.asarray(x))
  np.testing.assert_array_equal(jax.grad(lambda x: through(jax.lax.stop_gradient(x)))(x), 0 * x)


def test_operands_of_8_bits_are_refused(rng):
  """They have no scale, and neither would the result and the gradients."""
  x, w = lattice(rng, 16, 16), lattice(rng, 16, 16)
  for operands in ((x.astype(E4M3.dtype), w), (x, w.astype(E4M3.dtype))):
    with pytest.raises(TypeError, match="is float8_e4m3fn without a scale, and its gradient would"):
      dot_general(*operands, PLAIN, "tensor_current")


@pytest.mark.parametrize("size", [1e-9, 1e6])
def test_a_float32_gradient_of_float16_reaches_a_float32_weight(rng, size):
  """float16 has neither number; its FP8 scale does."""
  x, w = np.float16(lattice(rng, 16, 8)), lattice(rng, 8, 4)
  g = np.float32(size) * lattice(rng, 16, 4)
  product = lambda w: dot("TD,DF->TF", x, w, "tensor_current", out_dtype=jnp.float32)  # noqa: E731
  (dw,) = jax.vjp(product, w)[1](g)
  want = np.float64(x).T @ np.float64(g)
  assert np.linalg.norm(dw - want) < 0.06 * np.linalg.norm(want)


def test_scales_that_remember_begin_beside_random_bits(rng):
  """Keys have no gradient; sites of one name have other bits all the same."""
  x, w = lattice(rng, 16, 16), lattice(rng, 16, 16)
  site = site_lib.single("trillion_token")
  begun = site_lib.calibrate(site, lambda site: dot_general(x, w, PLAIN, site).sum())
  np.testing.assert_array_equal(begun.scaling_state.amax_3, [7, 7, 1])
  a, b = site_lib.with_keys([site, site], jax.random.key(1))
  assert a.key != b.key and a.key == site_lib.with_keys([site], jax.random.key(1))[0].key


def test_quantize_takes_a_key_and_an_amax_where_they_say_something(rng):
  x, fresh = lattice(rng, 16, 16), Quant(E4M3, tile=(1, 16), transform=Hadamard(16, "fresh"))
  given = Quant(E4M3, source=Delayed(1))
  for quant, options, message in (
    (Quant(E4M3), {"key": jax.random.key(0)}, "which draws nothing; leave it out"),
    (given, {"amax": -2.0}, "amax=-2.0, expected one number >= 0"),
    (given, {"amax": jnp.ones(8)}, "expected one number >= 0"),
  ):
    with pytest.raises(ValueError, match=message):
      api.quantize(x, quant, **options)
  rotated = [api.dequantize(api.quantize(x, fresh, key=jax.random.key(n))) for n in (0, 1)]
  norm, *norms = (np.linalg.norm(t, axis=1) for t in (x, *rotated))
  np.testing.assert_allclose(norms, [norm] * 2, rtol=0.05)
  assert np.any(rotated[0] != rotated[1])
  # Signs are drawn apart from roundings: those of the key itself would be the bits of both.
  q = api.quantize(x, fresh, key=jax.random.key(0))
  same = quantize.quantize(jnp.asarray(x), fresh, signs_key=jax.random.key(0))
  assert np.any(q.dequantize() != same.dequantize())
