"""Objectives of reinforcement learning over groups of completions, token by token.

An objective is a function of the log-probability of every drawn token alone, so that its gradient
is a weighted sum of theirs: `of_tokens` gives the weights, and the model's own cross entropy, with
these for the weights of its targets, the gradient (transformer.head_loss). Recipes, memory options
and optimizers are then those of all training.

Sources: GRPO: DeepSeekMath (arXiv:2402.03300 §4.1); DAPO: arXiv:2503.14476 §3; Dr. GRPO:
arXiv:2503.20783 §3.2; truncated importance sampling between rollout and training: Yao et al. 2025,
as InfiR2's scripts have it (slime). P is a prompt, J is a completion of its group.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Averages over the tokens of an update.
SEQUENCE, TOKEN, CONSTANT = "sequence", "token", "constant"
# Names of `Terms.sums`.
SUMS = ("tokens", "clipped", "kl_to_old", "kl_to_reference", "mismatch", "truncated")


@dataclasses.dataclass(frozen=True)
class Objective:
  """A clipped policy gradient.

  Attributes:
    clip_low, clip_high: the ratio to the policy that began the update counts from 1 - clip_low to
      1 + clip_high, where that is the worse for the objective.
    divides: whether advantages are divided by the deviation of their group's rewards.
    average: SEQUENCE: tokens of a completion, then completions; TOKEN: all tokens; CONSTANT: their
      sum over completions times the longest completion allowed.
    drops_equal: whether groups of equal rewards make way for others (dynamic sampling).
    kl: weight of the k3 estimate of KL(policy || reference); 0 without a reference.
    most_correction: bound of exp(old - rollout) by which a token counts; 0 leaves it out.
  """

  clip_low: float = 0.2
  clip_high: float = 0.2
  divides: bool = True
  average: str = SEQUENCE
  drops_equal: bool = False
  kl: float = 0.0
  most_correction: float = 0.0


OBJECTIVES = {
  "grpo": Objective(kl=0.04),
  "dapo": Objective(clip_high=0.28, average=TOKEN, drops_equal=True),
  "dr_grpo": Objective(divides=False, average=CONSTANT),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Policy:
  """A batch of completions, beside its tokens, targets and weights (`token_weights`).

  Attributes:
    advantages_BL: float32, of the completion that a target belongs to.
    old_BL: log-probabilities under the parameters that began the update, in training's recipe.
    rollout_BL: those with which the sampler drew them.
    reference_BL: of the reference model; None without one.
    objective: the rule.
    temperature: of the sampler; logits are divided by it everywhere.
  """

  advantages_BL: Any
  old_BL: Any
  rollout_BL: Any
  reference_BL: Any = None
  objective: Objective = dataclasses.field(default=Objective(), metadata=dict(static=True))
  temperature: float = dataclasses.field(default=1.0, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Terms:
  """The objective of a batch.

  Attributes:
    loss: float32 scalar, to be minimised.
    weights_BL: minus the derivative of `loss` with respect to every log-probability.
    sums: float32 [SUMS], over tokens that have a weight.
  """

  loss: Any
  weights_BL: Any
  sums: Any


def advantages(rewards_PJ: np.ndarray, objective: Objective) -> np.ndarray:
  """float64 [P, J]: rewards beside their group's mean; 0 where all of a group are equal.

  The deviation is the sample's (J - 1), plus 1e-6, as in slime and trl.
  """
  is_equal_P1 = rewards_PJ.min(axis=1, keepdims=True) == rewards_PJ.max(axis=1, keepdims=True)
  # The mean of equal numbers is rounded, and would be divided by nearly nothing.
  centred_PJ = np.where(is_equal_P1, 0.0, rewards_PJ - rewards_PJ.mean(axis=1, keepdims=True))
  if not objective.divides:
    return centred_PJ
  deviation_P1 = np.sqrt((centred_PJ**2).sum(axis=1, keepdims=True) / (rewards_PJ.shape[1] - 1))
  return centred_PJ / (deviation_P1 + 1e-6)


def token_weights(lengths: np.ndarray, objective: Objective, longest: int) -> np.ndarray:
  """float64, of every completion the weight of each of its tokens in the mean over an update.

  Args:
    lengths: tokens of the update's completions.
    longest: tokens that a completion may have.
  """
  if objective.average == SEQUENCE:
    return 1 / (len(lengths) * lengths)
  total = lengths.sum() if objective.average == TOKEN else len(lengths) * longest
  return np.full(len(lengths), 1 / total)


def of_tokens(policy: Policy, logp_BL, weights_BL) -> Terms:
  """The objective under the present log-probabilities; nothing is differentiated here.

  Args:
    weights_BL: `token_weights` of targets that were drawn, 0 elsewhere.
  """
  rule, a_BL, is_drawn_BL = policy.objective, policy.advantages_BL, weights_BL > 0
  log_ratio_BL = jnp.where(is_drawn_BL, logp_BL - policy.old_BL, 0.0)
  ratio_BL = jnp.exp(log_ratio_BL)
  bounded_BL = jnp.clip(ratio_BL, 1 - rule.clip_low, 1 + rule.clip_high)
  is_clipped_BL = bounded_BL * a_BL < ratio_BL * a_BL
  gap_BL = jnp.where(is_drawn_BL, policy.old_BL - policy.rollout_BL, 0.0)
  correction_BL, is_truncated_BL = jnp.ones_like(gap_BL), jnp.zeros_like(is_drawn_BL)
  if rule.most_correction:
    correction_BL = jnp.minimum(jnp.exp(gap_BL), rule.most_correction)
    is_truncated_BL = jnp.exp(gap_BL) > rule.most_correction
  gain_BL = correction_BL * jnp.minimum(ratio_BL * a_BL, bounded_BL * a_BL)
  slope_BL = jnp.where(is_clipped_BL, 0.0, correction_BL * ratio_BL * a_BL)
  k3_BL = jnp.zeros_like(gain_BL)
  if policy.reference_BL is not None:
    apart_BL = jnp.where(is_drawn_BL, policy.reference_BL - logp_BL, 0.0)
    k3_BL = jnp.expm1(apart_BL) - apart_BL
    slope_BL = slope_BL + rule.kl * jnp.expm1(apart_BL)
  counted = (
    jnp.ones_like(gain_BL), is_clipped_BL, jnp.expm1(-log_ratio_BL) + log_ratio_BL, k3_BL,
    jnp.abs(gap_BL), is_truncated_BL,
  )  # fmt: skip
  return Terms(
    jnp.sum(weights_BL * (rule.kl * k3_BL - gain_BL)),
    weights_BL * slope_BL,
    jnp.stack([jnp.sum(jnp.where(is_drawn_BL, x, 0.0)) for x in counted]),
  )
