"""Checkpoints as jobs read them."""

import dataclasses
import functools
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fp8jax import console as console_lib
from fp8jax import hub
from fp8jax.config import identity, resolve
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import REMOVED, UserError
from fp8jax.models import lora, transformer
from fp8jax.models.hf import peft
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.phases import decide
from fp8jax.run import calibration, checkpoint
from fp8jax.step import train_spec, train_step


def without_adapters(spec: train_spec.TrainSpec) -> train_spec.TrainSpec:
  """The spec of the same model without adapters."""
  model = lora.without(spec.model)
  phases = tuple(
    dataclasses.replace(p, rules=tuple(rule for rule in p.rules if rule not in lora.RULES))
    for p in spec.precision.phases
  )
  return dataclasses.replace(
    spec, model=model, declaration=transformer.params(model),
    precision=dataclasses.replace(spec.precision, phases=phases),
  )  # fmt: skip


def with_logits(spec: train_spec.TrainSpec, is_tied: bool) -> train_spec.TrainSpec:
  """The spec of the same model with a head of logits in the place of a reward head."""
  model = dataclasses.replace(spec.model, reward_head=False, tie_embeddings=is_tied)
  return dataclasses.replace(spec, model=model, declaration=transformer.params(model))


def find(spec: train_spec.TrainSpec, workdir: str, step: int | None = None) -> tuple[int, Any]:
  """(step, meta) of a checkpoint; without a step, of weights.step's."""
  if not os.path.isdir(workdir):  # Orbax would create it
    raise FileNotFoundError(f"{workdir} does not exist; train first, or name another --workdir")
  saved = checkpoint.Checkpoints(workdir, spec.checkpoint.keep)
  step = saved.find(spec.weights.step if step is None else step)
  meta = saved.meta(step)
  saved.close()
  return step, meta


def restore_params(spec: train_spec.TrainSpec, workdir: str, step: int | None = None):
  """(parameters, step, meta) of a checkpoint; without a step, of weights.step's."""
  step, meta = find(spec, workdir, step)
  changes = {
    k: v for k, v in identity.diff(identity.identity(spec), meta["config"]).items()
    if k.startswith("model.")
  }  # fmt: skip
  if changes:
    raise resolve.ConfigError(
      [f"{k} is {new} here and {old} in the checkpoint" for k, (old, new) in changes.items()]
    )
  # The master format of that run, whatever this configuration says.
  master = meta["config"].get("optim.master_format", "float32")
  spec = dataclasses.replace(spec, optim=dataclasses.replace(spec.optim, master_format=master))
  saved = checkpoint.Checkpoints(workdir, spec.checkpoint.keep)
  params = saved.restore_params(step, train_step.abstract_params(spec))
  saved.close()
  return params, step, meta


def restore_scaling_states(spec: train_spec.TrainSpec, workdir: str, step: int, meta, phase: int):
  """{site: ScalingState} of a checkpoint; without those that are of no use, and then says why."""

  def without(why: str):
    text = f"scales of step {step} of {workdir} {why}; current scales are computed instead"
    print(text, file=sys.stderr)
    return {}

  remembered = scaling_lib.recipes(spec.sites(phase=phase)) if step else {}
  if meta.get("remembered", remembered) != remembered:
    return without("belong to other recipes")
  saved = checkpoint.Checkpoints(workdir, spec.checkpoint.keep)
  scaling_states = saved.restore_scaling_states(
    step, train_step.abstract_state(spec, step).scaling_states
  )
  saved.close()
  sites = spec.sites(phase=phase)
  # Those of gradients may be awaited: no forward pass reads them, see evaluator.sites_of.
  if not (awaited := {*scaling_lib.unknown(sites, scaling_states, "xw")}):
    return scaling_states
  without(f"await, of {len(awaited)} sites, a batch with finite amaxes above 0")
  named = site_lib.flatten(sites)
  return {n: s for n, s in scaling_states.items() if awaited.isdisjoint(named[n].layer_names)}


@dataclasses.dataclass(frozen=True)
class Loaded:
  """The weights that a job reads.

  Attributes:
    spec: the job's, with the recipes that policies gave until the checkpoint.
    params: parameters as they are stored.
    states: of delayed and static scales; {} where nothing is known of them.
    where: {"workdir": ..., "step": ...} or {"hf": folder}, for a report.
    meta: of the checkpoint; {} of a folder.
    dtype: of the folder's weights, or that training began with.
  """

  spec: train_spec.TrainSpec
  params: Any
  phase: int
  states: Mapping[str, Any]
  where: dict[str, Any]
  meta: dict[str, Any]
  dtype: str


def load_weights(
  spec: train_spec.TrainSpec, workdir: str, kept: Collection[str] = (), has_scales: bool = True,
  has_frozen: bool = True,
) -> Loaded:  # fmt: skip
  """The weights of weights.hf, with init.adapters, or of the checkpoint weights.step of a workdir.

  Args:
    kept: paths of the weights that stay in a folder's FP8 codes.
    has_scales: whether `states` are read.
    has_frozen: whether a folder's weights beside adapters are as model.lora.base stores them in
      training, not the folder's own numbers.

  Raises:
    FileNotFoundError: there is no such workdir.
    UserError: precision.calibration is not the table that the checkpoint was trained with.
  """
  folder = spec.weights.hf
  table = os.path.expanduser(spec.calibration)
  if folder:
    _note_tokenizer(spec.data.tokenizer, folder)
    params, dtype = hf_weights.load_params(folder, spec.model, spec.run.layout, kept)
    params = peft.added(params, spec.init.adapters, spec.model, spec.run.layout)
    if spec.model.lora and has_frozen:  # adapters that start here, too
      begun = dataclasses.replace(spec, init=dataclasses.replace(spec.init, nudge=False))
      params = train_step.make_state(begun, params).params
    states = {}
    if table and has_scales:
      amaxes = calibration.load(spec, table)
      states = calibration.scaling_states_of(amaxes, spec.sites(), spec.run.layout)
    return Loaded(spec, params, 0, states, {"hf": folder}, {}, dtype)
  params, step, meta = restore_params(spec, workdir)
  digests = (x.get("precision.calibration") for x in (identity.identity(spec), meta["config"]))
  if table and len({*digests}) > 1:
    raise UserError(
      f"precision.calibration={spec.calibration!r} is not the table that the checkpoint of step "
      f"{step} was trained with, whose scales are read; set precision.calibration=''"
    )
  spec = as_trained(spec, meta)
  phase, states = spec.phase(max(step - 1, 0)), {}
  if has_scales:
    states = restore_scaling_states(spec, workdir, step, meta, phase)
  where = {"workdir": workdir, "step": step}
  return Loaded(spec, params, phase, states, where, meta, meta.get("weights_dtype", ""))


@functools.cache  # said once
def _note_tokenizer(tokenizer: Tokenizer, folder: str):
  """Says where texts are in other tokens than those of the folder's own tokenizer."""
  has_own = os.path.exists(os.path.join(hub.local(folder), "tokenizer.json"))
  if has_own and not tokenizer.is_of(folder):
    console_lib.console(stderr=True).print(
      f"note: texts are in tokens of data.tokenizer={tokenizer.path!r}, and {folder} has another "
      f"tokenizer; --config.data.tokenizer={folder} takes it"
    )


def load_or_init(
  spec: train_spec.TrainSpec, workdir: str, has_scales: bool = True
) -> Loaded | None:
  """As `load_weights`, and init.hf's where the workdir has no checkpoint; None without both.

  Raises:
    UserError: see `load_weights`; training would begin with another run's weights.
  """
  if spec.weights.hf or os.path.isdir(os.path.join(workdir, "checkpoints")):
    return load_weights(spec, workdir, has_scales=has_scales)
  if began := spec.init.workdir:
    raise UserError(
      f"{workdir} has no checkpoint, and this job does not begin as training does, with the "
      f"weights of init.workdir={began!r}: give --workdir={began}, with the model of that run, and "
      "--out for the result"
    )
  if not spec.init.hf:
    return None
  weights = dataclasses.replace(spec.weights, hf=spec.init.hf)
  return load_weights(dataclasses.replace(spec, weights=weights), workdir, has_scales=has_scales)


def load_trained(spec: train_spec.TrainSpec, workdir: str) -> Loaded:
  """As `load_or_init`, with scales.

  Raises:
    UserError: there are no trained weights.
  """
  loaded = load_or_init(spec, workdir)
  if loaded is None:
    raise UserError(
      f"{workdir} has no checkpoint and init.hf is empty: random weights say nothing; train first, "
      "or name a Hugging Face folder as weights.hf"
    )
  return loaded


def sites_with_scales(spec: train_spec.TrainSpec, phase: int, states: Mapping[str, Any]):
  """The sites in their recipes of a phase, with the scales that are not current.

  Raises:
    UserError: there are none.
  """
  sites = spec.sites(phase=phase)
  named = site_lib.flatten(sites)
  states = {name: state for name, state in states.items() if name in named}
  awaited = {*scaling_lib.unknown(sites, states, "xw")}
  missing = sorted(
    name for name in scaling_lib.states(sites)
    if name not in states or not awaited.isdisjoint(named[name].layer_names)
  )  # fmt: skip
  if missing:
    recipe = named[missing[0]].recipe
    raise UserError(
      f"site {missing[0]}: {recipe.name!r} takes scales from an amax history or a calibration, and "
      "these weights come without one; name the workdir of a run that trained with it, or "
      "precision.calibration=TABLE of --job=calibrate, or measure a recipe with current scales "
      "such as 'tensor_current'"
    )
  return scaling_lib.with_states(sites, states) if states else sites


def with_changes(spec: train_spec.TrainSpec, changes) -> train_spec.TrainSpec:
  """The spec with the recipes that policies gave, see Precision.with_changes."""
  if not changes:
    return spec
  names = list(site_tree.recipes_of(spec.sites()))
  return dataclasses.replace(spec, precision=spec.precision.with_changes(names, changes))


def as_trained(spec: train_spec.TrainSpec, meta: dict[str, Any]) -> train_spec.TrainSpec:
  """The spec with the recipes that policies gave until a checkpoint with this meta."""
  saved = meta.get("policy")
  return with_changes(spec, decide.PolicyState.from_json(saved).recipes) if saved else spec


def output_folder(path: str, workdir: str, name: str) -> str:
  """`path`, or a folder of that name under the workdir."""
  return os.path.expanduser(path) if path else os.path.join(workdir, name)


def check_same_run(
  changes: dict[str, tuple[Any, Any]], meta: dict[str, Any], step: int, fingerprint: str,
  readers: dict[str, Any], accepted: Sequence[str], read: Collection[str] = (),
):  # fmt: skip
  """Refuses a checkpoint whose run may not go on.

  Args:
    changes: of its configuration, {key: (then, now)}.
    meta, step: of the checkpoint.
    fingerprint, readers: of the data now.
    accepted: checkpoint.accept_changes.
    read: keys that policies decide by.

  Raises:
    ConfigError: something else would be computed, or read, and is not accepted; all reasons.
  """
  refused = identity.refused_changes(changes, accepted, read)
  problems = [
    f"{key} was {_shown(changes[key][0])} at step {step}"
    + (
      f", and is no key now: {REMOVED[key][0]}; take its weights, with init.weights_only"
      if key in REMOVED
      else f" and is {_shown(changes[key][1])} now"
    )
    for key in refused
  ]
  more = [key for key in refused if key not in REMOVED]
  if meta["data_fingerprint"] != fingerprint and "data" not in accepted:
    more.append("data")
    if not any(p.startswith("data.") for p in problems):
      bos = changes.get("data.bos")
      bos = f"; data.bos was {bos[0]}, is {bos[1]}" if bos else ""
      problems.append(
        f"the data changed since step {step} (fingerprint {meta['data_fingerprint']} -> "
        f"{fingerprint}{bos})"
      )
  reading, readers = _stated(readers, meta["readers"], changes)
  # Only a run on conversations reads it, and its data are others then.
  is_lost = _PLACE in changes and meta["data_fingerprint"] != fingerprint
  is_removed = any(key in REMOVED for key in refused)
  can_go_on = not (is_lost or is_removed or reading != readers)
  if is_lost:
    then, here = changes[_PLACE]
    problems = [p for p in problems if not p.startswith(_PLACE)]
    problems.append(
      f"{_PLACE} was {then} at step {step} and is {here} now, and the place in the data is a "
      "number of such steps: samples would be passed over, or come again. Set it back, or begin "
      "with the weights in another --workdir, with init.workdir and init.weights_only"
    )
  if reading != readers:
    problems.append(
      f"the data were read differently until step {step}, so that the place to go on from is "
      f"unknown: {reading}, now {readers}. Go on with as many processes, a mesh that "
      "splits the batch over them in the same way, and data.workers as before"
    )
  if problems:
    anyway = f'to go on anyway, --config.checkpoint.accept_changes="{(*accepted, *more)}"; '
    raise resolve.ConfigError(
      [*problems, f"{anyway * can_go_on}or start again with another --workdir"]
    )


# Of `readers`, the share of each process; checkpoints from before it are silent.
ORDER = "share of each process"


_WORKERS = "data.workers"


def _stated(readers: dict[str, Any], before: dict[str, Any], changes: Mapping[str, Any]):
  """(readers then, now), as far as both state them; worker processes have a place each."""
  now = {k: v for k, v in readers.items() if k in before or k != ORDER}
  if workers := changes.get(_WORKERS):
    return tuple({**of, _WORKERS: n} for of, n in zip((before, now), workers))
  return before, now


# The key that the saved place in the data counts by.
_PLACE = "data.samples_per_step"


def _shown(value: Any) -> Any:
  return "''" if value == "" else value
