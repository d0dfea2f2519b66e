"""Objectives of learning from judged completions: of groups token by token, and of pairs.

An objective is a function of the log-probability of every drawn token alone, so that its gradient
is a weighted sum of theirs: `of_tokens` gives the weights, and the model's own cross entropy, with
these for the weights of its targets, the gradient (transformer.head_loss). Recipes, memory options
and optimizers are then those of all training.

Sources: GRPO: DeepSeekMath (arXiv:2402.03300 §4.1); DAPO: arXiv:2503.14476 §3; Dr. GRPO:
arXiv:2503.20783 §3.2; truncated importance sampling between rollout and training: Yao et al. 2025,
as InfiR2's scripts have it (slime); DPO: arXiv:2305.18290 §4; rejection sampling: STaR
(arXiv:2203.14465) and RAFT (arXiv:2304.06767). P is a prompt or pair, J is a completion of its
group.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MOST = 80.0  # nats; exp of it is a float32
# Averages over the tokens of an update.
SEQUENCE, TOKEN, CONSTANT = "sequence", "token", "constant"


@dataclasses.dataclass(frozen=True)
class Objective:
  """A clipped policy gradient; with `beta` DPO, with `keeps_best` the cross entropy.

  Attributes:
    clip_low, clip_high: the ratio to the policy that began the update counts from 1 - clip_low to
      1 + clip_high, where that is the worse for the objective.
    divides: whether advantages are divided by the deviation of their group's rewards.
    average: SEQUENCE: tokens of a completion, then completions; TOKEN: all tokens; CONSTANT: their
      sum over completions times the longest completion allowed.
    drops_equal: whether groups of equal rewards make way for others (dynamic sampling).
    kl: weight of the k3 estimate of KL(policy || reference); 0 without a reference.
    most_correction: bound of exp(old - rollout) by which a token counts; 0 leaves it out.
    beta: of DPO, the reward of a log-ratio to the reference; rows 2i are preferred to rows 2i + 1.
    keeps_best: whether completions of a group's highest reward, if it is positive, are learned by
      their cross entropy, and others weigh 0.
  """

  clip_low: float = 0.2
  clip_high: float = 0.2
  divides: bool = True
  average: str = SEQUENCE
  drops_equal: bool = False
  kl: float = 0.0
  most_correction: float = 0.0
  beta: float = 0.0
  keeps_best: bool = False

  @property
  def has_reference(self) -> bool:
    return self.kl > 0 or self.beta > 0


OBJECTIVES = {
  "grpo": Objective(kl=0.04),
  "dapo": Objective(clip_high=0.28, average=TOKEN, drops_equal=True),
  "dr_grpo": Objective(divides=False, average=CONSTANT),
  "rejection": Objective(average=TOKEN, keeps_best=True),
  "dpo": Objective(drops_equal=True, beta=0.1),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Policy:
  """A batch of completions, beside its tokens, targets and weights (`token_weights`).

  Attributes:
    advantages_BL: float32, of the completion that a target belongs to; None of pairs, as the next
      two.
    old_BL: log-probabilities under the parameters that began the update, in training's recipe.
    rollout_BL: those with which the sampler drew them.
    reference_BL: of the reference model; None without one.
    objective: the rule.
    temperature: of the sampler; logits are divided by it everywhere.
  """

  advantages_BL: Any = None
  old_BL: Any = None
  rollout_BL: Any = None
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
    sums: {name: float32} over "count" of them: tokens that have a weight, or pairs.
  """

  loss: Any
  weights_BL: Any
  sums: Any


def advantages(rewards_PJ: np.ndarray, objective: Objective) -> np.ndarray:
  """float64 [P, J]: rewards beside their group's mean; 0 where all of a group are equal. Under
  `keeps_best` a group's best completions have 1, and its others 0.

  The deviation is the sample's (J - 1), plus 1e-6, as in slime and trl.
  """
  if objective.keeps_best:
    return 1.0 * (rewards_PJ == np.maximum(rewards_PJ.max(axis=1, keepdims=True), 1e-9))
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
    lengths: tokens of the update's completions that are learned.
    longest: tokens that a completion may have.
  """
  if objective.average == SEQUENCE:
    return 1 / (len(lengths) * lengths)
  total = max(lengths.sum(), 1) if objective.average == TOKEN else len(lengths) * longest
  return np.full(len(lengths), 1 / total)


def of_tokens(policy: Policy, logp_BL, weights_BL) -> Terms:
  """The objective under the present log-probabilities; nothing is differentiated here.

  Args:
    weights_BL: `token_weights` of targets that were drawn, 0 elsewhere.
  """
  rule, a_BL, is_drawn_BL = policy.objective, policy.advantages_BL, weights_BL > 0
  if rule.beta:
    return _of_pairs(policy, logp_BL, weights_BL)
  if rule.keeps_best:
    sums = {"count": is_drawn_BL.sum(dtype=jnp.float32)}
    return Terms(-jnp.sum(weights_BL * jnp.where(is_drawn_BL, logp_BL, 0)), weights_BL, sums)
  log_ratio_BL = jnp.where(is_drawn_BL, logp_BL - policy.old_BL, 0.0)
  ratio_BL = jnp.exp(jnp.minimum(log_ratio_BL, _MOST))  # infinite times an advantage of 0 is NaN
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
  counted = {
    "count": jnp.ones_like(gain_BL), "clipped": is_clipped_BL,
    "kl_to_old": jnp.expm1(-log_ratio_BL) + log_ratio_BL, "kl_to_reference": k3_BL,
    "mismatch": jnp.abs(gap_BL), "truncated": is_truncated_BL,
  }  # fmt: skip
  return Terms(
    jnp.sum(weights_BL * (rule.kl * k3_BL - gain_BL)),
    weights_BL * slope_BL,
    {name: jnp.sum(jnp.where(is_drawn_BL, x, 0.0)) for name, x in counted.items()},
  )


def _of_pairs(policy: Policy, logp_BL, weights_BL) -> Terms:
  """DPO (arXiv:2305.18290 eq. 7) of rows 2i beside rows 2i + 1, whose weights together are the
  pair's; a reward is beta * log(policy / reference) of a completion."""
  beta, is_drawn_BL = policy.objective.beta, weights_BL > 0
  apart_BL = jnp.where(is_drawn_BL, logp_BL - policy.reference_BL, 0.0)
  chosen_P, rejected_P = (beta * apart_BL.sum(axis=1)).reshape(-1, 2).T
  margin_P, weight_P = chosen_P - rejected_P, weights_BL.sum(axis=1).reshape(-1, 2).sum(axis=1)
  slope_P = weight_P * beta * jax.nn.sigmoid(-margin_P)
  slope_B1 = jnp.stack([slope_P, -slope_P], axis=1).reshape(-1, 1)
  counted = {
    "count": jnp.ones_like(margin_P), "margin": margin_P, "accuracy": margin_P > 0,
    "chosen": chosen_P, "rejected": rejected_P,
  }  # fmt: skip
  return Terms(
    jnp.sum(weight_P * jax.nn.softplus(-margin_P)),
    jnp.where(is_drawn_BL, slope_B1, 0.0),
    {name: jnp.sum(jnp.where(weight_P > 0, x, 0.0)) for name, x in counted.items()},
  )
