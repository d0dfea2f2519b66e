"""Tensor statistics of a dot's operands, which its site observes."""

import functools

import jax
import jax.numpy as jnp

from fp8jax.ops import collectives, operands
from fp8jax.ops.gemm_spec import GemmSpec, Role, ScalingInputs
from fp8jax.ops.operands import Quantizer
from fp8jax.quantization import tensor_stats
from fp8jax.quantization.block_codes import BlockCodes
from fp8jax.recipe.quant import Quant


def operand_stats(spec: GemmSpec, role: Role, t, inputs: ScalingInputs, amax=None):
  """float32 [S]: statistics of tensor t and of its quantization in this role.

  Args:
    role: X_FWD, W_FWD or G_DGRAD.
    amax: float32 [1] of t, if it is known: a site that observes no more needs nothing else.
  """
  if amax is not None and spec.statistics == tensor_stats.QUIET:
    return amax
  if not spec.observes:
    return jnp.zeros(spec.statistics, jnp.float32)
  if isinstance(t, BlockCodes):
    if spec.statistics == tensor_stats.QUIET:
      return t.amax()
    t = t.unpack()
  s, layout = spec.letters, spec.layout
  letters, contracted = spec.letters_of(role.tensor), spec.contracted(role.gemm)
  is_weight = role.tensor == "w"

  def local(t, inputs):
    if spec.statistics == tensor_stats.QUIET:
      axes_ = layout.weight_axes if is_weight else layout.act_axes
      stats, over = tensor_stats.amax(t)[None], [a for c in letters for a in axes_(c)]
    else:
      if is_weight:
        t = collectives.gather_weight(t, letters, layout)
      unquantized, quantized = (
        operands.activation(t, letters, contracted, s.batch, quantizer, t.dtype, layout).value
        for quantizer in (Quantizer(None), spec.quantizer(role, inputs))
      )
      stats = _statistics(unquantized, quantized, spec.quant(role), spec.statistics)
      over = layout.act_axes_of(letters)
    return stats if layout.is_manual else tensor_stats.over_mesh(stats, tuple(over))

  everywhere = jax.sharding.PartitionSpec()
  of_t = layout.weight_spec(letters) if is_weight else layout.act_spec(letters)
  return collectives.on_mesh(local, layout, (of_t, everywhere), everywhere)(t, inputs)


def _statistics(unquantized, quantized, quant: Quant | None, width: int):
  """float32 [width] of a matrix or a batch of them."""
  one = functools.partial(tensor_stats.statistics, quant=quant, width=width)
  if unquantized.ndim == 2:
    return one(unquantized, quantized)
  return tensor_stats.combine_all(jax.vmap(one)(unquantized, quantized), axis=0)
