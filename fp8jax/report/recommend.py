"""Formats and margins that the recorded ranges of a run ask for, by layer's site and tensor.

A scale per tensor is assumed, as delayed and static scales have it. Steps that were not recorded
are not known: where snapshots are several steps apart, the amax moves less between two steps.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fp8jax import patterns
from fp8jax.formats import E4M3, E5M2, Format
from fp8jax.quantization.amax_history import TENSORS
from fp8jax.recipe import library, rules
from fp8jax.report.files import Snapshots

# Snapshots of a tensor below which nothing is recommended.
LEAST_SNAPSHOTS = 8
# This share of the nonzero elements may lie below the format's range.
UNDERFLOW = 0.01
_FORMATS = (E4M3, E5M2)  # the one with more mantissa bits first
# Recipes with a scale per tensor that rules may name, the narrower range first.
_RECIPES = ("tensor_delayed", "tensor_current_e5m2")


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """The ranges of a tensor, and what holds them.

  Attributes:
    name, tensor: the layer's site, and "x", "w" or "g".
    snapshots: with an amax that is positive and finite.
    amax: 50 %, 99 % and 100 % quantiles of its log2 over them.
    jump: the largest log2 ratio of one snapshot's amax to the one's before.
    delayed, static: margins: the log2 ratio of an amax to the largest before, and to the first,
      rounded up, at least 0; None where there are too few snapshots.
    octaves: exponents that the format must hold, the delayed margin included; None where none were
      counted or snapshots are too few.
  """

  name: str
  tensor: str
  snapshots: int
  amax: tuple[float, ...]
  jump: float
  delayed: int | None
  static: int | None
  octaves: int | None

  @property
  def format(self) -> str:
    """Name of the format, "bf16" where no 8 bits suffice, "" without a recommendation."""
    if self.octaves is None:
      return ""
    return next((f.name for f in _FORMATS if octaves_of(f) >= self.octaves), "bf16")


def octaves_of(format: Format) -> int:
  """Exponents of its numbers, those of subnormal ones among them."""
  return format.max_exponent - math.frexp(format.smallest)[1] + 2


def recommendations(snapshots: Snapshots, exponents: Mapping[int, Mapping[str, Any]]):
  """Recommendations for every tensor of every GEMM's site, in the order of the snapshots' cells; of
  exponents see files.RunFiles."""
  weights = {(c.site, c.layer) for c in snapshots.cells if c.tensor == "w"}  # a GEMM has one
  rows = []
  for j, cell in enumerate(snapshots.cells):
    if (cell.site, cell.layer) in weights and cell.tensor in TENSORS:
      name = cell.site if cell.layer is None else f"layers/{cell.layer}/{cell.site}"
      counted = [
        at[name][cell.tensor] for at in exponents.values() if cell.tensor in at.get(name, ())
      ]
      rows.append(of_series(name, cell.tensor, snapshots.values["amax"][:, j], counted))
  return rows


def of_series(
  name: str, tensor: str, amaxes: np.ndarray, counted: Sequence[Mapping[str, Any]]
) -> Recommendation:
  """A recommendation.

  Args:
    amaxes: of the snapshots, in their order.
    counted: tensor_stats.exponents of some of them.
  """
  a = amaxes[np.isfinite(amaxes) & (amaxes > 0)]
  if len(a) < LEAST_SNAPSHOTS:
    return Recommendation(name, tensor, len(a), (), math.nan, None, None, None)
  logs = np.log2(a)
  quantiles = tuple(float(q) for q in np.quantile(logs, (0.5, 0.99, 1)))
  largest = np.maximum.accumulate(a)
  delayed = max(0, *(_log2_up(x / old) for x, old in zip(a[1:], largest)))
  static = max(0, _log2_up(largest[-1] / a[0]))
  spans = [_octaves(of) for of in counted if of["shares"]]
  octaves = max(spans) + delayed if spans else None
  jump = float(np.max(np.diff(logs)))
  return Recommendation(name, tensor, len(a), quantiles, jump, delayed, static, octaves)


def _log2_up(ratio: float) -> int:
  """ceil(log2(ratio)), exact at powers of two."""
  mantissa, exponent = math.frexp(ratio)
  return exponent - (mantissa == 0.5)


def _octaves(of: Mapping[str, Any]) -> int:
  """Exponents from the largest down to where no more than UNDERFLOW of the elements lie below."""
  below = np.cumsum(of["shares"]) / np.sum(of["shares"])
  return len(below) - int(np.count_nonzero(below <= UNDERFLOW))


def table(rows: Sequence[Recommendation]) -> list[tuple[Any, ...]]:
  """A row per site and tensor over its layers: the widest needs of any."""
  groups = collections.defaultdict(list)
  for of in rows:
    groups[patterns.of_layer(of.name)[1], of.tensor].append(of)
  return [(site, tensor, *_row(members)) for (site, tensor), members in groups.items()]


def _row(members: list[Recommendation]) -> tuple[Any, ...]:
  n = min(of.snapshots for of in members)
  known = [of for of in members if of.delayed is not None]
  if len(known) < len(members):
    return (n, "", "", "", f"no recommendation: fewer than {LEAST_SNAPSHOTS} snapshots", "", "")
  most = [max(of.amax[i] for of in known) for i in range(3)]
  octaves = [of.octaves for of in known if of.octaves is not None]
  widest = max(known, key=lambda of: of.octaves or 0)
  return (
    n, " / ".join(f"{q:.1f}" for q in most), f"{max(of.jump for of in known):+.2f}",
    max(octaves) if octaves else "", widest.format or "no recommendation: no exponents counted",
    max(of.delayed or 0 for of in known), max(of.static or 0 for of in known),
  )  # fmt: skip


COLUMNS = ("site", "tensor", "snapshots", "log2 amax: 50 % / 99 % / largest", "largest jump",
           "octaves", "format", "margin, delayed", "margin, static")  # fmt: skip


def precision_rules(rules_: Sequence[Recommendation], own: Sequence[Sequence[str]]) -> str:
  """precision.rules of the recommended recipes; sites outside of layers keep their own.

  Args:
    own: the run's rules, which sites without a recommendation keep, too.

  Returns:
    A line of Python, or "" where nothing is recommended.
  """
  by_site = collections.defaultdict(list)
  for of in rules_:
    by_site[of.name].append(of)
  named, kept = collections.defaultdict(list), []
  for name, members in by_site.items():
    recipe = _recipe(members) if patterns.of_layer(name)[0] is not None else ""
    if recipe:
      named[recipe].append(name)
    else:
      kept.append(name)
  if not named:
    return ""
  made = [("|".join(names), recipe) for recipe, names in named.items()]
  made += [tuple(rule) for rule in patterns.used(own, kept)]
  return f"c.precision.rules = {tuple(made)!r}"


def _recipe(members: Sequence[Recommendation]) -> str:
  """The first of _RECIPES that holds all tensors of a site, else bf16; "" where one is unknown."""
  if any(of.octaves is None or of.delayed is None for of in members):
    return ""
  for name in _RECIPES:
    if name in library.RECIPES:
      recipe = library.RECIPES[name]
      held = [
        all((of.octaves or 0) <= octaves_of(use.format) for use in recipe.uses()[of.tensor])
        for of in members
      ]
      if all(held):
        margin = max(of.delayed or 0 for of in members)
        stated = f"{name}(margin={margin})" if margin and recipe.is_stateful else name
        return rules.recipe_by_name(stated).name
  return "bf16"
