"""Unit scaling (arXiv:2303.11257): factors by which every tensor starts with a variance near 1.

Linear layers have theirs in recipes (recipe.gemm.Gain); these are of the other operations. A factor
of the gradient alone is legal where everything behind it is multiplied alike: at a parameter, at
the loss, and at both ends of a residual branch. Factors of gradients of embedding and norms are of
variance 1, as later work has them (arXiv:2407.17465); the first paper's are their squares.
"""

import math

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fp8jax.models.config import ModelConfig
from fp8jax.ops import dots, prologue
from fp8jax.ops.elementwise import scale_bwd

# 1 / the root of E[(u silu(g))^2] for independent normal u and g, by quadrature.
_SWIGLU = 1.6765


def parameter(w, uses: int, cfg: ModelConfig):
  """An embedding or a norm's gain, whose gradient is a sum over uses / w.size terms per entry.

  Args:
    uses: elements of the result that it makes.
  """
  return scale_bwd(w, math.sqrt(w.size / uses)) if cfg.unit_scaling == "all" else w


def head(h_BLD, head, cfg: ModelConfig):
  """The operands of the head. Behind the loss no other product shares its gradients' factors."""
  if cfg.unit_scaling != "all":
    return h_BLD, head
  tokens = h_BLD.size // h_BLD.shape[-1]
  return scale_bwd(h_BLD, cfg.vocab_size**-0.5), parameter(head, head.size * tokens, cfg)


def loss_gain(cfg: ModelConfig) -> float:
  """Factor of the gradient of logits, softmax - one-hot: at 1/V each, of variance (V - 1) / V^2."""
  size = cfg.vocab_size
  return 1.0 if cfg.unit_scaling == "none" else size / math.sqrt(size - 1)


def loss(value, weights_BL, cfg: ModelConfig):
  """A sum over tokens whose gradient is that of each token, though the step takes the mean."""
  return value if cfg.unit_scaling == "none" else scale_bwd(value, jnp.maximum(weights_BL.sum(), 1))


def attention_gain(length: int) -> float:
  """Factor of causal attention's output at logits of variance 1, over all positions.

  An average of k values by softmax has the variance e/k - (e - 1)/k^2 where k is large
  (arXiv:2502.05967 §2): over 256 positions the output has the deviation 0.91.
  """
  variances = (math.e / k - (math.e - 1) / k**2 for k in range(1, length + 1))
  return math.sqrt(length / sum(variances))


def attention(mixed, cfg: ModelConfig):
  """Attention's output; by the longest context, so that generation computes the same."""
  if cfg.unit_scaling != "all":
    return mixed
  return (mixed * attention_gain(cfg.max_positions)).astype(mixed.dtype)


def swiglu_mlp(eqns, x, ws, sites, name: str, save=None):
  """swiglu_mlp.swiglu_mlp, down's input times 1 / its deviation; the same arguments."""
  gate, up = (checkpoint_name(y, name) for y in dots.dots(eqns[:2], x, ws[:2], sites[:2]))
  up = (up * _SWIGLU).astype(up.dtype)
  return dots.dot(eqns[2], prologue.silu_mul(gate, up, save=save), ws[2], sites[2])
