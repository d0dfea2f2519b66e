"""The metrics of a step."""

import jax.numpy as jnp

from fp8jax.models.mixer import Aux


def of_aux(aux: Aux, tokens, num_layers: int):
  """Metrics beside the loss: "aux/NAME" of losses, per token and layers added up, and of
  statistics, per token and layer; "distill/cross_entropy" and "distill/kl" per token, "rl/NAME"
  of ops/policy_gradient.py per drawn token or pair; other Aux.sums as they are.

  Args:
    aux: sums over the tokens of a step, see models/mixer.py.
    tokens: their weights added up.
  """
  losses = {f"aux/{name}": value / tokens for name, value in aux.losses.items()}
  statistics = {
    f"aux/{name}": value / (tokens * num_layers) for name, value in aux.statistics.items()
  }
  sums = dict(aux.sums)
  if (parts := sums.pop("distill", None)) is not None:
    sums |= {"distill/cross_entropy": parts[0] / tokens, "distill/kl": parts[1] / tokens}
  if (parts := sums.pop("policy", None)) is not None:
    count = jnp.maximum(parts["count"], 1)
    sums |= {f"rl/{name}": value / count for name, value in parts.items() if name != "count"}
  return {**losses, **statistics, **sums}
