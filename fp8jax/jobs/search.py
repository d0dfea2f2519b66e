"""Formats chosen while a model trains (search/): the trainer's run with other steps, and rules."""

import collections
import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fp8jax import console as console_lib
from fp8jax.config import measured
from fp8jax.data import loader
from fp8jax.errors import UserError
from fp8jax.jobs import run_state, train
from fp8jax.models import transformer
from fp8jax.ops import site_tree
from fp8jax.phases.schedule import Phase, Precision
from fp8jax.recipe import rules as rules_lib
from fp8jax.records import make_folder
from fp8jax.run import checkpoint, evaluator, provenance
from fp8jax.search import controller as controller_lib
from fp8jax.search import cost
from fp8jax.search import step as step_lib
from fp8jax.search.settings import Search
from fp8jax.search.space import Space
from fp8jax.sensitivity import rules as chosen_rules
from fp8jax.step import train_step
from fp8jax.step.train_spec import TrainSpec

# Rules that cost so much of the target count as within it.
_SLACK = 1.05
_KEY = "search"


class SearchState(run_state.RunState):
  """The state of a run that searches."""

  def __init__(self, search: Search, policies, *args, **options):
    super().__init__(policies, *args, **options)
    self._settings = search
    self._space = step_lib.space_of(self.spec, search)
    self._take = step_lib.make_step(self.spec, self._space, search)
    self.controller = _fresh(self._space)

  def take_step(self, state, batch, is_loud: bool):
    state, self.controller, values = self._take(state, self.controller, batch, self.sites[False])
    return state, values

  def remembered(self) -> dict[str, Any]:
    numbers = controller_lib.to_json(self.controller)
    return {_KEY: {"settings": _plain(self._settings), "controller": numbers}}

  def recall(self, meta: Mapping[str, Any]):
    self.controller = _saved(meta, self._settings, self._space)


def _fresh(space: Space) -> controller_lib.Controller:
  return controller_lib.init(len(space.decisions), len(space.options))


def _plain(s: Search) -> dict[str, Any]:
  return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(s).items()}


def _saved(meta: Mapping[str, Any], s: Search, space: Space) -> controller_lib.Controller:
  """The policy of a checkpoint; a fresh one where it is of a run that did not search.

  Raises:
    UserError: it is another search's.
  """
  if _KEY not in meta:
    return _fresh(space)
  then, now = meta[_KEY]["settings"], _plain(s)
  if changed := [f"search.{k} was {then.get(k)!r} and is {v!r}" for k, v in now.items()
                 if then.get(k) != v]:  # fmt: skip
    raise UserError(
      f"the checkpoint is of another search: {'; '.join(changed)}. Set them as they were, or name "
      "another --workdir"
    )
  return controller_lib.from_json(meta[_KEY]["controller"], _fresh(space))


def problems_of_spec(spec: TrainSpec) -> list[str]:
  """The problems of a search with this model, in words."""
  s = spec.of(Search)
  if spec.model.lora:
    return ["--job=search trains whole models: set model.lora.rank=0"]
  if s.delay >= spec.steps:
    return [
      f"search.delay={s.delay} must be below steps={spec.steps}: the policy learns after it only"
    ]
  space = step_lib.space_of(spec, s)
  if not space.decisions:
    return [
      "--job=search: precision.rules quantize no forward product of a layer, so nothing is "
      "searched; give the config an arm, --config=FILE:fp8_dynamic"
    ]
  least, most = space.costs.min(1).sum(), space.costs.max(1).sum()
  if not least <= s.target <= most:
    return [f"search.target={s.target} must be from {least:.4g} to {most:.4g} with these options"]
  return []


def run(spec: TrainSpec, workdir: str) -> dict[str, Any]:
  """Trains in sampled formats, or resumes; writes WORKDIR/search/search.json with the rules.

  Raises:
    UserError: the workdir has another search; and as train.run.
  """
  s = spec.of(Search)
  if spec.verify_fp8_gemms:
    console_lib.console().print(
      "--job=search: no strict check of FP8 products, of which a step holds one per option"
    )
  spec = dataclasses.replace(spec, verify_fp8_gemms=False)
  feed = dataclasses.replace(train.texts(spec), job="search")
  summary = train.run(spec, workdir, make_state=functools.partial(SearchState, s), feed=feed)
  if "exit_code" in summary:
    return summary
  space = step_lib.space_of(spec, s)
  with contextlib.closing(checkpoint.Checkpoints(workdir)) as saved:
    step = saved.find()
    controller = _saved(saved.meta(step), s, space)
    params = saved.restore_params(step, train_step.abstract_state(spec, step).params)
  result = _result(spec, s, space, controller, params)
  folder = os.path.join(workdir, _KEY)
  make_folder(folder, "--workdir")
  provenance.write_json(folder, "search.json", result)
  chosen = result["budgets"][0]
  counts = collections.Counter(result["chosen"].values())
  rows = [[option.name, str(counts[option.name])] for option in space.options]
  out, title = console_lib.console(stderr=True), f"{chosen['budget']}: {chosen['verdict']}"
  out.print(console_lib.table(title, ["recipe", "sites"], rows))
  path = os.path.join(folder, "search.json")
  out.print(f"train with these rules: --config.precision.sensitivity={path}")
  return {"results": path, "rules": chosen["arms"][0]["rules"], "cost": result["cost"],
          "evaluation": result["evaluation"]}  # fmt: skip


def with_choice(spec: TrainSpec, space: Space, choice) -> TrainSpec:
  """The spec with the rules of a choice."""
  names = rules_lib.all_names(
    [*site_tree.find_sites(transformer.site_params(spec.model))], spec.model.num_layers
  )
  rules = chosen_rules.with_recipes(
    spec.precision.phases[0].rules, names, space.assigned(choice), spec.model.num_layers
  )
  return dataclasses.replace(spec, precision=Precision((Phase(0, rules),)))


def _result(spec: TrainSpec, s: Search, space: Space, controller, params) -> dict[str, Any]:
  probs = np.asarray(jax.nn.softmax(controller.logits), np.float64)
  choice = probs.argmax(1)
  chosen, spent = with_choice(spec, space, choice), space.cost(choice)
  recipes = site_tree.recipes_of(spec.sites())
  is_met = spent <= _SLACK * s.target
  total = cost.WIDE**2 * sum(cost.macs_per_token(spec.model)[n] for n in space.decision_of)
  return {
    "format": "fp8jax search 1",
    "model": spec.model.to_dict(),
    "sites": [{"name": n, "recipe": recipes[n].name} for n in space.decision_of],
    "budgets": [{
      "key": "bops",
      "budget": f"{spent:.4g} of BF16's BOPs, target {s.target:g}",
      "verdict": measured.MET if is_met else measured.MISSED,
      "arms": [{"arm": "most likely", "rules": chosen.precision.phases[0].rules}],
    }],
    "chosen": space.assigned(choice),
    "probabilities": {
      name: {o.name: round(float(p), 6) for o, p in zip(space.options, row, strict=True)}
      for name, row in zip(space.decisions, probs, strict=True)
    },
    "cost": {
      "share": spent, "target": s.target, "bops_per_token": spent * total,
      "bf16_bops_per_token": total,
      "other_linear_macs_per_token": step_lib.outside(spec.model, space),
    },
    "evaluation": evaluator.Evaluator(chosen).run(params, {}) if spec.eval.tokens else {},
    "settings": _plain(s),
    "provenance": provenance.provenance(
      dict(spec.flat), loader.fingerprint(spec.data), spec.seed, 1
    ),
  }  # fmt: skip
