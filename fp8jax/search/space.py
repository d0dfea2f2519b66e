"""Spaces that are searched: sites that share a decision, options, and the cost of each."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from fp8jax import patterns
from fp8jax.ops import site as site_lib
from fp8jax.ops import switch
from fp8jax.recipe.gemm import Recipe
from fp8jax.search import cost


@dataclasses.dataclass(frozen=True)
class Space:
  """A search space.

  Attributes:
    decision_of: {site of a layer: number of its decision}.
    costs: float64, BOPs as shares of all the sites in BF16.
  """

  options: tuple[Recipe, ...]
  decisions: tuple[str, ...]
  decision_of: Mapping[str, int]
  costs: np.ndarray

  def with_choice(self, sites, choice):
    """A tree of sites with the options that are chosen for those of this space."""

    def one(site):
      numbers = [self.decision_of.get(name, -1) for name in site.layer_names]
      if min(numbers) < 0:
        return None
      return choice[np.array(numbers)] if site.layers else choice[numbers[0]]

    return switch.with_options(sites, self.options, site_lib.tree_map(one, sites))

  def cost(self, choice: Sequence[int] | np.ndarray) -> float:
    """BOPs of a choice, as a share of BF16's."""
    return float(self.costs[np.arange(len(self.decisions)), np.asarray(choice)].sum())

  def assigned(self, choice: Sequence[int] | np.ndarray) -> dict[str, str]:
    """{site of a layer: name of the recipe} of a choice."""
    return {name: self.options[int(choice[d])].name for name, d in self.decision_of.items()}


def make(macs: Mapping[str, float], options: Sequence[Recipe], decisions: str = "layer") -> Space:
  """The space of some sites.

  Args:
    macs: {site of a layer: multiplications of its forward product}.
    decisions: "layer", "block" or "single", see Search.decisions.
  """

  def decision(name: str) -> str:
    layer, _ = patterns.of_layer(name)
    return {"single": "all", "block": name if layer is None else f"layers/{layer}"}.get(
      decisions, name
    )

  names = list(dict.fromkeys(map(decision, macs)))
  decision_of = {name: names.index(decision(name)) for name in macs}
  of_sites = cost.table(list(macs.values()), options)
  costs = np.zeros((len(names), len(options)))
  np.add.at(costs, list(decision_of.values()), of_sites)
  return Space(tuple(options), tuple(names), decision_of, costs)


def is_searched(site: site_lib.Site) -> bool:
  """Whether a site of the trainer's model takes part: `dot` multiplies it, which reads options."""
  return bool(site.layers) and site.recipe.fwd.is_quantized
