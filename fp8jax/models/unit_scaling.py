"""Unit scaling (arXiv:2303.11257): factors by which every tensor starts with a variance near 1.

Linear layers have theirs in recipes (recipe.gemm.Gain); these are of the other operations. A factor
of the gradient alone is legal where everything behind it is multiplied alike: at a parameter, at
the loss, and at both ends of a residual branch. Factors of gradients of embedding and norms are of
variance 1, as later work has them (arXiv:2407.17465); the first paper's are their squares.
"""

import math

from jax.ad_checkpoint import checkpoint_name

from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.ops import dots, prologue
from fp8jax.ops.elementwise import scale_bwd

# 1 / the root of E[(u silu(g))^2] for independent normal u and g, by quadrature.
_SWIGLU = 1.6765


def parameter(w, uses: int, cfg: ModelConfig, run: ComputeConfig):
  """An embedding or a norm's gain, whose gradient is a sum over uses / w.size terms per entry.

  Args:
    uses: elements of the result that it makes of a microbatch.
  """
  share = w.size / (uses * run.layout.microbatches)
  return scale_bwd(w, math.sqrt(share)) if cfg.unit_scaling == "all" else w


def head(h_BLD, head, cfg: ModelConfig, run: ComputeConfig):
  """The operands of the head. Behind the loss no other product shares its gradients' factors."""
  if cfg.unit_scaling != "all":
    return h_BLD, head
  tokens = h_BLD.size // h_BLD.shape[-1]
  return scale_bwd(h_BLD, cfg.vocab_size**-0.5), parameter(head, head.size * tokens, cfg, run)


def loss_gain(cfg: ModelConfig) -> float:
  """Factor of the gradient of logits, softmax - one-hot: at 1/V each, of variance (V - 1) / V^2."""
  size = cfg.vocab_size
  return 1.0 if cfg.unit_scaling == "none" else size / math.sqrt(size - 1)


def mean(loss, total, cfg: ModelConfig):
  """The part of a step's mean that is a microbatch's sum of losses; its gradient is the sum's.

  Args:
    total: weight of all tokens of the step.
  """
  return (loss if cfg.unit_scaling == "none" else scale_bwd(loss, total)) / total


def attention_gain(length: int) -> float:
  """Factor of causal attention's output at logits of variance 1, over all positions.

  An average of k values by softmax has the variance e/k - (e - 1)/k^2 where k is large
  (arXiv:2502.05967 §2): over 256 positions the output has the deviation 0.91.
  """
  variances = (math.e / k - (math.e - 1) / k**2 for k in range(1, length + 1))
  return math.sqrt(length / sum(variances))


def attention(mixed, cfg: ModelConfig):
  """Attention's output by a factor of max_positions, which training should have as its length.

  The library of arXiv:2407.17465 takes the length at hand, so that generation, token by token,
  would be another function. The factor grows nearly as its root: 4.3 at 256, 7.6 at 1,024.
  """
  if cfg.unit_scaling != "all":
    return mixed
  return (mixed * attention_gain(cfg.max_positions)).astype(mixed.dtype)


def swiglu_mlp(eqns, x, ws, sites, name: str, save=None):
  """swiglu_mlp.swiglu_mlp, down's input times 1 / its deviation; the same arguments."""
  gate, up = (checkpoint_name(y, name) for y in dots.dots(eqns[:2], x, ws[:2], sites[:2]))
  up = (up * _SWIGLU).astype(up.dtype)
  return dots.dot(eqns[2], prologue.silu_mul(gate, up, save=save), ws[2], sites[2])
