"""The learning rate by the step."""

from typing import Any

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
