"""Formats of gradients between backward pass and update, and their sums over microbatches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.formats import BF16, E4M3
from fp8jax.quantization import quantized_tensor
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.recipe.quant import Quant, Rounding, Scale

PRESETS: dict[str, Quant | None] = {
  "float32": None,
  # Stochastic: sums of many microbatches to the nearest would lose the later ones.
  "bf16_sr": Quant(BF16, scale=Scale.NONE, rounding=Rounding.STOCHASTIC),
  # FP8-LM (arXiv:2310.18313 §2.1): 1 byte, a scale per tensor. Microbatches are rounded to the
  # nearest, their sum stochastically.
  "e4m3": Quant(E4M3),
}

# FP8-LM §2.1: more than this share at the format's maximum is an overflow; without any, the room
# for it is given up again over so many steps.
_OVERFLOW, _STEPS = 1e-5, 1000
# E4M3's second largest number over its largest: a tensor's own largest element comes to lie there,
# and what is at the maximum did not fit.
_MOST = np.float32(416 / 448)


def wide(g):
  """float32 of one gradient."""
  return g.unpack() if isinstance(g, QuantizedTensor) else g.astype(jnp.float32)


def is_leaf(g) -> bool:
  return isinstance(g, QuantizedTensor)


def norm(tree):
  """The global norm of gradients in any format."""
  leaves = jax.tree.leaves(tree, is_leaf=is_leaf)
  return jnp.sqrt(sum(jnp.sum(jnp.square(wide(g))) for g in leaves))


def scaled(tree, factor):
  """Gradients times a scalar; where there are scales, these are multiplied, in float32."""

  def one(g):
    if isinstance(g, QuantizedTensor) and g.scale is not None:
      return dataclasses.replace(g, scale=g.scale * factor)
    return jax.tree.map(lambda x: (x * factor).astype(x.dtype), g)

  return jax.tree.map(one, tree, is_leaf=is_leaf)


def add(sums, new, key):
  """Adds a microbatch's gradients to the sums, in the format of the sums.

  8 bits stay on the grid of the first microbatch; larger sums saturate, and
  `next_grad_autoscale` sees it. Rounding is stochastic, unlike FP8-LM's: to the nearest, a sum of
  16 equal gradients stops at a fifth of its value, since each is less than half a step of the sum
  by then. Each of A additions errs by up to a step, 1/16 to 1/8 of the sum: in the end by about
  0.02 sqrt(A) of a sum of equals, with no sign.

  Args:
    key: a jax.random key.
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
  # A tensor whose first microbatch had no gradient has no grid to offer.
  axes = tuple(range(a.scale.ndim, a.data.ndim))
  is_empty = jnp.max(jnp.abs(a.data.astype(jnp.float32)), axis=axes) == 0
  return quantized_tensor.on_grid(
    a.unpack() + b.unpack(), jnp.where(is_empty, b.scale, a.scale), a, key
  )


# --- room for sums in 8 bits ---------------------------------------------------------------------


def init_grad_autoscale(quant: Quant | None, microbatches: int) -> dict[str, jax.Array]:
  """{"mu": float32} where gradients have 8 bits, else {}: `quantized_tensor.pack`'s room for them.

  A sum of equal microbatches comes to lie at half the maximum, as its roundings add up to some of
  it. Where they differ that is too much room, and mu grows.
  """
  if quant is None or not quant.format.is_narrow:
    return {}
  return {"mu": jnp.asarray(_MOST / (2 * microbatches - 1))}


def saturated(tree):
  """Share of the elements of 8-bit gradients that are at the format's maximum."""
  found = [g for g in jax.tree.leaves(tree, is_leaf=is_leaf) if is_leaf(g)]
  full = sum(
    jnp.sum(jnp.abs(g.data.astype(jnp.float32)) >= g.quant.format.max, dtype=jnp.float32)
    for g in found
  )
  return full / sum(g.data.size for g in found)


def next_grad_autoscale(room: dict[str, jax.Array], share):
  """The next step's: half after an overflow, else a little more, until the largest just fits.

  The paper's controller (FP8-LM §2.1). There mu multiplies gradients whose scales are then chosen
  from their own largest element, which takes mu out again, and may be 2; here it stays in, where
  more than 1 would clip a microbatch by itself. There mu is 1/2 after any overflow; here it is
  halved, so that sums of many microbatches find their room.
  """
  if not room:
    return room
  mu = room["mu"]
  grown = jnp.minimum(mu * np.float32(4.0 ** (1 / _STEPS)), _MOST)
  return {"mu": jnp.where(share > _OVERFLOW, jnp.maximum(mu / 2, np.float32(2.0**-10)), grown)}
