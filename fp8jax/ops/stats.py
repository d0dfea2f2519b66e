"""What a dot's operands are like, seen by whoever watches its site."""

import functools

import jax
import jax.numpy as jnp

from fp8jax.ops import collectives, operands
from fp8jax.ops.gemm_spec import GemmSpec, ScalingInputs
from fp8jax.ops.operands import Quantizer
from fp8jax.quantization import tensor_stats
from fp8jax.recipe.quant import Quant


def operand_stats(plan: GemmSpec, role: str, t, inputs: ScalingInputs, amax=None):
  """float32 [S]: what tensor t is like, and what its first narrowing does to it.

  Args:
    role: "x", "w" or "y" (for the gradient g of y).
    amax: float32 [1] of t, if it is known: a quiet look then needs nothing else.
  """
  if amax is not None and plan.statistics == tensor_stats.QUIET:
    return amax
  if not plan.is_watched:
    return jnp.zeros(plan.statistics, jnp.float32)
  s, layout = plan.letters, plan.layout
  letters = getattr(s, role)
  tensor, which = {"x": (0, 0), "w": (1, 0), "y": (2, 1)}[role]
  contracted, quant = plan.contracted(which), plan.quant(tensor, which)

  def local(t, inputs):
    if plan.statistics == tensor_stats.QUIET:
      axes_ = layout.weight_axes if role == "w" else layout.act_axes
      seen, over = tensor_stats.amax(t)[None], [a for c in letters for a in axes_(c)]
    else:
      if role == "w":
        t = collectives.gather_weight(t, letters, layout)
      wide, narrow = (
        operands.activation(t, letters, contracted, s.batch, how, t.dtype, layout).value
        for how in (Quantizer(None), plan.narrow(inputs, tensor, which))
      )
      seen, over = _statistics(wide, narrow, quant), layout.act_axes_of(letters)
    return seen if layout.is_manual else tensor_stats.over_mesh(seen, tuple(over))

  everywhere = jax.sharding.PartitionSpec()
  spec = layout.weight_spec(letters) if role == "w" else layout.act_spec(letters)
  return collectives.on_mesh(local, layout, (spec, everywhere), everywhere)(t, inputs)


def _statistics(wide, narrow, quant: Quant | None):
  """float32 [LOUD] of a matrix or a batch of them."""
  one = functools.partial(tensor_stats.statistics, quant=quant)
  if wide.ndim == 2:
    return one(wide, narrow)
  return tensor_stats.combine_all(jax.vmap(one)(wide, narrow), axis=0)
