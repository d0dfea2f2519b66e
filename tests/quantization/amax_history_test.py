"""Amax histories against NumPy loops, alone and over the steps of a model."""

import dataclasses
import types

import harness
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax.ops import site as site_lib
from fp8jax.quantization import amax_history
from fp8jax.recipe.gemm import Gemm, Recipe
from fp8jax.recipe.library import E4M3
from fp8jax.recipe.quant import Delayed, Quant, Static
from fp8jax.step import train_step


def test_delayed_scales_move_and_follow_what_was_seen():
  """The latest amax moves with every batch, a maximum where it is exceeded: at first, here.

  The amaxes of x and g: integrations/flax_test.py.
  """
  rules = (("layers/.*/mlp/down", "tensor_delayed_latest"), ("layers/.*/attn/o", "tensor_delayed"))
  spec = harness.text_spec(**{"precision.rules": (*rules, (".*", "bf16"))})
  step, sites = train_step.make_step(spec), spec.sites()
  recipes = {name: s.recipe for name, s in site_lib.flatten(sites).items()}
  length = {name: r.history for name, r in recipes.items() if r.is_stateful}
  assert sorted(length.values()) == [1, 1024]
  state, hosts = harness.calibrated_batches(spec, 4)
  state = dataclasses.replace(
    state, scaling_states=jax.tree.map(lambda x: x / 2, state.scaling_states)
  )
  first = jax.device_get(state.scaling_states)
  past = {name: [scaling_state.amax_3] for name, scaling_state in first.items()}
  for host in hosts:
    weights = {k: np.abs(np.asarray(w)) for k, w in params_lib.flatten(state.params).items()}
    state, _ = step(state, host, sites)
    for name, scaling_state in jax.device_get(state.scaling_states).items():
      past[name].insert(0, np.array(scaling_state.history_3H[..., 0]))
      of_w = weights[name].reshape(len(past[name][0]), -1).max(-1)
      np.testing.assert_array_equal(past[name][0][:, 1], of_w)
      window = np.stack(past[name][: length[name]], axis=-1)
      known = window.shape[-1]
      np.testing.assert_array_equal(scaling_state.history_3H[..., :known], window)
      assert not scaling_state.history_3H[..., known:].any()
      np.testing.assert_array_equal(scaling_state.amax_3, window.max(-1))
  for name, scaling_state in jax.device_get(state.scaling_states).items():
    assert (scaling_state.amax_3 != first[name].amax_3).all(), name


def test_history_follows_transformer_engine():
  """Roll, insert, reduce; 0 and what is not finite keep the scale. Against a loop in NumPy."""
  tensor = Quant(E4M3, source=Delayed(steps=3))
  latest = Quant(E4M3, source=Delayed(steps=1, reduce="latest"))
  fixed = Quant(E4M3, source=Static())
  recipe = Recipe("mixed", Gemm(tensor, latest), Gemm(fixed, latest), Gemm(tensor, fixed))
  seen = [(4, 1, 9), (2, 0, 9), (1, 3, 9), (np.inf, np.nan, 9), (1, 0, 9), (0.5, 2, 9), (0, 0, 9)]
  scaling_state = amax_history.calibrated(recipe, np.float32([3, 2, 5]))
  past = [3.0]
  want = np.array([3.0, 2.0, 5.0])
  update = jax.jit(lambda m, s: amax_history.update(m, s, recipe))
  for amaxes in seen:
    scaling_state = update(scaling_state, np.float32(amaxes))
    past = [amaxes[0] if np.isfinite(amaxes[0]) else 0.0, *past][:3]
    want[0] = max(past) or want[0]
    want[1] = amaxes[1] if np.isfinite(amaxes[1]) and amaxes[1] else want[1]
    np.testing.assert_array_equal(scaling_state.amax_3, want.astype(np.float32))
  assert scaling_state.history_3H.shape == (3, 3)


def test_zeros_are_no_amax_and_a_static_scale_takes_the_first_above_them():
  fixed, tensor = Quant(E4M3, source=Static()), Quant(E4M3, source=Delayed(steps=2))
  for recipe in (
    Recipe("static", Gemm(fixed, fixed), Gemm(fixed, fixed), Gemm(fixed, fixed)),
    Recipe("mixed", Gemm(fixed, fixed), Gemm(tensor, fixed), Gemm(fixed, tensor)),
  ):
    state = amax_history.calibrated(recipe, np.float32([3, 0, 0]))
    for seen, want in (((9, np.nan, 0), [3, 0, 0]), ((9, 2, np.inf), [3, 2, 0]),
                       ((0, 7, 5), [3, 2, 5])):  # fmt: skip
      state = amax_history.update(state, np.float32(seen), recipe)
      assert state.amax_3.tolist() == want
  nan, one = np.nan, recipe
  for own, other, want in (
    ([3, 0, nan], [5, 6, 7], [3, 6, 7]), ([3, 0, 0], [0, 0, nan], [3, 0, 0]),
    ([nan, nan, 4], [0, nan, np.inf], [0, nan, 4]),
  ):  # fmt: skip
    states = (amax_history.calibrated(one, np.float32(x)) for x in (own, other))
    np.testing.assert_array_equal(amax_history.filled(*states).amax_3, np.float32(want))


def test_windows_of_delayed_scales_have_their_own_lengths():
  windows = {"x": 2, "w": 4, "g": 1}
  uses = {t: [types.SimpleNamespace(source=Delayed(steps=n))] for t, n in windows.items()}
  recipe = types.SimpleNamespace(uses=lambda: uses, history=4)
  scaling_state = amax_history.ScalingState(jnp.zeros(3), jnp.zeros((3, 4)))
  for seen in (8.0, 4.0, 2.0):
    scaling_state = amax_history.update(scaling_state, jnp.full(3, seen), recipe)
  assert scaling_state.amax_3.tolist() == [4.0, 8.0, 2.0]
