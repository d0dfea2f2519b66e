"""An export from its source to its place: written beside it, compared with the source, moved."""

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from fp8jax import console as console_lib
from fp8jax import hub
from fp8jax import params as params_lib
from fp8jax.config import identity
from fp8jax.data import batch_sharding, loader
from fp8jax.data.chat import template
from fp8jax.data.config import DataConfig
from fp8jax.data.tokenize import BYTES
from fp8jax.errors import UserError
from fp8jax.evaluation.divergence import Batch
from fp8jax.export import checks, client, folder, matrices, padding, publish, serving, write
from fp8jax.export import fp8 as fp8_lib
from fp8jax.export.gate import Gate
from fp8jax.export.settings import Export
from fp8jax.models import lora, transformer
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names, peft
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree, stored_params
from fp8jax.run import calibration, provenance
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run.restore import Loaded
from fp8jax.step.train_spec import TrainSpec


@dataclasses.dataclass(frozen=True)
class Source:
  """The weights to export.

  Attributes:
    params: as they are stored.
    where: {"step": of the checkpoint} or {"hf": folder}.
    weights_dtype: that the weights came in, before training.
    stored: matrices that are there in codes, see fp8.choose.
    companions: folder of tokenizer and settings; "" for none.
    base: config.json beside the weights; of a run without Hugging Face files its ends, if any.
    amaxes: {(site, tensor): amax} of delayed and static scales.
    trained: provenance of the training; {} where there is none.
    inputs: {(site, "x"): amax} that a calibration just saw; export.input_scales come before it.
    before: (spec, parameters) of the model before methods changed its weights, with which the gate
      compares the folder; None: of `params`.
    whose: whose codes `stored` are, in reports; of a checkpoint those of its training.
  """

  params: Any
  where: dict[str, Any]
  weights_dtype: str
  stored: dict[str, fp8_lib.Stored | None]
  companions: str = ""
  base: dict[str, Any] | None = None
  phase: int = 0
  amaxes: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
  trained: dict[str, Any] = dataclasses.field(default_factory=dict)
  changed: dict[str, Any] = dataclasses.field(default_factory=dict)
  inputs: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
  before: tuple[TrainSpec, Any] | None = None
  whose: str = "training"


def of_folder(loaded: Loaded) -> Source:
  """The weights of weights.hf, with the adapters of init.adapters."""
  there = hf_tensors.Folder(loaded.where["hf"])
  stored = fp8_lib.of_folder(there, names.entries(loaded.spec.model))
  base = hf_config.read_json(there.folder, "config.json")
  whose = "folder" if stored else "training"
  return Source(
    loaded.params, loaded.where, loaded.dtype, stored, there.folder, base, whose=whose
  )  # fmt: skip


def of_checkpoint(loaded: Loaded, workdir: str) -> Source:
  """The weights of a checkpoint, with the recipes that policies gave."""
  kept = os.path.join(workdir, "hf_source")
  kept = kept if os.path.isdir(kept) else ""
  codes = fp8_lib.of_stacks(params_lib.flatten(loaded.params), names.entries(loaded.spec.model))
  trained, config = (_json(workdir, f"{name}.json") for name in ("provenance", "config"))
  return Source(
    loaded.params, {"step": loaded.where["step"]}, loaded.dtype, {**codes}, kept,
    base_of(kept, workdir), loaded.phase, _amaxes(loaded.spec, loaded.phase, loaded.states),
    trained, config.get("changed", {}),
  )  # fmt: skip


def base_of(companions: str, workdir: str) -> dict[str, Any] | None:
  """Source.base."""
  if companions:
    return hf_config.read_json(companions, "config.json")
  ends = _json(workdir, "generation_config.json").get("eos_token_id")
  base = {"bos_token_id": None, "eos_token_id": ends, "pad_token_id": None}
  return None if ends is None else base


def _json(workdir: str, name: str) -> dict[str, Any]:
  """A file of the run; {} where it is not there."""
  there = os.path.exists(os.path.join(workdir, name))
  return hf_config.read_json(workdir, name) if there else {}


def _amaxes(spec: TrainSpec, phase: int, states) -> dict[tuple[str, str], float]:
  """{(layer's site, tensor): amax} of the checkpoint's delayed and static scales."""
  sites, amaxes = spec.sites(phase=phase), {}
  if not states or not scaling_lib.states(sites):
    return amaxes
  for site in site_lib.flatten(scaling_lib.with_states(sites, states)).values():
    if site.scaling_state is not None:
      amax_N3 = params_lib.on_host(site.scaling_state.amax_3).reshape(-1, 3)
      for name, amax_3 in zip(site.layer_names, amax_N3, strict=True):
        amaxes |= {(name, tensor): float(a) for tensor, a in zip("xwg", amax_3)}
  return amaxes


# They say which codes training multiplied.
_PRECISION = ("rules", "first_bf16", "last_bf16", "schedule", "smooth_swiglu")


def check_codes(spec: TrainSpec, meta, step: int):
  """Refuses a checkpoint whose codes are not known, or cannot be kept, before it is read.

  Raises:
    UserError: it was trained with another precision, or see fp8.choose.
  """
  if checks.scheme(spec.of(Export)) is None:
    return
  changes = identity.diff(identity.identity(spec), meta["config"])
  other = [key for key in changes if key in {f"precision.{name}" for name in _PRECISION}]
  if other:
    old, new = changes[other[0]]
    raise UserError(
      f"{other[0]} is {new!r} here and {old!r} in the checkpoint of step {step}, so that the codes "
      "of its training are not known: export it with the configuration that it was trained with"
    )
  checks.check_inputs(spec, checks.choose(spec, spec.phase(max(step - 1, 0))))


def fold_smooth(spec: TrainSpec, params):
  """The parameters with Smooth-SwiGLU's scales per channel, those of held-out text, folded in."""
  sites = spec.sites(evaluator_lib.BF16)
  mixers = (m for m in transformer.mixers(spec.model) if m.fold_channel_scales is not None)
  scales = nothing = {mixer.key: None for mixer in mixers}
  run = jax.jit(functools.partial(transformer.hidden_and_aux, cfg=spec.model, run=spec.run))
  spread = batch_sharding.BatchSharder(spec.run.layout, spec.eval.batch)
  for source in spec.data.sources:
    counts = loader.DocumentCounts()
    for batch in loader.heldout_batches(
      spec.data,
      source,
      spread.local_rows,
      spec.of(Export).fold_smooth_batches,
      spread.shard,
      counts,
    ):
      scales = run(params, sites, spread.place(batch), states=scales)[1].states
    for what, number in counts.summary().items():
      text = f"held-out documents of {source} passed over as {what}: {number}"
      console_lib.console(stderr=True).print(text)
  if scales is nothing:
    raise UserError(
      "export.fold_smooth_batches needs held-out text to choose scales from, and there is none: "
      "raise data.heldout_fraction or give more documents"
    )
  return transformer.fold_channel_scales(params, scales, spec.model)


# --- the export ----------------------------------------------------------------------------------


def check_place(spec: TrainSpec, target: str, workdir: str) -> dict[str, str]:
  """The checks of an export of a run's before work that takes long; versions of the client."""
  names.entries(spec.model)  # raises where there is no mapping
  if spec.of(Export).format != "peft":
    hf_config.check_exportable(spec.model)
  if is_first := jax.process_index() == 0:
    folder.recover(target)
  _wait("what an interrupted export left")
  never = {workdir: "the run's own folder", spec.init.hf: "the folder of init.hf",
           spec.weights.hf: "the folder of weights.hf"}  # fmt: skip
  folder.check_other(target, {hub.local(path): what for path, what in never.items() if path})
  # `move` checks again.
  folder.check(target, ["config.json", publish.CARD])
  versions = client.probe(spec.of(Export)) if is_first else {}
  if spec.of(Export).push_to and is_first:
    publish.check_login(spec.of(Export).push_to)
  return versions


def build(
  spec: TrainSpec, plain: TrainSpec, source: Source, target: str, texts: list[Batch],
  versions: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
  """Writes an export beside its place and moves it there once the gate has passed it.

  Args:
    spec: of the source.
    plain: the same without adapters.

  Returns:
    The report of the command.
  """
  rows: matrices.Rows = {}  # of the FP8 matrices, as they are written
  began = (source.trained.get("config") or {}).get("init.hf", "") or spec.weights.hf
  if spec.of(Export).format == "peft":
    began = write.frozen_base(source.trained.get("config") or {}) or spec.weights.hf
    fp8, dtype, (gate, files, read) = None, "float32", _adapters(spec, source, texts, began)
  else:
    fp8 = _choose_fp8(spec, plain, source)
    dtype = spec.of(Export).dtype
    if dtype == "auto":
      dtype = "bfloat16" if fp8 else source.weights_dtype
    gate, files, read = _model(spec, plain, source, texts, fp8, dtype, rows)
  source = dataclasses.replace(source, params=None)
  with folder.replacing(target) as part:
    write.write(part, files, [publish.CARD, *([matrices.FILE] if fp8 else [])])
    del files
    if fp8 and jax.process_index() == 0:
      provenance.write_json(part, matrices.FILE, {"strategy": fp8.labels, "rows": rows})
    _wait("the export's files")
    gate.read_back(part, read, fp8)
    if spec.of(Export).client_python:
      ask = gate.server if spec.of(Export).client == "vllm" else gate.client
      ask(part, versions, read, fp8)
    if rows and jax.process_index() == 0:
      cells = [list(cells) for cells in matrices.worst(rows)]
      shown = console_lib.table(_WORST, [*matrices.COLUMNS], cells)
      console_lib.console(stderr=True).print(shown)
    summary = _summary(spec, source, fp8, rows)
    if spec.of(Export).format != "peft":
      summary["tensor_parallel"] = serving.degrees(fp8, plain.model)
      shown = ", ".join(map(str, summary["tensor_parallel"]))
      console_lib.console(stderr=True).print(f"servers can cut the folder into {shown} shards")
    result = {"folder": target, **source.where, "dtype": dtype, **summary, "gate": gate.report}
    if jax.process_index() == 0:
      _write_card(spec, part, target, source, result, rows, began if hub.is_id(began) else "")
  if spec.of(Export).push_to and jax.process_index() == 0:
    result["pushed_to"] = publish.push(target, spec.of(Export).push_to)
  return result


def _wait(what: str):
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)


# (the gate, the files, the reader of the folder that they are in).
_Parts = tuple[Gate, write.Files, Callable[[str], Any]]


def _has_adapters(source: Source) -> bool:
  """Also where the spec has some, a folder may have none."""
  return any(map(lora.is_adapter, params_lib.flatten(source.params)))


def _adapters(spec: TrainSpec, source: Source, texts: list[Batch], base: str) -> _Parts:
  """The adapters alone; they are read beside the base that they came with."""
  if not _has_adapters(source):
    raise UserError(
      "export.format='peft' writes adapters, and a folder has none: set init.adapters"
    )
  params = stored_params.dequantize_tree(source.params)
  read = functools.partial(peft.added, params, cfg=spec.model, layout=spec.run.layout)
  return Gate(spec, texts, params), write.adapters(params, spec.model, base), read


def _model(
  spec: TrainSpec, plain: TrainSpec, source: Source, texts: list[Batch],
  fp8: fp8_lib.Plan | None, dtype: str, rows: matrices.Rows,
) -> _Parts:  # fmt: skip
  """The whole model, with its adapters merged.

  The merged weights are float32; the format of the export rounds or quantizes them, and the gate
  compares the result with the adapters beside their base.
  """
  stored, adapted = source.params, None
  if spec.model.lora:
    stored = lora.merged(stored, spec.declaration, spec.model)
    if _has_adapters(source):
      adapted = stored_params.dequantize_tree(source.params)
  params = stored_params.dequantize_tree(stored)
  operands = jax.tree.map(stored_params.compute_copy, stored, is_leaf=stored_params.is_stored)
  if spec.of(Export).fold_smooth_batches:
    params = operands = fold_smooth(plain, params)
  if fp8 and spec.of(Export).kv_cache:
    scales = serving.kv_scales(params, plain, texts, fp8_lib.METHODS[spec.of(Export).format])
    fp8 = dataclasses.replace(fp8, kv_scales=scales)
  own = {} if source.companions else _own_tokenizer(spec.data)
  folder = os.path.dirname(own.get("tokenizer.json", ""))
  base, of_text = source.base, (source.companions or folder, spec.data.tokenizer)
  if plain.model.reward_head:
    base = padding.with_token(base, *of_text, plain.model.vocab_size)
  before = (spec, adapted) if adapted is not None else source.before or (plain, params)
  gate = Gate(plain, texts, before[1], before[0])
  files = write.model(
    params,
    plain.model,
    dtype,
    base,
    source=source.companions,
    fp8=fp8,
    operands=operands,
    rows=rows,
  )
  files |= own
  if plain.model.reward_head and base:
    files |= padding.file(files, *of_text, base["pad_token_id"])
  return gate, files, lambda part: hf_weights.load_params(part, plain.model, plain.run.layout)[0]


def _own_tokenizer(data: DataConfig) -> dict[str, Any]:
  """Of a run that began without a folder: the tokenizer and the template that it learned with."""
  if data.tokenizer.path == BYTES:
    return {}
  file = os.path.abspath(data.tokenizer.file)
  is_folders = os.path.basename(file) == "tokenizer.json"  # else its neighbours are of another
  files = {**(write.tokenizer_files(os.path.dirname(file)) if is_folders else {})}
  files["tokenizer.json"] = file
  if data.chat_template:
    files[template.FILE] = os.path.expanduser(data.chat_template)
  return files


def _choose_fp8(spec: TrainSpec, plain: TrainSpec, source: Source) -> fp8_lib.Plan | None:
  """The FP8 matrices, with the amaxes of their scales; told before anything is written."""
  merged = lora.adapted_paths(source.params) if spec.model.lora else ()
  fp8 = checks.choose(plain, source.phase, merged, source.stored)
  if fp8 is None:
    return None
  path = os.path.expanduser(spec.of(Export).input_scales)
  inputs = dict(source.inputs)
  if path:  # servers compute without Smooth-SwiGLU
    recipes = site_tree.recipes_of(plain.sites())
    inputs |= calibration.read(path, recipes, smooth_swiglu="none")
  fp8 = fp8_lib.with_amaxes(fp8, names.entries(plain.model), source.amaxes, inputs)
  reasons = collections.Counter(fp8.unquantized.values())
  unquantized = "".join(f"; unquantized: {n} matrices, {reason}" for reason, n in reasons.items())
  kinds = ", ".join(dict.fromkeys(str(m.quant) for m in fp8.matrices.values()))
  number = f"{len(fp8.matrices)} matrices"
  text = f"{fp8.share:.1%} of the parameters in codes of {kinds} ({number}){unquantized}"
  console_lib.console(stderr=True).print(text)
  return fp8


_WORST = f"FP8 matrices of the lowest signal-to-noise ratio (all: {matrices.FILE})"


def _summary(
  spec: TrainSpec, source: Source, fp8: fp8_lib.Plan | None, rows: matrices.Rows
) -> dict[str, Any]:
  if fp8 is None:
    return {"format": spec.of(Export).format}
  return {
    "format": spec.of(Export).format, "strategy": fp8.labels, "scale_fmt": fp8.scale_fmt,
    "fp8_share": fp8.share, "fp8_matrices": len(fp8.matrices),
    f"codes_of_{source.whose}": sum(m.is_trained for m in fp8.matrices.values()),
    "unquantized_matrices": len(fp8.unquantized), "matrices": matrices.FILE,
    "lowest_snr_db": min(r["snr_db"] for r in rows.values()),
  }  # fmt: skip


def _write_card(
  spec: TrainSpec, part: str, target: str, source: Source, result, rows: matrices.Rows, base: str
):
  """README.md with the facts of the export and the provenance of the training."""
  here = provenance.provenance(dict(spec.flat), "", spec.seed, spec.num_devices)
  kept = ("commit", "dirty", "seed", "data_fingerprint", "devices", "versions", "time")
  fp8 = result.get("fp8_share")
  weights = {
    "FP8": f"{fp8:.1%} of the parameters, {result['strategy']} scales" if fp8 else "",
    **{k: v for k, v in result.items() if k not in ("gate", "folder", "fp8_share", "strategy")},
  }
  facts = {
    "Weights": {k: v for k, v in weights.items() if v != ""},
    "Logits compared with the source's": result["gate"],
    **({_WORST: publish.table(matrices.COLUMNS, matrices.worst(rows))} if rows else {}),
    "Training": {k: source.trained[k] for k in kept if k in source.trained} or source.where,
    "Configuration that differs from configs/base.py": source.changed or "nothing",
    "Export": {k: here[k] for k in ("commit", "dirty", "versions", "time")},
  }
  name = os.path.basename(os.path.abspath(target))
  publish.write_card(part, name, facts, base, spec.model.reward_head)
