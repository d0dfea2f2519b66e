"""Tensor statistics: of a dot's operands, which its site observes, and of activations.

In a loud step the tree of sites also has ActivationSites: taps without a product. A model names the
activations; `observed` looks their sites up, and does nothing in the trees of all other steps.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.ops import collectives, operands, prologue, residuals
from fp8jax.ops.gemm_spec import GemmSpec, Role
from fp8jax.ops.quantizer import Quantizer
from fp8jax.ops.site import ActivationSite, ScalingInputs
from fp8jax.ops.stored_params import WeightOperands
from fp8jax.quantization import scaled_matrix, tensor_stats, vectorized
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe.quant import Quant

_EVERYWHERE = jax.sharding.PartitionSpec()


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
  if isinstance(t, WeightOperands):
    return t.stats
  t = scaled_matrix.taken(t)
  if isinstance(t, StoredMatrix):
    if spec.statistics == tensor_stats.QUIET:
      return t.amax()
    t = t.unpack()
  (letters, _, _), layout = spec.letters_of(role), spec.layout
  is_weight = role.tensor == "w"

  def local(t, inputs):
    if spec.statistics == tensor_stats.QUIET:
      axes_ = layout.weight_axes if is_weight else layout.act_axes
      amax = vectorized.amax if {*spec.backends} & {*gemm_api.WITH_VALUES} else tensor_stats.amax
      return _over_mesh(amax(t)[None], layout, [a for c in letters for a in axes_(c)])
    if is_weight:
      t = collectives.gather_weight(t, letters, layout)
    quantizer = Quantizer.of(spec, role, inputs)
    unquantized, quantized = (
      operands.matrix_of(spec, role, t, q, t.dtype).value for q in (Quantizer(None), quantizer)
    )
    rotated = quantizer.rotated(unquantized)
    stats = _statistics(rotated, quantized, spec.quant(role), spec.statistics)
    if spec.gemm(role.gemm).rotates(role.side):
      stats = tensor_stats.with_range_of(unquantized, stats)
    return _over_mesh(stats, layout, layout.act_axes_of(letters))

  of_t = layout.weight_spec(letters) if is_weight else layout.act_spec(letters)
  return collectives.on_mesh(local, layout, (of_t, _EVERYWHERE), _EVERYWHERE)(t, inputs)


def _statistics(unquantized, quantized, quant: Quant | None, width: int):
  """float32 [width] of a matrix or a batch of them."""
  one = functools.partial(tensor_stats.statistics, quant=quant, width=width)
  if unquantized.ndim == 2:
    return one(unquantized, quantized)
  return tensor_stats.combine_all(jax.vmap(one)(unquantized, quantized))


def _over_mesh(stats, layout: axes.Layout, over):
  """Statistics of this device's part -> those of all parts; the caller's task if it is manual."""
  return stats if layout.is_manual else tensor_stats.over_mesh(stats, tuple(dict.fromkeys(over)))


# --- activations ---------------------------------------------------------------------------------


def observed(x, sites: Mapping[str, Any], name: str) -> Any:
  """x, observed by sites[name] if the step records tensor statistics; the same numbers.

  The forward pass observes x, the backward pass the gradient of x if the site asks for it.

  Args:
    x: activation, or a Prologue, which stays one: a linear layer may still fuse it. Then the array
      is computed once more for the observation.
    sites: of the layer, or of the model.
    name: of the activation's site.
  """
  site = sites.get(name)
  if site is None:
    return x
  site.claim()
  array = prologue.value(jax.lax.stop_gradient(x))
  stats_x = activation_stats(array, site.letters, site.layout)
  # Saved by name: a backward pass that computes x again then need not observe it again.
  stats_x = residuals.named(stats_x, residuals.NAME)
  if isinstance(x, prologue.Prologue):
    source = _with_tap(None, x.sources[0], site.tap, stats_x)
    return dataclasses.replace(x, sources=(source, *x.sources[1:]))
  of_g = (site.letters, site.layout) if "g" in site.tensors else None
  return _with_tap(of_g, x, site.tap, stats_x)


def activation_stats(x, letters: str, layout: axes.Layout):
  """float32 [LOUD]: tensor_stats.statistics of an activation, without those of a quantization."""

  def local(x):
    stats = tensor_stats.statistics(x.reshape(-1, x.shape[-1]), None, None)
    return _over_mesh(stats, layout, layout.act_axes_of(letters))

  return collectives.on_mesh(local, layout, (layout.act_spec(letters),), _EVERYWHERE)(x)


def logits_stats(logits, site: ActivationSite | None):
  """float32 [1, LOUD] of a chunk of logits on this device; None without a site."""
  if site is None:
    return None
  return activation_stats(logits, site.letters, site.layout.manual())[None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_tap(of_g, x, tap, stats_x):
  """x; the cotangent of the tap is stats_x and, with of_g (letters, layout), those of x's."""
  del of_g, tap, stats_x
  return x


def _fwd(of_g, x, tap, stats_x):
  del of_g, tap
  return x, stats_x


def _bwd(of_g, stats_x, g):
  rows = [stats_x] if of_g is None else [stats_x, activation_stats(g, *of_g)]
  return g, jnp.stack(rows), jnp.zeros_like(stats_x)


_with_tap.defvjp(_fwd, _bwd)
