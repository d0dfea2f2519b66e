"""FLIQS' controller: formats are sampled while the model trains, and a policy learns from its loss.

The policy is one softmax per decision over free logits. REINFORCE moves it by the reward of every
step, the quality of the sampled formats less a penalty for their cost; a growing penalty on the
entropy makes it decide. Everything is data of the step's program (step.py).

Source: FLIQS (arXiv:2308.03290). The reward of a step is made of the training loss of its batch, as
in the authors' code; "absolute" is TuNAS's (arXiv:2008.06120), "soft" and "hard" are MnasNet's.

Shapes: the policy and costs are [decisions, options], choices [decisions].
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Where every logit begins, and the decay of the baseline.
_START, _DECAY = 0.5, 0.99


def absolute(quality, cost, beta):
  """Off the target costs, on either side."""
  return quality - beta * jnp.abs(cost - 1)


def one_sided(quality, cost, beta):
  """Above the target costs."""
  return quality - beta * jnp.maximum(cost - 1, 0)


def soft(quality, cost, beta):
  """A factor, on either side. A quality below 0 needs beta above 0, as then more is worse."""
  return quality * cost**beta


def hard(quality, cost, beta):
  """A factor above the target."""
  return quality * jnp.maximum(cost, 1) ** beta


REWARDS = {"absolute": absolute, "one_sided": one_sided, "soft": soft, "hard": hard}
# Of the time since the warm phase, 0 to 1, to the share of the largest weight of the entropy.
ENTROPY_SCHEDULES = {
  "cosine": lambda t: 0.5 * (1 - jnp.cos(math.pi * t)),
  "linear": lambda t: t,
  "heaviside": lambda t: jnp.where(t >= 0.5, 1.0, 0.0),
  "constant": jnp.ones_like,
}


@dataclasses.dataclass(frozen=True)
class Rules:
  """How a controller learns.

  Attributes:
    steps, delay: of the whole search, and the first ones, of uniform formats and a policy at rest.
    rate: of Adam, for the logits.
    reward, beta: of REWARDS, and its weight.
    entropy, entropy_schedule: the largest weight of the mean entropy in the policy's loss.
  """

  steps: int
  delay: int
  rate: float = 5e-3
  reward: str = "absolute"
  beta: float = 1.0
  entropy: float = 0.5
  entropy_schedule: str = "cosine"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controller:
  """A policy, a part of the state of a search.

  Attributes:
    logits: float32.
    baseline: float32 scalar, moving mean of rewards; NaN before the first.
  """

  logits: jax.Array
  opt: Any
  baseline: jax.Array


def init(decisions: int, options: int) -> Controller:
  """A policy that knows nothing."""
  logits = jnp.full((decisions, options), _START, jnp.float32)
  return Controller(logits, _adam(0.0).init(logits), jnp.full((), jnp.nan, jnp.float32))


def sample(rules: Rules, controller: Controller, step, key) -> jax.Array:
  """int32 [decisions]: an option per decision for the step after `step` steps."""
  logits = jnp.where(step < rules.delay, 0.0, controller.logits)
  return jax.random.categorical(key, logits).astype(jnp.int32)


def update(rules: Rules, controller: Controller, step, choice, quality, cost):
  """(the controller after a step, metrics).

  The baseline follows rewards from the first step on, the policy from the end of the warm phase.
  A quality that is not finite changes nothing.

  Args:
    step: steps taken before.
    quality: higher is better; minus a loss.
    cost: of the sampled formats, as a share of the target.
  """
  reward = REWARDS[rules.reward](quality, cost, rules.beta)
  baseline = jnp.where(
    jnp.isnan(controller.baseline), reward, _DECAY * controller.baseline + (1 - _DECAY) * reward
  )
  advantage = reward - baseline
  t = jnp.clip((step - rules.delay) / max(rules.steps - rules.delay, 1), 0.0, 1.0)
  weight = rules.entropy * ENTROPY_SCHEDULES[rules.entropy_schedule](t)

  def loss(logits):
    log_p = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, choice[:, None], axis=1).mean()
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=1).mean()
    return -advantage * chosen + weight * entropy, entropy

  (_, entropy), gradient = jax.value_and_grad(loss, has_aux=True)(controller.logits)
  moves, opt = _adam(rules.rate).update(gradient, controller.opt)
  moved = Controller(controller.logits + moves, opt, baseline)  # pyright: ignore
  at_rest = dataclasses.replace(controller, baseline=baseline)
  is_finite, is_warm = jnp.isfinite(reward), step < rules.delay

  def next_of(old, rest, new):
    return jnp.where(is_finite, jnp.where(is_warm, rest, new), old)

  metrics = {
    "search/reward": reward, "search/advantage": advantage, "search/cost": cost,
    "search/entropy": entropy, "search/entropy_weight": weight,
  }  # fmt: skip
  return jax.tree.map(next_of, controller, at_rest, moved), metrics


def _adam(rate: float) -> optax.GradientTransformation:
  return optax.adam(rate)


def to_json(controller: Controller) -> list[Any]:
  """Its numbers, of which JSON keeps every bit; None is NaN."""
  return [_plain(x.tolist()) for x in map(jax.device_get, jax.tree.leaves(controller))]


def from_json(values: list[Any], like: Controller) -> Controller:
  """The inverse of `to_json`.

  Raises:
    ValueError: they are of a controller of another size.
  """
  leaves, structure = jax.tree.flatten(like)
  made = [
    jnp.asarray(math.nan if v is None else v, x.dtype) for v, x in zip(values, leaves, strict=True)
  ]
  if [x.shape for x in made] != [x.shape for x in leaves]:
    raise ValueError(f"logits of {made[0].shape}, and this search has {leaves[0].shape}")
  return jax.tree.unflatten(structure, made)


def _plain(x: Any) -> Any:
  return None if isinstance(x, float) and math.isnan(x) else x
