"""Unit scaling (arXiv:2303.11257): factors of the operations beside linear layers, in float64."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

from fp8jax import params as params_lib
from fp8jax.errors import ConfigError
from fp8jax.models import mixer, presets, unit_scaling
from fp8jax.models.config import ComputeConfig
from fp8jax.ops import gemm_spec, prologue
from fp8jax.ops import site as site_lib
from fp8jax.ops.cross_entropy import cross_entropy
from fp8jax.step import train_step

TAU = 0.36
ALL = {
  "model.residual_tau": TAU, "model.unit_scaling": "all", "model.tie_embeddings": False,
  "optim.grad_clip_norm": 0.0,
}  # fmt: skip
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
  scale = lambda w: unit_scaling.parameter(w, x.size, CFG, ComputeConfig()).sum()  # noqa: E731
  scaled = jax.grad(scale)(np.ones(8, np.float32))
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
  value, gradient = jax.value_and_grad(lambda x: unit_scaling.mean(x, weights.sum(), CFG))(3.0)
  assert (value, gradient) == pytest.approx((0.5, 1), rel=1e-6)


WIDE = (("head", "unit_head"), ("layers/.*", "unit_scaling_wide"))


def _spec(devices=1, **changes):
  return harness.one_layer_spec(devices=devices, **{
    **ALL, "model.num_heads": 2, "model.num_kv_heads": 2, "model.init_std": 1.0,
    "precision.rules": WIDE, "precision.compute_dtype": "float32", "global_batch": 8, **changes,
  })  # fmt: skip


def test_factors_count_the_tokens_of_all_microbatches():
  """Those of one batch as large; the loss's own is tested in step/train_step_test.py."""
  spec = _spec(grad_accum_steps=2)
  cfg = spec.model
  x, w = jnp.zeros((4, 32, cfg.hidden_size)), jnp.ones((cfg.hidden_size, cfg.intermediate_size))
  up = gemm_spec.make_spec("BLD,DF->BLF", x, w, site_lib.flatten(spec.sites())["layers/mlp/up"])
  assert up.gain("wgrad") == pytest.approx((8 * 32) ** -0.5)
  assert up.gain("fwd") == pytest.approx((cfg.hidden_size * cfg.intermediate_size) ** -0.25)
  scale = lambda w: unit_scaling.parameter(w, x.size, cfg, spec.run).sum()  # noqa: E731
  np.testing.assert_allclose(jax.grad(scale)(w[:, 0]), (8 * 32) ** -0.5, rtol=1e-6)


def _uneven(rng, shape):
  """Documents of different lengths, and fewer tokens that count in later rows."""
  number, starts = np.arange(shape[-1]), rng.random(shape) < 0.1
  weights = rng.random(shape) < np.linspace(0.9, 0.1, shape[0])[:, None]
  tokens, targets = rng.integers(0, 256, (2, *shape), dtype=np.int32)
  first = np.maximum.accumulate(np.where(starts, number, 0), axis=-1)
  return {
    "tokens_BL": tokens, "targets_BL": targets, "weights_BL": weights.astype(np.float32),
    "segments_BL": 1 + np.cumsum(starts, axis=-1, dtype=np.int32),
    "positions_BL": (number - first).astype(np.int32),
  }  # fmt: skip


@pytest.mark.slow  # three steps
def test_microbatches_and_devices_give_the_gradients_of_the_whole_batch(rng):
  whole = _uneven(rng, (8, 32))
  parts = {name: x.reshape(2, 4, 32) for name, x in whole.items()}

  def gradients(batch, **changes):
    spec = _spec(**changes)
    params = train_step.make_state(spec).params
    step = jax.jit(lambda p, b: train_step.gradients(spec, p, spec.sites(), b)[1])
    return params_lib.flatten(jax.device_get(step(params, batch)))

  want, split = gradients(whole), {"grad_accum_steps": 2}
  mesh = {"devices": 8, "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
  for changes in (split, {**split, **mesh}):
    got = gradients(parts, **changes)
    for name, g in want.items():
      off = np.linalg.norm(got[name] - g) / np.linalg.norm(g)
      assert off < tolerances.SAME_SCALES[1], (name, off)


def test_what_has_no_factor_is_refused_and_float16_needs_no_loss_scale_with_them():
  rules, half = WIDE, {"precision.compute_dtype": "float16"}
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
    ({"optim.grad_clip_norm": 1.0}, "optim.grad_clip_norm with .*; set optim.grad_clip_norm=0.0"),
    (
      {"optim.clip_groups": ((".*", 1.0),), "model.unit_scaling": "loss"},
      "clip_groups with model.unit_scaling='loss'",
    ),
  ):
    with pytest.raises(ConfigError, match=word):
      harness.tiny_spec(harness.tiny_config("bf16", **{**ALL, **changes}))
