"""Unit scaling (arXiv:2303.11257): factors of the operations beside linear layers, in float64."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.errors import ConfigError
from fp8jax.models import mixer, presets, unit_scaling
from fp8jax.models.config import ComputeConfig
from fp8jax.ops import prologue
from fp8jax.ops import site as site_lib
from fp8jax.ops.cross_entropy import cross_entropy

TAU = 0.36
ALL = {"model.residual_tau": TAU, "model.unit_scaling": "all", "model.tie_embeddings": False}
CFG = dataclasses.replace(
  presets.DEBUG, tie_embeddings=False, residual_tau=TAU, unit_scaling="all", vocab_size=1024
)


def _rms(x):
  return np.sqrt(np.mean(np.square(np.float64(x))))


def test_each_factor_gives_what_it_multiplies_deviation_1(rng):
  """Samples of the operations, in NumPy: not the formulas that the factors come from."""
  u, g = rng.standard_normal((2, 2**20))
  assert _rms(unit_scaling._SWIGLU * u * g / (1 + np.exp(-g))) == pytest.approx(1, rel=5e-3)
  length, rows = 256, 64
  p = np.exp(rng.standard_normal((rows, length, length))) * np.tri(length)
  mixed = (p / p.sum(-1, keepdims=True)) @ rng.standard_normal((rows, length, 4))
  # The variance is that of many positions; the first ones have less.
  assert _rms(unit_scaling.attention_gain(length) * mixed) == pytest.approx(0.91, abs=0.02)
  assert _rms(mixed) < 0.3
  # Of uniform probabilities: 1/V - 1 once, 1/V otherwise.
  at_start = np.full(1024, 1 / 1024) - np.eye(1024)[0]
  assert unit_scaling.loss_gain(CFG) * _rms(at_start) == pytest.approx(1, rel=1e-9)
  # Sums of 512 independent gradients per gain; an embedding's rows have tokens / V each.
  x, terms = np.ones((4, 128, 8)), rng.standard_normal((512, 8, 2000))
  scaled = jax.grad(lambda w: unit_scaling.parameter(w, x.size, CFG).sum())(np.ones(8, np.float32))
  assert _rms(np.asarray(scaled)[:, None] * terms.sum(0)) == pytest.approx(1, rel=0.02)


def test_a_branch_has_its_factor_at_both_ends_and_the_stream_keeps_its_own(rng):
  x, f, g = rng.standard_normal((3, 2, 4, CFG.hidden_size)).astype(np.float32)
  p, run = {"norm": jnp.ones(CFG.hidden_size)}, ComputeConfig()
  y, pull = jax.vjp(lambda x, f: mixer.block_output(x, f, p, {}, CFG, run), x, f)
  dx, df = pull(g)
  np.testing.assert_allclose(y, 0.8 * x + 0.6 * f, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(dx, 0.8 * g, rtol=1e-6)
  np.testing.assert_array_equal(df, g)

  def split(x, cfg):
    return prologue.value(mixer.block_input(x, p, {}, cfg, run))

  plain = dataclasses.replace(CFG, residual_tau=0.0, unit_scaling="none")
  h, pull = jax.vjp(lambda x: split(x, CFG), x)
  want, plain_pull = jax.vjp(lambda x: split(x, plain), x)
  np.testing.assert_array_equal(h, want)
  np.testing.assert_allclose(pull(g)[0], 0.6 * plain_pull(g)[0], rtol=1e-6, atol=1e-7)


def test_the_loss_stays_and_its_gradients_have_the_gain(rng):
  """Of a step's mean the gradient is that of each token: of deviation 1 in float16, too."""
  h, head = rng.standard_normal((2, 3, 8)), rng.standard_normal((8, 16))
  arrays = (np.float32(h), np.float32(head))
  targets, weights = rng.integers(0, 16, (2, 3)), np.ones((2, 3), np.float32)

  def loss(h, head, gain):
    site = site_lib.single("bf16")
    args = ("BLD,DV->BLV", np.int32(targets), weights, site, 2)
    return cross_entropy(h, head, *args, gradient_gain=gain)

  value = jax.value_and_grad(loss, argnums=(0, 1))
  (plain, of_plain), (with_gain, of_gain) = value(*arrays, 1.0), value(*arrays, 4.0)
  assert plain == with_gain
  for a, b in zip(of_plain, of_gain, strict=True):
    np.testing.assert_array_equal(4 * np.asarray(a), b)
  mean = jax.grad(lambda x: unit_scaling.loss(x, weights, CFG) / weights.sum())(1.0)
  assert mean == pytest.approx(1, rel=1e-6)


def test_what_has_no_factor_is_refused_and_float16_needs_no_loss_scale_with_them():
  rules = (("head", "unit_head"), ("layers/.*", "unit_scaling_wide"))
  half = {"precision.compute_dtype": "float16"}
  harness.tiny_spec(harness.tiny_config("bf16", **ALL, **half, **{"precision.rules": rules}))
  for changes, word in (
    (half, "the recipe of .* has no gain; set precision.rules"),
    (
      half | {"precision.rules": (rules[0], ("layers/.*/mlp/.*", rules[1][1]), (".*", "bf16"))},
      "the recipe of layers/.*/attn/. has no gain",
    ),
    ({"model.tie_embeddings": True}, "with tie_embeddings"),
    ({"model.residual_tau": 0.0}, "with model.residual_tau=0"),
    ({"precision.smooth_swiglu": "token"}, "precision.smooth_swiglu='token' with model.unit_scal"),
    ({"grad_accum_steps": 2}, "model.unit_scaling='all' with grad_accum_steps=2"),
  ):
    with pytest.raises(ConfigError, match=word):
      harness.tiny_spec(harness.tiny_config("bf16", **{**ALL, **changes}))
