"""From a ConfigDict to checked, typed values. All that can be known to be wrong before compiling is
found here, and reported together.
"""

import dataclasses
import difflib
import json
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from fp8jax import axes, mesh
from fp8jax.data import loader, sources, tokenize
from fp8jax.kernels import backend, scaled_matmul
from fp8jax.models import config as model_config
from fp8jax.models import hf, presets, transformer
from fp8jax.ops import attention, site
from fp8jax.optim import build as optim_build

# A ConfigDict with every key of configs/base.py; types cannot know its keys.
Config = Any


class ConfigError(ValueError):
  """Everything that is wrong with a configuration, one line each."""

  def __init__(self, problems: list[str]):
    self.problems = problems
    lines = "\n".join(f"  - {p}" for p in problems)
    super().__init__(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the config:\n{lines}")


@dataclasses.dataclass(frozen=True)
class Plan:
  """A run, resolved: what launch jobs work from.

  Attributes:
    model: architecture.
    declaration: tree of Param.
    run: how the model executes, layout included.
    rules: site name pattern -> recipe name.
    optim: optimizer numbers.
    data: what is read.
    microbatch: sequences per microbatch over all devices.
    device: hardware that backends are chosen for.
    config: what it came from.
  """

  model: model_config.ModelConfig
  declaration: Any
  run: model_config.Execution
  rules: tuple[tuple[str, str], ...]
  optim: optim_build.Optim
  data: loader.Spec
  microbatch: int
  device: backend.Device
  config: Config

  def sites(self, recipe: str | None = None):
    """The tree of sites under the config's rules, or all in one named recipe."""
    rules = self.rules if recipe is None else ((".*", recipe),)
    return site.build_sites(
      transformer.site_params(self.model),
      self.model.dims,
      rules,
      self.run.layout,
      matmul=self.config.kernels.matmul,
      device=self.device,
      tokens=self.tokens_per_device,
    )

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
  problems = _Problems()
  for name in ("steps", "batch", "accumulation", "length"):
    problems.check(c[name] >= 1, f"{name}={c[name]} must be at least 1")

  shape = problems.attempt(lambda: mesh.resolve(c.mesh, num_devices))
  layout = axes.LOCAL
  if shape is not None and num_devices > 1:
    layout = axes.Layout(
      (make_mesh or mesh.make)(shape),
      axes.as_rules(c.sharding.weights),
      axes.as_rules(c.sharding.acts),
    )
    _check_rules(c, problems)

  model = problems.attempt(lambda: _model(c))
  if model is not None:
    problems.extend(model.problems())
    problems.check(
      c.length <= model.max_positions,
      f"length={c.length} is longer than model.max_positions={model.max_positions}",
    )
  run = _execution(c, layout, device, problems)
  optim = optim_build.Optim(
    **{k: c.optim[k] for k in c.optim if k != "on_nonfinite"}, steps=c.steps
  )
  problems.extend(optim.problems())
  _one_of(problems, "optim.on_nonfinite", c.optim.on_nonfinite, ("stop", "skip"))
  data = _data(c, model, problems)
  microbatch = _microbatch(c, layout, problems)
  rules = tuple((str(p), str(r)) for p, r in c.precision.rules)
  if model is not None and not problems.found:
    declaration = transformer.params(model)
    _check_layout(c, model, declaration, rules, layout, microbatch, problems)
  problems.check(c.eval.tokens >= 1, f"eval.tokens={c.eval.tokens} must be at least 1")
  _one_of(problems, "export.dtype", c.export.dtype, ("auto", *hf.DTYPES))
  if problems.found or model is None:
    raise ConfigError(problems.found)

  plan = Plan(model, declaration, run, rules, optim, data, microbatch, device, c)
  if problems.attempt(plan.sites) is None:
    raise ConfigError(problems.found)
  return plan


class _Problems:
  def __init__(self):
    self.found: list[str] = []

  def check(self, ok: bool, message: str):
    if not ok:
      self.found.append(message)

  def extend(self, messages: list[str]):
    self.found += messages

  def attempt(self, fn):
    """fn(), or None with its complaint noted."""
    try:
      return fn()
    except ConfigError as e:
      self.found += e.problems
    except (ValueError, OSError) as e:
      self.found.append(str(e))
    return None


def _one_of(problems: _Problems, key: str, value: str, allowed):
  if value not in allowed:
    near = difflib.get_close_matches(value, allowed, 1, 0.0)
    problems.found.append(
      f"{key}={value!r} is not one of {', '.join(map(repr, allowed))}; did you mean {near[0]!r}?"
    )


def _model(c: Config) -> model_config.ModelConfig:
  if c.model.preset == "hf":
    if not c.init.hf:
      raise ValueError(
        "model.preset='hf' reads the architecture of init.hf; set init.hf to a folder"
      )
    model = hf.read_config(c.init.hf)
  elif c.model.preset in presets.PRESETS:
    model = presets.PRESETS[c.model.preset]
  else:
    near = difflib.get_close_matches(c.model.preset, [*presets.PRESETS, "hf"], 1, 0.0)[0]
    raise ValueError(
      f"model.preset={c.model.preset!r} is unknown; did you mean {near!r}? "
      f"Known: {', '.join([*presets.PRESETS, 'hf'])}"
    )
  changes = {k: v for k, v in c.model.items() if k != "preset" and v is not None}
  model = dataclasses.replace(model, **changes)
  if c.init.hf and c.model.preset != "hf":
    there = hf.read_config(c.init.hf)
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
        f"init.hf={c.init.hf!r} holds another model than the config describes: "
        f"{'; '.join(different)}. Set model.preset='hf' to take the folder's"
      )
  return model


def _execution(c: Config, layout, device: backend.Device, problems: _Problems):
  on_gpu = device.platform == "gpu"
  compute = c.precision.compute
  _one_of(problems, "precision.compute", compute, ("auto", "bfloat16", "float32"))
  if compute == "auto":
    compute = "bfloat16" if on_gpu else "float32"
  implementation = c.kernels.attention
  _one_of(problems, "kernels.attention", implementation, ("auto", *attention.IMPLEMENTATIONS))
  if implementation == "auto":
    implementation = "cudnn" if on_gpu and compute == "bfloat16" else "xla"
  if implementation == "cudnn":
    problems.check(on_gpu, "kernels.attention='cudnn' needs an NVIDIA GPU; use 'xla' or 'auto'")
    problems.check(
      compute == "bfloat16",
      f"kernels.attention='cudnn' needs 16-bit inputs, precision.compute is {compute!r}; use 'xla'",
    )
  _one_of(problems, "kernels.matmul", c.kernels.matmul, ("auto", *scaled_matmul.BACKENDS))
  _one_of(problems, "memory.remat", c.memory.remat, model_config.REMAT)
  problems.check(c.memory.loss_chunk >= 1, f"memory.loss_chunk={c.memory.loss_chunk} must be >= 1")
  return model_config.Execution(
    jnp.dtype(compute if compute in ("bfloat16", "float32") else "float32"),
    implementation, c.memory.remat, c.memory.loss_chunk, layout,
  )  # fmt: skip


def _data(c: Config, model, problems: _Problems) -> loader.Spec:
  _one_of(problems, "data.on_malformed", c.data.on_malformed, tokenize.POLICIES)
  _one_of(problems, "data.on_long", c.data.on_long, tokenize.LONG_POLICIES)
  problems.check(0 <= c.data.heldout < 1, f"data.heldout={c.data.heldout} must be in [0, 1)")
  tokenizer = tokenize.Tokenizer(c.data.tokenizer or c.init.hf or tokenize.BYTES, c.data.eos)
  if problems.attempt(lambda: tokenizer.fingerprint) is not None and model is not None:
    problems.check(
      tokenizer.vocab_size <= model.vocab_size,
      f"data.tokenizer produces ids up to {tokenizer.vocab_size - 1}, the model has "
      f"model.vocab_size={model.vocab_size}; they do not belong together",
    )
  problems.check(len(c.data.sources) > 0, "data.sources is empty; give at least one")
  for name, spec in c.data.sources.items():
    key = f"data.sources.{name}"
    _one_of(problems, f"{key}.kind", spec.kind, sources.KINDS)
    problems.check(spec.weight > 0, f"{key}.weight={spec.weight} must be positive")
    if spec.kind in sources.KINDS:
      opened = problems.attempt(lambda spec=spec: sources.open_source(spec).files() and True)
      if opened and spec.kind == "prepared":
        problems.attempt(lambda spec=spec: _check_prepared(spec, tokenizer, c))
  return loader.Spec(
    sources={name: dict(spec) for name, spec in c.data.sources.items()},
    tokenizer=tokenizer,
    length=c.length,
    heldout=c.data.heldout,
    cross_document=c.data.cross_document,
    on_malformed=c.data.on_malformed,
    on_long=c.data.on_long,
    seed=c.seed,
    workers=c.data.workers,
    prefetch=c.data.prefetch,
  )


def _check_prepared(spec, tokenizer: tokenize.Tokenizer, c: Config):
  index = sources.Prepared(spec["path"], "train").index
  if index["tokenizer"] != tokenizer.fingerprint:
    raise ValueError(
      f"{spec['path']} was prepared with another tokenizer (fingerprint {index['tokenizer']}, "
      f"data.tokenizer has {tokenizer.fingerprint}); prepare it again with --job=prepare"
    )
  if index["heldout"] != c.data.heldout:
    raise ValueError(
      f"{spec['path']} was prepared with data.heldout={index['heldout']}, now it is "
      f"{c.data.heldout}; prepare it again or use that value"
    )


def _microbatch(c: Config, layout: axes.Layout, problems: _Problems) -> int:
  shards = layout.size(layout.act_axes("B"))
  problems.check(
    c.accumulation < 1 or c.batch % (c.accumulation * shards) == 0,
    f"batch={c.batch} must be a multiple of accumulation x batch shards = "
    f"{c.accumulation} x {shards}; the nearest is {_round_to(c.batch, c.accumulation * shards)}",
  )
  problems.check(
    c.eval.batch % shards == 0,
    f"eval.batch={c.eval.batch} must be a multiple of the {shards} batch shards of the mesh; "
    f"the nearest is {_round_to(c.eval.batch, shards)}",
  )
  return max(c.batch // max(c.accumulation, 1), 1)


def _round_to(n: int, multiple: int) -> int:
  return max(round(n / multiple), 1) * multiple


def _check_rules(c: Config, problems: _Problems):
  """The sharding tables name real letters and axes, and weights can be gathered to activations."""
  weights, acts = dict(axes.as_rules(c.sharding.weights)), dict(axes.as_rules(c.sharding.acts))
  for table, rules in (("weights", weights), ("acts", acts)):
    for letter, names in rules.items():
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


def _check_layout(c, model, declaration, rules, layout: axes.Layout, microbatch, problems):
  """Every split dimension divides, and no scale tile straddles devices."""
  if layout.mesh is None:
    problems.attempt(lambda: site.match_rules(
      list(site.find_sites(transformer.site_params(model))), rules))  # fmt: skip
    return
  used = {letter for p in site.params.flatten(declaration).values() for letter in p.letters}
  for letter in sorted(used):
    size = model.dims[letter]
    for kind, split in (("weights", layout.weight_axes(letter)), ("acts", layout.act_axes(letter))):
      shards = layout.size(split)
      if size % shards:
        problems.found.append(
          f"{_WORDS[letter]} = {size} does not divide over {shards} devices (sharding.{kind}."
          f"{letter} = {'+'.join(split)}); change mesh.{split[0]} or that sharding"
        )
  if not problems.found:
    tokens = microbatch * c.length // layout.size(layout.act_axes("B"))
    found = problems.attempt(
      lambda: site.find_misaligned_tiles(
        transformer.site_params(model), model.dims, rules, layout, tokens
      )
    )
    problems.extend(found or [])


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


def diff(new: dict[str, Any], old: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
  """{key: (old value, new value)} where two flat configurations differ; absent is None."""
  keys = sorted(new.keys() | old.keys())
  return {k: (old.get(k), new.get(k)) for k in keys if old.get(k) != new.get(k)}


# Keys that may change between a run and its continuation without changing its result.
_HARMLESS = (
  "log.", "checkpoint.", "eval.", "export.", "prepare.", "mesh.", "sharding.", "kernels.",
  "memory.", "data.workers", "data.prefetch", "init.hf", "optim.on_nonfinite",
)  # fmt: skip


def refused_changes(changes: dict[str, Any], accepted) -> list[str]:
  """Those changed keys that alter the result of a resumed run and were not accepted."""
  return [k for k in changes if not k.startswith(_HARMLESS) and k not in accepted]


def nearest_key(key: str, known) -> str | None:
  """The known key most like a mistyped one."""
  matches = difflib.get_close_matches(key, known, 1, 0.5)
  if not matches:
    last = key.rpartition(".")[2]
    by_last = {k.rpartition(".")[2]: k for k in known}
    matches = [by_last[m] for m in difflib.get_close_matches(last, by_last, 1, 0.5)]
  return matches[0] if matches else None


def folder_of(path: str, workdir: str, name: str) -> str:
  """`path`, or a folder of that name under the workdir."""
  return os.path.expanduser(path) if path else os.path.join(workdir, name)
