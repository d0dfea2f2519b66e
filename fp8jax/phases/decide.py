"""Decisions of policies, without a device: state and observation in, state and actions out.

All that a decision depends on is in `PolicyState`, which every checkpoint holds: a run that is
interrupted decides as the same run uninterrupted.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np

from fp8jax import patterns
from fp8jax.phases.policy import ANY, Policy, Refresh, RollBack, SwitchRecipe, WidenMargin, name_of
from fp8jax.recipe import rules

# The smallest standard deviation of losses, as a share of their mean: losses that hardly differ
# would make a jump of any difference.
_LEAST_SPREAD = 1e-3


@dataclasses.dataclass(frozen=True)
class Event:
  """A row of the events of a run: the step, the place, and a sentence."""

  step: int
  place: str
  text: str

  @property
  def row(self) -> dict[str, str]:
    return {"place": self.place, "text": self.text}


@dataclasses.dataclass(frozen=True)
class PolicyState:
  """The numbers that policies remember between steps; JSON-able by `to_json`.

  Attributes:
    losses: the last ones, of roll_back's window.
    looks: {policy: {layer's site: whether its alarm rang, of the last looks, oldest first}}.
    away: {policy: {layer's site: (override that it had, or "", quiet looks since)}} of sites that
      switch_recipe switched.
    counts: {policy: {layer's site: actions so far}}.
    recipes: (first step, {layer's site: recipe}) of every change, each in place of the one before.
    refresh: layers' sites whose scales begin anew before the next step.
    skipped: numbers of batches that are left out; a roll-back keeps them.
    undone: events of roll-backs, which a roll-back keeps.
  """

  losses: tuple[float, ...] = ()
  looks: Mapping[str, Mapping[str, tuple[bool, ...]]] = dataclasses.field(default_factory=dict)
  away: Mapping[str, Mapping[str, tuple[str, int]]] = dataclasses.field(default_factory=dict)
  counts: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
  recipes: tuple[tuple[int, Mapping[str, str]], ...] = ()
  refresh: tuple[str, ...] = ()
  skipped: tuple[int, ...] = ()
  undone: tuple[Event, ...] = ()

  def to_json(self) -> dict[str, Any]:
    """Plain lists and dictionaries; `from_json` inverts it exactly."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, plain: Mapping[str, Any]) -> "PolicyState":
    """The inverse of `to_json`, also after a way through JSON."""
    return msgspec.convert(plain, cls)

  @property
  def overrides(self) -> Mapping[str, str]:
    """{layer's site: recipe} that policies gave, at present."""
    return self.recipes[-1][1] if self.recipes else {}


def num_batches_read(step: int, skipped: Collection[int]) -> int:
  """Batches read after so many steps, including skipped ones."""
  for number in sorted(skipped):
    step += number < step
  return step


def z_score(policy: RollBack, before: PolicyState, loss: float) -> float:
  """Standard deviations of a loss above the last ones; 0 while the window is not full."""
  if not math.isfinite(loss):
    return math.inf
  if len(before.losses) < policy.window:
    return 0.0
  mean, spread = float(np.mean(before.losses)), float(np.std(before.losses))
  return (loss - mean) / max(spread, _LEAST_SPREAD * abs(mean))


def roll_back(policies: tuple[Policy, ...]) -> RollBack | None:
  """The policy that judges losses, if there is one."""
  return next((p for p in policies if isinstance(p, RollBack)), None)


def with_loss(policies: tuple[Policy, ...], before: PolicyState, loss: float) -> PolicyState:
  """The state after a step whose loss is no jump."""
  policy = roll_back(policies)
  if policy is None or not math.isfinite(loss):
    return before
  return dataclasses.replace(before, losses=(*before.losses, loss)[-policy.window :])


def rolled_back(
  policy: RollBack, at: int, z: float, now: PolicyState, then: PolicyState, to: int
) -> PolicyState:
  """The policies' state of a checkpoint that the run goes on from.

  Args:
    at: steps taken when the loss jumped.
    z: of that loss.
    now, then: the state before the roll-back, and the checkpoint's.
    to: step of the checkpoint.
  """
  steps = range(max(at - policy.skip, 0), at)
  batches = [num_batches_read(step + 1, now.skipped) - 1 for step in steps]
  how = f"is {z:.1f} standard deviations above the last ones"
  if math.isinf(z):
    how = "or its gradient or a GEMM's operand is not finite"
  text = (
    f"{name_of(policy)}: the loss of step {at} {how}; back to the checkpoint of step {to}, "
    f"batches {', '.join(map(str, batches))} are left out"
  )
  return dataclasses.replace(
    then,
    skipped=tuple(sorted({*now.skipped, *batches})),
    undone=(*now.undone, Event(to + 1, "loss", text)),
  )


def due(policies: tuple[Policy, ...], step: int) -> list[Refresh]:
  """The policies that refresh scales before the step after `step` steps by their interval."""
  return [p for p in policies if isinstance(p, Refresh) and p.every and step % p.every == 0 < step]


def after_statistics(
  policies: tuple[Policy, ...], before: PolicyState, step: int, firing: Collection[tuple[str, str]],
  recipe_of: Mapping[str, str],
) -> tuple[PolicyState, list[Event]]:  # fmt: skip
  """The decisions after a look at the tensor statistics.

  Args:
    step: steps taken.
    firing: (layer's site, statistic) of all alarms that ring.
    recipe_of: {layer's site: recipe name} of the step.

  Returns:
    The state, with new `recipes` and `refresh`, and an event for every decision.
  """
  draft = _Draft(before, step, firing, recipe_of)
  for policy in policies:
    if isinstance(policy, Refresh) and policy.alarm:
      draft.refresh(policy)
    elif isinstance(policy, WidenMargin):
      draft.widen(policy)
    elif isinstance(policy, SwitchRecipe):
      draft.switch(policy)
  return draft.finish(), draft.events


class _Draft:
  """Policy state being updated."""

  def __init__(self, before: PolicyState, step: int, firing, recipe_of: Mapping[str, str]):
    self.before, self.step, self.firing = before, step, firing
    self.events: list[Event] = []
    self.recipe_of, self.given = dict(recipe_of), dict(before.overrides)
    self.fresh: list[str] = []
    self.looks, self.away, self.counts = dict(before.looks), dict(before.away), dict(before.counts)

  def finish(self) -> PolicyState:
    recipes = self.before.recipes
    if self.given != self.before.overrides:
      recipes = (*recipes, (self.step, self.given))
    refresh = tuple(sorted({*self.before.refresh, *self.fresh}))
    return dataclasses.replace(
      self.before, looks=self.looks, away=self.away, counts=self.counts, recipes=recipes,
      refresh=refresh,
    )  # fmt: skip

  def refresh(self, policy: Refresh):
    sites = [site for site in self._sites(policy) if self._rings(policy, site)]
    sites = [site for site in sites if rules.recipe_by_name(self.recipe_of[site]).is_stateful]
    self.fresh += sites
    for site in sites:
      self._say(policy, site, f"{policy.alarm} rang: its scales begin anew from the next batch")

  def widen(self, policy: WidenMargin):
    for site in self._often(policy):
      wider = rules.with_wider_margin(self.recipe_of[site], policy.by, policy.most)
      if wider is not None:
        self._give(site, wider)
        self._say(policy, site, f"{self._why(policy)}: recipe {wider} from here on")

  def switch(self, policy: SwitchRecipe):
    key = name_of(policy)
    away, counts = dict(self.away.get(key, {})), dict(self.counts.get(key, {}))
    for site, (had, quiet) in list(away.items()):
      quiet = 0 if self._rings(policy, site) else quiet + 1
      away[site] = (had, quiet)
      if policy.back_after and quiet >= policy.back_after:
        del away[site]
        self._give(site, had)
        self._say(policy, site, f"{quiet} looks without an alarm: its own recipe again")
    for site in self._often(policy):
      may = site not in away and self.recipe_of.get(site) != policy.to
      if may and counts.get(site, 0) < policy.most:
        away[site], counts[site] = (self.given.get(site, ""), 0), counts.get(site, 0) + 1
        self._give(site, policy.to)
        self._say(policy, site, f"{self._why(policy)}: recipe {policy.to} from here on")
    self.away[key], self.counts[key] = away, counts

  def _sites(self, policy) -> list[str]:
    return patterns.matches(policy.sites, self.recipe_of)

  def _rings(self, policy, site: str) -> bool:
    return any(s == site and policy.alarm in (ANY, statistic) for s, statistic in self.firing)

  def _often(self, policy: WidenMargin | SwitchRecipe) -> list[str]:
    """Sites whose alarm rang in k of the last looks; they are counted from nothing again."""
    key, often = name_of(policy), []
    looks = dict(self.looks.get(key, {}))
    for site in self._sites(policy):
      looks[site] = (*looks.get(site, ()), self._rings(policy, site))[-policy.looks :]
      if sum(looks[site]) >= policy.k:
        often.append(site)
        looks[site] = ()
    self.looks[key] = looks
    return often

  def _give(self, site: str, recipe: str):
    """`recipe` from the next step on; "" is the configuration's."""
    self.given.pop(site, None)
    if recipe:
      self.given[site] = recipe

  def _why(self, policy: WidenMargin | SwitchRecipe) -> str:
    return f"{policy.alarm} rang in {policy.k} of the last {policy.looks} looks"

  def _say(self, policy: Policy, site: str, text: str):
    self.events.append(Event(self.step, site, f"{name_of(policy)}: {text}"))
