"""The state that a run without a checkpoint starts from."""

import contextlib
import filecmp
import os
from collections.abc import Sequence
from typing import Any

import jax
import rich.console

from fp8jax import console as console_lib
from fp8jax.config import resolve
from fp8jax.data.chat import template
from fp8jax.data.tokenize import BYTES, Tokenizer
from fp8jax.errors import UserError
from fp8jax.export import write
from fp8jax.generation import api
from fp8jax.jobs import start_codes
from fp8jax.models import lora
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import peft
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import stored_params
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.run import checkpoint, restore
from fp8jax.run import provenance as provenance_lib
from fp8jax.step import distillation, train_spec, train_step
from fp8jax.step.state import State

_SETTINGS = "generation_config.json"


def fresh(
  spec: train_spec.TrainSpec, workdir: str, out: rich.console.Console, ends: Sequence[int] = ()
) -> tuple[State, str]:
  """(a state with random weights or those of init.hf, the dtype that an export restores).

  Args:
    ends: tokens that close what the run trains.

  Raises:
    UserError: see start_codes.StartCodes.
  """
  source = spec.init.hf
  if not source:
    _note_ends(spec, workdir, ends)
    return train_step.make_state(spec), "bfloat16"
  codes = start_codes.StartCodes(spec)
  params, dtype = hf_weights.load_params(source, spec.model, spec.run.layout, values=codes)
  for line in codes.lines():
    out.print(line)
  params = peft.added(params, spec.init.adapters, spec.model, spec.run.layout)
  if said := peft.note(spec.init.adapters):
    out.print(said)
  _keep_files(spec, source, workdir, ends)
  return train_step.make_state(spec, params), dtype


def teacher(spec: train_spec.TrainSpec, out: rich.console.Console):
  """The teacher of a run (step/distillation.py); see `frozen`."""
  if not spec.distill.weight:
    return None
  made, where = frozen(spec, spec.distill.teacher, "distill.teacher")
  out.print(
    f"teacher: {where}, multiplied in {spec.run.dtype.name}, unquantized; loss (1 - w) CE + w t^2 "
    f"KL(teacher || student), w={spec.distill.weight}, t={spec.distill.temperature}"
  )
  return made


def frozen(spec: train_spec.TrainSpec, folder: str, key: str):
  """(parameters beside those that train, as a teacher's (step/distillation.py), where they come
  from): a folder's, those that training starts from before init.nudge and init.untie move them, or
  under adapters their base.

  Raises:
    UserError: the frozen base of init.workdir is not what training starts from.
    ConfigError: its checkpoint is of another model.
  """
  if distillation.is_base(spec, folder):
    if spec.init.workdir and _config(source(spec.init.workdir), spec.init.step).get("model.lora"):
      raise UserError(
        f"{key}='' with init.workdir={spec.init.workdir!r}, whose adapters are trained: its frozen "
        f"base is not what training starts from; export that run and set {key} to the folder"
      )
    return distillation.BASE, "the frozen base"
  model = lora.without(spec.model)
  if folder or not spec.init.workdir:
    where = folder or spec.init.hf
    params, _ = hf_weights.load_params(where, model, spec.run.layout)
    if codes := hf_weights.codes_of(where, model):
      where += f" (of codes, {codes}: not an unquantized model)"
  else:
    where = source(spec.init.workdir)
    params, step, meta = restore.restore_params(spec, where, spec.init.step)
    trained = meta["config"].get("precision.rules", "")
    where += f", step {step} (trained with precision.rules={trained})"
  return distillation.take(spec, params), where


def stage(
  spec: train_spec.TrainSpec, other: str, workdir: str, out: rich.console.Console,
  ends: Sequence[int] = (),
) -> tuple[State, str]:  # fmt: skip
  """`fresh` with the weights of another run's checkpoint, whose masters are float32 here.

  Adapters and a reward head start over where that run has none. Where it has adapters, the codes of
  its frozen base stay.

  Raises:
    ConfigError: the checkpoint is of another model.
  """
  began = _config(other, spec.init.step)
  begins_adapters = spec.model.lora is not None and not began.get("model.lora")
  there = restore.without_adapters(spec) if begins_adapters else spec
  if begins_head := spec.model.reward_head and not began.get("model.reward_head"):
    there = restore.with_logits(there, began["model.tie_embeddings"])
  try:
    params, step, meta = restore.restore_params(there, other, spec.init.step)
  except resolve.ConfigError as e:
    raise resolve.ConfigError(
      [f"init.workdir={spec.init.workdir!r} holds another model: {p}" for p in e.problems]
      + ["set model.preset and its overrides as in that run, or name another"]
    ) from e
  out.print(f"starting from the weights of step {step} in {spec.init.workdir}")
  take_source(spec, other, workdir, ends)
  params = {key: p for key, p in params.items() if key != "head" or not begins_head}
  params = jax.tree.map(
    lambda p: p if isinstance(p, StoredMatrix) else stored_params.dequantize_tree(p),
    params, is_leaf=stored_params.is_stored,
  )  # fmt: skip
  return train_step.make_state(spec, params), meta["weights_dtype"]


def _config(workdir: str, step: int) -> dict[str, Any]:
  with contextlib.closing(checkpoint.Checkpoints(workdir)) as saved:
    return saved.meta(saved.find(step))["config"]


def take_source(
  spec: train_spec.TrainSpec, other: str, workdir: str, ends: Sequence[int] = ()
):  # fmt: skip
  """Keeps the Hugging Face files that another run began with, for --job=export, or its ends."""
  source = os.path.join(other, "hf_source")
  if os.path.isdir(source):
    _keep_files(spec, source, workdir, ends)
  else:
    _note_ends(spec, workdir, [*ends, *_ends_of(spec, other)])


def _ends_of(spec: train_spec.TrainSpec, other: str) -> list[int]:
  """The ends that another run without Hugging Face files keeps; none of another tokenizer's."""
  if not os.path.exists(os.path.join(other, _SETTINGS)):
    return []
  then = hf_config.read_json(other, "config.json")["resolved"]["data.tokenizer"]
  own = spec.data.tokenizer
  is_same = then == own.path
  if not is_same and BYTES not in (then, own.path):
    try:
      is_same = filecmp.cmp(Tokenizer(then).file, own.file, shallow=False)
    except (UserError, OSError):
      console_lib.console(stderr=True).print(
        f"the tokenizer of {other}, {then!r}, is gone: whether its end tokens are this run's is "
        "not known, and they are left out; generate.stop_tokens names some"
      )
  return hf_config.read_json(other, _SETTINGS)["eos_token_id"] if is_same else []


def _note_ends(spec: train_spec.TrainSpec, workdir: str, ends: Sequence[int]):
  """Keeps the ends of a run that began without Hugging Face files: trained ones, and documents'."""
  own = []
  if ends and not jax.process_index():
    with contextlib.suppress(UserError):  # a tokenizer without an end of documents
      own = [spec.data.tokenizer.eos_id]
    os.makedirs(workdir, exist_ok=True)
    provenance_lib.write_json(workdir, _SETTINGS, {"eos_token_id": [*dict.fromkeys([*ends, *own])]})


def _own_eos(tokenizer: Tokenizer, folder: str) -> Tokenizer:
  """With the folder's own eos_token if it has one: data.eos ends documents, not turns."""
  own = Tokenizer(folder)
  try:
    _ = own.eos_id
  except UserError:
    return tokenizer
  return own


def _keep_files(spec: train_spec.TrainSpec, source: str, workdir: str, trained: Sequence[int]):
  """Keeps the files beside a model's weights, with the tokenizer and template of this run.

  Its tokenizer may be another than the model's own: a base model is fine-tuned with the tokenizer
  of the instruction-tuned one, whose end-of-turn token it learns to write.
  """
  if jax.process_index():
    return
  target, tokenizer = os.path.join(workdir, "hf_source"), spec.data.tokenizer
  folder = os.path.dirname(tokenizer.file) if tokenizer.path != BYTES else ""
  write.keep_companions(source, target, folder)
  if folder:
    own = _own_eos(tokenizer, folder)
    before = api.end_ids(target, own)
    ends = dict.fromkeys([*trained, *api.end_ids(folder, own), *before])
    if set(ends) != set(before):
      has_settings = os.path.exists(os.path.join(target, _SETTINGS))
      old = hf_config.read_json(target, _SETTINGS) if has_settings else {}
      provenance_lib.write_json(target, _SETTINGS, {**old, "eos_token_id": [*ends]})
  if given := spec.data.chat_template:  # a file hides all others
    with open(os.path.join(target, template.FILE), "w", encoding="utf-8") as f:
      f.write(template.ChatTemplate.load(tokenizer.path, given).text)


def source(workdir: str) -> str:
  """The workdir of init.workdir; raises FileNotFoundError where it has no checkpoint."""
  path = os.path.expanduser(workdir)
  if not os.path.isdir(os.path.join(path, "checkpoints")):  # Orbax would create it
    raise FileNotFoundError(
      f"init.workdir={workdir!r} holds no checkpoint; train that run first, or name another"
    )
  return path
