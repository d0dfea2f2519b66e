"""precision.sensitivity: rules that a job chose (sensitivity, search), not precision.rules."""

# ruff: noqa: UP013 (a table of types)

import os
import shlex
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from fp8jax import keys, records
from fp8jax.config import precision
from fp8jax.config.files import Config
from fp8jax.errors import UserError
from fp8jax.models import config as model_config
from fp8jax.models import transformer
from fp8jax.ops import site_tree
from fp8jax.recipe import rules as rules_lib

# Budgets by the key that sets them.
BUDGETS = ("max_loss", "min_fp8", "bops")
MET, MISSED, UNDECIDED = VERDICTS = ("met", "missed", "no verdict")


Site = TypedDict("Site", {"name": str, "recipe": str})
Arm = TypedDict("Arm", {"rules": list[tuple[str, str]]})
Budget = TypedDict("Budget", {
  "key": str, "budget": str, "verdict": str, "arms": Annotated[list[Arm], Meta(min_length=1)],
})  # fmt: skip
_Rules = list[tuple[str, str]]
Rules = TypedDict("Rules", {
  "precision.rules": _Rules, "precision.schedule": list[tuple[int, _Rules]],
})  # fmt: skip
Study = TypedDict("Study", {"model": dict[str, Any], "sites": list[Site], "budgets": list[Budget]})

_REPEAT = "repeat --job=sensitivity with this configuration in another --out"
# Fields of the model that its sites do not depend on.
_OTHER = ("init_std", "max_positions", "lora", "vocab_size")


def with_rules(c: Config, model: model_config.ModelConfig) -> Config:
  """The configuration with the rules of the file in it, so that nothing depends on the file later.

  Raises:
    ValueError: the file is not there, of another model or recipe, or says nothing for sure.
  """
  stated = c.precision.sensitivity
  if not stated:
    return c
  path, wanted = _file(stated)
  if not os.path.isfile(path):
    raise UserError(
      f"precision.sensitivity={stated!r}: there is no file {path!r}; --job=sensitivity writes it"
    )
  remedy = "run --job=sensitivity again in its folder, which keeps what has been measured"
  study = records.read(path, Study, remedy)
  _check_same(c, model, study, path)
  rules = _chosen(study["budgets"], wanted, path)
  if not any(rules_lib.recipe_by_name(recipe).fwd.is_quantized for _, recipe in rules):
    raise UserError(
      f"precision.sensitivity: {path} leaves no site in FP8 within its budget; raise "
      "sensitivity.max_loss, lower sensitivity.min_fp8, or measure a finer recipe"
    )
  c = c.copy_and_resolve_references()
  c.precision.rules, c.precision.sensitivity = tuple(map(tuple, rules)), ""
  # The rules begin with those of first and last layers, which hold in all phases.
  ends = rules_lib.first_last_rules(c.precision.first_bf16, c.precision.last_bf16, model.num_layers)
  later = ((step, (*ends, *map(tuple, rules))) for step, rules in c.precision.schedule)
  c.precision.schedule = tuple(later)
  c.precision.first_bf16 = c.precision.last_bf16 = 0
  return c


def check_there(c: Config, workdir: str):
  """Refuses the lost file of a run, with the options that state the rules that the run has.

  Raises:
    UserError: it is not there, and workdir/config.json has rules.
  """
  path, _ = _file(str(c.precision.sensitivity or ""))
  if not path or os.path.isfile(path):
    return
  remedy = "name another --workdir"
  if begun := records.find(workdir, "config.json", TypedDict("Begun", {"resolved": Rules}), remedy):
    rules, schedule = (
      keys.as_tuple(begun["resolved"][f"precision.{k}"]) for k in ("rules", "schedule")
    )
    options = {"sensitivity": "", "rules": rules, "first_bf16": 0, "last_bf16": 0}
    options |= {"schedule": schedule} if schedule else {}
    shown = " ".join(shlex.quote(f"--config.precision.{k}={v}") for k, v in options.items())
    raise UserError(
      f"precision.sensitivity={c.precision.sensitivity!r}: there is no file {path!r}, and "
      f"{workdir!r} remembers the rules of its run. To go on with them: {shown}"
    )


def _file(stated: str) -> tuple[str, str]:
  """(path, budget or "") of FILE or FILE:BUDGET."""
  path, _, wanted = stated.rpartition(":")
  path, wanted = (path, wanted) if wanted in BUDGETS else (stated, "")
  return os.path.expanduser(path), wanted


def _check_same(c: Config, model: model_config.ModelConfig, study: Study, path: str):
  """Refuses a study of another model, or of other recipes than the configuration's own."""
  there, here = study["model"], model.to_dict()
  for key in here.keys() - {*_OTHER}:
    if there.get(key) != (value := _plain(here[key])):
      raise UserError(
        f"precision.sensitivity: {path} is of a model with {key}={there.get(key)!r}, and this one "
        f"has {value!r}; {_REPEAT}"
      )
  own = precision.with_first_last_rules(precision.read(c), c, model).phases[0].rules
  paths = [*site_tree.find_sites(transformer.site_params(model))]
  chosen = rules_lib.match(rules_lib.all_names(paths, model.num_layers), own)
  chosen = {k: r for k, r in chosen.items() if rules_lib.recipe_by_name(r).fwd.is_quantized}
  measured = {site["name"]: site["recipe"] for site in study["sites"]}
  for name in chosen | measured:
    if measured.get(name) != chosen.get(name):
      was, now = (f"{of[name]!r}" if name in of else "no FP8" for of in (measured, chosen))
      raise UserError(
        f"precision.sensitivity: {path} measured {name} in {was}, and precision.rules give it "
        f"{now}; state the rules that were measured (--config=FILE:ARM), or {_REPEAT}"
      )


def _plain(value: Any) -> Any:
  """As JSON has it."""
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  return [*map(_plain, value)] if isinstance(value, (list, tuple)) else value


def _chosen(budgets: list[Budget], wanted: str, path: str) -> list[tuple[str, str]]:
  named = {one["key"]: one for one in budgets}
  if not named:
    raise UserError(
      f"precision.sensitivity: {path} has no rules; {_REPEAT}, sensitivity.max_loss or min_fp8 set"
    )
  if (not wanted and len(named) > 1) or (wanted and wanted not in named):
    raise UserError(
      f"precision.sensitivity={path!r} holds the rules of {', '.join(named)}; name one, "
      f"precision.sensitivity='{path}:{[*named][0]}'"
    )
  one = named[wanted or [*named][0]]
  if one["verdict"] != MET:
    raise UserError(
      f"precision.sensitivity: of the rules for {one['budget']!r} in {path} the other half of the "
      f"text says {one['verdict']!r}: {_REPEAT} and more sensitivity.tokens or a larger budget, or "
      "paste the rules as precision.rules"
    )
  return one["arms"][0]["rules"]
