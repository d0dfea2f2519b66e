"""Dynamic loss scaling (Micikevicius et al. 2017, arXiv:1710.03740 §3.2).

The scale is a power of two, so that taking it out of the gradients again is exact. Amax histories
hold gradients without it (ops/site.py, with_scaled_gradients), so that delayed and static scales
follow every change of it at once, as exactly.
"""

from typing import Any

import jax.numpy as jnp

from fp8jax.step.settings import LossScale

# A scale below or above is no help to any format.
SMALLEST, LARGEST = 2.0**-24, 2.0**24


def init(c: LossScale) -> dict[str, Any]:
  """The state at the start: {} where the scale is not dynamic."""
  if c.kind == "none":
    return {}
  return {"scale": jnp.float32(c.start), "good_steps": jnp.zeros((), jnp.int32)}


def update(state: dict[str, Any], is_finite, c: LossScale) -> dict[str, Any]:
  """The state after a step: halved if it overflowed, doubled after growth_interval that did not."""
  if not state:
    return {}
  good = jnp.where(is_finite, state["good_steps"] + 1, 0)
  grows = good >= c.growth_interval
  factor = jnp.where(is_finite, jnp.where(grows, 2.0, 1.0), 0.5)
  scale = jnp.clip(state["scale"] * factor, SMALLEST, LARGEST)
  return {"scale": scale, "good_steps": jnp.where(grows, 0, good)}
