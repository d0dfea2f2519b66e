"""Policies: the changes that a run makes to itself, each with the condition for it.

A policy is a value. `phases/decide.py` decides by it, `jobs/policy_runner.py` executes it. Every
field is written in a configuration as in Python: "refresh(every=500, alarm='underflow')".
"""

import dataclasses
import math
from typing import Any

from fp8jax import calls, patterns

ANY = "any"  # an alarm of whichever statistic


@dataclasses.dataclass(frozen=True)
class Refresh:
  """Delayed and static scales begin anew from the next batch.

  Attributes:
    every: steps between refreshes of all chosen sites; 0: on alarms alone.
    alarm: statistic of log.alarms that refreshes the site that it rings at, or "any"; "" for none.
    sites: regular expression on layers' sites, "layers/3/mlp/up".
  """

  every: int = 0
  alarm: str = ""
  sites: str = ".*"

  def problems(self) -> list[str]:
    """The problems of these numbers, in words."""
    found = [] if self.every >= 0 else [f"every={self.every} must not be negative"]
    if not self.every and not self.alarm:
      found.append("never refreshes anything: give every=N steps, or alarm='underflow'")
    return found


@dataclasses.dataclass(frozen=True)
class WidenMargin:
  """Delayed and static scales of a site leave more of the range unused above the amax.

  Attributes:
    alarm: statistic of log.alarms, or "any".
    k, looks: alarms in so many latest looks at the tensor statistics that widen the margin.
    by: how much wider, a power of two.
    most: the widest margin.
    sites: regular expression on layers' sites.
  """

  alarm: str = "saturation"
  k: int = 1
  looks: int = 1
  by: int = 1
  most: int = 3
  sites: str = ".*"

  def problems(self) -> list[str]:
    """The problems of these numbers, in words."""
    found = _window_problems(self)
    if not 1 <= self.by <= self.most <= 64:
      found.append(f"by={self.by} and most={self.most} need 1 <= by <= most <= 64")
    return found


@dataclasses.dataclass(frozen=True)
class SwitchRecipe:
  """A site gets another recipe, and its own again after quiet looks.

  Attributes:
    to: name of the other recipe.
    alarm: statistic of log.alarms, or "any".
    k, looks: alarms in so many latest looks that switch the site.
    back_after: successive looks without that alarm after which the site gets its recipe again; 0:
      never. A site in 16 bits raises no alarm, so that this is its time away.
    most: switches of a site in the whole run; each is a program to compile.
    sites: regular expression on layers' sites.
  """

  to: str = "bf16"
  alarm: str = ANY
  k: int = 3
  looks: int = 5
  back_after: int = 0
  most: int = 2
  sites: str = ".*"

  def problems(self) -> list[str]:
    """The problems of these numbers, in words."""
    found = _window_problems(self)
    for name, least in (("back_after", 0), ("most", 1)):
      if getattr(self, name) < least:
        found.append(f"{name}={getattr(self, name)} must be at least {least}")
    return found


@dataclasses.dataclass(frozen=True)
class RollBack:
  """The run goes on from its last good checkpoint, without the batches where the loss jumped.

  Attributes:
    z: standard deviations above the mean of the last losses that are a jump. A loss, a gradient or
      an operand of a GEMM that is not finite is one, too.
    window: so many last losses; no finite loss is judged before there are as many.
    skip: batches that are left out: the one whose loss jumped, and those before it, of whose
      updates the jump may come.
    most: roll-backs in the whole run.
  """

  z: float = 6.0
  window: int = 32
  skip: int = 2
  most: int = 3

  def problems(self) -> list[str]:
    """The problems of these numbers, in words."""
    found = [] if 0 < self.z < math.inf else [f"z={self.z} must be positive and finite"]
    for name, least in (("window", 2), ("skip", 1), ("most", 1)):
      if getattr(self, name) < least:
        found.append(f"{name}={getattr(self, name)} must be at least {least}")
    return found


Policy = Refresh | WidenMargin | SwitchRecipe | RollBack

KINDS: dict[str, type[Policy]] = {
  "refresh": Refresh,
  "widen_margin": WidenMargin,
  "switch_recipe": SwitchRecipe,
  "roll_back": RollBack,
}


def make(kind: str, fields: dict[str, Any]) -> Policy:
  """A policy of a kind.

  Args:
    kind: a key of KINDS.
    fields: of its class; others have their defaults.

  Raises:
    ValueError: no such kind or field, a value of another type, or numbers that make no sense.
  """
  if kind not in KINDS:
    raise ValueError(f"{kind!r} is no policy; there are {', '.join(KINDS)}")
  known = {f.name: f for f in dataclasses.fields(KINDS[kind])}
  for name, value in fields.items():
    if name not in known:
      raise ValueError(f"{kind} has no {name!r}; it has {', '.join(known)}")
    wanted = type(known[name].default)
    if not isinstance(value, wanted | int if wanted is float else wanted) or value is True:
      raise ValueError(f"{kind}: {name}={value!r} must be of type {wanted.__name__}")
    if wanted is int and value >= 2**31:
      raise ValueError(f"{kind}: {name}={value} must be below 2^31, the number of steps of any run")
  made = KINDS[kind](**fields)
  pattern = patterns.problem(getattr(made, "sites", ""))
  if problems := made.problems() + [f"sites={pattern}"] * bool(pattern):
    raise ValueError(f"{name_of(made)}: {'; '.join(problems)}")
  return made


def name_of(policy: Policy) -> str:
  """As a configuration says it, without the fields that have their defaults."""
  kind = next(name for name, of in KINDS.items() if isinstance(policy, of))
  fields = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
  defaults = {f.name: f.default for f in dataclasses.fields(policy)}
  return calls.write(kind, {k: v for k, v in fields.items() if v != defaults[k]})


def alarm_of(policy: Policy) -> str:
  """The statistic of the policy's alarms, ANY, or "" for none."""
  return "" if isinstance(policy, RollBack) else policy.alarm


def _window_problems(policy: WidenMargin | SwitchRecipe) -> list[str]:
  found = []
  if not 1 <= policy.k <= policy.looks:
    found.append(f"k={policy.k} alarms in looks={policy.looks} need 1 <= k <= looks")
  if not policy.alarm:
    found.append(f"alarm='' never rings; name a statistic of log.alarms, or {ANY!r}")
  return found
