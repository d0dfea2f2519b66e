"""AdamW of one parameter in jnp: the definition of what a kernel computes, and the slow way.

Operations are those of optax.scale_by_adam, add_decayed_weights and a multiplication by -rate, in
their order: jitted, float32 moments and a float32 master give Optax's bits. Moments are rounded
after they were used.

Source: Kingma & Ba 2015 (arXiv:1412.6980), Loshchilov & Hutter 2019 (arXiv:1711.05101).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.quantization import bf16_remainder, quantized_tensor
from fp8jax.recipe.quant import Rounding

Moment = quantized_tensor.QuantizedTensor | jax.Array
Master = bf16_remainder.SplitFloat32 | jax.Array


@dataclasses.dataclass(frozen=True)
class AdamWHparams:
  """Constants of a run: decays of the moments, eps beside the root, decoupled decay."""

  b1: float
  b2: float
  eps: float
  weight_decay: float


class StepScalars(NamedTuple):
  """Values that change from step to step, float32 each.

  Attributes:
    factor: by which gradients are multiplied first: clipping, the inverse of a loss scale.
    mu_correction, nu_correction: 1 / (1 - b^count).
  """

  factor: jax.Array
  rate: jax.Array
  mu_correction: jax.Array
  nu_correction: jax.Array


def supports(gradient, master, mu, nu, device) -> str | None:
  """Everything that needs no random numbers."""
  del gradient, master, device
  for name, moment in (("mu", mu), ("nu", nu)):
    quant = moment.quant if isinstance(moment, quantized_tensor.QuantizedTensor) else None
    if quant is not None and quant.rounding is Rounding.STOCHASTIC:
      return f"{name}={quant}: an update takes no key to round with"
  return None


def scalars(count, factor, rate, rule: AdamWHparams) -> StepScalars:
  # A division by a broadcast is what XLA makes a multiplication by the reciprocal of; the kernel
  # must not depend on it.
  corrections = (1.0 / (1.0 - b**count) for b in (rule.b1, rule.b2))
  return StepScalars(*(jnp.asarray(x, jnp.float32) for x in (factor, rate, *corrections)))


def step(gradient, master, mu, nu, scalars: StepScalars, rule: AdamWHparams):
  """(what is added to the master, mu, nu) of one step; float32 arrays all, any one shape."""
  g = gradient * scalars.factor
  mu = np.float32(1 - rule.b1) * g + np.float32(rule.b1) * mu
  nu = np.float32(1 - rule.b2) * (g * g) + np.float32(rule.b2) * nu
  root = jnp.sqrt(nu * scalars.nu_correction)
  direction = (mu * scalars.mu_correction) / (root + np.float32(rule.eps))
  if rule.weight_decay:
    direction = direction + np.float32(rule.weight_decay) * master
  return (-scalars.rate) * direction, mu, nu


def update(gradient, master, mu, nu, scalars: StepScalars, is_applied, rule: AdamWHparams):
  """See `api.update`."""
  p, g = bf16_remainder.to_float32(master), gradient.astype(jnp.float32)
  change, m, v = step(g, p, _unpack(mu), _unpack(nu), scalars, rule)
  new = bf16_remainder.like(p + change, master), _stored(m, mu), _stored(v, nu)
  if is_applied is not True:
    select = functools.partial(jnp.where, is_applied)
    change, *new = jax.tree.map(select, (change, *new), (0.0, master, mu, nu))
  return *new, jnp.stack([jnp.sum(jnp.square(x)) for x in (change, p)])


def _unpack(stored: Moment):
  return (
    stored.unpack()
    if isinstance(stored, quantized_tensor.QuantizedTensor)
    else stored.astype(jnp.float32)
  )


def _stored(x, before: Moment) -> Moment:
  """Like `before`, with these values."""
  if isinstance(before, quantized_tensor.QuantizedTensor):
    return before.repack(x)
  return x.astype(before.dtype)
