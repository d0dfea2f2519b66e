"""Refusals of the sections that one job reads, in words."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

from fp8jax.config import layout as layout_checks
from fp8jax.config import precision, registry
from fp8jax.errors import ConfigErrors
from fp8jax.evaluation import catalog
from fp8jax.evaluation.settings import Tasks
from fp8jax.export import checks as export_checks
from fp8jax.generation import api
from fp8jax.generation import checks as generation_checks
from fp8jax.generation.settings import VALUES, Generate, PlanInference
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.models import transformer
from fp8jax.ops import switch
from fp8jax.phases import policy
from fp8jax.ptq import methods
from fp8jax.recipe import rules
from fp8jax.search.settings import Search
from fp8jax.step.train_spec import TrainSpec


def train_problems(c: Any) -> list[str]:
  """The problems of sections that --job=train does not read, in words."""
  return [
    f"rl.{name}={value!r} is read by --job=rl, and --job=train would learn data.sources; give "
    f"--job=rl, or set rl.{name}=''"
    for name, value in (("tasks", c.rl.tasks), ("pairs", c.rl.pairs)) if value
  ]  # fmt: skip


def calibrate_problems(c: Any) -> list[str]:
  """The problems of a config's calibrate section, in words."""
  collected, method, percent = ConfigErrors(), c.calibrate.method, c.calibrate.percentile
  collected.check(
    50 <= percent <= 100, f"calibrate.percentile={percent} must be a percentage from 50 to 100"
  )
  collected.check(
    method == "amax" or c.loss_scale.kind == "none",
    f"calibrate.method={method!r} counts gradients as they are; set loss_scale.kind='none' for "
    "--job=calibrate, or calibrate.method='amax'",
  )
  return collected.found


def quantize_problems(c: Any) -> list[str]:
  """The problems of the sections quantize and export for --job=quantize, in words."""
  collected = ConfigErrors()
  collected.check(
    c.export.format in ("compressed-tensors", "modelopt", "hf-fp8-block"),
    f"export.format={c.export.format!r} holds no codes; --job=quantize writes "
    "'compressed-tensors', 'modelopt' or 'hf-fp8-block'",
  )
  collected.file("quantize.text", c.quantize.text, "name a text file, or '' for training documents")
  for text in c.quantize.methods:
    collected.attempt(functools.partial(methods.by_name, text), "quantize.methods")
  collected.extend(_pass_problems(c, "quantize"))
  return [*collected.found, *export_checks.problems(c)]


def generate_problems(config: Any) -> list[str]:
  """The problems of a config's generate section, in words."""
  collected, c = ConfigErrors(), registry.section(config, Generate)
  collected.extend(c.sampling.problems("generate."))
  remedy = "name a file with a prompt per line, or JSON lines with 'prompt' or 'messages'"
  collected.file("generate.prompts", c.prompts, remedy)
  taken = bool(c.out) and os.path.exists(os.path.expanduser(c.out))
  collected.check(not taken, f"generate.out={c.out!r} exists; move it away or name another file")
  return collected.found


def sensitivity_problems(config: Any) -> list[str]:
  """The problems of a config's sensitivity section, in words."""
  collected, c = ConfigErrors(), config.sensitivity
  collected.check(c.tokens >= 2, f"sensitivity.tokens={c.tokens} must be at least 2: two halves")
  collected.check(
    c.max_loss >= 0, f"sensitivity.max_loss={c.max_loss} must be percent, at least 0; 0 is none"
  )
  collected.check(
    0 <= c.min_fp8 <= 1, f"sensitivity.min_fp8={c.min_fp8} must be a share from 0 to 1; 0 is none"
  )
  collected.extend(_option_problems("sensitivity.recipes", c.recipes))
  collected.check(0 < c.bops <= 1, f"sensitivity.bops={c.bops} must be a share above 0, up to 1")
  attention = config.precision.attention
  collected.check(
    attention == "wide",
    f"precision.attention={attention!r}: --job=sensitivity compares linear layers with a forward "
    "pass in BF16, attention included; set precision.attention='wide'",
  )
  collected.extend(_pass_problems(config, "sensitivity"))
  return collected.found


def _pass_problems(config: Any, job: str) -> list[str]:
  if not config.precision.invariant:
    return []
  return [
    f"precision.invariant=True: --job={job} works on the layers of the plain forward pass; set "
    "precision.invariant=False"
  ]


def _option_problems(key: str, names: Sequence[str]) -> list[str]:
  collected = ConfigErrors()
  for name in names:
    recipe = collected.attempt(lambda name=name: rules.recipe_by_name(name), key)
    problem = switch.option_problem(recipe) if recipe else ""
    collected.check(not problem, f"{key}: {problem}")
  return collected.found


def search_problems(config: Any) -> list[str]:
  """The problems of a config's search section, in words."""
  collected, c = ConfigErrors(), registry.section(config, Search)
  collected.extend(_option_problems("search.options", c.options))
  collected.check(
    len(set(c.options)) > 1, f"search.options={c.options} must be at least two different recipes"
  )
  collected.check(
    0 < c.target <= 1, f"search.target={c.target} must be a share of BF16's BOPs, above 0 to 1"
  )
  collected.check(c.rate > 0, f"search.rate={c.rate} must be above 0")
  collected.check(
    not config.distill.weight,
    f"distill.weight={config.distill.weight}: --job=search takes the loss of the text for its "
    "reward; set distill.weight=0",
  )
  collected.extend(_pass_problems(config, "search"))
  collected.check(
    not config.log.tensor_stats_every,
    f"log.tensor_stats_every={config.log.tensor_stats_every}: --job=search draws a recipe for "
    "every product in each step, and has no statistics of one; set log.tensor_stats_every=0",
  )
  for key in ("policy", "schedule"):
    collected.check(
      not config.precision[key],
      f"precision.{key}={config.precision[key]!r}: --job=search chooses the recipes of every step "
      f"itself; set precision.{key}=()",
    )
  return collected.found


def noise_problems(c: Any) -> list[str]:
  """The problems of a config's noise section, in words."""
  collected = ConfigErrors()
  collected.file("noise.text", c.noise.text, "name a text file, or '' for held-out text")
  _check_recipes(collected, "noise.recipes", c.noise.recipes)
  return collected.found


def rl_problems(c: Any) -> list[str]:
  """The problems of a config's rl section and of those that it reads, in words."""
  collected = ConfigErrors()
  collected.extend(evaluation_problems(c))
  _check_recipes(collected, "rl.rollout", (c.rl.rollout,) if c.rl.rollout else ())
  return collected.found


def _check_recipes(collected: ConfigErrors, key: str, names: Sequence[str]):
  """Recipes of another forward pass than training's, by name."""
  for name in names:
    recipe = collected.attempt(lambda name=name: rules.recipe_by_name(name), key)
    collected.check(
      not recipe or not recipe.is_stateful,
      f"{key}: {name!r} has delayed or static scales, which belong to a run; make it the recipe of "
      "the job, --config=FILE:RECIPE, with that run's workdir or precision.calibration",
    )


def recipe_problems(spec: TrainSpec, key: str, names: Sequence[str]) -> list[str]:
  """The problems of other recipes of the layers with this model and mesh, in words."""
  texts, layout, dims = [], spec.run.layout, spec.model.dims
  sites = transformer.site_params(spec.model)
  for one in (spec.with_recipe(name).precision for name in names):
    texts += precision.frozen_problems(one, spec.model, layout)
    texts += precision.invariant_problems(dataclasses.replace(spec, precision=one))
    if layout.mesh is not None:
      split = (sites, dims, one.phases[0].rules, layout, None)
      texts += layout_checks.find_misaligned_tiles(*split)
  return [f"{key}: {text}" for text in texts]


def plan_inference_problems(config: Any) -> list[str]:
  """The problems of a config's plan_inference section, in words."""
  collected, c = ConfigErrors(), registry.section(config, PlanInference)
  for name in c.formats:
    collected.attempt(lambda name=name: rules.recipe_by_name(name), "plan_inference.formats")
  collected.check(
    0 <= c.reserve < 1,
    f"plan_inference.reserve={c.reserve} must be a share of the memory from 0 to below 1",
  )
  return collected.found


def evaluation_problems(c: Any) -> list[str]:
  """The problems of eval.tasks, of the settings that belong to it and of generation, in words."""
  settings = registry.section(c, Tasks)
  texts = [*generate_problems(c), *catalog.problems(settings)]
  other = c.eval.compare_with
  if other and not os.path.isdir(os.path.expanduser(other)):
    texts.append(
      f"eval.compare_with={other!r} does not exist; name the workdir of an evaluated run, or ''"
    )
  return texts


def accuracy_problems(spec: TrainSpec) -> list[str]:
  """The problems of policies that ask tasks in training, in words."""
  if not policy.asks_tasks(spec.precision.policy):
    return []
  texts = catalog.problems(spec.of(Tasks)) + generator_problems(spec)
  return [f"precision.policy, metric='accuracy': {text}" for text in texts]


def generator_problems(spec: TrainSpec) -> list[str]:
  """The problems of a generator in training, in words."""
  collected, g = ConfigErrors(), spec.of(Generate)
  collected.extend(generation_checks.of_model(spec.model, spec.run))
  matmul = spec.flat["kernels.matmul"]
  collected.check(
    g.weights != VALUES or matmul in gemm_api.WITH_VALUES,
    f"generate.weights='values' with kernels.matmul={matmul!r}: a recipe of any phase may multiply "
    "codes; set kernels.matmul='dequantized', on a CPU, or generate.weights='codes'",
  )
  longest = spec.model.max_positions
  collected.check(
    0 <= g.max_length <= longest,
    f"generate.max_length={g.max_length} must be from 0 to {longest}, the longest context of the "
    "model",
  )
  collected.attempt(
    lambda: api.end_ids("", spec.data.tokenizer, g.stop_tokens), "generate.stop_tokens"
  )
  return collected.found
