"""Stored gradients: their norm, their sum over microbatches, and the autoscale of 8-bit sums.

A gradient is float32 or a QuantizedTensor (storage.GRADIENTS) from the backward pass to the update.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.quantization import quantized_tensor
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.recipe.quant import Quant

# FP8-LM (arXiv:2310.18313 §2.1): a larger share of elements at the format's maximum is an overflow;
# without overflows mu grows fourfold over so many steps.
_OVERFLOW, _STEPS = 1e-5, 1000
# E4M3's second largest number over its largest: a tensor's largest element is mapped there, so that
# an element at the maximum is one that saturated.
_MOST = np.float32(416 / 448)


def dequantize(g):
  """One gradient in float32."""
  return g.unpack() if isinstance(g, QuantizedTensor) else g.astype(jnp.float32)


def is_leaf(g) -> bool:
  return isinstance(g, QuantizedTensor)


def norm(tree):
  """Global norm of the dequantized gradients."""
  leaves = jax.tree.leaves(tree, is_leaf=is_leaf)
  return jnp.sqrt(sum(jnp.sum(jnp.square(dequantize(g))) for g in leaves))


def scaled(tree, factor):
  """Gradients times a scalar: the scales, where there are any, to float32's precision."""

  def one(g):
    if isinstance(g, QuantizedTensor) and g.scale is not None:
      return dataclasses.replace(g, scale=g.scale * factor)
    return jax.tree.map(lambda x: (x * factor).astype(x.dtype), g)

  return jax.tree.map(one, tree, is_leaf=is_leaf)


def add(sums, new, key):
  """Sums of gradients plus those of another microbatch, in the format of the sums.

  8-bit sums stay on the grid of the first microbatch. An element that outgrows it saturates, and
  `next_grad_autoscale` reacts. Rounding is stochastic, unlike FP8-LM's: rounded to nearest, a sum
  of 16 equal gradients stops at a fifth of its value, because each is then below half a step of the
  sum. Each of A additions errs by up to a step, 1/16 to 1/8 of the sum: without bias, by about
  0.02 sqrt(A) of a sum of equal gradients.

  Args:
    sums, new: trees of gradients.
    key: random key.
  """
  leaves, structure = jax.tree.flatten(sums, is_leaf=is_leaf)
  others = structure.flatten_up_to(new)
  pairs = [
    _add(a, b, jax.random.fold_in(key, place)) for place, (a, b) in enumerate(zip(leaves, others))
  ]
  return structure.unflatten(pairs)


def _add(a, b, key):
  if not isinstance(a, QuantizedTensor):
    return a + b
  if a.scale is None:
    return a.repack(a.unpack() + b.unpack(), key)
  # A tensor whose first microbatch had gradient 0 has no grid.
  axes = tuple(range(a.scale.ndim, a.data.ndim))
  is_empty = jnp.max(jnp.abs(a.data.astype(jnp.float32)), axis=axes) == 0
  return quantized_tensor.on_grid(
    a.unpack() + b.unpack(), jnp.where(is_empty, b.scale, a.scale), a, key
  )


# --- autoscale of 8-bit sums ---------------------------------------------------------------------


def init_grad_autoscale(quant: Quant | None, microbatches: int) -> dict[str, jax.Array]:
  """{"mu": float32} for 8-bit gradients, else {}: FP8-LM's automatic scaling factor.

  `quantized_tensor.pack` maps a tensor's amax to mu times the format's maximum. At this mu a sum of
  equal microbatches reaches half the maximum, which leaves space for its rounding errors. Sums of
  different microbatches are smaller, and mu grows.
  """
  if quant is None or not quant.format.is_low_bit:
    return {}
  return {"mu": jnp.asarray(_MOST / (2 * microbatches - 1))}


def saturated(tree):
  """Share of elements of 8-bit gradients at the format's maximum."""
  gradients = [g for g in jax.tree.leaves(tree, is_leaf=is_leaf) if is_leaf(g)]
  full = sum(
    jnp.sum(jnp.abs(g.data.astype(jnp.float32)) >= g.quant.format.max, dtype=jnp.float32)
    for g in gradients
  )
  return full / sum(g.data.size for g in gradients)


def next_grad_autoscale(autoscale: dict[str, jax.Array], share):
  """The next step's mu: half of it after an overflow, else slightly more, at most _MOST.

  The controller of FP8-LM §2.1, with two differences. The paper's mu multiplies gradients whose
  scales then follow their own amax, which cancels mu, and may be 2; here it multiplies the scale,
  and more than 1 would clip a single microbatch. The paper sets mu to 1/2 after any overflow; here
  it is halved, so that mu can become small enough for sums of many microbatches.

  Args:
    autoscale: of `init_grad_autoscale` or of the step before.
    share: of `saturated`.
  """
  if not autoscale:
    return autoscale
  mu = autoscale["mu"]
  grown = jnp.minimum(mu * np.float32(4.0 ** (1 / _STEPS)), _MOST)
  return {"mu": jnp.where(share > _OVERFLOW, jnp.maximum(mu / 2, np.float32(2.0**-10)), grown)}
