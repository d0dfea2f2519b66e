"""Scaling states of a tree of sites: the amaxes and amax histories of delayed and static scales.

They are a part of the training state, by name. A step reads them, returns the sites' tensor
statistics, and `next_states` has `site.update` compute the states of the next step. With a loss
scale, states hold the amaxes of the gradients of the unscaled loss.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.ops import site as site_lib
from fp8jax.quantization import amax_history, tensor_stats
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import Delayed, Static


def states(sites) -> dict[str, amax_history.ScalingState]:
  """{site name: ScalingState} of delayed and static scales: a part of the training state."""
  return {
    name: s.scaling_state
    for name, s in site_lib.flatten(sites).items()
    if s.scaling_state is not None
  }


def with_states(sites, scaling_states: Mapping[str, amax_history.ScalingState]):
  """The sites with these scaling states."""

  def one(site):
    return (
      dataclasses.replace(site, scaling_state=scaling_states[site.name])
      if site.scaling_state
      else site
    )

  return site_lib.tree_map(one, sites)


def next_states(sites, stats: Mapping[str, Any]) -> dict[str, amax_history.ScalingState]:
  """`states` of sites after a step with the observations {name: [..., 3, S]}."""
  return states(site_lib.update(sites, _observed(sites, stats)))


def calibrated(sites, stats: Mapping[str, Any]) -> dict[str, amax_history.ScalingState]:
  """`states` of sites that start from the observations {name: [..., 3, S]}."""
  return states(site_lib.calibrated(sites, _observed(sites, stats)))


def _observed(sites, stats: Mapping[str, Any]):
  return site_lib.tree_map(lambda s: dataclasses.replace(s, tap=stats[s.name]), sites)


# The gradient of the head is that of the sum over tokens, before any factor on the loss
# (ops/cross_entropy.py).
_HEAD = "head"


def with_scaled_gradients(sites, factor):
  """The sites with amaxes of gradients multiplied by `factor`, the loss scale.

  Scaling states hold the amaxes of the unscaled loss, whatever the loss scale was at the time.
  """
  factors = jnp.stack([1.0, 1.0, factor])

  def one(site):
    if site.scaling_state is None or site.name == _HEAD:
      return site
    scaling_state = dataclasses.replace(
      site.scaling_state, amax_3=site.scaling_state.amax_3 * factors
    )
    return dataclasses.replace(site, scaling_state=scaling_state)

  return site_lib.tree_map(one, sites)


def with_unscaled_gradients(sites, stats, factor):
  """Observations, a tree like `taps(sites)`, divided by the loss scale `factor`."""

  def one(site, tap):
    if site.name == _HEAD or "g" not in site.tensors:
      return tap
    g = site.tensors.index("g")
    return tap.at[..., g, :].set(tensor_stats.rescaled(tap[..., g, :], 1 / factor))

  return site_lib.tree_map(one, sites, stats)


def recipes(sites) -> dict[str, str]:
  """{site: recipe} of sites with a scaling state, which is valid for the same recipe alone."""
  return {
    name: s.recipe.name
    for name, s in site_lib.flatten(sites).items()
    if s.scaling_state is not None
  }


def _memory(recipe: Recipe):
  """Of each tensor, whatever must agree for a scaling state to serve another recipe; no margins."""
  kinds = []
  for source in amax_history.sources(recipe):
    if isinstance(source, Delayed | Static):
      source = dataclasses.replace(source, margin=0)
    kinds.append(source)
  return kinds, recipe.history


def carried(
  old_sites, old: Mapping[str, amax_history.ScalingState], new_sites, fresh
) -> dict[str, amax_history.ScalingState]:
  """The scaling states of sites after some layers' sites got other recipes.

  Args:
    old_sites, old: before, with their states.
    new_sites, fresh: after, with states made anew.

  Returns:
    {site: ScalingState}: of a layer the old one where its recipe remembers alike, else the fresh.
  """
  rows = {}
  for name, site in site_lib.flatten(old_sites).items():
    for i, layer in enumerate(site.layer_names if name in old else ()):
      row = jax.tree.map(lambda x, i=i: x[i], old[name]) if site.layers else old[name]
      rows[layer] = (_memory(site.recipe), row)
  result = {}
  for name, site in site_lib.flatten(new_sites).items():
    if site.scaling_state is None:
      continue
    found = []
    for i, layer in enumerate(site.layer_names):
      memory, row = rows.get(layer, (None, None))
      if memory != _memory(site.recipe):
        row = jax.tree.map(lambda x, i=i: x[i], fresh[name]) if site.layers else fresh[name]
      found.append(row)
    result[name] = jax.tree.map(lambda *x: jnp.stack(x), *found) if site.layers else found[0]
  return result


def replaced(
  sites, old: Mapping[str, amax_history.ScalingState], fresh, layers: Collection[str]
) -> dict[str, amax_history.ScalingState]:
  """The old scaling states, those of the layers' sites `layers` replaced by the fresh ones."""
  result = {}
  for name, site in site_lib.flatten(sites).items():
    if site.scaling_state is None:
      continue
    mask = np.array([layer in layers for layer in site.layer_names])
    mask = mask if site.layers else mask[0]

    def one(new, before, mask=mask):
      return jnp.where(mask.reshape(mask.shape + (1,) * (new.ndim - mask.ndim)), new, before)

    result[name] = jax.tree.map(one, fresh[name], old[name])
  return result
