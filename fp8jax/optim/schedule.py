"""The learning rate by the step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def schedule(optim: Any) -> optax.Schedule:
  """step -> learning rate of an OptimizerConfig; step 0 is the first update."""
  warmup = optax.schedules.linear_schedule(0.0, optim.peak_lr, optim.warmup_steps)
  hold = optax.schedules.constant_schedule(optim.peak_lr)

  def tail(steps):
    alpha = optim.min_lr / optim.peak_lr if optim.peak_lr else 0.0
    return optax.schedules.cosine_decay_schedule(optim.peak_lr, max(steps, 1), alpha)

  if optim.schedule == "cosine":
    pieces, starts = [warmup, tail(optim.steps - optim.warmup_steps)], [optim.warmup_steps]
  elif optim.schedule == "wsd":
    pieces = [warmup, hold, tail(optim.decay_steps)]
    starts = [optim.warmup_steps, optim.steps - optim.decay_steps]
  else:
    pieces, starts = [warmup, hold], [optim.warmup_steps]
  return optax.schedules.join_schedules(pieces, starts)


def rate_of(optim: Any) -> Callable[..., jax.Array]:
  """(step, scale=None) -> float32 learning rate, times a factor if there is one; jitted.

  A step takes the rate as an argument, so that runs that differ in it share a compiled program.
  """
  of_step = schedule(optim)

  @jax.jit
  def rate(step, scale=None):
    value = jnp.asarray(of_step(step), jnp.float32)
    return value if scale is None else value * scale

  return rate
