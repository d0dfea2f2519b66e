"""From numbers to Optax values: a chain (clip, Adam, decoupled weight decay) and a schedule.

The learning rate multiplies the chain's output in the train step, by the step's own number: a
skipped update then loses its turn instead of delaying the schedule.
"""

import dataclasses

import optax

from fp8jax import params as params_lib

SCHEDULES = ("wsd", "cosine", "constant")


@dataclasses.dataclass(frozen=True)
class Optim:
  """AdamW and its learning rate.

  Attributes:
    schedule: "wsd": linear warm-up, constant, cosine from peak_lr to min_lr over the last
      decay_steps (InfiR2's WSD with a cosine tail, arXiv:2509.22536); "cosine": warm-up, then
      cosine to min_lr, reached one step after the last; "constant": warm-up, then peak_lr.
    peak_lr, min_lr, warmup_steps, decay_steps, steps: its numbers, in steps.
    b1, b2, eps: Adam.
    weight_decay: decoupled (Loshchilov & Hutter 2019, arXiv:1711.05101).
    clip: global gradient norm, 0 for none.
  """

  schedule: str
  peak_lr: float
  min_lr: float
  warmup_steps: int
  decay_steps: int
  steps: int
  b1: float
  b2: float
  eps: float
  weight_decay: float
  clip: float

  def problems(self) -> list[str]:
    """What is impossible about these numbers, in words."""
    found = []
    phases = ["warmup_steps", "decay_steps"] if self.schedule == "wsd" else ["warmup_steps"]
    used = sum(getattr(self, name) for name in phases)
    if used > self.steps:
      words = " + ".join(f"optim.{name}" for name in phases)
      found.append(f"{words} = {used} exceed steps={self.steps}; shorten the schedule")
    if not 0 <= self.min_lr <= self.peak_lr:
      found.append(f"need 0 <= optim.min_lr={self.min_lr} <= optim.peak_lr={self.peak_lr}")
    for name in ("b1", "b2"):
      if not 0 <= getattr(self, name) < 1:
        found.append(f"optim.{name}={getattr(self, name)} must be in [0, 1)")
    for name in ("clip", "weight_decay", "warmup_steps", "decay_steps"):
      if getattr(self, name) < 0:
        found.append(f"optim.{name}={getattr(self, name)} must not be negative")
    if self.eps <= 0:
      found.append(f"optim.eps={self.eps} must be positive")
    return found


def schedule(optim: Optim) -> optax.Schedule:
  """step -> learning rate; step 0 is the first update."""
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


def build(optim: Optim, declaration) -> optax.GradientTransformation:
  """The chain for parameters with these declarations; its updates still want -learning_rate."""
  decayed = params_lib.tree_map(lambda p: p.decay, declaration)
  return optax.chain(
    optax.clip_by_global_norm(optim.clip) if optim.clip else optax.identity(),
    optax.scale_by_adam(optim.b1, optim.b2, optim.eps),
    optax.add_decayed_weights(optim.weight_decay, mask=decayed),
  )
