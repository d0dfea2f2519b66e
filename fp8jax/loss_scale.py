"""Dynamic loss scaling (Micikevicius et al. 2017, arXiv:1710.03740 §3.2).

The scale is a power of two, so that taking it out of the gradients again is exact. Amax histories
hold gradients without it (ops/site.py, with_scaled_gradients), so that delayed and static scales
follow every change of it at once, as exactly.
"""

import math
from typing import Any

import jax.numpy as jnp

from fp8jax.errors import Problems

# A scale below or above is no help to any format.
SMALLEST, _LARGEST = 2.0**-24, 2.0**24


def problems(c: Any, compute: str) -> list[str]:
  """What is wrong with a config's loss_scale section, in words.

  Args:
    compute: precision.compute.
  """
  collected = Problems()
  collected.one_of("loss_scale.kind", c.kind, ("none", "dynamic"))
  found = collected.found
  if not SMALLEST <= c.start <= _LARGEST or math.frexp(c.start)[0] != 0.5:
    found.append(f"loss_scale.start={c.start} must be a power of two from 2^-24 to 2^24")
  if c.growth_steps < 1:
    found.append(f"loss_scale.growth_steps={c.growth_steps} must be at least 1")
  if compute == "float16" and c.kind == "none":
    found.append(
      "precision.compute='float16' with loss_scale.kind='none': gradients below 6e-8 become 0 and "
      "those above 65,504 infinite; set loss_scale.kind='dynamic', or compute in 'bfloat16'"
    )
  return found


def fresh(c: Any) -> dict[str, Any]:
  """The state at the start: {} where the scale is not dynamic."""
  if c.kind == "none":
    return {}
  return {"scale": jnp.float32(c.start), "good_steps": jnp.zeros((), jnp.int32)}


def update(state: dict[str, Any], is_finite, c: Any) -> dict[str, Any]:
  """The state after a step: halved if it overflowed, doubled after growth_steps that did not."""
  if not state:
    return {}
  good = jnp.where(is_finite, state["good_steps"] + 1, 0)
  grows = good >= c.growth_steps
  factor = jnp.where(is_finite, jnp.where(grows, 2.0, 1.0), 0.5)
  scale = jnp.clip(state["scale"] * factor, SMALLEST, _LARGEST)
  return {"scale": scale, "good_steps": jnp.where(grows, 0, good)}
