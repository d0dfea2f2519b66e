"""Policies: the changes that a run makes to itself, each with the condition for it.

A condition is about alarms of tensor statistics, the loss, or evaluations (see Evaluated). A policy
is a value. `phases/decide.py` decides by it, `jobs/policy_runner.py` executes it. Every
field is written in a configuration as in Python: "refresh(every=500, alarm='underflow')".
"""

import dataclasses
import math
from typing import Any

from fp8jax import calls, patterns

ANY = "any"  # an alarm of whichever statistic
HELDOUT = "heldout"  # the mean held-out loss of all sources; "heldout/SOURCE" is that of one
ACCURACY = "accuracy"  # the mean share of right answers; "accuracy/TASK" is that of one task


@dataclasses.dataclass(frozen=True)
class Evaluated:
  """A condition on the evaluations of eval.every, in place of the policy's other condition.

  Attributes:
    metric: "heldout", the mean loss of all sources in nats, "heldout/SOURCE" that of one;
      "accuracy", the mean share of right answers over eval.tasks, "accuracy/TASK" that of one; ""
      for none.
    worse_by: an evaluation is worse whose loss is more than this above the least one so far, or
      whose accuracy is more than this below the highest: of 50 questions, 0.02 is one answer, and
      one less is not worse.
    patience: successive evaluations that are worse before the policy acts.
  """

  metric: str = ""
  worse_by: float = 0.02
  patience: int = 1

  def metric_problems(self) -> list[str]:
    """The problems of these numbers, in words."""
    if self.patience >= 1 and 0 <= self.worse_by < math.inf:
      return []
    return [
      f"worse_by={self.worse_by} and patience={self.patience} need worse_by >= 0, patience >= 1"
    ]


@dataclasses.dataclass(frozen=True)
class Refresh(Evaluated):
  """Delayed and static scales are re-initialised from the next batch.

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
    texts = [] if self.every >= 0 else [f"every={self.every} must not be negative"]
    if not (self.every or self.alarm or self.metric):
      texts.append(
        "never refreshes anything: give every=N steps, alarm='underflow' or metric='heldout'"
      )
    return texts


@dataclasses.dataclass(frozen=True)
class WidenMargin(Evaluated):
  """Delayed and static scales of a site leave more of the range unused above the amax.

  Attributes:
    alarm: statistic of log.alarms, or "any".
    k, looks: alarms in so many latest snapshots of the tensor statistics that widen the margin.
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
    texts = _window_problems(self)
    if not 1 <= self.by <= self.most <= 64:
      texts.append(f"by={self.by} and most={self.most} need 1 <= by <= most <= 64")
    return texts


@dataclasses.dataclass(frozen=True)
class SwitchRecipe(Evaluated):
  """A site gets another recipe, and its own again after quiet snapshots.

  Attributes:
    to: name of the other recipe.
    alarm: statistic of log.alarms, or "any".
    k, looks: alarms in so many latest snapshots that switch the site.
    back_after: successive snapshots without that alarm, or evaluations that are not worse, after
      which the site gets its recipe again; 0: never. A site in 16 bits raises no alarm, so that
      this is its time away.
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
    return _window_problems(self) + _too_small(self, back_after=0, most=1)


@dataclasses.dataclass(frozen=True)
class RollBack(Evaluated):
  """The run goes on from its last good checkpoint, without the batches where the loss jumped.

  Attributes:
    z: standard deviations above the mean of the last losses that are a jump. A loss, a gradient or
      an operand of a GEMM that is not finite is one, too.
    window: so many last losses; no finite loss is judged before there are as many.
    skip: batches that are left out: the one whose loss jumped, and those before it, of whose
      updates the jump may come. With a metric: all since the last evaluation that was not worse.
    most: roll-backs in the whole run.
  """

  z: float = 6.0
  window: int = 32
  skip: int = 2
  most: int = 3

  def problems(self) -> list[str]:
    """The problems of these numbers, in words."""
    texts = [] if 0 < self.z < math.inf else [f"z={self.z} must be positive and finite"]
    return texts + _too_small(self, window=2, skip=1, most=1)


@dataclasses.dataclass(frozen=True)
class LowerRate:
  """The learning rate is multiplied by a factor when evaluations stop improving.

  Names, defaults of tolerances and rules are those of optax.contrib.reduce_on_plateau. That
  transformation itself is not used: it would keep its numbers in the optimizer state of every
  parameter and change the compiled step of all configurations; here they are a policy's. It has no
  mode of a metric that grows: the rule for an accuracy is "max" of PyTorch's ReduceLROnPlateau.

  Attributes:
    factor: of one reduction.
    metric: see Evaluated.
    patience: successive evaluations without improvement before a reduction.
    rtol, atol: an improvement is below the best loss, or above the best accuracy, by more than this
      share of it, and this much.
    cooldown: evaluations after a reduction that are not counted.
    min_scale: the smallest product of factors.
  """

  factor: float = 0.5
  metric: str = HELDOUT
  patience: int = 3
  rtol: float = 1e-4
  atol: float = 0.0
  cooldown: int = 0
  min_scale: float = 0.0

  def problems(self) -> list[str]:
    """The problems of these numbers, in words."""
    wrong = [] if 0 < self.factor < 1 else [f"factor={self.factor} must be between 0 and 1"]
    if not (0 <= self.rtol <= 1 and 0 <= self.atol < math.inf and self.rtol + self.atol > 0):
      wrong.append(f"rtol={self.rtol} and atol={self.atol} must not be negative, nor both 0")
    if not 0 <= self.min_scale < 1:
      wrong.append(f"min_scale={self.min_scale} must be at least 0 and below 1")
    if self.patience < 1 or self.cooldown < 0 or not self.metric:
      numbers = f"metric={self.metric!r}, patience={self.patience}, cooldown={self.cooldown}"
      wrong.append(f"{numbers} need a metric, patience >= 1 and cooldown >= 0")
    return wrong


Policy = Refresh | WidenMargin | SwitchRecipe | RollBack | LowerRate

KINDS: dict[str, type[Policy]] = {
  "refresh": Refresh,
  "widen_margin": WidenMargin,
  "switch_recipe": SwitchRecipe,
  "roll_back": RollBack,
  "lower_rate": LowerRate,
}
# Fields of the other conditions, which a metric replaces, and those that a metric needs.
_OTHER, _OF_METRIC = {"alarm", "k", "looks", "z", "window", "skip"}, {"worse_by", "patience"}


def _fields(cls: type[Policy]) -> list[dataclasses.Field]:
  """In the order of messages: the policy's own first."""
  of_base = {f.name for f in dataclasses.fields(Evaluated)} if issubclass(cls, Evaluated) else ()
  return sorted(dataclasses.fields(cls), key=lambda f: f.name in of_base)


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
  known = {f.name: f for f in _fields(KINDS[kind])}
  for name, value in fields.items():
    if name not in known:
      raise ValueError(f"{kind} has no {name!r}; it has {', '.join(known)}")
    wanted = type(known[name].default)
    is_bool = isinstance(value, bool) and wanted is not bool
    if not isinstance(value, wanted | int if wanted is float else wanted) or is_bool:
      is_whole = wanted is int and isinstance(value, float) and value.is_integer()
      fix = f"; write {name}={value:.0f}" * is_whole
      raise ValueError(f"{kind}: {name}={value!r} must be of type {wanted.__name__}{fix}")
    if wanted is int and value >= 2**31:
      raise ValueError(f"{kind}: {name}={value} must be below 2^31, the number of steps of any run")
  made = KINDS[kind](**fields)
  pattern = patterns.problem(getattr(made, "sites", ""))
  problems = made.problems() + [f"sites={pattern}"] * bool(pattern)
  if isinstance(made, Evaluated):
    problems += made.metric_problems()
    both = sorted(_OTHER & {*fields})
    if made.metric and both:
      problems.append(f"metric={made.metric!r} takes the place of {', '.join(both)}; leave one out")
    if not made.metric and _OF_METRIC & {*fields}:
      problems.append("worse_by and patience are of a metric; give metric='heldout'")
  kind, slash, one = made.metric.partition("/")
  if made.metric and (kind not in (HELDOUT, ACCURACY) or bool(slash) != bool(one)):
    problems.append(
      f"metric={made.metric!r} is none of 'heldout', 'heldout/SOURCE', 'accuracy', 'accuracy/TASK'"
    )
  if problems:
    raise ValueError(f"{name_of(made)}: {'; '.join(problems)}")
  return made


def name_of(policy: Policy) -> str:
  """As a configuration says it, without the fields that have their defaults."""
  kind = next(name for name, of in KINDS.items() if isinstance(policy, of))
  fields = [(f, getattr(policy, f.name)) for f in _fields(type(policy))]
  return calls.write(kind, {f.name: value for f, value in fields if value != f.default})


def alarm_of(policy: Policy) -> str:
  """The statistic of the policy's alarms, ANY, or "" for none."""
  return "" if policy.metric or isinstance(policy, RollBack | LowerRate) else policy.alarm


def keys_read(policies: tuple[Policy, ...]) -> set[str]:
  """Keys of a configuration that policies decide by, and that alter no result without them."""
  alarms = {"log.alarms", "log.tensor_stats_every"} if any(map(alarm_of, policies)) else set()
  if any(isinstance(p, RollBack) for p in policies):
    alarms |= {"checkpoint.every", "checkpoint.keep"}  # the steps that it goes back to
  metrics = {"eval.every", "eval.tokens", "eval.batch", "eval.precisions"}
  # Of eval.tasks a checkpoint remembers what was asked, see jobs/accuracy.py.
  tasks = {"eval.tasks", "eval.chat", "eval.seed", "generate.cache_format", "generate.max_length"}
  tasks |= {"generate.slots", "generate.stop", "generate.stop_tokens"}
  metrics |= tasks if asks_tasks(policies) else set()
  return alarms | (metrics if any(p.metric for p in policies) else set())


def is_accuracy(metric: str) -> bool:
  """Whether a metric is of tasks, so that more of it is better."""
  return metric.partition("/")[0] == ACCURACY


def asks_tasks(policies: tuple[Policy, ...]) -> bool:
  """Whether a policy decides by the answers to eval.tasks."""
  return any(is_accuracy(policy.metric) for policy in policies)


def _too_small(policy: SwitchRecipe | RollBack, **least: int) -> list[str]:
  values = {name: getattr(policy, name) for name in least}
  return [f"{k}={v} must be at least {least[k]}" for k, v in values.items() if v < least[k]]


def _window_problems(policy: WidenMargin | SwitchRecipe) -> list[str]:
  texts = []
  if not 1 <= policy.k <= policy.looks:
    texts.append(f"k={policy.k} alarms in looks={policy.looks} need 1 <= k <= looks")
  if not policy.alarm:
    texts.append(f"alarm='' never rings; name a statistic of log.alarms, or {ANY!r}")
  return texts
