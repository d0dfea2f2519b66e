"""Scaling states of a tree of sites: the amaxes and amax histories of delayed and static scales.

They are a part of the training state, by name. A step reads them, returns the sites' tensor
statistics, and `next_states` has `site.update` compute the states of the next step. With a loss
scale, states hold the amaxes of the gradients of the unscaled loss.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
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
    if site.scaling_state is None:
      return site
    return dataclasses.replace(site, scaling_state=scaling_states[site.name])

  return site_lib.tree_map(one, sites)


def next_states(sites, stats: Mapping[str, Any]) -> dict[str, amax_history.ScalingState]:
  """`states` of sites after a step with the observations {name: [..., 3, S]}."""
  return states(site_lib.update(sites, _observed(sites, stats)))


def calibrated(sites, stats: Mapping[str, Any]) -> dict[str, amax_history.ScalingState]:
  """`states` of sites that start from the observations {name: [..., 3, S]}."""
  return states(site_lib.calibrated(sites, _observed(sites, stats)))


def _observed(sites, stats: Mapping[str, Any]):
  return site_lib.tree_map(lambda s: dataclasses.replace(s, tap=stats[s.name]), sites)


def unknown(
  sites, scaling_states: Mapping[str, amax_history.ScalingState], tensors: str = "xwg",
  is_known: Callable[[Any], Any] = amax_history.is_known,
) -> list[str]:  # fmt: skip
  """Layers' sites with a scale, of one of these tensors, for which no batch gave an amax yet: it is
  not finite, or 0 (np.isfinite as `is_known`: not finite). Waits for the states."""
  named, names = site_lib.flatten(sites), []
  for name, state in jax.device_get(dict(scaling_states)).items():
    sources = zip(amax_history.TENSORS, amax_history.sources(named[name].recipe))
    is_made = [t in tensors and isinstance(s, Delayed | Static) for t, s in sources]
    are_known = np.atleast_1d(is_known(state.amax_3[..., is_made]).all(axis=-1))
    names += [layer for layer, known in zip(named[name].layer_names, are_known) if not known]
  return names


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
  named = site_lib.flatten(sites)
  return {name: named[name].recipe.name for name in states(sites)}


def _memory(recipe: Recipe):
  """Of each tensor, whatever must agree for a scaling state to serve another recipe; no margins."""
  kinds = []
  for source in amax_history.sources(recipe):
    if isinstance(source, Delayed | Static):
      source = dataclasses.replace(source, margin=0)
    kinds.append(source)
  return kinds, recipe.history


def carried(
  old_sites, old: Mapping[str, amax_history.ScalingState], new_sites, fresh,
  reset: Collection[str] = (), fill: Collection[str] = (),
) -> dict[str, amax_history.ScalingState]:  # fmt: skip
  """The scaling states of sites after other recipes came, or some are re-initialised.

  Args:
    old_sites, old: before, with their states.
    new_sites, fresh: after, with states made again.
    reset: layers' sites that take the fresh states.
    fill: layers' sites that take the fresh amaxes of those tensors that have none.

  Returns:
    {site: ScalingState}: of a layer the old one where its recipe remembers alike, else the fresh.
    Of a tensor with a fresh amax that is 0 or not finite the old one stays, as in
    amax_history.update.
  """

  def rows_of(name, site, states):
    """(layer's site, its state) of a site."""
    for i, layer in enumerate(site.layer_names):
      yield layer, jax.tree.map(lambda x, i=i: x[i], states[name]) if site.layers else states[name]

  before = {
    layer: (_memory(site.recipe), row)
    for name, site in site_lib.flatten(old_sites).items() if name in old
    for layer, row in rows_of(name, site, old)
  }  # fmt: skip
  result = {}
  for name, site in site_lib.flatten(new_sites).items():
    if site.scaling_state is None:
      continue
    rows = []
    for layer, row in rows_of(name, site, fresh):
      memory, old_row = before.get(layer, (None, None))
      if old_row is not None and memory == _memory(site.recipe):
        if layer in reset:
          row = amax_history.filled(row, old_row)
        else:
          row = amax_history.filled(old_row, row) if layer in fill else old_row
      rows.append(row)
    result[name] = jax.tree.map(lambda *x: jnp.stack(x), *rows) if site.layers else rows[0]
  return result
