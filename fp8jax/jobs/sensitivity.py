"""The loss that each linear layer loses by its recipe, and `precision.rules` for a budget of it."""

import dataclasses
import hashlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.data import loader
from fp8jax.errors import UserError, missing_package
from fp8jax.jobs.restore import folder_of, load_or_init
from fp8jax.models import transformer
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree, switch
from fp8jax.recipe import rules as rules_lib
from fp8jax.records import make_folder
from fp8jax.run import provenance, sensitivity, sensitivity_records, sensitivity_rules
from fp8jax.run.sensitivity import CHOOSE, HALVES, PARTS, REPORT, Measured, Study
from fp8jax.sensitivity.settings import Sensitivity
from fp8jax.step import run_spec

_BOTH = PARTS[-1]
_ON = (1.0, 1.0)


def run(plan: run_spec.RunSpec, workdir: str, out: str = "") -> dict[str, Any]:
  """Measures, chooses rules, writes and draws the results; returns the short of them.

  Raises:
    UserError: adapters, no quantized site, delayed or static scales without any, or no text.
  """
  started = time.time()
  folder = folder_of(out, workdir, "sensitivity")
  if plan.model.lora:
    raise UserError(
      "--job=sensitivity measures models without adapters; merge them by --job=export, and name "
      "the folder as weights.hf with model.lora.rank=0"
    )
  loaded = load_or_init(plan, workdir)
  if loaded is None:
    raise UserError(
      f"{workdir} has no checkpoint and init.hf is empty: random weights say nothing; train first, "
      "or name a Hugging Face folder as weights.hf"
    )
  plan, params, phase, states = loaded.spec, loaded.params, loaded.phase, loaded.states
  sites = _with_scales(plan, phase, states)
  if not sensitivity.places(plan, sites):
    raise UserError(
      "precision.rules quantize no forward GEMM, so there is nothing to measure; give the config "
      "an arm, --config=FILE:block_128"
    )
  batches = _halves(plan)
  make_folder(folder, "--out")
  fingerprint = loader.fingerprint(plan.data)
  records = sensitivity_records.Records(
    os.path.join(folder, "measurements.jsonl"), _header(plan, params, sites, fingerprint, states)
  )

  def say(line: str):
    print(f"{time.time() - started:6.0f} s  {line}", file=sys.stderr, flush=True)

  study = Study(plan, params, sites, batches, records, say)
  result: dict[str, Any] = {}
  for part in _stages(plan.of(Sensitivity)):
    result = {
      "format": sensitivity_records.FORMAT,
      "weights": loaded.where,
      **_results(study, dataclasses.replace(plan, sections={Sensitivity: part}), phase),
      "programs_compiled": study.programs.compiled,
      "provenance": provenance.provenance(dict(plan.flat), fingerprint, plan.seed, 1),
    }
    provenance.write_json(folder, "sensitivity.json", result)
  lines, pictures = table(result), _pictures(folder, result)
  print("\n".join(lines), file=sys.stderr)
  return {
    "results": os.path.join(folder, "sensitivity.json"),
    "pictures": pictures,
    "seconds": round(time.time() - started),
    "rules": [{"budget": b["budget"], "rules": b["arms"][0]["rules"]} for b in result["budgets"]],
  }


def _stages(s: Sensitivity) -> list[Sensitivity]:
  """Parts of the work, each with those before it: results are written after each of them."""
  few = tuple(group for group in s.groups if group != "layers")
  parts = (((), 0), (few, 0), (few, s.top), (s.groups, s.top))
  return [dataclasses.replace(s, groups=groups, top=top) for groups, top in parts]


# --- what is measured ----------------------------------------------------------------------------


def _with_scales(plan: run_spec.RunSpec, phase: int, states: Mapping[str, Any]):
  """The sites in their recipes, with the scales that are not current."""
  sites = plan.sites(phase=phase)
  missing = sorted(scaling_lib.states(sites).keys() - states.keys())
  if missing:
    recipe = site_lib.flatten(sites)[missing[0]].recipe
    raise UserError(
      f"site {missing[0]}: {recipe.name!r} takes scales from an amax history or a calibration, and "
      "these weights come without one; name the workdir of a run that trained with it, or "
      "precision.calibration=TABLE of --job=calibrate, or measure a recipe with current scales "
      "such as 'tensor_current'"
    )
  return scaling_lib.with_states(sites, states) if states else sites


def _halves(plan: run_spec.RunSpec) -> dict[str, list[dict[str, np.ndarray]]]:
  """The held-out batches of both halves; no document is in both.

  Raises:
    UserError: a half without tokens.
  """
  size = plan.eval.batch
  each = math.ceil(plan.of(Sensitivity).tokens / 2 / (size * plan.data.seq_len)) * size
  found: dict[str, list[dict[str, np.ndarray]]] = {half: [] for half in HALVES}
  for name in plan.data.sources:
    windows = _windows(plan, name)
    first = [next(windows) for _ in range(each)]
    later = _after_first_document(windows, each)
    for half, some in zip(HALVES, (first, later), strict=True):
      if not sum(w["weights_BL"].sum() for w in some):
        raise UserError(
          f"data.sources.{name} has no held-out token for the half {half!r} of sensitivity.tokens="
          f"{plan.of(Sensitivity).tokens}; lower it, raise data.heldout_fraction, or give more text"
        )
      batches = (some[i : i + size] for i in range(0, each, size))
      found[half] += [{k: np.stack([w[k] for w in rows]) for k in rows[0]} for rows in batches]
    windows.close()
  return found


def _windows(plan: run_spec.RunSpec, name: str):
  """Held-out windows of a source, one after the other; where they run out, windows of weight 0."""
  stream = loader.heldout_batches(plan.data, name, plan.eval.batch, sys.maxsize)
  for batch in stream:
    for i in range(plan.eval.batch):
      yield {k: np.array(v[i]) for k, v in batch.items()}
  stream.close()


def _after_first_document(windows, count: int) -> list[dict[str, np.ndarray]]:
  """So many windows after the document that the next begins with, which may have begun before.

  Where it ends within a window, its tokens have weight 0.
  """
  for window in windows:
    segments = window.get("segments_BL")
    is_over = not window["weights_BL"].any()
    if segments is None:  # documents are not kept apart
      is_over = True
    elif not is_over:
      is_first = segments == segments[0]
      window["weights_BL"][is_first] = 0
      is_over = not is_first.all()
    if is_over:
      return [window, *(next(windows) for _ in range(count - 1))]
  return []


def _header(plan: run_spec.RunSpec, params, sites, fingerprint: str, states) -> dict[str, Any]:
  """Everything that a measurement depends on."""
  recipes = {name: recipe.to_dict() for name, recipe in site_tree.recipes_of(sites).items()}
  return {
    "model": plan.model.to_dict(),
    "weights": _digest(params),
    "recipes": hashlib.sha256(repr(sorted(recipes.items())).encode()).hexdigest()[:16],
    "scales": _digest(states),
    "data": fingerprint,
    "windows": [plan.of(Sensitivity).tokens, plan.eval.batch, plan.data.seq_len],
    "compute": [plan.run.dtype.name, plan.kernels.matmul, plan.run.attention,
                plan.run.smooth_swiglu],
    "seed": plan.seed,
  }  # fmt: skip


def _digest(tree) -> str:
  """Changes with the shapes and with sums of the numbers of a tree."""
  sums = jax.jit(lambda tree: [jnp.sum(jnp.abs(x.astype(jnp.float32))) for x in tree])
  leaves = jax.tree.leaves(tree)
  parts = [(x.shape, str(x.dtype)) for x in leaves], jax.device_get(sums(leaves))
  return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# --- the results ---------------------------------------------------------------------------------


def _results(study: Study, plan: run_spec.RunSpec, phase: int) -> dict[str, Any]:
  """Everything that plan.of(Sensitivity) asks for, measured unless it has been."""
  names = [place.name for place in study.places]
  together = {half: study.measure("all sites", dict.fromkeys(names, _ON), half) for half in HALVES}
  estimates = study.estimate()
  damage = {name: float(parts[_BOTH]["kl"].sum()) for name, parts in estimates.items()}
  order = sensitivity_rules.ordered(study.places, damage)
  budgets = _budgets(study, plan, phase, order)
  groups = _groups(study, plan.of(Sensitivity).groups)
  top = sorted(names, key=lambda name: -damage[name])[: plan.of(Sensitivity).top]
  measured = {name: _both(study, name, {name: _ON}) for name in top}
  base = together[CHOOSE]
  return {
    "tokens": {half: int(study.tokens(half).sum()) for half in HALVES},
    "windows": {half: int((study.tokens(half) > 0).sum()) for half in HALVES},
    "bf16_loss": {half: _ratio(m.base_I, m.tokens_I) for half, m in together.items()},
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


def _ratio(over, under) -> float:
  return float(f"{over.sum() / under.sum():.6g}")


def _estimated(sums: Mapping[str, np.ndarray], base: Measured) -> dict[str, Any]:
  """A row like `Measured.row`, of sums by window."""
  found = Measured(base.tokens_I, base.base_I, base.base_I + sums["loss"], sums["kl"]).row()
  return {key: found[key] for key in ("loss_percent", "kl")}


def _both(study: Study, label: str, on: Mapping[str, Sequence[float]]) -> dict[str, Any]:
  """A set of sites on both halves."""
  first, second = (study.measure(label, on, half) for half in HALVES)
  return first.joined(second).row()


def _groups(study: Study, which: Sequence[str]) -> list[dict[str, Any]]:
  places, found = study.places, []
  for group in which:
    if group == "tensors":
      for i, tensor in enumerate(switch.TENSORS):
        number = tuple(float(i == j) for j in range(len(switch.TENSORS)))
        on = {p.name: number for p in places}
        found.append({"group": group, "name": tensor, **_both(study, f"{tensor} of all sites", on)})
      continue
    key = {"kinds": lambda p: p.kind, "layers": lambda p: p.layer}[group]
    for value in dict.fromkeys(map(key, places)):
      if value is not None:
        on = {p.name: _ON for p in places if key(p) == value}
        label = f"{group[:-1]} {value}"
        found.append({"group": group, "name": str(value), **_both(study, label, on)})
  return found


def _budgets(study: Study, plan: run_spec.RunSpec, phase: int, order: list[str]):
  """For every budget the rules that were chosen on one half, and others, as the other half says."""

  def measured(bf16: Sequence[str], half: str) -> Measured:
    on = {p.name: _ON for p in study.places if p.name not in set(bf16)}
    digest = hashlib.sha256(repr(sorted(bf16)).encode()).hexdigest()[:12]
    label = f"all sites but {len(bf16)} ({digest})" if bf16 else "all sites"
    return study.measure(label, on, half)

  def change(bf16: Sequence[str]) -> float:
    return measured(bf16, CHOOSE).change.high  # the budget holds if the whole interval does

  s, found = plan.of(Sensitivity), []
  chosen_for: dict[str, list[str]] = {}
  if s.min_fp8:
    name = f"at least {100 * s.min_fp8:g} % of FLOPs"
    chosen_for[name] = sensitivity_rules.within_flops(study.places, order, s.min_fp8)
  if s.max_loss:
    name = f"at most {s.max_loss:g} % loss"
    chosen_for[name] = sensitivity_rules.within_loss(order, change, s.max_loss)
  rules, layers = plan.precision.phases[phase].rules, plan.model.num_layers
  names = _all_names(plan)
  for budget, chosen in chosen_for.items():
    arms = {"chosen": chosen}
    if chosen:
      arms["none in BF16"] = []
      arms |= sensitivity_rules.rivals(study.places, chosen, layers, plan.seed)
    best, rows = measured(chosen, REPORT), []
    for arm, bf16 in arms.items():
      on_report = measured(bf16, REPORT)
      written = sensitivity_rules.with_bf16(rules, names, bf16, layers)
      rows.append({
        "arm": arm, "bf16_sites": len(bf16),
        "bf16_flops": round(sensitivity_rules.share(study.places, bf16), 4),
        "report": on_report.row(),
        "above_chosen": on_report.minus(best),
        "runs_of_layers": sensitivity_rules.layers_apart(written, names, layers),
        "rules": written,
      })  # fmt: skip
    found.append({"budget": budget, "chosen_on": measured(chosen, CHOOSE).row(), "arms": rows})
  return found


def _all_names(plan: run_spec.RunSpec) -> list[str]:
  """Every site that rules are matched against, one per layer."""
  found = []
  for path in site_tree.find_sites(transformer.site_params(plan.model)):
    layers = range(plan.model.num_layers)
    is_stacked = path.startswith("layers/")
    found += [rules_lib.layer_name(path, i) for i in layers] if is_stacked else [path]
  return found


# --- what is shown -------------------------------------------------------------------------------


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
    lines += [f"{budget['budget']}: chosen on one half, here on the other"]
    for arm in budget["arms"]:
      share = f"{100 * arm['bf16_flops']:.1f} % of FLOPs in BF16"
      lines.append(f"{row(arm['arm'], arm['report'])}   {share}")
    lines += [f"  precision.rules = {tuple(map(tuple, budget['arms'][0]['rules']))}"]
  return lines


def _pictures(folder: str, result: Mapping[str, Any]) -> list[str]:
  """Paths of the page and the pictures; none, and a line that says so, without the extra."""
  try:
    return _draw(folder, result)
  except ModuleNotFoundError as e:
    print(f"no pictures: {missing_package(e)}; then the same command draws them", file=sys.stderr)
    return []


def _draw(folder: str, result: Mapping[str, Any]) -> list[str]:
  from fp8jax.report import sensitivity_page  # the extra `report`

  return sensitivity_page.write(folder, result)
