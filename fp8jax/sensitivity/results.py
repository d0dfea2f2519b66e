"""The results of a study: groups, sites, and rules within budgets of loss and FLOPs."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fp8jax import statistics
from fp8jax.config import measured as measured_rules
from fp8jax.models import transformer
from fp8jax.ops import site_tree, switch
from fp8jax.recipe.rules import all_names
from fp8jax.sensitivity import rules as rules_lib
from fp8jax.sensitivity.settings import Sensitivity
from fp8jax.sensitivity.study import CHOOSE, HALVES, ON, REPORT, Measured, QuantizedSite, Study


def measure(study: Study, s: Sensitivity, phase: int) -> dict[str, Any]:
  """Everything that the section asks for, measured unless it has been; chosen rules begin with
  those of the phase."""
  names = [place.name for place in study.places]
  together = {half: study.measure("all sites", dict.fromkeys(names, ON), half) for half in HALVES}
  estimates = study.estimate()
  damage = {name: float(parts["both"]["kl"].sum()) for name, parts in estimates.items()}
  order = rules_lib.ordered(study.places, damage)
  choices = _choices(study, s, order)
  budgets = [_budget(study, s, key, *of, phase) for key, of in choices.items()]
  groups = [
    {"group": group, "name": name, **_both(study, label, on)}
    for group in s.groups for name, label, on in _members(study.places, group)
  ]  # fmt: skip
  top = sorted(names, key=lambda name: -damage[name])[: s.top]
  measured = {name: _both(study, name, {name: ON}) for name in top}
  base = together[CHOOSE]
  return {
    "tokens": {half: int(study.tokens(half).sum()) for half in HALVES},
    "windows": {half: int((study.tokens(half) > 0).sum()) for half in HALVES},
    "bf16_loss": {
      half: float(f"{m.base_I.sum() / m.tokens_I.sum():.6g}") for half, m in together.items()
    },
    "all": {half: m.row() for half, m in together.items()},
    "groups": groups,
    "budgets": budgets,
    "sites": [
      {
        "name": p.name, "kind": p.kind, "layer": p.layer, "recipe": p.recipe,
        "flops_per_token": p.flops,
        "estimated": {part: _estimated(of, base) for part, of in estimates[p.name].items()},
        "measured": measured.get(p.name),
      }
      for p in study.places
    ],
  }  # fmt: skip


def _estimated(sums: Mapping[str, np.ndarray], base: Measured) -> dict[str, Any]:
  """A row like `Measured.row`, of sums by window."""
  row = Measured(base.tokens_I, base.base_I, base.base_I + sums["loss"], sums["kl"]).row()
  return {key: row[key] for key in ("loss_percent", "kl")}


def _both(study: Study, label: str, on: Mapping[str, Sequence[float]]) -> dict[str, Any]:
  """A set of sites on both halves."""
  first, second = (study.measure(label, on, half) for half in HALVES)
  return first.joined(second).row()


def _members(
  places: Sequence[QuantizedSite], group: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
  """(name, label of the measurement, what is switched on) of every member of a group."""
  if group == "tensors":
    for tensor in switch.TENSORS:
      number = tuple(float(tensor == other) for other in switch.TENSORS)
      yield tensor, f"{tensor} of all sites", {p.name: number for p in places}
    return
  key = group.removesuffix("s")
  for value in dict.fromkeys(getattr(p, key) for p in places):
    if value is not None:
      on = {p.name: ON for p in places if getattr(p, key) == value}
      yield str(value), f"{key} {value}", on


def _measured(study: Study, half: str, bf16: Sequence[str]) -> Measured:
  """A half with some sites in BF16."""
  on = {p.name: ON for p in study.places if p.name not in set(bf16)}
  digest = hashlib.sha256(repr(sorted(bf16)).encode()).hexdigest()[:12]
  label = f"all sites but {len(bf16)} ({digest})" if bf16 else "all sites"
  return study.measure(label, on, half)


def _choices(study: Study, s: Sensitivity, order: list[str]) -> dict[str, tuple[str, list[str]]]:
  """{key of the budget: (the budget in words, sites for BF16)}, chosen on one half."""
  choices = {}
  if s.min_fp8:
    chosen = rules_lib.within_flops(study.places, order, s.min_fp8)
    choices["min_fp8"] = f"at least {100 * s.min_fp8:g} % of FLOPs", chosen
  if s.max_loss:  # the budget holds if the whole interval does
    chosen = rules_lib.within_loss(
      order, lambda bf16: _measured(study, CHOOSE, bf16).change.high, s.max_loss
    )
    choices["max_loss"] = f"at most {s.max_loss:g} % loss", chosen
  return choices


def verdict(key: str, loss: statistics.Interval, most: float) -> str:
  """Whether the other half confirms rules; a share of FLOPs holds by itself."""
  if key != "max_loss":
    return measured_rules.MET
  return statistics.verdict(loss.low, loss.high, most, measured_rules.VERDICTS)


def _budget(
  study: Study, s: Sensitivity, key: str, budget: str, chosen: list[str], phase: int
) -> dict[str, Any]:
  """The rules that were chosen on one half, and others, as the other half says."""
  spec, layers = study.spec, study.spec.model.num_layers
  paths = [*site_tree.find_sites(transformer.site_params(spec.model))]
  names = all_names(paths, layers)
  measured = functools.partial(_measured, study)
  arms, rows = {"chosen": chosen}, []
  if chosen:
    arms |= {"none in BF16": []} | rules_lib.rivals(study.places, chosen, layers, spec.seed)
  best = measured(REPORT, chosen)
  for arm, bf16 in arms.items():
    on_report = measured(REPORT, bf16)
    written = rules_lib.with_bf16(spec.precision.phases[phase].rules, names, bf16, layers)
    rows.append({
      "arm": arm, "bf16_sites": len(bf16),
      "bf16_flops": round(rules_lib.share(study.places, bf16), 4),
      "report": on_report.row(),
      "above_chosen": on_report.minus(best),
      "runs_of_layers": rules_lib.layers_apart(written, names, layers),
      "rules": written,
    })  # fmt: skip
  return {
    "key": key,
    "budget": budget,
    "verdict": verdict(key, best.change, s.max_loss),
    "chosen_on": measured(CHOOSE, chosen).row(),
    "arms": rows,
  }


def table(result: Mapping[str, Any]) -> list[str]:
  """The results for a terminal."""

  def row(name: str, of: Mapping[str, Any]) -> str:
    loss, kl = of["loss_percent"], of["kl"]
    return f"  {name:24} {loss[0]:+8.3f} [{loss[1]:+.3f}, {loss[2]:+.3f}] %   KL {kl[0]:.3g}"

  tokens = result["tokens"]
  lines = [
    f"loss relative to BF16 on {tokens[CHOOSE]:,} + {tokens[REPORT]:,} held-out tokens, 95 % "
    "intervals over windows; KL in nats per token",
    *(row(f"all sites, {half}", result["all"][half]) for half in HALVES),
    *(row(f"{g['group'][:-1]} {g['name']}", g) for g in result["groups"]),
  ]
  lines += [row(s["name"], s["measured"]) for s in result["sites"] if s["measured"]]
  for budget in result["budgets"]:
    lines += [f"{budget['budget']}: chosen on one half, here on the other: {budget['verdict']}"]
    for arm in budget["arms"]:
      share = f"{100 * arm['bf16_flops']:.1f} % of FLOPs in BF16"
      lines.append(f"{row(arm['arm'], arm['report'])}   {share}")
    lines += [f"  precision.rules = {tuple(map(tuple, budget['arms'][0]['rules']))}"]
  return lines
