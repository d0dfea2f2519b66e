"""The noise floor of a model by recipe: its difference from itself with norms one ulp larger."""

import os
from typing import Any

from fp8jax import console as console_lib
from fp8jax.data import loader
from fp8jax.evaluation import divergence
from fp8jax.evaluation.settings import Noise
from fp8jax.jobs import checks
from fp8jax.ops import site as site_lib
from fp8jax.records import make_folder
from fp8jax.run import provenance
from fp8jax.run.restore import load_trained, output_folder, sites_with_scales
from fp8jax.step.train_spec import TrainSpec


def run(spec: TrainSpec, workdir: str, out: str = "") -> dict[str, Any]:
  """Measures the recipes of the weights and those asked for; writes them for reports.

  Raises:
    UserError: no trained weights, too few tokens, or a recipe whose scales are not known.
  """
  path, n = output_folder(out, workdir, "noise_floor.json"), spec.of(Noise)
  texts = divergence.batches(spec, divergence.Wanted(n.tokens, n.text, "noise."))
  loaded = load_trained(spec, workdir)
  own = loaded.spec
  measured = [(own, loaded.phase, loaded.states)]
  measured += [(own.with_recipe(name), 0, {}) for name in n.recipes]
  trees = [sites_with_scales(*one) for one in measured]  # refused before the work
  rows = []
  for (of, phase, _), sites in zip(measured, trees, strict=True):
    recipes = {site.recipe.name: site.recipe.fwd for site in site_lib.flatten(sites).values()}
    names = [name for name, gemm in recipes.items() if gemm.is_quantized] or ["bf16"]
    floor = divergence.noise_floor(of, loaded.params, sites, texts)
    rules = of.precision.phases[phase].rules
    rows.append({"recipe": ", ".join(names), "is_own": of is own, **floor, "rules": rules})
  result = {
    "weights": loaded.where, "compute_dtype": spec.run.dtype.name, "rows": rows,
    "provenance": provenance.provenance(
      dict(spec.flat), loader.fingerprint(spec.data), spec.seed, spec.num_devices
    ),
  }  # fmt: skip
  make_folder(os.path.dirname(os.path.abspath(path)), "--out")
  provenance.write_json(*os.path.split(path), result)
  columns, cells = divergence.table(rows)
  console_lib.console(stderr=True).print(console_lib.table("noise floor", columns, cells))
  return {"results": path, **{k: v for k, v in result.items() if k != "provenance"}}


def problems_of_spec(spec: TrainSpec) -> list[str]:
  """The problems of noise.recipes with this model and mesh, in words."""
  return checks.recipe_problems(spec, "noise.recipes", spec.of(Noise).recipes)
