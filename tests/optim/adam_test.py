"""Adam and Lion with narrow moments: Optax's numbers without them, known failures with them."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances

import fp8jax.optim
from fp8jax.formats import BF16, E4M3, E5M2
from fp8jax.optim import moments
from fp8jax.quant import packed
from fp8jax.recipe import Quant, Rounding, Scale, SquareRoot

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from experiments.moments import dynamics  # noqa: E402

NARROW = [name for name in moments.PRESETS if name != "float32"]
SHAPES = {"w": (32, 256), "heads": (64, 4, 32), "bias": (256,), "small": (3, 5)}


def _trees(rng, count):
  return [
    {k: rng.standard_normal(s).astype(np.float32) * 10.0 ** rng.integers(-6, 2) for k, s in
     SHAPES.items()} for _ in range(count)
  ]  # fmt: skip


def _run(tx, params, gradients):
  """Updates of every step, and the last state."""
  state, step, updates = tx.init(params), jax.jit(tx.update), []
  for g in gradients:
    update, state = step(g, state, params)
    updates.append(update)
  return updates, state


@pytest.mark.parametrize(
  "ours,theirs",
  [
    (fp8jax.optim.scale_by_adam(), optax.scale_by_adam()),
    (
      fp8jax.optim.scale_by_adam(0.8, 0.95, 1e-3, 1e-2),
      optax.scale_by_adam(0.8, 0.95, 1e-3, 1e-2),
    ),
    (fp8jax.optim.scale_by_lion(), optax.scale_by_lion()),
  ],
  ids=["adam", "adam with eps_root", "lion"],
)
def test_float32_moments_are_optax_to_the_bit(rng, ours, theirs):
  params, *gradients = _trees(rng, 7)
  jax.tree.map(
    np.testing.assert_array_equal, _run(ours, params, gradients), _run(theirs, params, gradients)
  )


# The others differ from these in values that tests of `packed` go through.
_FIRST = ("coat", "sqrt_v", "bf16_sr", "fp8lm")


@pytest.mark.parametrize(
  "name", [n if n in _FIRST else pytest.param(n, marks=pytest.mark.slow) for n in NARROW]
)
def test_kept_narrow_beside_what_is_small(rng, name):
  """Matrices of 4096 numbers take the preset's formats and bytes; the rest equals Optax."""
  kept = moments.PRESETS[name]
  params, *gradients = _trees(rng, 5)
  updates, state = _run(
    fp8jax.optim.scale_by_adam(b2=0.95, mu=kept.mu, nu=kept.nu), params, gradients
  )
  wanted, exact = _run(optax.scale_by_adam(b2=0.95), params, gradients)
  for moment, quant in ((state.mu, kept.mu), (state.nu, kept.nu)):
    for k in ("w", "heads"):
      assert moment[k].data.dtype == quant.format.dtype and moment[k].shape == SHAPES[k]
      assert moment[k].nbytes == pytest.approx(moments.nbytes(quant) * params[k].size, abs=8)
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


def test_keeps_bfloat16_parameters(rng):
  """Large gradients and small ones in bfloat16."""
  kept = moments.PRESETS["coat"]
  params = {"w": jnp.zeros((64, 128), jnp.bfloat16), "norm": jnp.ones((128,), jnp.bfloat16)}
  ours = fp8jax.optim.scale_by_adam(b2=0.95, mu=kept.mu, nu=kept.nu)
  theirs = optax.scale_by_adam(b2=0.95)
  for size in (3.0, 1e-3):
    g = {k: jnp.asarray(size * rng.standard_normal(p.shape), p.dtype) for k, p in params.items()}
    got, state = ours.update(g, ours.init(params), params)
    want, _ = theirs.update(g, theirs.init(params), params)
    assert state.mu["norm"].dtype == jnp.bfloat16 and got["norm"].dtype == jnp.bfloat16
    # The first step divides g by its own magnitude; bfloat16 keeps 8 bits of what is squared.
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.02), got, want
    )


def test_works_inside_a_chain_and_learns(rng):
  """A least-squares problem under optax.chain, jitted, its state donated."""
  x = rng.standard_normal((512, 64)).astype(np.float32)
  truth = rng.standard_normal((64, 128)).astype(np.float32)
  kept = moments.PRESETS["coat"]
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    fp8jax.optim.scale_by_adam(b2=0.95, mu=kept.mu, nu=kept.nu),
    optax.scale(-0.03),
  )

  def loss(w):
    return jnp.mean(jnp.square(x @ w - x @ truth))

  @jax.jit
  def step(w, state):
    update, state = tx.update(jax.grad(loss)(w), state, w)
    return optax.apply_updates(w, update), state

  w = jnp.zeros((64, 128))
  state, before = tx.init(w), loss(w)
  for _ in range(200):
    w, state = step(w, state)
  assert loss(w) < 1e-3 * before


def test_stochastic_rounding_is_a_function_of_seed_step_and_place(rng):
  kept = moments.PRESETS["bf16_sr"]
  params = {"a": np.zeros((64, 64), np.float32), "b": np.zeros((64, 64), np.float32)}
  g = rng.standard_normal((64, 64)).astype(np.float32)
  gradients = [{"a": g, "b": g}] * 2

  def states(seed):
    tx = fp8jax.optim.scale_by_adam(mu=kept.mu, nu=kept.nu, seed=seed)
    return [_run(tx, params, gradients[:n])[1] for n in (1, 2)]

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
    fp8jax.optim.scale_by_adam(b2=b2, nu=nu)


def test_the_same_to_the_nearest_where_it_can_fall():
  fp8jax.optim.scale_by_adam(b2=0.95, nu=Quant(BF16, scale=Scale.NONE))
  fp8jax.optim.scale_by_adam(
    b2=0.999, nu=Quant(E5M2, (1, 128), Scale.POW2, rounding=Rounding.STOCHASTIC)
  )
  with pytest.raises(ValueError, match="8 bits need a scale"):
    Quant(E4M3, scale=Scale.NONE)


def test_dynamics_of_presets_and_of_what_they_avoid():
  """A short run of experiments/moments: the order of the published table holds."""
  names = ["coat", "sqrt_v", "tensor_e4m3_e5m2", "fp8lm"]
  torchao, e5m2, e4m3 = (
    next(row for row in dynamics.OTHERS if words in row)
    for words in ("torchao", "E5M2/128 of powers of two (refused)", "E4M3 of the tensor")
  )
  rows = {name: moments.PRESETS[name] for name in names}
  rows |= {name: dynamics.OTHERS[name] for name in (torchao, e5m2, e4m3)}
  found = dynamics.simulate(rows, 0.95, 800, (32, 256))
  error = {name: [end[0] for end in ends] for name, ends in found.items()}
  for name, most in zip(names, (0.07, 0.11, 0.13, 0.07)):
    for error_, v, largest in found[name]:
      assert error_ < most and 0.85 < v < 1.15 and largest < 1.6, name
  assert error["coat"][0] < error["sqrt_v"][0]
  # A v of 0 under an m that is not: steps a hundred times too long.
  assert found[torchao][0][2] > 10
  # Powers of two to the nearest: v stays where it was while gradients shrink twentyfold.
  assert found[e5m2][1][1] > 20
  assert found[e4m3][1][0] > 5


def test_bfloat16_to_the_nearest_stalls_at_0_999():
  name = "float32 and BF16 to the nearest"
  rows = {name: dynamics.OTHERS[name], "sr": moments.PRESETS["bf16_sr"]}
  found = dynamics.simulate(rows, 0.999, 3000, (8, 128))
  assert found[name][1][1] > 1.5
  assert 0.95 < found["sr"][1][1] < 1.05


def test_lion_keeps_its_momentum_narrow(rng):
  params, *gradients = _trees(rng, 5)
  tx = fp8jax.optim.scale_by_lion(mu=Quant(E4M3, (1, 128)))
  updates, state = _run(tx, params, gradients)
  wanted, exact = _run(optax.scale_by_lion(), params, gradients)
  assert isinstance(state.mu["w"], packed.Packed)
  assert np.mean(np.asarray(updates[-1]["w"]) == wanted[-1]["w"]) > 0.95
  wide = state.mu["w"].unpack()
  assert np.linalg.norm(wide - exact.mu["w"]) < 0.1 * np.linalg.norm(exact.mu["w"])
