"""Quantizes a checkpoint or a folder after training, and writes the folder that servers read."""

import dataclasses
import functools
import os
import sys
from typing import Any

import numpy as np
import rich.progress

from fp8jax import console as console_lib
from fp8jax.data import batch_sharding, text_files
from fp8jax.errors import ConfigErrors, UserError
from fp8jax.evaluation import divergence
from fp8jax.export import build, checks, refusals, served
from fp8jax.export.fp8 import Stored, fused_with, site_of
from fp8jax.export.settings import Export
from fp8jax.models.hf import names, schemes
from fp8jax.ops import site_tree, stored_params
from fp8jax.optim import sparsity
from fp8jax.ptq import apply, methods
from fp8jax.ptq import run as ptq_run
from fp8jax.ptq.settings import Quantize
from fp8jax.recipe.gemm import Recipe
from fp8jax.run import restore
from fp8jax.step.train_spec import TrainSpec


def run(spec: TrainSpec, workdir: str, out: str = "") -> dict[str, Any]:
  """Quantizes the weights of weights.hf, or a checkpoint, and writes them to a folder.

  Raises:
    UserError: adapters, no recipe that quantizes, too little text, or see ptq_run.quantize.
  """
  q, e = spec.of(Quantize), spec.of(Export)
  if spec.model.lora:
    raise UserError(
      "--job=quantize quantizes models without adapters; merge them by --job=export, and name the "
      "folder as weights.hf with model.lora.rank=0"
    )
  target = restore.output_folder(out, workdir, "quantized")
  versions = build.check_place(spec, target, workdir)
  texts = divergence.batches(spec, divergence.Wanted(e.gate_tokens, e.gate_text, "export.gate_"))
  chosen = methods.in_order(map(methods.by_name, q.methods))
  products = [recipe.fwd for recipe in site_tree.recipes_of(spec.sites()).values()]
  windows = calibration_windows(spec) if apply.reads_text(chosen, products) else []
  loaded = restore.load_weights(spec, workdir, has_scales=False)
  source = build.of_folder(loaded) if spec.weights.hf else build.of_checkpoint(loaded, workdir)
  if source.stored and not e.requantize:
    raise UserError(
      f"{_where(loaded)} holds codes already ({_kinds(source)}): quantizing them again adds "
      "errors; start from the unquantized weights, or set export.requantize=True"
    )
  columns = (console_lib.column("{task.description}"), rich.progress.BarColumn(),
             rich.progress.MofNCompleteColumn(), rich.progress.TimeRemainingColumn())  # fmt: skip
  console = console_lib.console(stderr=True)
  with rich.progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
    task = bar.add_task("quantizing layers", total=spec.model.num_layers)

    def said(done: int, of: int, line: str):
      bar.update(task, completed=done, total=of)
      if not console.is_terminal:
        print(f"{done}/{of} {line}", file=sys.stderr, flush=True)

    made = ptq_run.quantize(
      loaded.spec, loaded.params, windows, chosen, os.path.join(workdir, "quantize"), said
    )
  stored = codes_by_name(made.spec, made)
  before = (loaded.spec, stored_params.dequantize_tree(loaded.params))
  source = dataclasses.replace(
    source, params=made.params, stored=stored, inputs=made.inputs, before=before,
    whose="calibration",
  )  # fmt: skip
  result = build.build(made.spec, made.spec, source, target, texts, versions)
  made.discard()
  calibrated = {"methods": list(q.methods), "calibration_tokens": sum(w.size for w in windows)}
  if errors := [row["error"] for row in made.rows.values() if "error" in row]:
    calibrated["largest_relative_error"] = max(errors)
    calibrated["mean_relative_error"] = float(np.mean(errors))
  return result | calibrated


def _where(loaded: restore.Loaded) -> str:
  return ", ".join(f"{'weights.hf' if k == 'hf' else k}={v!r}" for k, v in loaded.where.items())


def _kinds(source: build.Source) -> str:
  return ", ".join(dict.fromkeys(str(of.quant) for of in source.stored.values() if of))


def problems_of_spec(spec: TrainSpec) -> list[str]:
  """Of the methods against the recipes and the model, and of recipes that no server has."""
  chosen = [methods.by_name(text) for text in spec.of(Quantize).methods]
  recipes = site_tree.recipes_of(spec.sites())
  of_layers = {name: recipe for name, recipe in recipes.items() if name.startswith("layers/")}
  problems = ConfigErrors()
  for recipe in dict.fromkeys(of_layers.values()):
    if recipe.fwd.rhs is not None:
      problems.attempt(functools.partial(_scheme, recipe, spec.of(Export)))
  products = {e.name: recipes[site_of(e)].fwd for e in names.entries(spec.model)
              if e.layer is not None and e.inputs is not None}  # fmt: skip
  for group in dict.fromkeys(map(fused_with, products)):
    of = {n: (w, products[n].lhs) for n in group if n in products and (w := products[n].rhs)}
    unlike = refusals.unlike({n: w for n, (w, _) in of.items()})
    problems.check(len({*of.values()}) < 2, f"precision.rules: {unlike}")
  filling = [methods.name_of(m) for m in chosen if isinstance(m, methods.FILLING)]
  problems.check(
    not filling or spec.optim.sparsity == sparsity.NONE,
    f"quantize.methods={filling} with optim.sparsity={spec.optim.sparsity!r}: they move zeros of "
    "the mask; leave them out (awq, smooth_quant and equalize keep zeros)",
  )
  if not problems.found:  # refused now, or after all layers
    problems.attempt(lambda: checks.choose(spec, 0, stored=codes_by_name(spec)))
  texts = methods.check(chosen, of_layers, spec.model)
  return [*problems.found, *(f"quantize.methods: {text}" for text in texts)]


def _scheme(recipe: Recipe, e: Export) -> schemes.Scheme:
  """The scheme that a recipe's weights are written in.

  Raises:
    ValueError: servers have no such product.
  """
  of_section, fwd = checks.scheme(e), recipe.fwd
  if of_section is None or fwd.rhs is None:
    raise ValueError(f"export.format={e.format!r} or recipe {recipe.name!r} has no codes: set both")
  is_block, is_set = of_section.method == schemes.FINE_GRAINED, e.strategy != "auto"
  if (is_block or is_set) and not of_section.holds(apply.current(fwd.rhs)):
    said, fix = f"export.strategy={e.strategy!r}", "export.strategy='auto'"
    if is_block:
      said = f"export.format={e.format!r}"
      fix = "export.format='compressed-tensors', or take 'fp8_block'"
    raise ValueError(
      f"{said} holds {of_section.weight}, and recipe {recipe.name!r} of precision.rules has "
      f"{fwd.rhs}; set {fix}"
    )
  try:
    return served.scheme(fwd.rhs, fwd.lhs, of_section.method)
  except ValueError as error:
    raise ValueError(f"precision.rules: recipe {recipe.name!r}: {error}") from error


def codes_by_name(
  spec: TrainSpec, made: ptq_run.Quantized | None = None
) -> dict[str, Stored | None]:
  """{weight's name: its codes as an export has them, or None where it stays in 16 bits}.

  Args:
    made: reads the codes; None where they are yet to be made.
  """
  recipes = site_tree.recipes_of(spec.sites())
  stored: dict[str, Stored | None] = {}
  for entry in names.entries(spec.model):
    if entry.layer is None or entry.inputs is None:
      continue
    site = site_of(entry)
    recipe, stored[entry.name] = recipes[site], None
    if recipe.fwd.rhs is not None:
      factor = made.tensor_scales[site] if made else None
      scheme, read = _scheme(recipe, spec.of(Export)), functools.partial(_read, made, site)
      stored[entry.name] = Stored(apply.current(recipe.fwd.rhs), read, None, factor, scheme)
  return stored


def _read(made: Any, site: str) -> tuple[np.ndarray, np.ndarray]:
  codes = made.codes[site]()
  return np.asarray(codes.data), np.asarray(codes.scale)


def calibration_windows(spec: TrainSpec) -> list[np.ndarray]:
  """int32 tokens [B, L] of whole windows, as many as quantize.tokens asks for.

  Raises:
    UserError: there are fewer; names the text and how many it has.
  """
  q, length, rows = spec.of(Quantize), spec.data.seq_len, spec.eval.batch
  number = max(1, -(-q.tokens // length))
  if q.text:
    ids = spec.data.tokenizer.encode(text_files.read(q.text, "name a text file as quantize.text"))
    windows = np.asarray(ids[: len(ids) // length * length], np.int32).reshape(-1, length)
    where = f"quantize.text={q.text!r} has {len(ids):,} tokens"
  else:
    windows, where = _of_training(spec, number), "the training documents have too few whole windows"
  if len(windows) < number:
    fewer = f"quantize.tokens={len(windows) * length}" if len(windows) else "a smaller seq_len"
    raise UserError(
      f"{where}, fewer than quantize.tokens={q.tokens} in windows of seq_len={length}: give more "
      f"text, or set {fewer}"
    )
  return [windows[i : min(i + rows, number)] for i in range(0, number, rows)]


def _of_training(spec: TrainSpec, number: int) -> np.ndarray:
  """The first windows of the training data without padding."""
  batches = batch_sharding.TrainBatches(spec.data, spec.run.layout, spec.microbatch, 1)
  windows: list[np.ndarray] = []
  try:
    for _, batch in zip(range(4 * number), batches.iterator, strict=False):
      # Weights are also 0 at the last token of a document, where segments tell them from padding.
      is_text = batch.get("segments_BL", batch["weights_BL"]) > 0
      windows += [*batch["tokens_BL"][is_text.all(-1)]]
      if len(windows) >= number:
        break
  finally:
    batches.iterator.close()
  return np.asarray(windows[:number], np.int32).reshape(-1, spec.data.seq_len)
