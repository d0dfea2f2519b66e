"""The loss that each linear layer loses by its recipe, and `precision.rules` for a budget of it."""

import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from fp8jax.data import loader
from fp8jax.errors import UserError, missing_package
from fp8jax.models.config import EVAL_PRECISIONS
from fp8jax.recipe import rules as rules_lib
from fp8jax.records import make_folder
from fp8jax.run import provenance
from fp8jax.run.restore import load_trained, output_folder, sites_with_scales
from fp8jax.search import formats
from fp8jax.sensitivity import halves, records, results
from fp8jax.sensitivity.settings import Sensitivity
from fp8jax.sensitivity.study import Study, places
from fp8jax.step.train_spec import TrainSpec


def run(spec: TrainSpec, workdir: str, out: str = "") -> dict[str, Any]:
  """Measures, chooses rules, writes and draws the results; returns the short of them.

  Raises:
    UserError: adapters, no quantized site, delayed or static scales without any, or no text.
  """
  started, s = time.time(), spec.of(Sensitivity)
  folder = output_folder(out, workdir, "sensitivity")
  if spec.model.lora:
    raise UserError(
      "--job=sensitivity measures models without adapters; merge them by --job=export, and name "
      "the folder as weights.hf with model.lora.rank=0"
    )
  loaded = load_trained(spec, workdir)
  spec, params, phase, states = loaded.spec, loaded.params, loaded.phase, loaded.states

  def say(line: str):
    print(f"{time.time() - started:6.0f} s  {line}", file=sys.stderr, flush=True)

  sites = sites_with_scales(spec, phase, states)
  if not places(spec, sites):
    why = "precision.rules quantize no forward GEMM, so there is nothing to measure"
    raise UserError(f"{why}; give the config an arm, --config=FILE:block_128")
  batches = halves.read(spec)
  make_folder(folder, "--out")
  fingerprint = loader.fingerprint(spec.data)
  header = records.header(spec, params, sites, fingerprint, states)
  kept = records.Records(os.path.join(folder, "measurements.jsonl"), header)
  study = Study(spec, params, sites, batches, kept, say)
  result = {}
  few = tuple(group for group in s.groups if group != "layers")
  # Parts of the work, each with those before it: results are written after each.
  for groups, top in (((), 0), (few, 0), (few, s.top), (s.groups, s.top)):
    result = {
      "format": records.FORMAT,
      "model": spec.model.to_dict(),
      "weights": loaded.where,
      **results.measure(study, dataclasses.replace(s, groups=groups, top=top), phase),
      "programs_compiled": study.programs.compiled,
      "provenance": provenance.provenance(dict(spec.flat), fingerprint, spec.seed, 1),
    }
    provenance.write_json(folder, "sensitivity.json", result)
  lines, pictures = results.table(result), _pictures(folder, result)
  if s.recipes:
    own = records.Records(os.path.join(folder, "formats.jsonl"), {**header, "of": s.recipes})
    options = [rules_lib.recipe_by_name(name) for name in (*s.recipes, EVAL_PRECISIONS[1])]
    of_formats = formats.FormatStudy(options, spec, params, sites, batches, own, say)
    chosen = formats.choose(of_formats, s.bops, spec.precision.phases[phase].rules)
    of = {k: result[k] for k in ("weights", "provenance")}
    provenance.write_json(folder, "formats.json", chosen | of)
    lines += formats.table(chosen)
  print("\n".join(lines), file=sys.stderr)
  return {
    "results": os.path.join(folder, "sensitivity.json"),
    "pictures": pictures,
    "seconds": round(time.time() - started),
    "rules": [{"budget": b["budget"], "rules": b["arms"][0]["rules"]} for b in result["budgets"]],
  }


def _pictures(folder: str, result: Mapping[str, Any]) -> list[str]:
  """Paths of the page and the pictures; none, and a line that says so, without the extra."""
  try:
    page = importlib.import_module("fp8jax.sensitivity.page")  # needs the extra `report`
    return page.write(folder, result)
  except ModuleNotFoundError as e:
    print(f"no pictures: {missing_package(e)}; then the same command draws them", file=sys.stderr)
    return []
