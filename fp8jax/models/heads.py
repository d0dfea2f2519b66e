"""The head of a model: logits [D, V], or the score [D, 1] of a text (ModelConfig.reward_head).

A score is trained on pairs (P is their number): rows 2i and 2i + 1 of a batch, the first preferred.
Scores are log-odds up to a constant: the probability of that is sigmoid(s_2i - s_2i+1).

Source: the Bradley-Terry loss of Ouyang et al. 2022 (arXiv:2203.02155 §3.5).
"""

import jax
import jax.numpy as jnp

from fp8jax.models.config import ModelConfig
from fp8jax.params import Param


def declared(cfg: ModelConfig) -> Param:
  """The head; beside adapters that of logits is frozen."""
  if cfg.reward_head:
    return Param("DC", std=cfg.init_std, inputs=1)
  return Param("DV", std=cfg.init_std, inputs=1, trainable=cfg.lora is None)


def equation(cfg: ModelConfig) -> str:
  """Einsum of the head; a tied one multiplies by the embedding."""
  if cfg.reward_head:
    return "BLD,DC->BLC"
  return "BLD,VD->BLV" if cfg.tie_embeddings else "BLD,DV->BLV"


def weighted(x_BLD, weights_BL):
  """[B, 1, D]: of every row the token that has a weight, 0 of a row without any.

  A sum with zeros, which is exact, and which a mesh splits as it splits rows.
  """
  return jnp.sum(jnp.where(weights_BL[..., None] > 0, x_BLD, 0), axis=1, keepdims=True)


def bradley_terry(scores_B, weights_B):
  """(sum over pairs of weight * softplus(s_2i+1 - s_2i), sums over pairs: their "count", "accuracy"
  and "margin").

  A pair's weight is that of both rows together; of weight 0 it does not count. Equal scores are
  half right.

  Args:
    scores_B: float32, of an even number of rows.
    weights_B: float32, of rows.
  """
  scores_P2, weight_P = scores_B.reshape(-1, 2), weights_B.reshape(-1, 2).sum(1)
  gap_P = jnp.where(weight_P > 0, scores_P2[:, 0] - scores_P2[:, 1], 0.0)
  right_P = jnp.where(weight_P > 0, 0.5 * (1 + jnp.sign(gap_P)), 0.0)
  each = {"count": jnp.float32(weight_P > 0), "accuracy": right_P, "margin": gap_P}
  return jnp.sum(weight_P * jax.nn.softplus(-gap_P)), {k: jnp.sum(x) for k, x in each.items()}
