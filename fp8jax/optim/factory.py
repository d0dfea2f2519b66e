"""From numbers to Optax values: a chain (Adam or Lion, weight decay) per parameter, and a schedule.

The learning rate multiplies a chain's output in the train step, by the step's own number: a skipped
update then loses its turn instead of delaying the schedule. Clipping is a factor on the gradients
as they are read, so that no second copy of them exists.
"""

import dataclasses
import zlib
from typing import Any

import jax.numpy as jnp
import optax

from fp8jax import params as params_lib
from fp8jax.kernels.adamw.reference import AdamWHparams
from fp8jax.optim import adam, gradients, masters, moments
from fp8jax.params import Param

SCHEDULES = ("wsd", "cosine", "constant")
# Of the keys that name something.
CHOICES = {
  "optimizer": ("adam", "lion"),
  "schedule": SCHEDULES,
  "moment_format": tuple(moments.PRESETS),
  "master_format": tuple(masters.PRESETS),
  "grad_format": tuple(gradients.PRESETS),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW, or Lion, and its learning rate.

  Attributes:
    optimizer: "adam", or "lion" (arXiv:2302.06675), which has one moment and wants a learning
      rate three to ten times smaller.
    moment_format, master_format, grad_format: how these are stored between steps: names in
      moments.PRESETS, masters.PRESETS and gradients.PRESETS. Norms and biases stay float32.
    schedule: "wsd": linear warm-up, constant, cosine from peak_lr to min_lr over the last
      decay_steps (InfiR2's WSD with a cosine tail, arXiv:2509.22536); "cosine": warm-up, then
      cosine to min_lr, reached one step after the last; "constant": warm-up, then peak_lr.
    peak_lr, min_lr, warmup_steps, decay_steps, steps: its numbers, in steps.
    b1, b2, eps: of Adam; b1 and b2 of Lion.
    weight_decay: decoupled (Loshchilov & Hutter 2019, arXiv:1711.05101).
    grad_clip_norm: global gradient norm, 0 for none.
    in_backward: update every layer inside the backward pass, as soon as it has a gradient
      (fp8jax/step/layerwise.py), instead of all parameters after it.
  """

  optimizer: str
  moment_format: str
  master_format: str
  grad_format: str
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
  grad_clip_norm: float
  in_backward: bool = False

  def problems(self) -> list[str]:
    """Reasons why these numbers are impossible."""
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
    for name in ("grad_clip_norm", "weight_decay", "warmup_steps", "decay_steps"):
      if getattr(self, name) < 0:
        found.append(f"optim.{name}={getattr(self, name)} must not be negative")
    if self.eps <= 0:
      found.append(f"optim.eps={self.eps} must be positive")
    kept = moments.PRESETS.get(self.moment_format)
    if kept is not None:
      if self.optimizer == "adam":
        reasons = moments.problems(kept, self.b1, self.b2)
      else:
        reasons = moments.problems(moments.Moments(kept.mu), self.b2, self.b2)
      found.extend(f"optim.moment_format={self.moment_format!r}: {reason}" for reason in reasons)
    return found

  def bytes_per_parameter(self) -> dict[str, float]:
    """Of a large matrix: {"weight", "master", "gradient", "moments": bytes}, scales included; no
    gradient where it is of one layer at a time.

    "weight" is what a master keeps that products read as it is, the BF16 of "bf16_remainder" and of
    "bf16_sr"; "master" is the rest of it. The optimizer's own, as papers count it, is master and
    moments: 4.08 of "bf16_remainder" with "coat" beside 2 of weights, 6.08 of "float32" with it.
    """
    kept = moments.PRESETS[self.moment_format]
    parts = (kept.mu, kept.nu) if self.optimizer == "adam" else (kept.mu,)
    weight, master = masters.nbytes(masters.PRESETS[self.master_format])
    return {
      "weight": weight,
      "master": master,
      "gradient": moments.nbytes(gradients.PRESETS[self.grad_format]) * (not self.in_backward),
      "moments": sum(map(moments.nbytes, parts)),
    }


def read(numbers, steps: int) -> OptimizerConfig:
  """From a configuration's `optim` and its number of steps; right or wrong."""
  return OptimizerConfig(**{k: numbers[k] for k in numbers if k != "on_nonfinite"}, steps=steps)


def schedule(optim: OptimizerConfig) -> optax.Schedule:
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


@dataclasses.dataclass(frozen=True)
class ParamOptimizer:
  """The optimizer of one parameter and the formats of its state.

  Attributes:
    path: its name, "layers/mlp/gate".
    transformation: an Optax transformation of this parameter alone; it still wants -learning_rate.
    master, gradient: values of masters.PRESETS and gradients.PRESETS.
    lead: so many first axes number tensors of their own: layers.
    seed: of stochastic rounding.
    is_large: False of norms and biases, which keep float32 and are never a kernel's.
    rule: hyperparameters where the transformation is AdamW; else None.
    backend: "xla": Optax's operations; or a kernel's name (kernels/adamw), chosen by
      `fused_adamw.choose`.
    note: why no kernel updates it; "" where none was asked for.
    sharding: where it lies on a mesh, for a kernel; None on a single device.
  """

  path: str
  transformation: optax.GradientTransformationExtraArgs
  master: Any
  gradient: Any
  lead: int
  seed: int
  is_large: bool = True
  rule: AdamWHparams | None = None
  backend: str = "xla"
  note: str = ""
  sharding: Any = None

  @property
  def gradient_dtype(self):
    return self.gradient.format.dtype if self.gradient else jnp.dtype(jnp.float32)


def leaves(optim: OptimizerConfig, declaration, seed: int = 0):
  """A tree of ParamOptimizer like the declaration.

  Norms and biases, which weight decay leaves alone, keep float32.

  Args:
    seed: of the run.
  """

  def one(path: str, p: Param) -> ParamOptimizer:
    own = zlib.crc32(f"{seed}/{path}".encode())
    lead = int(p.letters.startswith("N"))
    move = _moved_by(
      optim, moments.PRESETS[optim.moment_format if p.decay else "float32"], lead, own
    )
    rule = None
    if p.decay:
      move = optax.chain(move, optax.add_decayed_weights(optim.weight_decay))
      if optim.optimizer == "adam":
        rule = AdamWHparams(optim.b1, optim.b2, optim.eps, optim.weight_decay)
    narrow = (masters.PRESETS[optim.master_format], gradients.PRESETS[optim.grad_format])
    kept, gradient = narrow if p.decay else (None, None)
    return ParamOptimizer(path, move, kept, gradient, lead, own, p.decay, rule)

  return params_lib.unflatten(
    {path: one(path, p) for path, p in params_lib.flatten(declaration).items()}
  )


def _moved_by(optim: OptimizerConfig, kept: moments.Moments, lead: int, seed: int):
  places = adam.Places(narrow=True, lead=lead)
  if optim.optimizer == "lion":
    return adam.scale_by_lion(optim.b1, optim.b2, mu=kept.mu, places=places, seed=seed)
  return adam.scale_by_adam(
    optim.b1, optim.b2, optim.eps, mu=kept.mu, nu=kept.nu, places=places, seed=seed
  )
