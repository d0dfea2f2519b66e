"""Folds leave the network as it is: logits of a float64 NumPy decoder before and after."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax import params as params_lib
from fp8jax.errors import UserError
from fp8jax.models import attention_gqa, mlp_swiglu, transformer
from fp8jax.models.config import ComputeConfig, Lora, ModelConfig
from fp8jax.ops import site_tree
from fp8jax.ptq import fold, rotate

# 72 = 24 x 3 is no Hadamard size; groups of three heads share keys and values.
LLAMA = ModelConfig(
  architecture="llama", vocab_size=40, hidden_size=72, intermediate_size=56, num_layers=2,
  num_heads=6, num_kv_heads=2, head_dim=8, max_positions=16, init_std=0.3,
)  # fmt: skip
MODELS = {
  "llama": LLAMA,
  "qwen2": dataclasses.replace(LLAMA, architecture="qwen2", qkv_bias=True, tie_embeddings=True),
  "qwen3": dataclasses.replace(LLAMA, architecture="qwen3", qk_norm=True),
}
ATTENTION, MLP = attention_gqa.MIXER, mlp_swiglu.MIXER
# Weights rounded to float32 up to three times, each by 2^-24; of the largest logit. What a fold
# does wrong moves logits by more than a tenth.
ROUNDED = 3e-6
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 9))


def _params(cfg, seed=0):
  """Random, gains and biases too; float32."""
  rng = np.random.default_rng(seed)

  def one(param):
    shape = params_lib.shape(param, cfg.dims)
    x = rng.standard_normal(shape) * (0.3 if param.inputs or param.letters == "VD" else 0.5)
    return (x + (param.init == "ones")).astype(np.float32)

  return params_lib.tree_map(one, transformer.params(cfg))


def _logits(params, cfg):
  """float64 [B, L, V], from the papers."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  heads, groups, size = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim

  def norm(x, gain):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + cfg.norm_eps) * gain

  def rope(x):
    angles = np.arange(x.shape[1])[:, None] / cfg.rope_theta ** (np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : size // 2], x[..., size // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  x = p["embed"][TOKENS]
  for n in range(cfg.num_layers):
    a, m = ({k: v[n] for k, v in p["layers"][key].items()} for key in ("attn", "mlp"))
    h = norm(x, a["norm"])
    q, k, v = (np.einsum("bld,dhk->blhk", h, a[name]) + a.get(f"{name}_bias", 0) for name in "qkv")
    if cfg.qk_norm:
      q, k = norm(q, a["q_norm"]), norm(k, a["k_norm"])
    q, k, v = rope(q), *(np.repeat(y, heads // groups, 2) for y in (rope(k), v))
    scores = np.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(size)
    scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + np.einsum("bhlm,bmhk,hkd->bld", weights, v, a["o"])
    h = norm(x, m["norm"])
    gate, up = h @ m["gate"], h @ m["up"]
    x = x + (gate / (1 + np.exp(-gate)) * up) @ m["down"]
  head = p["embed"].T if cfg.tie_embeddings else p["head"]
  return norm(x, p["norm"]) @ head


def _difference(a, b):
  return np.max(np.abs(a - b)) / np.max(np.abs(b))


@pytest.mark.parametrize("name", MODELS)
def test_rotations_and_scales_leave_the_logits(name):
  cfg, params = MODELS[name], _params(MODELS[name])
  before = _logits(params, cfg)
  for r1, r2 in ((True, False), (False, True), (True, True)):
    made, its = rotate.rotated(params, cfg, r1, r2, seed=3)
    assert its == dataclasses.replace(cfg, tie_embeddings=cfg.tie_embeddings and not r1)
    assert _difference(_logits(made, its), before) < ROUNDED
    shapes = jax.tree.map(lambda x: x.shape, params_lib.abstract(transformer.params(its), its.dims))
    assert jax.tree.map(np.shape, made) == shapes
    moved = {k for k, v in made["layers"]["attn"].items() if v is not params["layers"]["attn"][k]}
    own = ["v_bias"] * (r2 and cfg.qkv_bias) + ["v", "o"] + ["norm", "q", "k"] * r1
    assert moved == set(own)
  layers = dict(params["layers"])
  rng = np.random.default_rng(1)
  for mixer in (ATTENTION, MLP):
    own = layers[mixer.key]
    for input in mixer.makers:
      shape = fold.reader_amax(own, mixer, input, cfg).shape
      own = fold.scaled(own, mixer, input, rng.uniform(0.2, 5, shape), cfg)
    assert all(np.any(own[k] != layers[mixer.key][k]) for k in ("norm", mixer.sites[0].name))
    layers[mixer.key] = fold.equalized(own, mixer, cfg)
  made = {**params, "layers": layers}
  assert _difference(_logits(made, cfg), before) < ROUNDED


def test_the_decoder_is_ours():
  """This file's, and the program that a rotated model runs: grouped heads, biases, untied."""
  cfg = MODELS["qwen2"]
  params = _params(cfg)
  made, its = rotate.rotated(params, cfg)
  sites = site_tree.build_sites(transformer.site_params(its), its.dims, ((".*", "bf16"),))
  batch = {"tokens_BL": jnp.asarray(TOKENS), "positions_BL": jnp.arange(9)[None].repeat(2, 0)}
  got = transformer.logits(made, sites, batch, its, ComputeConfig())
  assert _difference(np.float64(got), _logits(params, cfg)) < 2e-5  # products in float32, too


def test_equalized_weights_have_equal_ranges():
  """Of one layer: up and down channel by channel; v and o by groups of heads."""
  cfg = MODELS["llama"]
  layer = jax.tree.map(lambda x: x[0], _params(cfg)["layers"])
  mlp = fold.equalized(layer["mlp"], MLP, cfg)
  np.testing.assert_allclose(np.abs(mlp["up"]).max(0), np.abs(mlp["down"]).max(1), rtol=1e-6)
  np.testing.assert_array_equal(mlp["gate"], layer["mlp"]["gate"])
  attn = fold.equalized(layer["attn"], ATTENTION, cfg)
  of_o = np.abs(attn["o"]).max(2).reshape(2, 3, 8).max(1)  # consecutive heads share a value
  np.testing.assert_allclose(np.abs(attn["v"]).max(0), of_o, rtol=1e-6)
  statistic = np.arange(48.0)
  pooled = fold.pooled(statistic, ATTENTION, "mixed", cfg)
  np.testing.assert_array_equal(pooled[:24], np.tile(np.arange(16, 24), 3))


def test_rotation_matrices_are_orthogonal_and_flat():
  for size, most in (
    (2, 1),
    (64, 1),
    (576, 1),
    (896, 1),
    (960, 1),
    (72, 2),
    (9, 2),
    (7, 2),
    (1, 1),
  ):
    matrix = rotate.orthogonal(size)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-13)
    # The largest square is `most` times the mean one.
    assert np.max(matrix**2) * size <= most * (1 + 1e-12), size


def test_models_that_cannot_be_rotated_are_refused():
  changes = {"residual_tau": 0.4}, {"lora": Lora(rank=4)}
  for change, word in zip(changes, ("residual_tau=0.4", "merge them first"), strict=True):
    cfg = dataclasses.replace(LLAMA, **change)
    with pytest.raises(UserError, match=word):
      rotate.rotated({}, cfg)
