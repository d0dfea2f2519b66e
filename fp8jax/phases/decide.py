"""Decisions of policies, without a device: state and observation in, state and actions out.

All that a decision depends on is in `PolicyState`, which every checkpoint holds: a run that is
interrupted decides as the same run uninterrupted.
"""

import dataclasses
import math
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from fp8jax import patterns
from fp8jax.phases.policy import (
  ANY,
  LowerRate,
  Policy,
  Refresh,
  RollBack,
  SwitchRecipe,
  WidenMargin,
  alarm_of,
  is_accuracy,
  name_of,
)
from fp8jax.phases.trend import Trend
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
class Undo:
  """A roll-back to be done.

  Attributes:
    at: steps taken.
    skip: batches before it that are left out.
    why: the end of the sentence "... of step 9".
    to: step of the checkpoint.
  """

  policy: RollBack
  at: int
  skip: int
  why: str
  to: int


@dataclasses.dataclass(frozen=True)
class PolicyState:
  """The numbers that policies remember between steps; JSON-able by `to_json`.

  Attributes:
    losses: the last ones, of roll_back's window.
    looks: {policy: {layer's site: whether its alarm fired, of the last snapshots, oldest first}}.
    away: {policy: {layer's site: (override that it had, or "", quiet snapshots since)}} of sites
      that switch_recipe switched.
    counts: {policy: {layer's site: actions so far}}.
    recipes: (first step, {layer's site: recipe}) of every change, each in place of the one before.
    refresh: layers' sites whose scales are re-initialised before the next step.
    skipped: numbers of batches that are left out; a roll-back keeps them.
    undone: events of roll-backs, which a roll-back keeps.
    trends: {policy: of its metric}.
    rate_scale: factor on the learning rate.
  """

  losses: tuple[float, ...] = ()
  looks: Mapping[str, Mapping[str, tuple[bool, ...]]] = dataclasses.field(default_factory=dict)
  away: Mapping[str, Mapping[str, tuple[str, int]]] = dataclasses.field(default_factory=dict)
  counts: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
  recipes: tuple[tuple[int, Mapping[str, str]], ...] = ()
  refresh: tuple[str, ...] = ()
  skipped: tuple[int, ...] = ()
  undone: tuple[Event, ...] = ()
  trends: Mapping[str, Trend] = dataclasses.field(default_factory=dict)
  rate_scale: float = 1.0

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


def has_roll_back(policies: tuple[Policy, ...]) -> bool:
  """Whether the run may go back to a checkpoint."""
  return any(isinstance(p, RollBack) for p in policies)


def roll_back(policies: tuple[Policy, ...]) -> RollBack | None:
  """The policy that judges the loss of every step, if there is one."""
  return next((p for p in policies if isinstance(p, RollBack) and not p.metric), None)


def with_loss(policies: tuple[Policy, ...], before: PolicyState, loss: float) -> PolicyState:
  """The state after a step whose loss is no jump."""
  policy = roll_back(policies)
  if policy is None or not math.isfinite(loss):
    return before
  return dataclasses.replace(before, losses=(*before.losses, loss)[-policy.window :])


def why_jump(z: float) -> str:
  """The reason of a roll-back after a loss of this score."""
  if math.isinf(z):
    return "or its gradient or a GEMM's operand is not finite"
  return f"is {z:.1f} standard deviations above the last ones"


def rolled_back(undo: Undo, now: PolicyState, then: PolicyState) -> PolicyState:
  """The policies' state of a checkpoint that the run goes on from.

  Args:
    now, then: the state before the roll-back, and the checkpoint's.
  """
  steps = range(max(undo.at - undo.skip, 0), undo.at)
  batches = [num_batches_read(step + 1, now.skipped) - 1 for step in steps]
  named = ", ".join(map(str, batches)) if len(batches) <= 8 else f"{batches[0]} to {batches[-1]}"
  text = (
    f"{name_of(undo.policy)}: the {undo.policy.metric or 'loss'} of step {undo.at} {undo.why}; "
    f"back to the checkpoint of step {undo.to}, batches {named} are left out"
  )
  return dataclasses.replace(
    then,
    skipped=tuple(sorted({*now.skipped, *batches})),
    undone=(*now.undone, Event(undo.to + 1, "loss", text)),
  )


def may_undo(policy: RollBack, now: PolicyState) -> bool:
  """Whether the policy has roll-backs left."""
  own = [e for e in now.undone if e.text.startswith(f"{name_of(policy)}: ")]
  return len(own) < policy.most


def due(policies: tuple[Policy, ...], step: int) -> list[Refresh]:
  """The policies that refresh scales before the step after `step` steps by their interval."""
  return [p for p in policies if isinstance(p, Refresh) and p.every and step % p.every == 0 < step]


def after_statistics(
  policies: tuple[Policy, ...], before: PolicyState, step: int, firing: Collection[tuple[str, str]],
  own: Mapping[str, str], held: Mapping[str, str] | None = None,
) -> tuple[PolicyState, list[Event]]:  # fmt: skip
  """The decisions after a snapshot of the tensor statistics.

  Args:
    firing: (layer's site, statistic) of all alarms that ring.
    own: {layer's site: recipe name} by the configuration, of the step that comes.
    held: the overrides that still hold there; None: all.

  Returns:
    The state, with new `recipes` and `refresh`, and an event for every decision.
  """
  draft = _Draft(before, step, own, firing, held)
  draft.decide([p for p in policies if not p.metric and not isinstance(p, RollBack)])
  return draft.finish(), draft.events


def after_evaluation(
  policies: tuple[Policy, ...], before: PolicyState, step: int, values: Mapping[str, float],
  own: Mapping[str, str], held: Mapping[str, str] | None = None,
) -> tuple[PolicyState, list[Event], list[tuple[RollBack, int, str]]]:  # fmt: skip
  """The decisions after an evaluation.

  Args:
    values: {metric: loss in nats, or share of right answers}.
    own, held: see `after_statistics`.

  Returns:
    The state, an event for every decision, and the roll-backs that are due: (policy, step of the
    last evaluation that was not worse, why).
  """
  draft = _Draft(before, step, own, (), held)
  judged = [p for p in policies if p.metric]
  for policy in judged:
    draft.judge(policy, values[policy.metric])
  acting = [p for p in judged if p in draft.acting]
  draft.decide([p for p in judged if isinstance(p, SwitchRecipe) or p in acting])
  back = [
    (p, draft.trends[name_of(p)].good, draft.why(p)) for p in acting if isinstance(p, RollBack)
  ]
  return draft.finish(), draft.events, back


class _Draft:
  """Policy state being updated."""

  def __init__(self, before: PolicyState, step: int, own: Mapping[str, str], firing, held):
    self.before, self.step, self.firing = before, step, firing
    self.events: list[Event] = []
    self.own, self.held = own, dict(before.overrides if held is None else held)
    self.given = dict(self.held)
    self.recipe_of = ChainMap(self.given, dict(own))  # as decided so far
    self.fresh: list[str] = []
    self.looks, self.counts = dict(before.looks), dict(before.counts)
    ended = before.overrides.keys() - self.held.keys()
    self.away = {
      key: {site: of for site, of in sites.items() if site not in ended}
      for key, sites in before.away.items()
    }
    self.trends, self.rate_scale = dict(before.trends), before.rate_scale
    # Of policies with a metric: those whose evaluation was worse, those that act, and the reasons.
    self.failing: set[Policy] = set()
    self.acting: dict[Policy, str] = {}

  def judge(self, policy: Policy, value: float):
    """Adds an evaluation to the policy's trend."""
    old = self.trends.get(name_of(policy), Trend())
    new, acts = old.after(policy, self.step, -value if is_accuracy(policy.metric) else value)
    self.trends[name_of(policy)] = new
    if new.good != self.step:
      self.failing.add(policy)
    if acts:
      best = "" if old.best is None else f", best {abs(old.best):.4f}"
      kind = "no improvement" if isinstance(policy, LowerRate) else "worse"
      self.acting[policy] = f"is {value:.4f}{best}: {kind} in {policy.patience} evaluations"

  def decide(self, policies: Sequence[Policy]):
    # A refresh last: a site may just have got a recipe without past scales.
    for policy in sorted(policies, key=lambda p: isinstance(p, Refresh)):
      if isinstance(policy, Refresh) and (policy.alarm or policy.metric):
        self.refresh(policy)
      elif isinstance(policy, WidenMargin):
        self.widen(policy)
      elif isinstance(policy, SwitchRecipe):
        self.switch(policy)
      elif isinstance(policy, LowerRate):
        self.lower(policy)

  def finish(self) -> PolicyState:
    recipes = self.before.recipes
    if self.given != self.held:
      recipes = (*recipes, (self.step, self.given))
    refresh = tuple(sorted({*self.before.refresh, *self.fresh}))
    return dataclasses.replace(
      self.before, looks=self.looks, away=self.away, counts=self.counts, recipes=recipes,
      refresh=refresh, trends=self.trends, rate_scale=self.rate_scale,
    )  # fmt: skip

  def lower(self, policy: LowerRate):
    scale = max(self.rate_scale * policy.factor, policy.min_scale)
    if scale < self.rate_scale:
      self.rate_scale = scale
      self._say(policy, "learning rate", f"{self.why(policy)}: rate times {scale:.4g} from here on")

  def refresh(self, policy: Refresh):
    sites = [s for s in self._sites(policy) if self._rings(policy, s) or policy in self.acting]
    sites = [site for site in sites if rules.recipe_by_name(self.recipe_of[site]).is_stateful]
    self.fresh += sites
    for site in sites:
      self._say(
        policy, site, f"{self.why(policy)}: its scales are re-initialised from the next batch"
      )

  def widen(self, policy: WidenMargin):
    for site in self._often(policy):
      wider = rules.with_wider_margin(self.recipe_of[site], policy.by, policy.most)
      if wider is not None:
        self._give(site, wider)
        self._say(policy, site, f"{self.why(policy)}: recipe {wider} from here on")

  def switch(self, policy: SwitchRecipe):
    key = name_of(policy)
    away, counts = dict(self.away.get(key, {})), dict(self.counts.get(key, {}))
    for site, (had, quiet) in list(away.items()):
      quiet = 0 if self._rings(policy, site) else quiet + 1
      away[site] = (had, quiet)
      if policy.back_after and quiet >= policy.back_after:
        del away[site]
        quietly = (
          "evaluations that were not worse" if policy.metric else "snapshots without an alarm"
        )
        again = "its own recipe again" + self._take_back(site, policy.to, had)
        self._say(policy, site, f"{quiet} {quietly}: {again}")
    for site in self._often(policy):
      may = site not in away and self.recipe_of.get(site) != policy.to
      if may and counts.get(site, 0) < policy.most:
        away[site], counts[site] = (self.given.get(site, ""), 0), counts.get(site, 0) + 1
        self._give(site, policy.to)
        self._say(policy, site, f"{self.why(policy)}: recipe {policy.to} from here on")
    self.away[key], self.counts[key] = away, counts

  def _sites(self, policy) -> list[str]:
    return patterns.matches(policy.sites, self.recipe_of)

  def _rings(self, policy, site: str) -> bool:
    """Whether the site has an alarm of the policy, or the evaluation was worse."""
    return (
      policy in self.failing
      or not policy.metric
      and any(s == site and policy.alarm in (ANY, statistic) for s, statistic in self.firing)
    )

  def _often(self, policy: WidenMargin | SwitchRecipe) -> list[str]:
    """Sites whose alarm fired in k of the last snapshots; they are counted from nothing again.

    All of the policy's where evaluations act.
    """
    if policy.metric:
      return self._sites(policy) if policy in self.acting else []
    key, often = name_of(policy), []
    fired = dict(self.looks.get(key, {}))
    for site in self._sites(policy):
      fired[site] = (*fired.get(site, ()), self._rings(policy, site))[-policy.looks :]
      if sum(fired[site]) >= policy.k:
        often.append(site)
        fired[site] = ()
    self.looks[key] = fired
    return often

  def _give(self, site: str, recipe: str):
    """`recipe` from the next step on; "" is the configuration's."""
    self.given.pop(site, None)
    if recipe:
      self.given[site] = recipe

  def _take_back(self, site: str, recipe: str, had: str) -> str:
    """Gives what the site had before `recipe`; "", or the policy that does so later.

    That is one which has switched the site since.
    """
    for key, away in self.away.items():
      before, quiet = away.get(site, ("", 0))
      if before == recipe != self.recipe_of[site]:
        self.away[key] = {**away, site: (had, quiet)}
        return f" after {key}"
    # An earlier override may have ended meanwhile, see Precision.held.
    self._give(site, had if had and rules.outlasts(had, self.own[site]) else "")
    return ""

  def why(self, policy: Policy) -> str:
    """The reason of an action; of a roll-back without its subject."""
    if policy.metric:
      subject = "" if isinstance(policy, RollBack) else f"{policy.metric} "
      return f"{subject}{self.acting[policy]}"
    if isinstance(policy, WidenMargin | SwitchRecipe):
      return f"{policy.alarm} rang in {policy.k} of the last {policy.looks} snapshots"
    return f"{alarm_of(policy)} rang"

  def _say(self, policy: Policy, site: str, text: str):
    self.events.append(Event(self.step, site, f"{name_of(policy)}: {text}"))
