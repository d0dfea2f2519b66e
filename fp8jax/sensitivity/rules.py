"""From the sensitivity of sites to `precision.rules` within a budget."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from fp8jax import patterns
from fp8jax.models.config import EVAL_PRECISIONS
from fp8jax.phases.schedule import Rules
from fp8jax.recipe import rules as rules_lib
from fp8jax.sensitivity.study import QuantizedSite

# Shares of FLOPs are sums of floats.
_SLACK = 1e-9


def with_bf16(rules: Rules, names: Sequence[str], chosen: Collection[str], layers: int) -> Rules:
  """`with_recipes` of some sites in BF16."""
  recipe_of = dict.fromkeys(filter(chosen.__contains__, names), EVAL_PRECISIONS[1])
  return with_recipes(rules, names, recipe_of, layers)


def with_recipes(
  rules: Rules, names: Sequence[str], recipe_of: Mapping[str, str], layers: int
) -> Rules:
  """The rules with other recipes for some sites, and without rules that then decide nothing.

  Args:
    rules: as precision.rules has them.
    names: of all sites, one per layer.
    recipe_of: {one of them: name of its recipe}.
  """
  new = []
  for recipe in dict.fromkeys(recipe_of.values()):
    kinds: dict[str, list[int]] = {}
    for name in (name for name in names if recipe_of.get(name) == recipe):
      layer, kind = patterns.of_layer(name)
      if layer is None:
        new.append((re.escape(name), recipe))
      else:
        kinds.setdefault(kind, []).append(layer)
    by_layers: dict[tuple[str, ...], list[str]] = {}
    for kind, numbers in kinds.items():
      by_layers.setdefault(tuple(map(str, sorted(numbers))), []).append(kind)
    for numbers, some in by_layers.items():
      which = ".*" if len(numbers) == layers else _either(numbers)
      new.append((f"layers/{which}/{_either(some)}", recipe))
  return tuple(patterns.used((*new, *rules), names))


def _either(names: Sequence[str]) -> str:
  return names[0] if len(names) == 1 else f"({'|'.join(names)})"


def share(places: Sequence[QuantizedSite], chosen: Collection[str]) -> float:
  """Share of the FLOPs of the sites that some of them have."""
  return sum(p.flops for p in places if p.name in chosen) / sum(p.flops for p in places)


def ordered(places: Sequence[QuantizedSite], damage: Mapping[str, float]) -> list[str]:
  """Names, those first that lose most per FLOP; in the order of the places where they are equal."""
  return [p.name for p in sorted(places, key=lambda p: -damage[p.name] / p.flops)]


def within_flops(places: Sequence[QuantizedSite], order: Sequence[str], least: float) -> list[str]:
  """Sites for BF16 such that the others have at least this share of the FLOPs.

  They are taken in order; one that does not fit any more is passed over.
  """
  flops, total = {p.name: p.flops for p in places}, sum(p.flops for p in places)
  chosen, spent = [], 0.0
  for name in order:
    if spent + flops[name] <= (1 - least + _SLACK) * total:
      chosen.append(name)
      spent += flops[name]
  return chosen


def within_loss(order: Sequence[str], change: Callable[[Sequence[str]], float], most: float):
  """The shortest beginning of `order` for BF16 with which the loss is within a budget.

  By bisection, as if each site more made the loss smaller; within the noise it need not be the
  shortest.

  Args:
    change: of the loss in percent, with so many sites in BF16 and the others as they are: the upper
      end of its interval.
    most: budget in percent.
  """
  low, high = 0, len(order)  # all in BF16 changes nothing
  while low < high:
    middle = (low + high) // 2
    if change(order[:middle]) <= most:
      high = middle
    else:
      low = middle + 1
  return list(order[:high])


def rivals(
  places: Sequence[QuantizedSite], chosen: Collection[str], layers: int, seed: int
) -> dict[str, list[str]]:
  """{arm: sites for BF16} by habit or by lot, each with at least as many FLOPs in BF16."""
  wanted = share(places, chosen) - _SLACK

  def of_layers(first: int, last: int) -> list[str]:
    numbers = {*range(first), *range(layers - last, layers)}
    return [p.name for p in places if p.layer in numbers]

  def fewest(pairs) -> list[str]:
    sets = (of_layers(*pair) for pair in pairs)
    return next((some for some in sets if share(places, some) >= wanted), of_layers(layers, 0))

  counts = range(1, layers + 1)
  others = {
    "first layers": fewest((n, 0) for n in counts),
    "last layers": fewest((0, n) for n in counts),
    "first and last layers": fewest(((n + 1) // 2, n // 2) for n in counts),
  }
  lot, names = [], [p.name for p in places]
  for i in np.random.default_rng(seed).permutation(len(names)):
    if share(places, lot) >= wanted:
      break
    lot.append(names[i])
  return {**others, "sites by lot": lot}


def layers_apart(rules: Rules, names: Sequence[str], layers: int) -> int:
  """Runs of layers that these rules make: each is compiled for itself."""
  apart = map(patterns.of_layer, names)
  paths = {kind if layer is None else f"layers/{kind}" for layer, kind in apart}
  return len(rules_lib.segments(sorted(paths), layers, rules))
