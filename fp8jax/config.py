"""From a ConfigDict to checked, typed values. All that can be known to be wrong before compiling is
found here, and reported together.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from fp8jax import axes, by_layer, config_file, loss_scale, mesh, precision, watch
from fp8jax import params as params_lib
from fp8jax.data import check, loader
from fp8jax.errors import ConfigError, Problems
from fp8jax.kernels import backend, scaled_matmul
from fp8jax.models import config as model_config
from fp8jax.models import hf, hf_config, presets, transformer
from fp8jax.ops import alignment, attention, kept, site
from fp8jax.optim import build as optim_build
from fp8jax.optim import fused, walk
from fp8jax.quant import observe

# A ConfigDict with every key of configs/base.py; types cannot know its keys.
Config = Any


@dataclasses.dataclass(frozen=True)
class Plan:
  """A run, resolved: what launch jobs work from.

  Attributes:
    model: architecture.
    declaration: tree of Param.
    run: how the model executes, layout included.
    precision: recipes, phase by phase.
    optim: optimizer numbers.
    data: what is read.
    microbatch: sequences per microbatch over all devices.
    device: hardware that backends are chosen for.
    config: what it came from.
  """

  model: model_config.ModelConfig
  declaration: Any
  run: model_config.Execution
  precision: precision.Precision
  optim: optim_build.Optim
  data: loader.Spec
  microbatch: int
  device: backend.Device
  config: Config

  def phase(self, step: int) -> int:
    """Index of the precision phase that the step after `step` steps belongs to."""
    return self.precision.at(step)

  def sites(self, recipe: str | None = None, *, phase: int = 0, statistics: int = observe.QUIET):
    """The tree of sites.

    Args:
      recipe: all sites in this named recipe; None takes the config's rules.
      phase: whose rules.
      statistics: observe.QUIET, or observe.LOUD to watch everything.
    """
    rules = self.precision.phases[phase].rules if recipe is None else ((".*", recipe),)
    return site.build_sites(
      transformer.site_params(self.model),
      self.model.dims,
      rules,
      self.run.layout,
      matmul=self.config.kernels.matmul,
      device=self.device,
      tokens=self.tokens_per_device,
      statistics=statistics,
    )

  @functools.cached_property
  def leaves(self):
    """Tree of optim.build.Leaf: how every parameter is kept and moved."""
    leaves = optim_build.leaves(self.optim, self.declaration, self.config.seed)
    params = params_lib.abstract(self.declaration, self.model.dims, self.run.layout)
    if self.optim.is_by_layer:
      by_layer.check(leaves, params)
    return walk.with_backends(leaves, params, self.device, self.config.kernels.optimizer)

  @property
  def num_devices(self) -> int:
    """Devices that the run computes on: those of its mesh, all processes' together."""
    mesh_ = self.run.layout.mesh
    return 1 if mesh_ is None else mesh_.size

  @property
  def tokens_per_device(self) -> int:
    """Tokens of one microbatch on one device."""
    layout = self.run.layout
    return self.microbatch * self.data.length // layout.size(layout.act_axes("B"))


def resolve(
  c: Config, num_devices: int, device: backend.Device, make_mesh: Callable | None = None
) -> Plan:
  """Checks a configuration against itself, the machine and the files it names.

  Args:
    c: a configuration with every key of configs/base.py.
    num_devices: over all processes.
    device: what they are.
    make_mesh: (data, fsdp, tensor) -> mesh; default: one over JAX's devices.

  Raises:
    ConfigError: with all problems found.
  """
  problems = Problems()
  _check_numbers(c, problems)
  chosen = _layout(c, num_devices, make_mesh or mesh.make, problems)
  layout = chosen or axes.LOCAL
  model = problems.attempt(lambda: _model(c))
  if model is not None:
    problems.extend(model.problems())
    problems.check(
      c.length <= model.max_positions,
      f"length={c.length} is longer than model.max_positions={model.max_positions}",
    )
    if c.init.hf and not model.problems():
      problems.attempt(lambda: _check_folder(c, model), "init.hf")
  run = _execution(c, layout, device, problems)
  optim = _optim(c, problems)
  data = check.spec(c, model and model.vocab_size, problems)
  problems.check(c.data.heldout != 0, "data.heldout=0 leaves nothing to evaluate on; raise it")
  microbatch = _microbatch(c, layout, problems)
  recipes = problems.attempt(lambda: precision.read(c))
  precision.check_smooth(c, problems)
  problems.file("precision.calibration", c.precision.calibration, "write it with --job=calibrate")
  declaration = None
  if model is not None and not model.problems():
    declaration = transformer.params(model)
    problems.extend(run.problems(model))
    if recipes:
      recipes = problems.attempt(functools.partial(precision.with_ends, recipes, c, model))
    if chosen and recipes:
      _check_layout(c, model, declaration, recipes, layout, microbatch, problems)
  problems.attempt(lambda: watch.read_alarms(c.log.alarms))
  problems.extend(loss_scale.problems(c.loss_scale, c.precision.compute))
  _check_eval_precisions(c, problems)
  problems.one_of("export.dtype", c.export.dtype, ("auto", *hf.DTYPES))
  problems.keys("checkpoint.accept_changes", c.checkpoint.accept_changes, _acceptable(c))
  if problems.found or model is None or recipes is None:
    raise ConfigError(problems.found)

  plan = Plan(model, declaration, run, recipes, optim, data, microbatch, device, c)
  for phase in range(len(recipes.phases)):
    problems.attempt(lambda phase=phase: _check_float16(plan, phase))
  problems.attempt(lambda: plan.leaves)
  problems.refuse()
  return plan


def resolve_data(c: Config) -> loader.Spec:
  """The data alone, without a model or a mesh: what --job=prepare reads. Raises as `resolve`."""
  problems = Problems()
  _check_numbers(c, problems)
  data = check.spec(c, None, problems)
  problems.refuse()
  return data


# Smallest value of every number that has one and that nobody else checks.
_LEAST = {
  "steps": 1, "batch": 1, "accumulation": 1, "length": 1, "eval.tokens": 1, "eval.batch": 1,
  "eval.every": 0, "checkpoint.every": 0, "checkpoint.keep": 1, "log.every": 1,
  "log.numerics_every": 0, "calibrate.batches": 1, "data.workers": 0, "data.prefetch": 0,
  "data.shuffle_windows": 0, "prepare.shard_tokens": 1, "memory.loss_chunk": 1,
  "memory.gpu_fraction": 0,
  "export.merge_smooth": 0,
}  # fmt: skip


def _check_numbers(c: Config, problems: Problems):
  config_file.check_numbers(flatten(c), problems)
  problems.refuse()  # the other checks compute with these numbers
  for key, least in _LEAST.items():
    value = functools.reduce(getattr, key.split("."), c)
    problems.check(value >= least, f"{key}={value} must be at least {least}")


def _layout(c: Config, num_devices: int, make_mesh: Callable, problems: Problems):
  """Where each letter lives, or None if mesh or sharding tables are wrong."""
  shape = problems.attempt(lambda: mesh.resolve(c.mesh, num_devices))
  if not _check_sharding(c, problems) or shape is None:
    return None
  if math.prod(shape) == 1:
    return axes.LOCAL
  return axes.Layout(
    make_mesh(shape), axes.as_rules(c.sharding.weights), axes.as_rules(c.sharding.acts)
  )


def _model(c: Config) -> model_config.ModelConfig:
  if c.model.preset == "hf":
    if not c.init.hf:
      raise ValueError(
        "model.preset='hf' reads the architecture of init.hf; set init.hf to a folder"
      )
    try:
      model = hf_config.read_config(c.init.hf)
    except (ValueError, OSError) as e:
      raise ValueError(f"init.hf: {e}") from e
  elif c.model.preset in presets.PRESETS:
    model = presets.PRESETS[c.model.preset]
  else:
    unknown = Problems()
    unknown.one_of("model.preset", c.model.preset, (*presets.PRESETS, "hf"))
    raise ConfigError(unknown.found)
  changes = {k: v for k, v in c.model.items() if k != "preset" and v is not None}
  return dataclasses.replace(model, **changes)


def _check_folder(c: Config, model: model_config.ModelConfig):
  """The weights that training starts from are those of the model; reads headers only."""
  there = hf_config.read_config(c.init.hf)
  # These do not change what the weights compute; a vocabulary may be padded.
  harmless = {"init_std", "max_positions"}
  if there.vocab_size <= model.vocab_size:
    harmless.add("vocab_size")
  different = [
    f"{f.name} {getattr(there, f.name)} there, {getattr(model, f.name)} here"
    for f in dataclasses.fields(model)
    if f.name not in harmless and getattr(there, f.name) != getattr(model, f.name)
  ]
  if different:
    raise ValueError(
      f"{c.init.hf!r} holds another model than the config describes: {'; '.join(different)}. Set "
      "model.preset='hf' and override nothing else of model to take the folder's"
    )
  hf.check(hf.Folder(c.init.hf), dataclasses.replace(model, vocab_size=there.vocab_size))


_SIXTEEN_BITS = ("bfloat16", "float16")
_COMPUTE = (*_SIXTEEN_BITS, "float32")


def _execution(c: Config, layout, device: backend.Device, problems: Problems):
  compute = c.precision.compute
  problems.one_of("precision.compute", compute, ("auto", *_COMPUTE))
  if compute == "auto":
    compute = backend.compute_dtype(device)
  if reason := backend.lacks_dtype(device, compute):
    problems.found.append(f"precision.compute={compute!r}: {reason}; use 'float32' or 'auto'")
  implementation = c.kernels.attention
  problems.one_of("kernels.attention", implementation, ("auto", *attention.IMPLEMENTATIONS))
  if implementation == "auto":
    implementation = backend.attention(device, compute)
  if implementation == "cudnn":
    reason = backend.lacks_cudnn(device)
    problems.check(reason is None, f"kernels.attention='cudnn' {reason}; use 'xla' or 'auto'")
    problems.check(
      compute in _SIXTEEN_BITS,
      f"kernels.attention='cudnn' needs 16-bit inputs, precision.compute is {compute!r}; use 'xla'",
    )
  problems.one_of("kernels.matmul", c.kernels.matmul, ("auto", *scaled_matmul.BACKENDS))
  problems.one_of("memory.remat", c.memory.remat, model_config.REMAT)
  problems.check(
    c.memory.gpu_fraction <= 1, f"memory.gpu_fraction={c.memory.gpu_fraction} must be at most 1"
  )
  names = {k: c.memory[k] for k in ("norms", "gated", "residual")}
  for key, name in names.items():
    problems.one_of(f"memory.{key}", name, tuple(kept.QUANTS))
  waiting = kept.Kept(**{k: kept.QUANTS.get(name) for k, name in names.items()})
  return model_config.Execution(
    jnp.dtype(compute if compute in _COMPUTE else "float32"),
    implementation, c.memory.remat, waiting, c.memory.loss_chunk, layout,
    c.precision.smooth_swiglu,
  )  # fmt: skip


# Forward passes that an evaluation may take: the recipes of training, and 16 bits everywhere.
EVAL_PRECISIONS = ("recipe", "bf16")


def _check_eval_precisions(c: Config, problems: Problems):
  names = c.eval.precisions
  if not isinstance(names, (tuple, list)) or not names:
    problems.found.append(
      f"eval.precisions={names!r} names no forward pass; give some of {EVAL_PRECISIONS}"
    )
    return
  for name in names:
    problems.one_of("eval.precisions", name, EVAL_PRECISIONS)


def _check_float16(plan: Plan, phase: int):
  """The sites of a phase, none of them on kernels that were written for bfloat16 alone."""
  for one in site.flatten(plan.sites(phase=phase)).values():
    backends = sorted(set(one.backends) & set(scaled_matmul.WITH_QUANTIZER))
    if plan.run.dtype == jnp.float16 and backends:
      raise ValueError(
        f"precision.compute='float16': site {one.name} is multiplied by {', '.join(backends)}, "
        "whose kernels read bfloat16; set precision.compute='bfloat16', or kernels.matmul='xla' or "
        "'reference'"
      )


def _optim(c: Config, problems: Problems) -> optim_build.Optim:
  optim = optim_build.read(c.optim, c.steps)
  problems.extend(optim.problems())
  for key, known in optim_build.CHOICES.items():
    problems.one_of(f"optim.{key}", getattr(optim, key), known)
  problems.one_of("kernels.optimizer", c.kernels.optimizer, fused.CHOICES)
  problems.one_of("optim.on_nonfinite", c.optim.on_nonfinite, ("stop", "skip"))
  problems.extend(by_layer.problems(c))
  return optim


def _microbatch(c: Config, layout: axes.Layout, problems: Problems) -> int:
  shards = layout.size(layout.act_axes("B"))
  if min(c.accumulation, c.batch, c.eval.batch) < 1:
    return 1  # said already
  problems.check(
    c.batch % (c.accumulation * shards) == 0,
    f"batch={c.batch} must be a multiple of accumulation x batch shards = "
    f"{c.accumulation} x {shards}; change accumulation, or take the nearest batch, "
    f"{_round_to(c.batch, c.accumulation * shards)}",
  )
  problems.check(
    c.eval.batch % shards == 0,
    f"eval.batch={c.eval.batch} must be a multiple of the {shards} batch shards of the mesh; "
    f"the nearest is {_round_to(c.eval.batch, shards)}",
  )
  return max(c.batch // c.accumulation, 1)


def _round_to(n: int, multiple: int) -> int:
  return max(round(n / multiple), 1) * multiple


def _check_sharding(c: Config, problems: Problems) -> bool:
  """Whether the tables name real letters and axes, and weights can be gathered to activations."""
  before = len(problems.found)
  weights, acts = dict(axes.as_rules(c.sharding.weights)), dict(axes.as_rules(c.sharding.acts))
  for table, rules in (("weights", weights), ("acts", acts)):
    # Activations of a layer's width D stay whole: norms and the loss are computed per device.
    letters = set("BFHGV") if table == "acts" else set(_WORDS)
    for letter, names in rules.items():
      problems.check(
        letter in letters,
        f"sharding.{table}.{letter} cannot be split; the letters are {', '.join(sorted(letters))}",
      )
      for name in names:
        if name not in mesh.AXES:
          problems.found.append(
            f"sharding.{table}.{letter} names mesh axis {name!r}; there are {', '.join(mesh.AXES)}"
          )
  for letter in weights.keys() & acts.keys() | acts.keys() - {"B"}:
    have, need = weights.get(letter, ()), acts.get(letter, ())
    problems.check(
      have[: len(need)] == need,
      f"sharding.weights.{letter}={have} must begin with sharding.acts.{letter}={need}: a weight "
      "is gathered to where activations are, never scattered",
    )
  return len(problems.found) == before


def _check_layout(c, model, declaration, recipes, layout: axes.Layout, microbatch, problems):
  """Every split dimension divides, no scale tile straddles devices, rotations divide."""
  sites = transformer.site_params(model)
  tokens = microbatch * c.length // layout.size(layout.act_axes("B"))
  for phase in recipes.phases:
    problems.extend(alignment.find_broken_rotations(sites, model.dims, phase.rules, tokens))
  if layout.mesh is None:
    return
  used = {letter for p in site.params.flatten(declaration).values() for letter in p.letters}
  wrong = {}
  for letter in sorted(used):
    size = model.dims[letter]
    for kind, split in (("weights", layout.weight_axes(letter)), ("acts", layout.act_axes(letter))):
      shards = layout.size(split)
      if size % shards:
        wrong[letter, shards] = (
          f"{_WORDS[letter]} = {size} does not divide over {shards} devices (sharding.{kind}."
          f"{letter} = {'+'.join(split)}); change mesh.{split[0]} or that sharding"
        )
  problems.extend(list(wrong.values()))
  if not wrong:
    found = [
      problem
      for phase in recipes.phases
      for problem in alignment.find_misaligned_tiles(sites, model.dims, phase.rules, layout, tokens)
    ]
    problems.extend(list(dict.fromkeys(found)))


_WORDS = {
  "V": "model.vocab_size", "D": "model.hidden_size", "F": "model.intermediate_size",
  "N": "model.num_layers", "H": "model.num_heads", "G": "model.num_kv_heads",
  "K": "model.head_dim",
}  # fmt: skip


# --- configurations as data ----------------------------------------------------------------------


def flatten(c: Config) -> dict[str, Any]:
  """{"optim.peak_lr": 1e-3, ...}, JSON-able."""
  flat = {}

  def visit(prefix, node):
    for key, value in node.items():
      if isinstance(value, ConfigDict):
        visit(f"{prefix}{key}.", value)
      else:
        flat[f"{prefix}{key}"] = json.loads(json.dumps(value))

  visit("", c)
  return flat


def identity(plan: Plan) -> dict[str, Any]:
  """The configuration with what "auto" and presets stand for: what a checkpoint remembers."""
  model = {f"model.{k}": v for k, v in plan.model.to_dict().items() if k != "init_std"}
  flat = {k: v for k, v in flatten(plan.config).items() if not k.startswith("model.")}
  return (
    flat
    | json.loads(json.dumps(model))
    | {
      "precision.compute": plan.run.dtype.name,
      # By content: a table may move, but not change under its name.
      "precision.calibration": _digest(plan.config.precision.calibration),
    }
  )


def _digest(path: str) -> str:
  """Of a file; "" of none."""
  if not path:
    return ""
  with open(os.path.expanduser(path), "rb") as f:
    return "sha256 " + hashlib.sha256(f.read()).hexdigest()[:16]


def diff(new: dict[str, Any], old: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
  """{key: (old value, new value)} where two flat configurations differ; absent is None."""
  keys = sorted(new.keys() | old.keys())
  return {k: (old.get(k), new.get(k)) for k in keys if old.get(k) != new.get(k)}


# Keys that may change between a run and its continuation without changing its result.
_HARMLESS = (
  "log.", "checkpoint.", "eval.", "export.", "prepare.", "mesh.", "sharding.", "kernels.",
  "memory.remat", "memory.target", "memory.loss_chunk", "memory.gpu_fraction", "data.workers",
  "data.prefetch", "init.", "optim.on_nonfinite", "optim.order", "calibrate.", "precision.strict",
)  # fmt: skip


def _acceptable(c: Config) -> set[str]:
  """What accept_changes may name: keys, also of sources that are gone, and the data's content."""
  gone = {k for k in c.checkpoint.accept_changes if str(k).startswith("data.sources.")}
  model = {f"model.{f.name}" for f in dataclasses.fields(model_config.ModelConfig)}
  return {"data"} | gone | model | flatten(c).keys()


def refused_changes(changes: dict[str, Any], accepted) -> list[str]:
  """Those changed keys that alter the result of a resumed run and were not accepted."""
  return [k for k in changes if not k.startswith(_HARMLESS) and k not in accepted]
