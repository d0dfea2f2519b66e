"""Which recipe every site has at every step: the section `precision` of a config, checked."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from fp8jax import patterns
from fp8jax.phases.policy import Policy
from fp8jax.recipe import rules as rules_lib

Rules = tuple[tuple[str, str], ...]
Changes = Sequence[tuple[int, Mapping[str, str]]]


@dataclasses.dataclass(frozen=True)
class Phase:
  """Steps that share their recipes.

  Attributes:
    start: first step (0-based) of the phase; it lasts until the next one begins.
    rules: (pattern, recipe name), those for the first and last layers in front.
    by_policy: whether a policy began it: sites that keep their recipe then keep their scales. In a
      phase of the configuration all scales are re-initialised.
  """

  start: int
  rules: Rules
  by_policy: bool = False


@dataclasses.dataclass(frozen=True)
class Precision:
  """The recipes of a run, phase by phase; the first phase starts at step 0.

  Attributes:
    phases: those of the configuration, and those that policies began.
    policy: the changes that the run may make to itself.
  """

  phases: tuple[Phase, ...]
  policy: tuple[Policy, ...] = ()

  def at(self, step: int) -> int:
    """Index of the phase that trains the step after `step` steps taken."""
    return max(i for i, phase in enumerate(self.phases) if phase.start <= step)

  def held(self, changes: Changes, step: int) -> dict[str, str]:
    """{layer's site: recipe} of those that policies gave and that hold after `step` steps.

    A later phase of the configuration with another recipe for the site ends some for good, see
    rules.outlasts.

    Args:
      changes: (first step, {layer's site: recipe name}), each in place of the one before.
    """
    given: dict[str, tuple[str, int]] = {}  # with the step that gave it
    for start, recipes in changes:
      if start <= step:
        before = {site: (recipe, since) for site, (recipe, since) in given.items()
                  if recipes.get(site) == recipe}  # fmt: skip
        given = {site: (recipe, start) for site, recipe in recipes.items()} | before
    later = [phase.start for phase in self.phases if phase.start <= step]
    return {
      s: r
      for s, (r, start) in given.items()
      if all(self._holds(s, r, start, at) for at in later if at > start)
    }

  def _holds(self, site: str, recipe: str, start: int, step: int) -> bool:
    then, now = (self._own(site, at) for at in (start, step))
    return now == then or rules_lib.outlasts(recipe, now)

  def _own(self, site: str, step: int) -> str:
    rules = self.phases[self.at(step)].rules
    return rules[patterns.first(rules, site)][1]

  def with_changes(self, names: Sequence[str], changes: Changes) -> "Precision":
    """The same with recipes that policies gave to layers' sites.

    Args:
      names: all layers' sites.
      changes: see `held`.
    """
    if not changes:
      return self
    own, phases = {phase.start for phase in self.phases}, []
    for start in sorted(own | {step for step, _ in changes}):
      rules = self.phases[self.at(start)].rules
      if given := self.held(changes, start):
        rules = with_overrides(names, rules, given)
      phases.append(Phase(start, rules, by_policy=start not in own))
    return dataclasses.replace(self, phases=tuple(phases))


def with_overrides(names: Sequence[str], rules: Rules, recipes: Mapping[str, str]) -> Rules:
  """Rules that give these layers' sites these recipes, and all others of `names` what they had."""
  first = tuple((re.escape(name), recipe) for name, recipe in sorted(recipes.items()))
  return first + tuple(patterns.used(rules, [n for n in names if n not in recipes]))
