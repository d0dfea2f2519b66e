"""A checkpoint as a folder that Hugging Face, vLLM and others read."""

import collections
import dataclasses
import functools
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fp8jax import console as console_lib
from fp8jax import hub
from fp8jax import params as params_lib
from fp8jax.config import identity
from fp8jax.data import batch_sharding, loader
from fp8jax.errors import UserError, writing
from fp8jax.export import checks as export_config
from fp8jax.export.settings import Export
from fp8jax.jobs import export_gate
from fp8jax.jobs.restore import folder_of, load_weights, without_adapters
from fp8jax.models import lora, transformer
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import export_folder, fp8_base, fp8_export, peft, publish
from fp8jax.models.hf import names as hf_names
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree, stored_params
from fp8jax.run import calibration, provenance
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.step import run_spec


@dataclasses.dataclass(frozen=True)
class Source:
  """The weights to export.

  Attributes:
    params: as they are stored.
    where: {"step": of the checkpoint} or {"hf": folder}.
    phase: of the precision schedule.
    weights_dtype: that the weights came in, before training.
    companions: folder of tokenizer and settings; "" for none.
    amaxes: {(site, tensor): amax} of delayed and static scales.
    trained: provenance of the training; {} where there is none.
    changed: configuration keys that training changed.
    stored: matrices that are there in codes, see fp8_export.choose.
  """

  params: Any
  where: dict[str, Any]
  phase: int
  weights_dtype: str
  companions: str
  amaxes: dict[tuple[str, str], float]
  trained: dict[str, Any]
  changed: dict[str, Any]
  stored: dict[str, fp8_export.Stored | None]


def run(plan: run_spec.RunSpec, workdir: str, out: str = ""):
  """Writes a checkpoint, or the folder weights.hf, as a Hugging Face folder.

  The folder is written beside its place and moved there once the gate has passed it.
  """
  target, versions = _place(plan, workdir, out)
  texts = export_gate.batches(plan)
  plan, source = _source(plan, workdir, target)
  is_peft = plan.of(Export).format == "peft"
  if is_peft and not any(map(lora.is_adapter, params_lib.flatten(source.params))):
    raise UserError(
      "export.format='peft' writes adapters, and a folder has none: set init.adapters"
    )
  adapted, plan, source = (None, plan, source) if is_peft else _merged(plan, source)
  fp8 = _fp8(plan, source, () if adapted is None else lora.adapted_paths(adapted[0]))
  params = stored_params.dequantize_tree(source.params)
  operands = jax.tree.map(
    stored_params.compute_copy, source.params, is_leaf=stored_params.is_stored
  )
  if plan.of(Export).fold_smooth_batches:
    params = operands = _fold_smooth(plan, params)
  dtype = plan.of(Export).dtype
  if is_peft:
    dtype = "float32"
  elif dtype == "auto":
    dtype = source.weights_dtype if fp8 is None else "bfloat16"
  base = _base(source, workdir)
  gate = export_gate.Gate(plan, texts, *(adapted or (params, plan)))
  del adapted
  part = os.path.realpath(target) + ".part"
  try:
    with writing(target):
      if is_peft:
        peft.save(part, params, plan.model, _began(plan, source), [publish.CARD])
      else:
        hf_weights.save_params(
          part, params, plan.model, dtype, base, source=source.companions, fp8=fp8,
          operands=operands, extra=[publish.CARD],
        )  # fmt: skip
    beside = params if is_peft else None
    del params, operands
    source = dataclasses.replace(source, params=None)
    _wait("the export's files")
    gate.read_back(part, beside)
    del beside
    if plan.of(Export).client_python:
      gate.client(part, versions)
    result = {"folder": target, **source.where, "dtype": dtype, **_summary(plan, source, fp8)}
    result["gate"] = gate.report
    if jax.process_index() == 0:
      with writing(target):
        _write_card(plan, part, target, source, result)
      export_folder.move(part, target)
  except BaseException:
    if jax.process_index() == 0:
      export_folder.discard(part)
    raise
  if plan.of(Export).push_to and jax.process_index() == 0:
    result["pushed_to"] = publish.push(target, plan.of(Export).push_to)
  return result


def _base(source: Source, workdir: str) -> dict[str, Any] | None:
  """The config.json beside the weights; of a run without Hugging Face files its ends, if any."""
  if source.companions:
    return hf_config.read_json(source.companions, "config.json")
  ends = _json(workdir, "generation_config.json").get("eos_token_id")
  found = {"bos_token_id": None, "eos_token_id": ends, "pad_token_id": None}
  return None if ends is None else found


def _place(plan: run_spec.RunSpec, workdir: str, out: str) -> tuple[str, dict[str, str]]:
  """(the folder to write, versions of the client), checked before work that takes long."""
  hf_names.entries(plan.model)  # before anything is read: raises where there is no mapping
  target = folder_of(out, workdir, "hf")
  if jax.process_index() == 0:
    export_folder.recover(target)
  _wait("what an interrupted export left")
  never = {workdir: "the run's own folder", plan.init.hf: "the folder of init.hf",
           plan.weights.hf: "the folder of weights.hf"}  # fmt: skip
  export_folder.check_other(target, _local(never))
  # `move` checks again.
  export_folder.check(target, ["config.json", publish.CARD])
  versions = export_gate.probe(plan) if jax.process_index() == 0 else {}
  if plan.of(Export).push_to and jax.process_index() == 0:
    publish.check_login(plan.of(Export).push_to)
  return target, versions


def _began(plan: run_spec.RunSpec, source: Source) -> str:
  """The folder or id on the hub that the weights began with; "" for none."""
  return (source.trained.get("config") or {}).get("init.hf", "") or plan.weights.hf


def _local(folders: dict[str, str]) -> dict[str, str]:
  return {hub.local(folder): what for folder, what in folders.items() if folder}


def _wait(what: str):
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)


def _source(plan: run_spec.RunSpec, workdir: str, target: str) -> tuple[run_spec.RunSpec, Source]:
  """(the plan with the recipes that policies gave, the weights to export)."""
  is_fp8 = export_config.fp8_format(plan.of(Export)) is not None
  loaded = load_weights(plan, workdir, has_scales=is_fp8)
  plan, params, meta = loaded.spec, loaded.params, loaded.meta
  if plan.weights.hf:
    folder = hf_weights.Folder(plan.weights.hf)
    stored = fp8_base.stored(folder, hf_names.entries(plan.model))
    return plan, Source(params, loaded.where, 0, loaded.dtype, folder.folder, {}, {}, {}, stored)
  began_with = {meta["config"].get("init.hf", ""): "the folder that training started from"}
  export_folder.check_other(target, _local(began_with))
  step = loaded.where["step"]
  if is_fp8:
    _check_precision(plan, meta["config"], step)
  entries, flat = hf_names.entries(plan.model), params_lib.flatten(params)
  codes = fp8_base.of_stacks(flat, entries, hf_weights.on_host)
  kept = os.path.join(workdir, "hf_source")
  kept = kept if os.path.isdir(kept) else ""
  trained, config = (_json(workdir, f"{name}.json") for name in ("provenance", "config"))
  return plan, Source(
    params, {"step": step}, loaded.phase, loaded.dtype, kept,
    _amaxes(plan, loaded.phase, loaded.states), trained, config.get("changed", {}), {**codes},
  )  # fmt: skip


# They say which codes training multiplied.
_PRECISION = ("rules", "first_bf16", "last_bf16", "schedule", "smooth_swiglu")


def _check_precision(plan: run_spec.RunSpec, trained: dict[str, Any], step: int):
  """Refuses to call codes those of training that a checkpoint was not trained with."""
  changes = identity.diff(identity.identity(plan), trained)
  other = [key for key in changes if key in {f"precision.{name}" for name in _PRECISION}]
  if other:
    old, new = changes[other[0]]
    raise UserError(
      f"{other[0]} is {new!r} here and {old!r} in the checkpoint of step {step}, so that the codes "
      "of its training are not known: export it with the configuration that it was trained with"
    )


def _json(workdir: str, name: str) -> dict[str, Any]:
  """A file of the run; {} where it is not there."""
  there = os.path.exists(os.path.join(workdir, name))
  return hf_config.read_json(workdir, name) if there else {}


def _merged(
  plan: run_spec.RunSpec, source: Source
) -> tuple[tuple[Any, run_spec.RunSpec] | None, run_spec.RunSpec, Source]:
  """((float32 parameters, plan) of a model with adapters, or None; plan and source without them).

  The merged weights are float32; the format of the export rounds or quantizes them, and the gate
  compares the result with the adapters beside their base.
  """
  if plan.model.lora is None:
    return None, plan, source
  merged = without_adapters(plan)
  params = lora.merged(source.params, plan.declaration, plan.model)
  adapted = None
  if any(map(lora.is_adapter, params_lib.flatten(source.params))):  # a folder has none
    adapted = (stored_params.dequantize_tree(source.params), plan)
  return adapted, merged, dataclasses.replace(source, params=params)


def _amaxes(plan: run_spec.RunSpec, phase: int, states) -> dict[tuple[str, str], float]:
  """{(layer's site, tensor): amax} of the checkpoint's delayed and static scales."""
  sites = plan.sites(phase=phase)
  if not states or not scaling_lib.states(sites):
    return {}
  found = {}
  for site in site_lib.flatten(scaling_lib.with_states(sites, states)).values():
    if site.scaling_state is not None:
      amax_N3 = np.asarray(hf_weights.on_host(site.scaling_state.amax_3)).reshape(-1, 3)
      for name, amax_3 in zip(site.layer_names, amax_N3, strict=True):
        found |= {(name, tensor): float(a) for tensor, a in zip("xwg", amax_3)}
  return found


def _fp8(plan: run_spec.RunSpec, source: Source, merged) -> fp8_export.Fp8Plan | None:
  """The FP8 matrices, with the amaxes of their scales; told before anything is written."""
  fp8 = export_config.choose(plan, source.phase, merged, source.stored)
  if fp8 is None:
    return None
  path = os.path.expanduser(plan.of(Export).input_scales)
  inputs = calibration.read(path, site_tree.recipes_of(plan.sites())) if path else {}
  fp8 = fp8_export.with_amaxes(fp8, hf_names.entries(plan.model), source.amaxes, inputs)
  reasons = collections.Counter(fp8.unquantized.values())
  unquantized = "".join(f"; unquantized: {n} matrices, {reason}" for reason, n in reasons.items())
  text = f"{fp8.share:.1%} of the parameters in FP8 ({len(fp8.matrices)} matrices){unquantized}"
  console_lib.console(stderr=True).print(text)
  return fp8


def _summary(
  plan: run_spec.RunSpec, source: Source, fp8: fp8_export.Fp8Plan | None
) -> dict[str, Any]:
  if fp8 is None:
    return {"format": plan.of(Export).format}
  kept = {"codes_of_folder" if plan.weights.hf and source.stored else "codes_of_training": sum(
    m.is_trained for m in fp8.matrices.values()
  )}  # fmt: skip
  return {
    "format": plan.of(Export).format, "strategy": fp8.fp8.strategy, "scale_fmt": fp8.fp8.scale_fmt,
    "fp8_share": fp8.share, "fp8_matrices": len(fp8.matrices), **kept,
    "unquantized_matrices": len(fp8.unquantized),
  }  # fmt: skip


def _write_card(plan: run_spec.RunSpec, part: str, target: str, source: Source, result):
  """README.md with the facts of the export and the provenance of the training."""
  here = provenance.provenance(dict(plan.flat), "", plan.seed, plan.num_devices)
  kept = ("commit", "dirty", "seed", "data_fingerprint", "devices", "versions", "time")
  fp8 = result.get("fp8_share")
  weights = {
    "FP8": f"{fp8:.1%} of the parameters, {result['strategy']} scales" if fp8 else "",
    **{k: v for k, v in result.items() if k not in ("gate", "folder", "fp8_share", "strategy")},
  }
  facts = {
    "Weights": {k: v for k, v in weights.items() if v != ""},
    "Logits compared with the source's": result["gate"],
    "Training": {k: source.trained[k] for k in kept if k in source.trained} or source.where,
    "Configuration that differs from configs/base.py": source.changed or "nothing",
    "Export": {k: here[k] for k in ("commit", "dirty", "versions", "time")},
  }
  began = _began(plan, source)
  base = began if began and hub.is_id(began) else ""
  publish.write_card(part, os.path.basename(os.path.abspath(target)), facts, base)


def _fold_smooth(plan: run_spec.RunSpec, params):
  """The parameters with Smooth-SwiGLU's scales per channel, those of held-out text, folded in."""
  sites = plan.sites(evaluator_lib.BF16)
  mixers = (m for m in transformer.mixers(plan.model) if m.fold_channel_scales is not None)
  scales = nothing = {mixer.key: None for mixer in mixers}
  run = jax.jit(functools.partial(transformer.hidden_and_aux, cfg=plan.model, run=plan.run))
  spread = batch_sharding.BatchSharder(plan.run.layout, plan.eval.batch)
  for source in plan.data.sources:
    counts = loader.DocumentCounts()
    for batch in loader.heldout_batches(
      plan.data,
      source,
      spread.local_rows,
      plan.of(Export).fold_smooth_batches,
      spread.shard,
      counts,
    ):
      scales = run(params, sites, spread.place(batch), states=scales)[1].states
    for what, number in counts.summary_everywhere().items():
      text = f"held-out documents of {source} passed over as {what}: {number}"
      console_lib.console(stderr=True).print(text)
  if scales is nothing:
    raise UserError(
      "export.fold_smooth_batches needs held-out text to choose scales from, and there is none: "
      "raise data.heldout_fraction or give more documents"
    )
  return transformer.fold_channel_scales(params, scales, plan.model)
