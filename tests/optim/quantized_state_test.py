"""Optax transformations whose state is stored in a format, and the optimizers named after them."""

import functools

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tolerances
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax import contrib

import fp8jax
from fp8jax.formats import E4M3
from fp8jax.optim import optimizers, quantized_moments, storage, update
from fp8jax.optim.storage import Moments
from fp8jax.params import Param
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.recipe.quant import Quant, Rounding

NARROW = [name for name in storage.MOMENTS if name != "float32"]
SHAPES = {"w": (32, 256), "stack": {"heads": (5, 4, 2, 128)}, "bias": (256,), "few": (3, 5)}
LARGE = 32 * 256 + 5 * 4 * 2 * 128


def _tree(rng, size=1.0):
  return jax.tree.map(
    lambda s: (size * rng.standard_normal(s)).astype(np.float32),
    SHAPES,
    is_leaf=lambda s: isinstance(s, tuple),
  )


def _quantized(state) -> list[QuantizedTensor]:
  leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, QuantizedTensor))
  return [x for x in leaves if isinstance(x, QuantizedTensor)]


@jax.jit
def _unpacked(x: QuantizedTensor):
  return x.unpack()


def _run(tx, params, gradients):
  """(updates of every step, state after each), by lax.scan."""
  stacked = jax.tree.map(lambda *x: np.stack(x), *gradients)

  def step(state, g):
    updates, state = tx.update(g, state, params)
    return state, (updates, state)

  return jax.jit(lambda: jax.lax.scan(step, tx.init(params), stacked)[1])()


@pytest.mark.parametrize("group", [0, 256])
def test_momentum_in_e4m3_is_numpy_to_the_code(rng, group):
  """t = g + t / 2 of two steps of eighths, the largest 448 and 224: scales are powers of 2."""
  tx = fp8jax.quantized_state(
    optax.trace(0.5), Moments(Quant(E4M3, (1, group) if group else (0, 0)))
  )
  g = rng.integers(-800, 800, (2, 24, 256)) / 8
  g[:, :, 0] = np.array([448, 0])[:, None]
  rows = 2.0 ** np.arange(24)[:, None] if group else np.ones((24, 1))
  gradients = [{"w": np.float32(x * rows)} for x in g]
  updates, states = _run(tx, gradients[0], gradients)
  kept = np.zeros((24, 256))
  for step, scale in enumerate((1.0, 0.5)):
    wide = g[step] * rows + 0.5 * kept
    np.testing.assert_array_equal(updates["w"][step], wide)  # does not see its own rounding
    codes = (wide / (scale * rows)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    got = jax.tree.map(lambda x, i=step: np.asarray(x[i]), states.inner_state.trace["w"])
    np.testing.assert_array_equal(got.data.astype(np.float64), codes)
    np.testing.assert_array_equal(got.scale, scale * rows if group else scale)
    assert got.nbytes == 24 * 256 + 4 * (24 if group else 1)
    kept = codes * scale * rows
    assert np.mean(kept != wide) > 0.3


# Slow: a transform or a format that the others have, "coat" in adam_test.py.
_LIKE_OTHER_FORMATS = ("sqrt_v", "fp8lm", "bf16", "e4m3_256", "coat")


@pytest.mark.parametrize("name", [
  pytest.param(name, marks=[pytest.mark.slow] * (name in _LIKE_OTHER_FORMATS)) for name in NARROW
])  # fmt: skip
def test_state_of_adam_is_that_of_scale_by_adam(rng, name):
  params, *gradients = (_tree(rng, 10.0**-i) for i in range(4))
  decays = {"mu": 0.9, "nu": 0.95}
  theirs = _run(fp8jax.scale_by_adam(0.9, 0.95, moment_format=name), params, gradients)
  tx = fp8jax.quantized_state(optax.scale_by_adam(0.9, 0.95), name, decays=decays)
  updates, state = _run(tx, params, gradients)
  jax.tree.map(np.testing.assert_array_equal, (updates, state.inner_state), theirs)
  assert len(_quantized(state)) == 4 and int(state.count[-1]) == 3


def _by_name(params):
  return {k: "one" if k in ("w", "bias") else "other" for k in params}


# A transformation, and how many moments of all large parameters it has.
TRANSFORMATIONS = {
  "sgd": (optax.sgd(0.1, momentum=0.9, nesterov=True), 1),
  "sgd without a moment": (optax.sgd(0.1), 0),
  "adamw": (optax.adamw(1e-3), 2),
  "amsgrad": (optax.amsgrad(1e-3), 3),
  "adafactor": (optax.adafactor(1e-3, momentum=0.9, min_dim_size_to_factor=999), 2),
  "adafactor, factored": (optax.adafactor(1e-3, momentum=0.9, min_dim_size_to_factor=2), 1),
  "rmsprop": (optax.rmsprop(1e-3, momentum=0.9), 2),
  "lion": (optax.lion(1e-4), 1),
  "adadelta": (optax.adadelta(1e-1), 2),
  "adan": (optax.adan(1e-3), 3),
  "novograd": (optax.novograd(1e-3), 1),
  "sm3": (optax.sm3(1e-2), 1),
  "muon": (contrib.muon(1e-3), None),
  "chain": (optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.5), optax.adamax(1e-3)), 3),
  "masked": (
    optax.masked(optax.adam(1e-3), {"w": True, "stack": False, "bias": True, "few": True}), None
  ),
  "multi_transform": (
    optax.multi_transform({"one": optax.adam(1e-3), "other": optax.sgd(0.1, 0.9)}, _by_name), None
  ),
  "inject_hyperparams": (optax.inject_hyperparams(optax.adam)(1e-3), 2),
}  # fmt: skip
# Of what does not hold all large parameters alike: elements of QuantizedTensors.
ELEMENTS = {"muon": 32 * 256 + 2 * 5 * 4 * 2 * 128, "masked": 2 * 32 * 256,
            "multi_transform": 2 * 32 * 256 + 5 * 4 * 2 * 128}  # fmt: skip


# Slow: states of the shapes that others have; "multi_transform" masks, and adam_test.py injects.
_LIKE_OTHERS = ("adamw", "amsgrad", "adafactor", "rmsprop", "lion", "adadelta", "novograd",
                "adan", "sgd", "sm3", "masked", "inject_hyperparams", "chain")  # fmt: skip


@pytest.mark.parametrize("name", [
  pytest.param(name, marks=[pytest.mark.slow] * (name in _LIKE_OTHERS)) for name in TRANSFORMATIONS
])  # fmt: skip
def test_every_moment_of_a_large_parameter_is_stored_and_nothing_else(rng, name):
  """COAT's bytes exactly; Optax's first update, and moments within their error after three, in a
  format that compiles in half the time."""
  transformation, moments = TRANSFORMATIONS[name]
  params, *gradients = (_tree(rng) for _ in range(4))
  tx = fp8jax.quantized_state(transformation, "tensor_e4m3_e5m2")
  updates, states = _run(tx, params, gradients)
  wanted, exact = _run(transformation, params, gradients)
  close = functools.partial(np.testing.assert_allclose, rtol=tolerances.FLOAT32_SUM, atol=1e-7)
  jax.tree.map(lambda a, b: close(a[0], b[0]), updates, wanted)
  state = jax.tree.map(lambda x: np.asarray(x)[-1], states)
  count = ELEMENTS[name] if moments is None else moments * LARGE
  in_coat = jax.eval_shape(fp8jax.quantized_state(transformation).init, params)
  for kept in (state, in_coat):
    assert sum(x.data.size for x in _quantized(kept)) == count
  # A code, and for each 128 the float32 amax and the uint8 power of the expansion.
  assert sum(x.nbytes for x in _quantized(in_coat)) == count + 5 * (count // 128)
  exact = [np.asarray(x)[-1] for x in jax.tree.leaves(exact)]
  leaves = jax.tree.leaves(state.inner_state, is_leaf=lambda x: isinstance(x, QuantizedTensor))
  for got, want in zip(leaves, exact, strict=True):
    if isinstance(got, QuantizedTensor):
      assert got.shape == want.shape
      wide = _unpacked(got)
      assert np.linalg.norm(wide - want) < 2.0**-3 * np.linalg.norm(want)
      assert np.any(wide != want)
    else:
      assert got.dtype == want.dtype and got.shape == want.shape


def test_stochastic_rounding_is_right_in_the_mean(rng):
  """A momentum of 400 copies, between two codes of E4M3, every step with other bits."""
  value = np.full((64, 64), 1.03, np.float32)
  value[0, 0] = 448
  tx = fp8jax.quantized_state(optax.trace(0.5), Moments(Quant(E4M3)), stochastic=True)
  both = {"w": value, "same": value}
  _, states = _run(tx, both, [both, jax.tree.map(lambda x: x / 2, both)])
  trace = jax.device_get(states.inner_state.trace)
  codes = [trace[k].data[0].astype(np.float32) for k in both]
  assert 0.2 < np.mean(codes[0] != codes[1]) < 0.5  # 2 * .24 * .76 of independent draws
  first, second = (
    np.asarray(_unpacked(jax.tree.map(lambda a, i=i: a[i], trace["w"])))[1:] for i in (0, 1)
  )
  assert set(np.unique(first)) == {1.0, 1.125}
  assert abs(np.mean(first) - 1.03) < 4 * 0.0535 / 63  # standard error 0.125 sqrt(.24 .76) / 63.5
  assert abs(np.mean((first > 1) == (second > 1.01)) - 0.5) < 0.4
  other = _run(
    fp8jax.quantized_state(optax.trace(0.5), Moments(Quant(E4M3)), stochastic=True, seed=1),
    {"w": value}, [{"w": value}],
  )[1].inner_state.trace["w"]  # fmt: skip
  assert np.any(np.asarray(_unpacked(other))[0] != codes[0])


@pytest.mark.parametrize("moment_format", ["float32", "coat"])
def test_moments_of_16_bit_parameters_are_float32(moment_format):
  """In BF16 the second moment would stay at 0.196; a square of float16 would be 0."""
  tx, b2 = fp8jax.scale_by_adam(moment_format=moment_format), 0.999
  params = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(64, jnp.bfloat16)}

  def step(state, g):
    updates, state = tx.update(jax.tree.map(lambda p: jnp.full_like(p, g), params), state)
    return state, updates["b"][0]

  g = jnp.where(jnp.arange(1700) < 200, 1.0, 0.01)
  state, updates = jax.jit(lambda s: jax.lax.scan(step, s, g))(tx.init(params))
  nu = state.nu["b"]
  small = float(jnp.bfloat16(0.01)) ** 2
  want = b2**1500 * (1 - b2**200) + (1 - b2**1500) * small
  assert nu.dtype == jnp.float32 and updates.dtype == jnp.bfloat16
  np.testing.assert_allclose(nu, want, rtol=1e-4)
  half = {"b": jnp.ones(4, jnp.float16)}
  updates, _ = tx.update(jax.tree.map(lambda p: 1e-4 * p, half), tx.init(half))
  np.testing.assert_allclose(updates["b"], 1, rtol=2e-3)  # eps is 1e-8 of 1e-4


@pytest.mark.parametrize("moment_format", ["e4m3_256", "sqrt_v", "tensor_e4m3_e5m2"])
def test_a_second_moment_that_overflows_moves_its_parameter_less_and_no_other_one_more(
  moment_format,
):
  """Of a gradient of 1e20 the square is infinite, and the first moment 1e19."""
  tx = fp8jax.scale_by_adam(moment_format=moment_format)
  g = jnp.full((64, 256), 0.01)
  state, update = tx.init({"w": g}), jax.jit(tx.update)
  for big in (0.01, 0.01, 1e20):
    _, state = update({"w": g.at[3, 7].set(big)}, state)
  updates, _ = update({"w": g}, state)
  assert np.abs(updates["w"]).max() <= 1


def test_wrappers_belong_around_it(rng):
  """MultiSteps of two equal gradients is the step of one; a NaN leaves the codes as they are."""
  tx = fp8jax.quantized_state(optax.adam(1e-2), "tensor_e4m3_e5m2")
  params, *gradients = ({k: _tree(rng)[k] for k in ("w", "bias")} for _ in range(3))
  updates, states = _run(tx, params, gradients)
  twice = _run(optax.MultiSteps(tx, 2), params, [g for g in gradients for _ in range(2)])
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1::2], b), twice[0], updates)
  nan = jax.tree.map(lambda g: g * np.nan, gradients[0])
  finite = _run(optax.apply_if_finite(tx, 3), params, [gradients[0], nan, gradients[1]])
  both = zip(_quantized(finite[1].inner_state), _quantized(states), strict=True)
  for got, want in both:
    np.testing.assert_array_equal(np.asarray(got.data), np.asarray(want.data)[[0, 0, 1]])


@pytest.mark.parametrize(
  "make,words",
  [
    (lambda: contrib.schedule_free_adamw(1e-3), r'ScheduleFreeState.z .*fields={"z": ...}, None'),
    (lambda: optax.rmsprop(1e-3, centered=True), r"ScaleByRStdDev\w*State.mu has an array"),
    (lambda: optax.flatten(optax.adam(1e-3)), "ScaleByAdamState.mu is a vector of .* of all para"),
    (lambda: optax.adagrad(1e-3), "ScaleByRssState.sum_of_squares has an array"),
    (lambda: optax.MultiSteps(optax.adam(1e-3), 2), "optax.MultiSteps.quantized_state.tx., 2."),
    (lambda: optax.apply_if_finite(optax.adam(1e-3), 2), "leaves the state inside as it is"),
    (
      lambda: optax.conditionally_mask(optax.adam(1e-3), lambda step: step < 1),
      "leaves the state inside as it is",
    ),
    (
      lambda: optax.GradientTransformation(lambda p: {"m": p}, lambda g, s, p=None: (g, s)),
      "the state has an array of a parameter's shape",
    ),
  ],
)
def test_a_state_of_which_nothing_is_known_is_refused(rng, make, words):
  tx = fp8jax.quantized_state(make())
  with pytest.raises(ValueError, match=words):
    jax.eval_shape(tx.init, _tree(rng))
  few = {"few": np.ones((3, 5), np.float32)}
  jax.eval_shape(tx.init, few) if "State." in words else None


def test_fields_say_what_a_state_is(rng):
  tx = fp8jax.quantized_state(contrib.schedule_free_adamw(1e-3), fields={"z": None})
  params, *gradients = ({k: _tree(rng)[k] for k in ("w", "bias")} for _ in range(3))
  state = jax.tree.map(lambda x: np.asarray(x)[-1], _run(tx, params, gradients)[1])
  assert state.inner_state.z["w"].dtype == np.float32
  # Adam without a first moment.
  assert sum(x.data.size for x in _quantized(state)) == 32 * 256
  tx = fp8jax.quantized_state(optax.adagrad(1e-3), fields={"sum_of_squares": "nu"})
  start = jax.jit(tx.init)(params).inner_state[0].sum_of_squares["w"]
  np.testing.assert_allclose(_unpacked(start), 0.1, rtol=2**-3)  # not of zeros
  tx = fp8jax.quantized_state(optax.adam(1e-3), fields={"nu": None})
  adam = jax.eval_shape(tx.init, params).inner_state[0]
  assert adam.nu["w"].dtype == np.float32 and adam.mu["w"].data.dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
  "how,words",
  [
    (dict(format="coats"), "did you mean 'coat'"),
    (dict(format="bf16"), "nu=.*learning stop.*decays={'mu': 0.9, 'nu': 0.95}"),
    (dict(format="fp8lm"), "mu=.*learning stop"),
    (dict(fields={"mu": "first"}), "fields\\['mu'\\]='first' must be"),
    (dict(decays={"b1": 0.9}), "has \\['b1'\\]"),
  ],
)
def test_what_would_not_train_is_refused(how, words):
  with pytest.raises(ValueError, match=words):
    fp8jax.quantized_state(optax.adam(1e-3), **how)


def test_what_would_not_train_does_stochastically_or_with_known_decays():
  for how in (
    dict(format="fp8lm", stochastic=True), dict(format="bf16", stochastic=True),
    *(dict(format=name, decays={"mu": 0.9, "nu": 0.95}) for name in ("fp8lm", "bf16")),
  ):  # fmt: skip
    tx = fp8jax.quantized_state(optax.adam(1e-3), **how)
    state = jax.eval_shape(tx.init, {"w": np.ones((64, 64), np.float32)})
    want = Rounding.STOCHASTIC if "stochastic" in how else Rounding.NEAREST
    assert {x.quant.rounding for x in _quantized(state)} == {want}


def test_a_tree_of_a_mask_also_fits_where_some_parameters_have_no_moment():
  shapes = {"w": (64, 64), "b": (64, 64), "bias": (64,)}
  params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
  mask = quantized_moments.StorageMask(quantized={"w": True, "b": False, "bias": False})
  tx = fp8jax.quantized_state(contrib.muon(1e-3), "e4m3_256", stochastic=True, mask=mask)
  (only,) = _quantized(jax.eval_shape(tx.init, params))
  assert only.data.shape == (64, 64)


def test_state_lies_like_its_parameters_and_comes_back_from_a_checkpoint(rng, tmp_path):
  """Rows over one axis of a mesh, columns over the other; three steps are those of one device."""
  mesh = Mesh(np.reshape(jax.devices()[:8], (4, 2)), ("data", "model"))
  spec = {"w": ("data", "model"), "stack": {"heads": (None, "data")}, "bias": ("model",), "few": ()}
  params, *gradients = (_tree(rng) for _ in range(4))
  places = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(*s)), spec,
                        is_leaf=lambda s: isinstance(s, tuple))  # fmt: skip
  tx = fp8jax.quantized_state(optax.adamw(1e-3))
  split = jax.device_put(params, places)
  outs = quantized_moments.shardings(jax.eval_shape(tx.init, params), split)
  state = jax.jit(tx.init, out_shardings=outs)(split)
  mu = state.inner_state[0].mu
  assert mu["w"].data.addressable_shards[0].data.shape == (8, 128)
  assert mu["w"].scale.addressable_shards[0].data.shape == (8, 1)
  assert mu["stack"]["heads"].data.addressable_shards[0].data.shape == (5, 1, 2, 128)
  assert state.count.sharding.is_fully_replicated
  wanted, states = _run(tx, params, gradients)
  step = jax.jit(tx.update, out_shardings=(places, outs))
  for i, g in enumerate(gradients):
    if i == 2:
      with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        shapes = jax.tree.map(
          lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        saver.wait_until_finished()
        back = saver.restore(tmp_path / "state", shapes)
      jax.tree.map(np.testing.assert_array_equal, back, state)
      state = back
    updates, state = step(jax.device_put(g, places), state, split)
    jax.tree.map(
      lambda a, b, i=i: np.testing.assert_allclose(a, b[i], rtol=1e-5, atol=1e-9), updates, wanted
    )
  got, want = _quantized(state), _quantized(jax.tree.map(lambda x: np.asarray(x)[-1], states))
  for a, b in zip(got, want, strict=True):
    assert np.mean(np.asarray(a.data) != np.asarray(b.data)) < 1e-3


# --- by name -------------------------------------------------------------------------------------

_B = dict(b1=0.8, b2=0.95, eps=1e-6)
BY_NAME = {
  "adam": lambda: optax.adamw(0.01, **_B, weight_decay=0.1),
  "lion": lambda: optax.lion(0.01, 0.8, 0.95, weight_decay=0.1),
  "adabelief": lambda: _decayed(optax.adabelief(1.0, **_B)),
  "adamax": lambda: optax.adamaxw(0.01, **_B, weight_decay=0.1),
  "nadam": lambda: optax.nadamw(0.01, **_B, weight_decay=0.1),
  "radam": lambda: _decayed(optax.radam(1.0, **_B)),
  # Adam without a first moment, also where gradients are as small as the root of eps.
  "rmsprop": lambda: _decayed(optax.adam(1.0, 0.0, 0.95, 1e-6)),
  # A trace of 0.2 g.
  "sgd": lambda: _decayed(optax.chain(optax.scale(-0.2), optax.trace(0.8))),
}
_UNREAD = {"rmsprop": ("b1",), "madam": ("b1",), "sgd": ("b2", "eps"), "lion": ("eps",)}


def _decayed(transformation):
  """With the weight decay of 0.1 and the rate of 0.01 that the others have."""
  decay = (optax.scale(-1), optax.add_decayed_weights(0.1), optax.scale(-0.01))
  return optax.chain(transformation, *decay)


def _by_name_as_leaf(name, format):
  """(its OptimizerConfig, its transformation of a matrix)."""
  read = {k: v for k, v in _B.items() if k not in _UNREAD.get(name, ())}
  optim = optimizers.OptimizerConfig(
    name, format, weight_decay=0.1, warmup_steps=0, steps=99, **read
  )
  assert not optim.problems()
  return optim, optimizers.leaves(optim, {"w": Param("DF", inputs=1)})["w"].transformation


@pytest.mark.parametrize("name", BY_NAME)
def test_an_optimizer_by_name_is_the_one_of_optax(rng, name):
  """In float32. Its state has the bytes that it declares, in COAT's format too."""
  w, *gradients = (rng.standard_normal((32, 256)).astype(np.float32) for _ in range(8))
  gradients = [g * np.float32(10.0) ** -i for i, g in enumerate(gradients)]
  wanted, _ = _run(BY_NAME[name](), w, gradients)
  updates, _ = _run(_by_name_as_leaf(name, "float32")[1], w, gradients)
  np.testing.assert_allclose(-0.01 * updates, wanted, rtol=1e-5, atol=1e-8)
  for format in ("float32", "coat"):
    optim, tx = _by_name_as_leaf(name, format)
    state = jax.jit(tx.init).eval_shape(w)
    moments = [x for x in jax.tree.leaves(state) if x.ndim]
    nbytes = sum(x.size * x.dtype.itemsize for x in moments)
    assert nbytes == int(optim.bytes_per_parameter()["moments"] * w.size)


# Slow: the first update on every device is below, in the default run for every fourth one; that of
# any transformation that stores its moments is test_every_moment_of_a_large_parameter_....
@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "lion")) for n in BY_NAME]
)
def test_an_optimizer_by_name_keeps_its_first_update_in_coat(rng, name):
  w, g = (rng.standard_normal((32, 256)).astype(np.float32) for _ in range(2))
  (wanted,), _ = _run(BY_NAME[name](), w, [g])
  (updates,), _ = _run(_by_name_as_leaf(name, "coat")[1], w, [g])
  np.testing.assert_allclose(-0.01 * updates, wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_a_hyperparameter_that_an_optimizer_does_not_read_is_refused(name):
  values, unread = dict(b1=0.8, b2=0.9, eps=1e-6), _UNREAD.get(name, ())
  optim = optimizers.OptimizerConfig(name, warmup_steps=0, steps=99, **values)
  read = ", ".join(k for k in values if k not in unread)
  assert [text.split("; ")[0] for text in optim.problems()] == [
    f"optim.{key}={values[key]} is not read by {name!r}, which reads {read}" for key in unread
  ]


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=[pytest.mark.slow] * (i % 4 > 0)) for i, n in enumerate(BY_NAME)]
)
def test_an_optimizer_by_name_moves_its_part_on_every_device(rng, name):
  """Moments and master lie like the parameter; updates are those of Optax and of one device."""
  optim = optimizers.OptimizerConfig(name, "coat", "bf16_remainder", weight_decay=0.1, **_B)
  leaf = optimizers.leaves(optim, {"w": Param("DF", inputs=1)})["w"]
  mesh = Mesh(np.reshape(jax.devices()[:8], (2, 4)), ("tensor", "fsdp"))
  place = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
  w, *gradients = (rng.standard_normal((32, 256)).astype(np.float32) for _ in range(3))
  places = jax.tree.map(
    lambda x: x.sharding,
    update.abstract(leaf, jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=place)),
  )

  def run(put, places=None):
    start = jax.jit(functools.partial(update.init, leaf), out_shardings=places)
    move = lambda *of: update.update_param(leaf, *of, update.UpdateArgs(1, 0.01, 1.0))[:2]  # noqa: E731
    move, kept = jax.jit(move, out_shardings=places), [start(put(w))]
    for g in gradients:
      kept.append(move(put(g), *kept[-1]))
    return kept

  split, alone = run(lambda x: jax.device_put(x, place), places), run(jnp.asarray)
  state, master = split[-1]
  moments = _quantized(state)
  assert len(moments) == len(optimizers.OPTIMIZERS[name].decays)
  for x in [*jax.tree.leaves(master), *(m.data for m in moments)]:
    assert x.addressable_shards[0].data.shape == (8, 128)
  assert all(m.scale.addressable_shards[0].data.shape == (8, 1) for m in moments)
  (wanted,), _ = _run(BY_NAME[name](), w, gradients[:1])
  np.testing.assert_allclose(split[1][1].unpack() - w, wanted, rtol=1e-5, atol=1e-6)
  changed = np.asarray(split[2][1].unpack()) - np.asarray(split[1][1].unpack())
  again = np.asarray(alone[2][1].unpack()) - np.asarray(alone[1][1].unpack())
  np.testing.assert_allclose(changed, again, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("slow", ["b1", "b2"])
def test_a_moment_that_decays_too_slowly_for_bf16_is_refused_by_its_own_key(name, slow):
  """A grid of 8 bits holds a moment that falls by less than 2^-8 where it is."""
  keys = {"lion": {"mu": "b2"}, "sgd": {"mu": "b1"}, "rmsprop": {"nu": "b2"}}
  keys = keys.get(name, {"mu": "b1", "nu": "b2"})
  optim = optimizers.OptimizerConfig(name, "bf16", steps=99, **{"b1": 0.5, "b2": 0.5, slow: 0.999})
  refused = [moment for moment, key in keys.items() if key == slow]
  texts = [text for text in optim.problems() if "is not read" not in text]
  assert len(texts) == len(refused)
  assert all(f"{m}=" in text and "decay of 0.999" in text for m, text in zip(refused, texts))


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_an_optimizer_by_name_trains_in_the_step(name):
  changes = {
    "optim.optimizer": name,
    "optim.moment_format": "coat",
    "optim.master_format": "bf16_sr",
  }
  spec = harness.tiny_spec(harness.tiny_config("block_128", **changes))
  losses, _ = harness.Runner(spec).run(harness.host_batches()[:8])
  assert losses[-1] < losses[0]


@pytest.mark.parametrize(
  ("saved", "wanted"), [("sqrt_v", "coat"), ("fp8lm", "tensor_e4m3_f16"), ("bf16_sr", "e4m3_256")]
)
def test_moments_are_not_restored_as_those_of_another_format(tmp_path, saved, wanted):
  """Of sqrt_v's and coat's arrays all shapes and dtypes of one moment are equal."""
  params = {"w": jnp.ones((64, 256))}
  old, new = (fp8jax.scale_by_adam(moment_format=name) for name in (saved, wanted))
  _, state = old.update({"w": jnp.full((64, 256), 1e-3)}, old.init(params))
  with ocp.StandardCheckpointer() as saver:
    saver.save(tmp_path / "state", state)
    saver.wait_until_finished()
    back = saver.restore(tmp_path / "state", old.init(params))
    jax.tree.map(np.testing.assert_array_equal, back, state)
    with pytest.raises(ValueError, match="data_"):
      saver.restore(tmp_path / "state", new.init(params))


def test_a_parameter_may_be_called_as_a_field_of_the_state(rng):
  """Its moments are those of any other one's, and the count is the optimizer's."""
  w, g = (rng.standard_normal((64, 128)).astype(np.float32) for _ in range(2))
  tx = fp8jax.scale_by_adam(moment_format="coat")

  def twice(name):
    params = {"layer": {name: w, "b": w[0]}}
    state = tx.init(params)
    for _ in range(2):
      made, state = tx.update({"layer": {name: g, "b": g[0]}}, state, params)
    assert state.count == 2
    return made["layer"][name]

  want = twice("w")
  for name in ("count", "mu", "nu", "inner_state"):
    np.testing.assert_array_equal(twice(name), want)


def test_a_vector_of_all_parameters_is_refused():
  """None of its moments would be quantized."""
  vector = jnp.ones(4096)
  for tx in (fp8jax.scale_by_adam(moment_format="coat"), fp8jax.quantized_state(optax.adam(1e-3))):
    with pytest.raises(ValueError, match="mu is a vector of 4096 elements, of all"):
      optax.flatten(tx).init({"w": jnp.ones((32, 128))})
    jax.eval_shape(tx.init, {"norm": vector})
    jax.eval_shape(tx.init, vector[1:])
  mask = quantized_moments.StorageMask(quantized=True)
  state = fp8jax.scale_by_adam(moment_format="coat", mask=mask).init(vector)
  assert state.mu.data.dtype == jnp.float8_e4m3fn
