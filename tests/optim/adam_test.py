"""Adam and Lion with narrow moments: Optax's numbers without them, known failures with them."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import tolerances

from fp8jax.errors import UserError
from fp8jax.formats import BF16, E4M3, E5M2
from fp8jax.optim import quantized_moments, storage
from fp8jax.optim.storage import Moments
from fp8jax.quantization import quantized_tensor
from fp8jax.recipe.quant import DynamicRangeExpansion, Quant, Rounding, Scale, SquareRoot

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from experiments.moments import dynamics  # noqa: E402

NARROW = [name for name in storage.MOMENTS if name != "float32"]
SHAPES = {"w": (32, 256), "heads": (64, 4, 32), "bias": (256,), "small": (3, 5)}


def _lion(moments, b2=0.99):
  lion = optax.scale_by_lion(0.9, b2)
  return quantized_moments.stored(lion, moments, {"mu": b2})


def _trees(rng, count):
  return [
    {k: rng.standard_normal(s).astype(np.float32) * 10.0 ** rng.integers(-6, 2) for k, s in
     SHAPES.items()} for _ in range(count)
  ]  # fmt: skip


def _run(tx, params, gradients):
  """Updates of every step, and the last state."""
  state, step, updates = jax.jit(tx.init)(params), jax.jit(tx.update), []
  for g in gradients:
    update, state = step(g, state, params)
    updates.append(update)
  return updates, state


@pytest.mark.parametrize(
  "ours,theirs",
  [
    (quantized_moments.scale_by_adam(), optax.scale_by_adam()),
    (
      quantized_moments.scale_by_adam(0.8, 0.95, 1e-3, 1e-2),
      optax.scale_by_adam(0.8, 0.95, 1e-3, 1e-2),
    ),
    (_lion(Moments()), optax.scale_by_lion()),
  ],
  ids=["adam", "adam with eps_root", "lion"],
)
def test_float32_moments_are_optax_to_the_bit(rng, ours, theirs):
  params, *gradients = _trees(rng, 7)
  jax.tree.map(
    np.testing.assert_array_equal, _run(ours, params, gradients), _run(theirs, params, gradients)
  )


def _grid(bits: int):
  """float64 to so many mantissa bits, ties to even; of normal numbers."""

  def rounded(x):
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-14))) - bits)
    return np.rint(x / unit) * unit

  return rounded


# name: (rounding of m, of v, largest numbers, smallest v), written down here or ml_dtypes'.
_cast = lambda dtype: lambda x: x.astype(dtype).astype(np.float64)  # noqa: E731
PAIRS = {
  "tensor_e5m2_e4m3": (
    _cast(ml_dtypes.float8_e5m2), _cast(ml_dtypes.float8_e4m3fn), (57344, 448), 2.0**-9),
  "tensor_e4m3_240_e5m2": (
    _cast(ml_dtypes.float8_e4m3), _cast(ml_dtypes.float8_e5m2), (240, 57344), 2.0**-16),
  "tensor_int8_e5m6": (np.rint, _grid(6), (127, 65024), 2.0**-20),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_any_two_formats_are_a_pair_of_moments(rng, name):
  """Codes of both moments as NumPy's, and v, spread over 60 octaves, never 0."""
  kept, (*rules, largest, least) = storage.moments(name), PAIRS[name]
  m = np.float32(rng.standard_normal((64, 64)) * np.exp2(rng.integers(-8, 8, (64, 64))))
  v = np.float32(np.square(m) * np.exp2(rng.integers(-60, 0, (64, 64))))
  for x, quant, rule, most in zip((m, v), (kept.mu, kept.nu), rules, largest, strict=True):
    packed = jax.jit(quantized_tensor.pack, static_argnums=1)(x, quant)
    scale = np.abs(x).max() * np.float32(1 / most)
    assert packed.scale == scale and packed.nbytes == x.size * quant.format.dtype.itemsize + 4
    want = np.clip(rule(np.float64(np.clip(x * (np.float32(1) / scale), -most, most))), -most, most)
    if x is v:
      assert np.mean(want < least) > 0.1
      want = np.maximum(want, least)
    np.testing.assert_array_equal(np.float64(packed.data), want)
    np.testing.assert_array_equal(packed.unpack(), np.float32(want) * scale)
  quantized_moments.scale_by_adam(moment_format=name)


def test_names_of_pairs_are_read_or_refused():
  assert storage.moments("tensor_e4m3_e5m2") == storage.MOMENTS["tensor_e4m3_e5m2"]
  assert storage.moments("tensor_f32_e4m3(max=240)").mu is None
  assert storage.moments("tensor_e4m3_f32").nu is None
  for name, reason in {
    "coats": "did you mean 'coat'", "tensor_e4m3": "Known: float32, bf16",
    "tensor_e4m3_e9m1": "e9m1", "tensor_e8m0_e5m2": "holds scales",
    "tensor_e4m3_logfmt8": "extents that lie within a device",
  }.items():  # fmt: skip
    with pytest.raises(UserError, match=f"moment_format='{name}' is unknown.*{reason}"):
      quantized_moments.scale_by_adam(moment_format=name)


# The others differ from these in values that tests of `packed` go through.
_FIRST = ("coat", "sqrt_v", "bf16_sr", "fp8lm")


@pytest.mark.parametrize(
  "name", [n if n in _FIRST else pytest.param(n, marks=pytest.mark.slow) for n in NARROW]
)
def test_kept_narrow_beside_what_is_small(rng, name):
  """Matrices of 4096 numbers take the preset's formats and bytes; the rest equals Optax."""
  kept = storage.MOMENTS[name]
  params, *gradients = _trees(rng, 5)
  updates, state = _run(
    quantized_moments.scale_by_adam(b2=0.95, moment_format=kept), params, gradients
  )
  wanted, exact = _run(optax.scale_by_adam(b2=0.95), params, gradients)
  for moment, quant in ((state.mu, kept.mu), (state.nu, kept.nu)):
    for k in ("w", "heads"):
      assert moment[k].data.dtype == quant.format.dtype and moment[k].shape == SHAPES[k]
      assert moment[k].nbytes == pytest.approx(storage.nbytes(quant) * params[k].size, abs=8)
  close = functools.partial(np.testing.assert_allclose, rtol=tolerances.FLOAT32_SUM)
  jax.tree.map(close, updates[0], wanted[0])  # nothing rounded yet
  for k in SHAPES:
    if k in ("w", "heads"):
      mu, nu = state.mu[k].unpack(), state.nu[k].unpack()
      assert np.linalg.norm(mu - exact.mu[k]) < 0.1 * np.linalg.norm(exact.mu[k])
      assert np.linalg.norm(nu - exact.nu[k]) < 0.2 * np.linalg.norm(exact.nu[k])
      assert np.any(np.asarray(mu) != exact.mu[k])
    else:
      close(updates[-1][k], wanted[-1][k])


def test_bfloat16_parameters_have_float32_moments_and_bfloat16_updates(rng):
  """Large gradients and small ones in bfloat16."""
  kept = storage.MOMENTS["coat"]
  params = {"w": jnp.zeros((64, 128), jnp.bfloat16), "norm": jnp.ones((128,), jnp.bfloat16)}
  ours = quantized_moments.scale_by_adam(b2=0.95, moment_format=kept)
  theirs = optax.scale_by_adam(b2=0.95)
  first_step = lambda tx: jax.jit(lambda g, p: tx.update(g, tx.init(p), p))  # noqa: E731
  first_step = functools.cache(first_step)
  for size in (3.0, 1e-3):
    g = {k: jnp.asarray(size * rng.standard_normal(p.shape), p.dtype) for k, p in params.items()}
    got, state = first_step(ours)(g, params)
    want, _ = first_step(theirs)(g, params)
    assert state.mu["norm"].dtype == jnp.float32 and got["norm"].dtype == jnp.bfloat16
    # The first step divides g by its own magnitude; bfloat16 keeps 8 bits of what is squared.
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.02), got, want
    )


def test_adam_with_coat_moments_learns_in_an_optax_chain(rng):
  """A least-squares problem under optax.chain, jitted, parameters and state donated."""
  x = rng.standard_normal((512, 64)).astype(np.float32)
  truth = rng.standard_normal((64, 128)).astype(np.float32)
  kept = storage.MOMENTS["coat"]
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    quantized_moments.scale_by_adam(b2=0.95, moment_format=kept),
    optax.scale(-0.03),
  )

  def loss(p):  # the bias, which is kept wide, has nothing to learn
    return jnp.mean(jnp.square(x @ p["w"] + p["bias"] - x @ truth))

  def step(p, state):
    update, state = tx.update(jax.grad(loss)(p), state, p)
    return optax.apply_updates(p, update), state

  p = {"w": jnp.zeros((64, 128)), "bias": jnp.zeros(128)}
  state, before, step = tx.init(p), loss(p), jax.jit(step, donate_argnums=(0, 1))
  for _ in range(200):
    old, (p, state) = state, step(p, state)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
  assert loss(p) < 1e-3 * before


WRAPPERS = {
  "inject_hyperparams": lambda make: optax.inject_hyperparams(make)(b1=0.9),
  "MultiSteps": lambda make: optax.MultiSteps(make(), 2),
  "masked": lambda make: optax.masked(make(), {"w": True, "heads": False, "bias": True}),
  "apply_if_finite": lambda make: optax.apply_if_finite(make(), 3),
}


# Others: quantized_state_test.py.
_QUICK = (("inject_hyperparams", "coat"), ("inject_hyperparams", None), ("masked", "coat"))


@pytest.mark.parametrize(
  "wrapper,name",
  [
    pytest.param(w, n, marks=[] if (w, n) in _QUICK else [pytest.mark.slow])
    for w in WRAPPERS
    for n in (None, "coat", "bf16", "bf16_sr")
  ],
)
def test_optax_wrappers_change_nothing(rng, name, wrapper):
  """Jitted, what is wrapped gives what it gives alone, narrow or not."""
  kept = storage.MOMENTS[name or "float32"]

  def make(b1=0.9, b2=0.95):
    return quantized_moments.scale_by_adam(b1, b2, moment_format=kept)

  params, *gradients = ({k: t[k] for k in ("w", "heads", "bias")} for t in _trees(rng, 4))
  want, _ = _run(make(), params, gradients)
  if wrapper == "MultiSteps":  # every gradient twice, whose mean it is
    gradients = [g for g in gradients for _ in range(2)]
  got, _ = _run(WRAPPERS[wrapper](make), params, gradients)
  if wrapper == "MultiSteps":
    got = got[1::2]
  if wrapper == "masked":
    for updates, g in zip(got, gradients):
      np.testing.assert_array_equal(updates["heads"], np.float32(g["heads"]))
    # What is drawn depends on the place in the tree.
    names = ("w", "bias") if name != "bf16_sr" else ("bias",)
    got, want = ([{k: u[k] for k in names} for u in us] for us in (got, want))
  # An injected b1 is an array: a code in 10,000 may fall on the other side of a tie, by a step.
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b)


def test_what_is_injected_is_refused_where_it_is_a_number():
  """In `init`; traced, a b2 has no value to look at."""
  kept = storage.MOMENTS["bf16"]
  make = optax.inject_hyperparams(quantized_moments.scale_by_adam)
  with pytest.raises(ValueError, match="learning stop"):
    make(b2=0.999, moment_format=kept).init({"w": jnp.zeros((64, 64))})


def test_tree_map_params_takes_a_narrow_moment_as_one_leaf(rng):
  kept = storage.MOMENTS["coat"]
  tx = quantized_moments.scale_by_adam(b2=0.95, moment_format=kept)
  params = _trees(rng, 1)[0]
  found = optax.tree_map_params(
    tx, lambda x, p: (x.shape, p.shape), tx.init(params), params,
    transform_non_params=lambda _: None,
    is_leaf=lambda x: isinstance(x, quantized_tensor.QuantizedTensor),
  )  # fmt: skip
  assert found == optax.ScaleByAdamState(None, *2 * [{k: (s, s) for k, s in SHAPES.items()}])


def test_stochastic_rounding_is_a_function_of_seed_step_and_place(rng):
  kept = storage.MOMENTS["bf16_sr"]
  params = {"a": np.zeros((64, 64), np.float32), "b": np.zeros((64, 64), np.float32)}
  g = rng.standard_normal((64, 64)).astype(np.float32)
  gradients = [{"a": g, "b": g}] * 2

  def states(seed):
    tx = quantized_moments.scale_by_adam(moment_format=kept, seed=seed)
    step = jax.jit(tx.update)
    _, first = step(gradients[0], jax.jit(tx.init)(params), params)
    return first, step(gradients[1], first, params)[1]

  (first, _), (again, _), (other, _) = states(0), states(0), states(1)
  jax.tree.map(np.testing.assert_array_equal, first, again)
  assert np.any(first.nu["a"].data != first.nu["b"].data)
  assert np.any(first.nu["a"].data != other.nu["a"].data)
  # Equal magnitudes in both moments would round alike by one key.
  ups = [np.sign(np.asarray(m["a"].unpack() - e)) for m, e in ((first.mu, 0.1 * g),)]
  assert 0.4 < np.mean(ups[0] * np.sign(g) > 0) < 0.6


@pytest.mark.parametrize(
  "nu,b2",
  [
    (Quant(E5M2, (1, 128), Scale.POW2), 0.95),
    (Quant(E4M3, (1, 128), Scale.POW2, transform=SquareRoot()), 0.95),
    (Quant(E4M3, scale=Scale.FLOOR), 0.5),
    (Quant(BF16, scale=Scale.NONE), 0.999),
  ],
  ids=str,
)
def test_second_moments_that_could_not_fall_are_refused(nu, b2):
  with pytest.raises(ValueError, match="learning stop.*stochastic"):
    quantized_moments.scale_by_adam(b2=b2, moment_format=Moments(nu=nu))


@pytest.mark.parametrize(
  "nu",
  [
    Quant(E4M3, (1, 256)),
    Quant(E4M3),
    Quant(E4M3, (1, 128), rounding=Rounding.STOCHASTIC),
  ],
  ids=str,
)
def test_second_moments_that_would_become_0_are_refused(nu):
  with pytest.raises(ValueError, match="19 binades.*becomes 0.*keeps_nonzero=True"):
    quantized_moments.scale_by_adam(b2=0.95, moment_format=Moments(nu=nu))


def test_second_moments_with_the_range_or_without_a_0_are_not():
  for change in (
    dict(keeps_nonzero=True),
    dict(transform=SquareRoot()),
    dict(transform=DynamicRangeExpansion()),
  ):
    quantized_moments.scale_by_adam(moment_format=Moments(nu=Quant(E4M3, (1, 256), **change)))
  quantized_moments.scale_by_adam(moment_format=Moments(nu=Quant(E5M2, (1, 256))))


@pytest.mark.parametrize(
  "name,decay,size",
  [
    ("fp8lm", 0.9, 0.2), ("fp8lm", 0.95, 0.0), ("fp8lm", 0.99, 0.2), ("bf16", 0.99, 0.2),
    ("bf16", 0.999, 1.5), ("coat", 0.99, 0.2), ("tensor_e4m3_e5m2", 0.99, 0.2),
  ],
)  # fmt: skip
def test_first_moments_are_refused_where_they_stay_and_only_there(rng, name, decay, size):
  """200 steps after all gradients turned around, `size` times as large as what m is of."""
  quant, steps = storage.MOMENTS[name].mu, 200
  first = rng.standard_normal((32, 256)).astype(np.float32)
  draws = rng.standard_normal((steps, *first.shape)).astype(np.float32)

  def move(kept, xs):
    key, draw = xs
    g = -size * first * (1 + 0.3 * draw)
    return kept.repack(decay * kept.unpack() + (1 - decay) * g, key), None

  keys = jax.random.split(jax.random.key(0), steps)
  start = quantized_tensor.pack(first, quant, key=jax.random.key(1))
  kept, _ = jax.jit(lambda *a: jax.lax.scan(move, *a))(start, (keys, draws))
  left = np.median(np.asarray(kept.unpack()) / first)
  exact = decay**steps - size * (1 - decay**steps)
  if storage.moment_problems(Moments(quant), decay, None):
    assert left > 0.6 > exact
    with pytest.raises(ValueError, match="mu=.*learning stop.*stochastic"):
      quantized_moments.scale_by_adam(decay, moment_format=Moments(quant))
    with pytest.raises(ValueError, match="mu=.*learning stop.*stochastic"):
      _lion(Moments(quant), decay)
  else:
    assert abs(left - exact) < 0.05
    quantized_moments.scale_by_adam(decay, moment_format=Moments(quant))
    _lion(Moments(quant), decay)


def test_the_same_to_the_nearest_where_it_can_fall():
  quantized_moments.scale_by_adam(b2=0.95, moment_format=Moments(nu=Quant(BF16, scale=Scale.NONE)))
  nu = Quant(E5M2, (1, 128), Scale.POW2, rounding=Rounding.STOCHASTIC)
  quantized_moments.scale_by_adam(b2=0.999, moment_format=Moments(nu=nu))
  with pytest.raises(ValueError, match="8 bits need a scale"):
    Quant(E4M3, scale=Scale.NONE)


@pytest.mark.slow
def test_dynamics_of_presets_and_of_what_they_avoid():
  """A short run of experiments/moments: the order of the published table holds."""
  names = ["coat", "sqrt_v", "tensor_e4m3_e5m2", "fp8lm", "e4m3_256"]
  torchao, e5m2, e4m3 = (
    next(row for row in dynamics.OTHERS if words in row)
    for words in ("torchao", "E5M2/128 of powers of two (refused)", "E4M3 of the tensor")
  )
  rows = {name: storage.MOMENTS[name] for name in names}
  rows |= {name: dynamics.OTHERS[name] for name in (torchao, e5m2, e4m3)}
  found = dynamics.simulate(rows, 0.95, 800, (32, 256))
  error = {name: [end[0] for end in ends] for name, ends in found.items()}
  for name, most in zip(names, (0.07, 0.11, 0.13, 0.07, 0.09)):
    for error_, v, largest in found[name]:
      assert error_ < most and 0.85 < v < 1.15 and largest < 1.6, name
  assert error["coat"][0] < error["sqrt_v"][0]
  # A v of 0 under an m that is not: steps a hundred times too long.
  assert found[torchao][0][2] > 10
  # Powers of two to the nearest: v stays where it was while gradients shrink twentyfold.
  assert found[e5m2][1][1] > 20
  assert found[e4m3][1][0] > 5


@pytest.mark.slow
def test_updates_stay_bounded_under_no_eps():
  """Of presets; a v of 0 is then divided by alone."""
  torchao = next(row for row in dynamics.OTHERS if "torchao" in row)
  rows = {n: storage.MOMENTS[n] for n in NARROW} | {torchao: dynamics.OTHERS[torchao]}
  found = dynamics.simulate(rows, 0.95, 200, (32, 256), eps=1e-30)
  for name in NARROW:
    assert max(largest for _, _, largest in found[name]) < 1.6, name
  # What this step adds to a v of 0 is all there is of it.
  assert found[torchao][0][2] > 100


@pytest.mark.slow  # one step of it: quantized_state_test.py
def test_bfloat16_to_the_nearest_stalls_at_0_999():
  name = "float32 and BF16 to the nearest"
  rows = {name: dynamics.OTHERS[name], "sr": storage.MOMENTS["bf16_sr"]}
  found = dynamics.simulate(rows, 0.999, 3000, (8, 128))
  assert found[name][1][1] > 1.5
  assert 0.95 < found["sr"][1][1] < 1.05


def test_lion_keeps_its_momentum_narrow(rng):
  params, *gradients = _trees(rng, 5)
  tx = _lion(Moments(Quant(E4M3, (1, 128))))
  updates, state = _run(tx, params, gradients)
  wanted, exact = _run(optax.scale_by_lion(), params, gradients)
  assert isinstance(state.mu["w"], quantized_tensor.QuantizedTensor)
  assert np.mean(np.asarray(updates[-1]["w"]) == wanted[-1]["w"]) > 0.95
  wide = state.mu["w"].unpack()
  assert np.linalg.norm(wide - exact.mu["w"]) < 0.1 * np.linalg.norm(exact.mu["w"])
