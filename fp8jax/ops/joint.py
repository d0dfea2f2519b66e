"""Weights that have the first of two levels of scales in common: those that multiply one input.

Servers multiply q, k and v, and gate and up, as one matrix, and NVFP4 has one float32 scale of a
matrix above the E4M3 ones. A Quant with `is_joint` makes it from the largest magnitude of all the
weights that multiply an input with such a Quant. Export takes the same one (export/fp8.py), so that
a folder has the codes that were trained, and servers fuse them as they are.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.ops import stored_params
from fp8jax.ops.site import Site


def lent(ws: Sequence[Any], sites: Sequence[Any], stacked: int = 0) -> Sequence[Any]:
  """The sites of products of one input, those of a joint scale with the amax of their weights.

  Args:
    ws: as they are stored.
    sites: one per weight; one that is lent an amax is claimed here.
    stacked: 1 where both are stacks of layers: each layer has an amax.
  """
  joint = [n for n, site in enumerate(sites) if is_joint(site) and not _is_quantized(ws[n])]
  if len(joint) < 2:  # its own amax
    return sites
  amax = functools.reduce(jnp.maximum, (_amax(ws[n], stacked) for n in joint))
  for n in joint:
    if type(sites[n]) is Site:  # the copy below is another to whoever multiplies
      sites[n].claim()
  return [
    dataclasses.replace(site, joint_amax=amax) if n in joint else site
    for n, site in enumerate(sites)
  ]


def is_joint(site) -> bool:
  """Whether a weight of a site has a joint scale."""
  quants = [recipe.fwd.rhs for recipe in getattr(site, "options", ()) or (site.recipe,)]
  return any(quant is not None and quant.is_joint for quant in quants)


def _is_quantized(w) -> bool:
  """Whether its operands are there already."""
  return isinstance(getattr(w, "stored", w), stored_params.WeightOperands)


def _amax(w, stacked: int):
  """float32 scalar, or [N], of what a GEMM reads; NaN does not count, as in a tile's."""
  magnitude = jnp.abs(jax.lax.stop_gradient(stored_params.compute_copy(w)).astype(jnp.float32))
  over = tuple(range(stacked, magnitude.ndim))
  return jnp.max(jnp.where(jnp.isnan(magnitude), 0.0, magnitude), axis=over)
