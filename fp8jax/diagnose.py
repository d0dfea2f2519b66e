"""Which site went wrong first: a second look at a batch whose loss or gradient was not finite."""

from typing import Any

import jax
import numpy as np

from fp8jax import params as params_lib
from fp8jax.config import Plan
from fp8jax.models import transformer

# Order in which a layer computes.
_ORDER = ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down")


def observe(plan: Plan, params, batch) -> tuple[float, dict[str, np.ndarray], dict[str, bool]]:
  """One forward and backward pass that watches every site.

  Args:
    batch: [B, L], or [A, B, L] when accumulating.

  Returns:
    (loss, {site: [3] or [N, 3] largest magnitudes of x, w, g}, {parameter: gradient is finite})
  """

  @jax.jit
  def look(params, sites, batch):
    def loss(params, sites):
      total = transformer.loss(params, sites, batch, plan.model, plan.run)
      return total / jax.numpy.maximum(batch["weights_BL"].sum(), 1)

    value, (gradients, seen) = jax.value_and_grad(loss, argnums=(0, 1))(params, sites)
    finite = jax.tree.map(lambda g: jax.numpy.isfinite(g).all(), gradients)
    return value, jax.tree.map(lambda s: s.tap, seen, is_leaf=lambda s: hasattr(s, "tap")), finite

  sites = plan.sites()
  micro = [batch]
  if plan.config.accumulation > 1:
    micro = [{k: v[i] for k, v in batch.items()} for i in range(plan.config.accumulation)]
  loss, seen, finite = 0.0, {}, {}
  for part in micro:
    value, taps, good = jax.device_get(look(params, sites, part))
    loss += float(value) / len(micro)
    for name, tap in params_lib.flatten(taps).items():
      # Amaxes combine by maximum, NaN staying NaN.
      seen[name] = np.maximum(seen.get(name, 0), tap)
    for name, ok in params_lib.flatten(good).items():
      finite[name] = finite.get(name, True) and bool(ok)
  return loss, seen, finite


def first_bad(seen: dict[str, np.ndarray], finite: dict[str, bool], loss: float) -> str:
  """The first site, in order of computation, at which something was not finite, in words."""
  layers = next(v for k, v in seen.items() if k.startswith("layers/")).shape[0]
  visits = [(f"layers/{n}", i) for i in range(layers) for n in _ORDER] + [("head", None)]

  def at(name, layer, tensor):
    return seen[name][tensor] if layer is None else seen[name][layer, tensor]

  def where(name, layer):
    return name if layer is None else f"{name} of layer {layer}"

  for name, layer in visits:
    for tensor, word in ((1, "weight"), (0, "input")):
      if not np.isfinite(at(name, layer, tensor)):
        return f"{where(name, layer)}: its {word} is not finite (forward)"
  if not np.isfinite(loss):
    return "the loss itself, after a finite forward pass through every site"
  for name, layer in reversed(visits):
    if not np.isfinite(at(name, layer, 2)):
      return f"{where(name, layer)}: its incoming gradient is not finite (backward)"
  bad = [name for name, is_good in finite.items() if not is_good]
  if bad:
    return f"{bad[0]}: its gradient is not finite although every site's operands were"
  return "none: the same batch and parameters now give finite values"


def report(plan: Plan, params, batch) -> dict[str, Any]:
  """JSON-able account of one batch: the loss, the first bad site, amaxes per site."""
  loss, seen, finite = observe(plan, params, batch)
  return {
    "loss": loss,
    "first_bad_site": first_bad(seen, finite, loss),
    "amax_x_w_g": {k: v.tolist() for k, v in seen.items()},
    "parameters_with_bad_gradients": [k for k, ok in finite.items() if not ok],
  }
