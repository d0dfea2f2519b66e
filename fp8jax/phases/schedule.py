"""Which recipe every site has at every step: the section `precision` of a config, checked."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from fp8jax import patterns
from fp8jax.phases.policy import Policy

Rules = tuple[tuple[str, str], ...]


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

  def with_changes(
    self, names: Sequence[str], changes: Sequence[tuple[int, Mapping[str, str]]]
  ) -> "Precision":
    """The same with recipes that policies gave to layers' sites.

    Args:
      names: all layers' sites.
      changes: (first step, {layer's site: recipe name}), each in place of the one before.
    """
    if not changes:
      return self
    own, phases = {phase.start for phase in self.phases}, []
    for start in sorted(own | {step for step, _ in changes}):
      rules = self.phases[self.at(start)].rules
      given = [recipes for step, recipes in changes if step <= start]
      if given:
        rules = with_overrides(names, rules, given[-1])
      phases.append(Phase(start, rules, by_policy=start not in own))
    return dataclasses.replace(self, phases=tuple(phases))


def with_overrides(names: Sequence[str], rules: Rules, recipes: Mapping[str, str]) -> Rules:
  """Rules that give these layers' sites these recipes, and all others of `names` what they had."""
  first = tuple((re.escape(name), recipe) for name, recipe in sorted(recipes.items()))
  return first + tuple(patterns.used(rules, [n for n in names if n not in recipes]))
