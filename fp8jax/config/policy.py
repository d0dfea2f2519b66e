"""precision.policy of a configuration: read, and checked against the rest of it."""

import dataclasses
from typing import Any

from fp8jax import calls, patterns
from fp8jax.config import registry
from fp8jax.config.alarms import ADVICE, read_alarms
from fp8jax.errors import ConfigErrors, UserError, nearest
from fp8jax.ops import site_tree
from fp8jax.phases import policy as policy_lib
from fp8jax.phases.policy import Policy
from fp8jax.phases.schedule import Precision
from fp8jax.recipe import rules
from fp8jax.step.settings import Alarm
from fp8jax.step.train_spec import TrainSpec

_EXAMPLE = "\"refresh(every=500, alarm='underflow')\" or {'kind': 'refresh', 'every': 500}"


def read(stated) -> tuple[Policy, ...]:
  """precision.policy as values.

  Args:
    stated: texts "kind(field=value, ...)", or mappings with the key "kind" and the fields.

  Raises:
    ValueError: a policy that is none, or that is there twice.
  """
  if isinstance(stated, (str, dict)):
    raise ValueError(f"precision.policy={stated!r} is one policy; write a tuple of them: (…,)")
  policies: list[Policy] = []
  for i, entry in enumerate(stated):
    key = f"precision.policy[{i}]"
    try:
      policy = policy_lib.make(*_parts(entry))
    except ValueError as e:
      raise ValueError(f"{key}: {e}") from e
    name = policy_lib.name_of(policy)
    if policy in policies:
      raise ValueError(f"{key}: {name} is there twice; leave one out")
    is_second = isinstance(policy, policy_lib.RollBack) and any(
      isinstance(p, policy_lib.RollBack) and p.metric == policy.metric for p in policies
    )
    if is_second:
      raise ValueError(f"{key}: {name} is a second roll_back; a loss is judged by one")
    policies.append(policy)
  return tuple(policies)


def _parts(entry) -> tuple[str, dict[str, Any]]:
  """(kind, fields) of a text or a mapping."""
  if hasattr(entry, "items"):
    fields = dict(entry.items())
    if not isinstance(kind := fields.pop("kind", None), str):
      raise ValueError(f"{entry!r} has no 'kind'; write {_EXAMPLE}")
    return kind, fields
  try:
    return calls.parse(entry)
  except (ValueError, AttributeError) as e:
    hint = f"; {e}" if isinstance(e, UserError) else ""
    raise ValueError(
      f"{entry!r} is no policy of finite numbers and texts; write {_EXAMPLE}{hint}"
    ) from e


def attach(
  c: Any, precision: Precision | None, alarms: tuple[Alarm, ...], errors: ConfigErrors
) -> Precision | None:
  """The precision with precision.policy of a configuration; problems go to `errors`."""
  policies = errors.attempt(lambda: read(c.precision.policy)) or ()
  errors.extend(problems(c, policies, alarms))
  return precision and dataclasses.replace(precision, policy=policies)


def problems(c: Any, policies: tuple[Policy, ...], alarms: tuple[Alarm, ...]) -> list[str]:
  """Settings that a policy needs and that are not there, in words."""
  texts, firing = [], {alarm.statistic for alarm in alarms}
  for policy in policies:
    name = f"precision.policy: {policy_lib.name_of(policy)}"
    if statistic := policy_lib.alarm_of(policy):
      if statistic != policy_lib.ANY and statistic not in ADVICE:
        near = nearest(statistic, ADVICE)
        hint = f"did you mean {near!r}? " if near else ""
        texts.append(f"{name}: no statistic {statistic!r}; {hint}There are {', '.join(ADVICE)}")
      elif statistic not in firing and (statistic != policy_lib.ANY or not firing):
        texts.append(f"{name}: log.alarms has no rule about it that could ring; add one")
      if not c.log.tensor_stats_every:
        texts.append(
          f"{name}: its alarms need tensor statistics, and log.tensor_stats_every=0 takes none; "
          "set log.tensor_stats_every=100"
        )
    if isinstance(policy, policy_lib.SwitchRecipe):
      try:
        rules.recipe_by_name(policy.to)
      except ValueError as e:
        texts.append(f"{name}: {e}")
    if policy.metric:
      texts += [f"{name}: {problem}" for problem in _metric_problems(c, policy.metric)]
    if isinstance(policy, policy_lib.RollBack):
      texts += [f"{name}: {problem}" for problem in _roll_back_problems(c, policy)]
    if isinstance(policy, policy_lib.LowerRate) and c.optim.decay_by == "schedule":
      texts.append(
        f"{name}: optim.decay_by='schedule' takes no notice of a lower rate; set "
        "optim.decay_by='rate'"
      )
  return texts


def _metric_problems(c: Any, metric: str) -> list[str]:
  """Evaluations that a metric needs and that the run does not make, in words."""
  source = "" if policy_lib.is_accuracy(metric) else metric.partition("/")[2]
  wrong = [
    f"it decides at evaluations, and {key}={c.eval[key.partition('.')[2]]} makes none; set {to}"
    for key, to in (("eval.every", "eval.every=100"), ("eval.tokens", "eval.tokens=8192"))
    if not c.eval[key.partition(".")[2]]
  ]
  if source and source not in c.data.sources:
    wrong.append(f"data.sources has no {source!r}; there are {', '.join(c.data.sources)}")
  if policy_lib.is_accuracy(metric) and not c.eval.tasks:
    wrong.append("eval.tasks='' asks nothing; name tasks, and few eval.questions")
  return wrong


def site_problems(spec: TrainSpec) -> list[str]:
  """Sites that cannot have what a policy may give them, and policies without sites, in words.

  So are patterns of policies and alarms that cannot be matched with the sites in time, and alarms
  of no tensor but the default ones: a model may be without the sites that those know.
  """
  if not spec.precision.policy and all(alarm.sites == ".*" for alarm in spec.log.alarms):
    return []
  try:
    phases = [site_tree.recipes_of(spec.sites(phase=i)) for i in range(len(spec.precision.phases))]
  except ValueError:
    return []  # sites that cannot be built without a policy are told by the check of sites
  names = list(phases[0])
  tensors = [f"{name}/{tensor}" for name in names for tensor in "xwg"]
  stated = [(f"log.alarms: {a.statistic}", a.sites, tensors) for a in spec.log.alarms]
  stated += [
    (f"precision.policy: {policy_lib.name_of(p)}", getattr(p, "sites", ""), names)
    for p in spec.precision.policy
  ]
  tried = [(key, patterns.problem(sites, of)) for key, sites, of in stated]
  defaults = read_alarms(registry.KEYS["log.alarms"].default)
  tried += [
    (f"log.alarms: {a.statistic}", f"{a.sites!r} matches none of {', '.join(tensors[:6])}, …")
    for a in spec.log.alarms
    if a not in defaults
    if not patterns.problem(a.sites, tensors) and not patterns.matches(a.sites, tensors)
  ]
  if texts := [f"{key}: {problem}" for key, problem in tried if problem]:
    return texts
  switches = [p for p in spec.precision.policy if isinstance(p, policy_lib.SwitchRecipe)]
  stateful = {n for of in phases for n, recipe in of.items() if recipe.is_stateful}
  if any(rules.recipe_by_name(p.to).is_stateful for p in switches):
    stateful = set(names)
  for policy in spec.precision.policy:
    if not isinstance(policy, policy_lib.Refresh | policy_lib.WidenMargin):
      continue
    if not patterns.matches(policy.sites, stateful):
      texts.append(
        f"precision.policy: {policy_lib.name_of(policy)} never does anything: no site that it "
        f"names (sites={policy.sites!r}) has delayed or static scales; leave it out"
      )
  for policy in switches:
    name = f"precision.policy: {policy_lib.name_of(policy)}"
    chosen = dict.fromkeys(patterns.matches(policy.sites, names), policy.to)
    if not chosen:
      texts.append(f"{name}: sites={policy.sites!r} matches none of {', '.join(names[:8])}, …")
      continue
    changed = spec.precision.with_changes(names, [(0, chosen)])
    try:
      dataclasses.replace(spec, precision=changed).sites()
    except ValueError as e:
      texts.append(f"{name}: {e}")
  return texts


def _roll_back_problems(c: Any, policy: policy_lib.RollBack) -> list[str]:
  texts, every, keep = [], c.checkpoint.every, c.checkpoint.keep
  skip = policy.patience * c.eval.every if policy.metric else policy.skip
  if not every:
    texts.append("checkpoint.every=0 leaves no checkpoint to go back to; set it")
  elif keep < 2 or every * (keep - 1) < skip:
    texts.append(
      f"checkpoint.every={every} and keep={keep} may keep no checkpoint from before the "
      f"skip={skip} batches that are left out; keep at least "
      f"{max(2, -(-skip // every) + 1)}"
    )
  if c.optim.in_backward and not policy.metric:
    texts.append("with optim.in_backward=True layers move before the loss is seen; leave one out")
  return texts
