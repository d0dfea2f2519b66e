"""Multiplicative updates on logarithmic masters against float64 arithmetic (arXiv:2106.13914)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8jax.optim import optimizers, storage, update
from fp8jax.params import Param

_EPS = 1e-8


def _leaf(**how):
  optim = optimizers.OptimizerConfig(steps=99, warmup_steps=0, decay_steps=0, **how)
  assert optim.problems() == []
  return optimizers.leaves(optim, {"w": Param("DF", inputs=1)})["w"]


def test_madam_multiplies_by_the_gradient_over_its_root_mean_square(rng):
  leaf = _leaf(optimizer="madam", b2=0.9, weight_decay=0.1)
  w = rng.standard_normal((8, 16)).astype(np.float32)
  w[0, :4] = 0.0
  state, master = update.init(leaf, jnp.asarray(w))
  want, mean = w.astype(np.float64), 0.0
  for step in range(4):
    g = rng.standard_normal(w.shape).astype(np.float32)
    g[3] *= 1e4 if step == 3 else 1  # beyond the bound of 10 on a step
    move = jax.jit(lambda *of: update.update_param(leaf, *of, update.UpdateArgs(1, 0.01, 1.0))[:2])
    state, master = move(jnp.asarray(g), state, master)
    mean = 0.9 * mean + 0.1 * g.astype(np.float64) ** 2
    scaled = np.clip(g / (np.sqrt(mean / (1 - 0.9 ** (step + 1))) + _EPS), -10, 10)
    want = want * np.exp(-0.01 * (np.sign(want) * scaled + 0.1))
  np.testing.assert_allclose(master, want, rtol=2e-6)
  assert not np.any(np.asarray(master)[0, :4])


def test_madams_moment_is_stored_in_8_bits(rng):
  """Its transformation is a chain, whose count lies deeper."""
  leaf, wide = (_leaf(optimizer="madam", moment_format=f) for f in ("coat", "float32"))
  w = jnp.asarray(rng.standard_normal((64, 128)), jnp.float32)
  moved = {}
  for name, of in (("coat", leaf), ("float32", wide)):
    state, master = update.init(of, w)
    for seed in range(3):
      g = jnp.asarray(np.random.default_rng(seed).standard_normal(w.shape), jnp.float32)
      state, master = update.update_param(of, g, state, master, update.UpdateArgs(1, 0.01, 1.0))[:2]
    moved[name] = master
    kept = {x.dtype.itemsize for x in jax.tree.leaves(state) if x.size >= w.size}
    assert kept == ({1} if name == "coat" else {4})
  steps = {name: np.log(np.abs(m / w)) for name, m in moved.items()}
  np.testing.assert_allclose(steps["coat"], steps["float32"], atol=0.01 * 3 * 2**-4)
  assert not np.array_equal(steps["coat"], steps["float32"])


@pytest.mark.parametrize("bits", [16, 12, 10])
def test_the_error_of_a_multiplicative_update_does_not_depend_on_the_weight(bits):
  """A step of one number moves every magnitude by one number exactly; an additive step that is a
  whole number for small weights is lost for large ones (theorem 1 of the paper, both sides)."""
  gamma = 2 ** (bits - 5)
  format = storage.MASTERS[f"lns{bits}"]
  w = np.float32(2.0 ** -np.arange(0, 12, 0.25))[:, None] * np.float32([1, -1])
  for apply in (optimizers.OPTIMIZERS["madam"].apply, None):
    leaf = optimizers.ParamOptimizer(
      "w", optax.with_extra_args_support(optax.identity()), format, None, 0, 7, apply=apply
    )
    state, master = update.init(leaf, jnp.asarray(w))
    before = np.asarray(master.unpack(), np.float64)
    # Multiplicative: the update is the sign, so that all grow by 2^(1/gamma). Additive: the step of
    # the smallest weight.
    step = np.log(2) / gamma if apply else np.abs(before).min() * (2 ** (1 / gamma) - 1)
    g, args = -np.sign(w), update.UpdateArgs(1, np.float32(step), 1.0)
    after = np.asarray(update.update_param(leaf, g, state, master, args)[1].unpack(), np.float64)
    moved = np.rint(gamma * np.log2(after / before)).astype(int)
    np.testing.assert_allclose(after / before, 2.0 ** (moved / gamma), rtol=2e-7)
    if apply:
      assert np.all(moved == 1)
    else:
      small, large = np.abs(before) < 1.2 * np.abs(before).min(), np.abs(before) > 0.1
      assert np.all(moved[small] == 1) and np.all(moved[large] == 0)
