"""The reward head: its loss against float64, its scores and folders against transformers."""

import dataclasses
import json

import harness
import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
import safetensors.numpy
import tolerances

from fp8jax import params as params_lib
from fp8jax.errors import UserError
from fp8jax.export import write
from fp8jax.generation import api
from fp8jax.models import heads, transformer
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import same_model
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site_tree


def test_bradley_terry_equals_float64(rng):
  """Also at gaps whose exponential overflows float32; a pair without weight counts nowhere."""
  scores = np.float32(rng.standard_normal(12))
  scores[:6] = [0, 0, 200, -200, -200, 200]
  weights = np.float32([0.5] * 8 + [0, 0, 1, 2])
  scores[8] = np.nan
  chosen, rejected = np.float64(scores).reshape(-1, 2).T
  gap, weight = chosen - rejected, np.float64(weights).reshape(-1, 2).sum(1)
  each = np.maximum(-gap, 0) + np.log1p(np.exp(-np.abs(gap)))  # log(1 + exp(-gap))
  is_pair = weight > 0
  slope = np.where(is_pair, -weight / (1 + np.exp(gap)), 0)
  (loss, sums), gradient = jax.value_and_grad(heads.bradley_terry, has_aux=True)(scores, weights)
  np.testing.assert_allclose(loss, (weight * each)[is_pair].sum(), rtol=tolerances.FLOAT32_SUM)
  want = np.stack([slope, -slope], 1)
  np.testing.assert_allclose(np.reshape(gradient, (-1, 2)), want, rtol=1e-6, atol=1e-38)
  right = np.where(gap == 0, 0.5, gap > 0)[is_pair].sum()
  assert jax.tree.map(float, sums) == pytest.approx(
    {"count": 5, "accuracy": right, "margin": gap[is_pair].sum()}, rel=1e-6
  )


@pytest.mark.parametrize("name", ["qwen2_tied", pytest.param("llama", marks=pytest.mark.slow)])
def test_scores_equal_transformers_and_folders_come_back_to_the_bit(tmp_path, name):
  golden, source = np.load(harness.GOLDEN / "hf_scores.npz"), tmp_path / "source"
  base = harness.folder_of_scores(name, source, golden[f"{name}/head"])
  cfg = hf_config.read_config(str(source))
  assert cfg.reward_head and not cfg.tie_embeddings and not cfg.problems()
  weights, _ = hf_weights.load_params(str(source), cfg)
  tokens, ends = golden["tokens"].astype(np.int32), golden["lengths"] - 1
  positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
  at_end = np.float32(np.arange(tokens.shape[1]) == ends[:, None])
  batch = {"tokens_BL": tokens, "positions_BL": positions, "weights_BL": at_end / 2}
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, ((".*", "bf16"),))
  both = jax.jit(lambda p: (
    transformer.logits(p, sites, batch, cfg, ComputeConfig()),
    transformer.loss_and_aux(p, sites, batch, cfg, ComputeConfig()),
  ))  # fmt: skip
  scores_BLC, (loss, aux) = both(weights)
  want = golden[f"{name}/scores"]
  assert np.max(np.abs(np.sum(scores_BLC[..., 0] * at_end, 1) - want)) < tolerances.LOGITS_TINY
  # The loss is at the same tokens, whatever the padding behind them.
  gap = np.float64(want[::2] - want[1::2])
  assert float(loss) == pytest.approx(np.log1p(np.exp(-gap)).sum(), abs=tolerances.LOGITS_TINY)
  assert jax.tree.map(float, aux.sums["policy"]) == pytest.approx(
    {"count": 2, "accuracy": (gap > 0).sum(), "margin": gap.sum()}, abs=tolerances.LOGITS_TINY
  )

  target = tmp_path / "target"
  write.save(str(target), write.model(weights, cfg, "float32", base | {"pad_token_id": 95}))
  written = json.loads((target / "config.json").read_text())
  assert written["architectures"] == base["architectures"]
  assert (written["num_labels"], written["id2label"]) == (1, {"0": "LABEL_0"})
  old, new = (safetensors.numpy.load_file(f / "model.safetensors") for f in (source, target))
  assert old.keys() == new.keys() and "lm_head.weight" not in new
  for key, value in old.items():
    np.testing.assert_array_equal(new[key], value, key)
  assert hf_config.read_config(str(target)) == cfg


def test_a_head_of_scores_starts_anew_on_the_folder_of_a_language_model():
  folder = str(harness.GOLDEN / "hf" / "qwen2_tied")
  cfg = hf_config.read_config(folder)
  scores = dataclasses.replace(cfg, reward_head=True, tie_embeddings=False)
  declared = params_lib.flatten(transformer.params(scores))
  weights, _ = hf_weights.load_params(folder, scores)
  assert declared.keys() - params_lib.flatten(weights).keys() == {"head"}
  assert declared["head"].letters == "DC" and declared["head"].trainable
  assert jnp.shape(weights["embed"]) == (96, 32)


@pytest.mark.slow
def test_loss_and_gradient_equal_float64(rng):
  """Of all parameters, along one direction each, by central differences of the float64 loss."""
  cfg = ModelConfig(
    architecture="llama", vocab_size=96, hidden_size=72, intermediate_size=144, num_layers=2,
    num_heads=6, num_kv_heads=2, head_dim=16, max_positions=64, init_std=0.15, reward_head=True,
  )  # fmt: skip
  made = params_lib.tree_map(
    lambda p: (
      np.float32(p.std * rng.standard_normal(params_lib.shape(p, cfg.dims)) + 1)
      if p.init == "ones"
      else np.float32(p.std * rng.standard_normal(params_lib.shape(p, cfg.dims)))
    ),
    transformer.params(cfg),
  )
  ends, length = np.array([3, 11, 0, 7]), 12
  at_end = np.float32(np.arange(length) == ends[:, None]) / 2
  batch = {
    "tokens_BL": rng.integers(0, 96, (4, length)).astype(np.int32), "weights_BL": at_end,
    "positions_BL": np.broadcast_to(np.arange(length, dtype=np.int32), (4, length)),
  }  # fmt: skip

  def by_hand(weights):
    scores = numpy_model.logits(cfg, weights, batch)[np.arange(4), ends, 0]
    return np.log1p(np.exp(-(scores[::2] - scores[1::2]))).sum()

  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, ((".*", "bf16"),))
  loss = lambda p: transformer.loss(p, sites, batch, cfg, ComputeConfig())  # noqa: E731
  value, gradient = jax.jit(jax.value_and_grad(loss))(made)
  assert float(value) == pytest.approx(by_hand(made), rel=tolerances.FLOAT32_SUM)
  flat = params_lib.flatten(jax.tree.map(np.float64, made))
  for path, g in params_lib.flatten(gradient).items():
    direction = rng.standard_normal(g.shape)
    up, down = (
      by_hand(params_lib.unflatten({**flat, path: flat[path] + by * direction}))
      for by in (1e-5, -1e-5)
    )
    got = np.sum(np.float64(g) * direction)
    assert abs(got - (up - down) / 2e-5) < 1e-5 * np.linalg.norm(g), path


def test_a_reward_model_is_no_language_model(tmp_path):
  """Where logits or another head are asked for, by name."""
  head = np.load(harness.GOLDEN / "hf_scores.npz")["qwen2_tied/head"]
  harness.folder_of_scores("qwen2_tied", tmp_path / "scores", head)
  with pytest.raises(UserError, match="holds a reward model, which scores texts and writes none"):
    api.load(str(tmp_path / "scores"))
  cfg = hf_config.read_config(str(tmp_path / "scores"))
  with pytest.raises(ValueError, match="another model .*: reward_head True there, False here"):
    same_model.check(str(tmp_path / "scores"), dataclasses.replace(cfg, reward_head=False))
  two = {"score.weight": np.concatenate([head, head])}
  tensors = safetensors.numpy.load_file(tmp_path / "scores" / "model.safetensors")
  safetensors.numpy.save_file(tensors | two, tmp_path / "scores" / "model.safetensors")
  with pytest.raises(UserError, match=r"score.weight has shape \(2, 32\), expected \(1, 32\)"):
    hf_weights.load_params(str(tmp_path / "scores"), cfg)
