"""From a ConfigDict to checked, typed values. All that can be known to be wrong before compiling is
found here, and reported together.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fp8jax import axes, hub, mesh
from fp8jax.config import alarms, checks, measured, registry
from fp8jax.config import chat as chat_checks
from fp8jax.config import data as data_checks
from fp8jax.config import files as config_files
from fp8jax.config import layout as layout_checks
from fp8jax.config import policy as policy_checks
from fp8jax.config import precision as precision_checks
from fp8jax.config.files import Config
from fp8jax.config.identity import acceptable_changes, flatten
from fp8jax.config.needs import TRAINING, Needs
from fp8jax.data import config as data_config_lib
from fp8jax.errors import ConfigError, ConfigErrors
from fp8jax.kernels import choose
from fp8jax.kernels.attention import api as attention_api
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.models import attention_gqa, lora, presets, transformer
from fp8jax.models import config as model_config
from fp8jax.models.hf import config as hf_config_lib
from fp8jax.models.hf import peft, same_model
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import residuals, site, site_tree
from fp8jax.optim import groups, optimizers, param_stats, sparsity, storage
from fp8jax.recipe.gemm import PASSES
from fp8jax.step import settings
from fp8jax.step.train_spec import TrainSpec


def resolve(
  c: Config, num_devices: int, device: choose.Device, make_mesh: Callable | None = None,
  needs: Needs = TRAINING,
) -> TrainSpec:  # fmt: skip
  """Checks a configuration against itself, the machine and the files it names.

  Args:
    c: a configuration with every key of configs/base.py.
    num_devices, device: over all processes, and what they are.
    make_mesh: (data, fsdp, tensor) -> mesh; default: one over JAX's devices.
    needs: of the job, whose other sections are not read.

  Raises:
    ConfigError: with all problems found.
  """
  problems = ConfigErrors()
  _check_numbers(c, problems)
  chosen = layout_checks.read(c, num_devices, make_mesh or mesh.make, problems, needs)
  layout = chosen or axes.LOCAL
  model = _checked_model(c, needs, problems)
  c = c if model is None else problems.attempt(lambda: measured.with_rules(c, model)) or c
  run = _execution(c, layout, device, problems)
  data = data_checks.spec(c, model and model.vocab_size, problems, needs)
  steps = chat_checks.steps(c, data, problems) if needs.has_steps else c.steps
  optim = _optim(c, steps, model, problems)
  microbatch = layout_checks.microbatch(c, layout, problems, needs)
  run = _with_attention(c, run, model, microbatch, device, problems)
  recipes = problems.attempt(lambda: precision_checks.read(c, steps))
  precision_checks.check_smooth(c, model, problems)
  table = c.precision.calibration if needs.has_calibration else ""
  problems.file("precision.calibration", table, "write it with --job=calibrate")
  declaration = None
  if model is not None and not model.problems():
    declaration = transformer.params(model)
    problems.extend(run.problems(model))
    if recipes:
      with_rules = functools.partial(precision_checks.with_first_last_rules, recipes, c, model)
      recipes = problems.attempt(with_rules)
    if chosen and recipes:
      of_model = (model, declaration, recipes, layout, microbatch)
      layout_checks.check(c, *of_model, problems, needs)
  named = groups.names(declaration, model.num_layers) if declaration and model else {}
  problems.extend(checks.group_problems(c, optim, named) + param_stats.problems(c, optim))
  watched = problems.attempt(lambda: alarms.read_alarms(c.log.alarms)) or ()
  recipes = policy_checks.attach(c, recipes, watched, problems)
  _check_sections(c, problems, needs)
  if c.distill.weight and needs.has_loss and model is not None and not model.problems():
    problems.attempt(lambda: _check_teacher(c, model))
  if problems.found or model is None or recipes is None:
    raise ConfigError(problems.found)

  spec = TrainSpec(
    model, declaration, run, recipes, optim, data, device, microbatch,
    **_sections(c, watched), steps=steps, calibration=table, flat=flatten(c),
    sections={one: registry.section(c, one) for one in needs.sections},
  )  # fmt: skip
  _check_spec(spec, problems, needs)
  problems.extend(needs.problems_of_spec(spec))
  problems.refuse()
  return spec


def _sections(c: Config, watched: tuple[settings.Alarm, ...]) -> dict[str, Any]:
  """The fields of TrainSpec that need no device, model or file."""
  log = dataclasses.replace(registry.section(c, settings.Log), alarms=watched)
  typed: tuple[Any, ...] = (
    settings.Init, settings.Kernels, settings.LossScale, settings.Distill, settings.Weights,
    settings.Eval, settings.Checkpoint,
  )  # fmt: skip
  return {one.NAME: registry.section(c, one) for one in typed} | dict(
    global_batch=c.global_batch,
    grad_accum_steps=c.grad_accum_steps,
    seed=c.seed,
    verify_fp8_gemms=c.precision.verify_fp8_gemms,
    log=log,
  )


def resolve_data(c: Config) -> data_config_lib.DataConfig:
  """The data alone, without a model or a mesh. Raises as `resolve`."""
  return resolve_steps(c, Needs())[0]


def resolve_steps(c: Config, needs: Needs = TRAINING) -> tuple[data_config_lib.DataConfig, int]:
  """(the data, optimizer steps), without a model or a mesh. Raises as `resolve`."""
  problems = ConfigErrors()
  _check_numbers(c, problems)
  data = data_checks.spec(c, None, problems)
  steps = chat_checks.steps(c, data, problems) if needs.has_steps else c.steps
  problems.refuse()
  return data, steps


def _check_numbers(c: Config, problems: ConfigErrors):
  config_files.check_numbers(flatten(c), problems)
  problems.refuse()  # the other checks compute with these numbers
  problems.extend(registry.problems(c))
  n = c.data.workers
  problems.check(n <= 1024, f"data.workers={n}, each a process, must be at most 1024")


def _checked_model(c: Config, needs: Needs, problems: ConfigErrors):
  """The model, which the weights of its folder are of, or None."""
  folder, its_key = needs.folder(c)
  model = problems.attempt(lambda: _model(c, folder, its_key))
  if model is None:
    return None
  problems.extend(model.problems())
  problems.check(
    needs.takes_scores or not model.reward_head,
    "the model has a reward head, which gives scores and no logits: --job=rl with rl.loss='reward' "
    "trains it and --job=export writes it; set model.reward_head=None and name another model",
  )
  problems.check(
    c.seq_len <= model.max_positions,
    f"seq_len={c.seq_len} is longer than model.max_positions={model.max_positions}",
  )
  if folder and not model.problems():
    problems.attempt(lambda: same_model.check(folder, model), its_key)
  return model


def _model(c: Config, folder: str, its_key: str) -> model_config.ModelConfig:
  if c.model.preset == "hf" or its_key == "weights.hf":
    if not folder:
      raise ValueError(
        "model.preset='hf' reads the architecture of init.hf; set init.hf to a folder"
      )
    try:
      model = hf_config_lib.read_config(folder)
    except (ValueError, OSError) as e:
      raise ValueError(f"{its_key}: {e}") from e
  elif c.model.preset in presets.PRESETS:
    model = presets.PRESETS[c.model.preset]
  else:
    unknown = ConfigErrors()
    unknown.one_of("model.preset", c.model.preset, (*presets.PRESETS, "hf"))
    raise ConfigError(unknown.found)
  changes = {k: v for k, v in c.model.items() if k not in ("preset", "lora") and v is not None}
  if changes.get("reward_head"):  # in the place of a head that may be tied
    changes["tie_embeddings"] = False
    if its_key == "weights.hf" and not model.reward_head:
      raise ValueError(
        f"model.reward_head=True with weights.hf={folder!r}, which has none; --job=rl with "
        "rl.loss='reward' and init.hf trains one"
      )
  if c.model.lora.rank:
    wanted = {**c.model.lora, "targets": tuple(c.model.lora.targets)}
    changes["lora"] = model_config.Lora(**wanted)
    if its_key == "weights.hf" and not c.init.adapters:
      raise ValueError(
        f"model.lora.rank={c.model.lora.rank} with weights.hf={folder!r}, which has no adapters; "
        "set init.adapters to theirs, model.lora.rank=0 for the folder alone, or weights.hf='' for "
        "the checkpoint with its adapters"
      )
  model = dataclasses.replace(model, **changes)
  if c.init.adapters:
    model = _with_adapters(c, model, folder)
  texts = transformer.problems(model)
  if model.lora and not texts:
    layers = transformer.linear_layers(model)
    texts += lora.problems(model.lora, model.hidden_size, layers, storage.FROZEN)
  if c.optim.sparsity != sparsity.NONE and not texts:
    texts += sparsity.problems(transformer.params(model), model.dims)
  if texts:
    raise ConfigError(texts)
  return model


def _with_adapters(c: Config, model, folder: str) -> model_config.ModelConfig:
  """The model with the adapters of init.adapters, which model.lora may not contradict."""
  if c.init.workdir or not folder:
    raise ValueError(
      f"init.adapters={c.init.adapters!r} are beside the weights of a Hugging Face folder; set "
      "init.hf (or weights.hf) to it, and init.workdir=''"
    )
  there = peft.lora_of(c.init.adapters, model, c.model.lora.base)
  here, linears = model.lora or there, transformer.linear_layers(model)
  texts = [f"{key} is {getattr(there, key)} there and {getattr(here, key)} here"
           for key in ("rank", "alpha") if getattr(there, key) != getattr(here, key)]  # fmt: skip
  if set(there.targets) != set(lora.matching(here, linears)):
    texts.append(f"the targets are {there.targets} there and {here.targets} here")
  if texts:
    raise ValueError(
      f"init.adapters={c.init.adapters!r} and model.lora contradict each other: "
      f"{'; '.join(texts)}. Set model.lora.rank=0 to take the folder's"
    )
  return dataclasses.replace(model, lora=here)


def _check_teacher(c: Config, model: model_config.ModelConfig):
  """The teacher is there, and gives probabilities of the student's tokens."""
  if texts := checks.distill_problems(c):
    raise ConfigError(texts)
  if folder := c.distill.teacher or (not c.init.workdir and c.init.hf):
    here = dataclasses.replace(model, lora=None)
    if c.distill.teacher:
      same_model.check(folder, here)
    codes = hf_weights.codes_of(folder, here)
    is_own = bool(c.init.hf) and hub.local(folder) == hub.local(c.init.hf)
    if codes and is_own:
      raise ValueError(
        f"distill.weight={c.distill.weight}: the teacher {folder!r} holds codes ({codes}), those "
        "that training starts from, and distillation recovers towards the unquantized model; set "
        "distill.teacher to its folder"
      )
    if (there := hf_config_lib.read_config(folder)).vocab_size != here.vocab_size:
      raise ValueError(
        f"the teacher {folder!r} has a vocabulary of {there.vocab_size} and the model one of "
        f"{here.vocab_size}: it says nothing of the other tokens; set model.vocab_size=None, or "
        "distill.teacher to a folder of this vocabulary"
      )


def _execution(c: Config, layout, device: choose.Device, problems: ConfigErrors):
  compute = c.precision.compute_dtype
  if compute == "auto":
    compute = choose.compute_dtype(device)
  if reason := choose.lacks_dtype(device, compute):
    problems.found.append(f"precision.compute_dtype={compute!r}: {reason}; use 'float32' or 'auto'")
  problems.check(
    c.memory.gpu_fraction <= 1, f"memory.gpu_fraction={c.memory.gpu_fraction} must be at most 1"
  )
  names = {
    "norm_inputs": c.memory.save_norm_inputs,
    "gate_up": c.memory.save_gate_up,
    "layer_inputs": c.memory.save_layer_inputs,
  }
  inputs = {form.value: form for form in residuals.GemmInput}
  formats = residuals.ResidualFormats(
    **{k: residuals.QUANTS.get(name) for k, name in names.items()},
    gemm_inputs=inputs.get(c.memory.save_gemm_inputs, residuals.GemmInput.UNQUANTIZED),
  )
  return model_config.ComputeConfig(
    jnp.dtype(compute if compute in settings.COMPUTE_DTYPES else "float32"),
    "xla", c.memory.remat_policy, formats, c.memory.loss_chunk, layout,
    c.precision.smooth_swiglu, len(c.data.sources) if c.log.source_loss else 0,
    is_invariant=c.precision.invariant, weight_operands=c.memory.weight_operands,
  )  # fmt: skip


def _with_attention(c: Config, run, model, microbatch: int, device, problems: ConfigErrors):
  """`run` with the attention that the configuration names or "auto" stands for."""
  wanted = c.kernels.attention
  if recipe := precision_checks.read_attention(c, device, problems):
    return dataclasses.replace(run, attention_recipe=recipe)
  if wanted not in ("auto", *attention_api.BACKENDS):
    return run
  problem = attention_api.AttentionProblem(1, 128, 1, 1, 128, run.dtype.name, True, device)
  if model is not None and not model.problems():
    size = (max(microbatch, c.eval.batch), c.seq_len, not c.data.cross_document)
    problem = attention_gqa.problem(model, run, device, *size)
  chosen = choose.attention(problem, wanted)
  if isinstance(chosen, choose.Refusal):
    problems.found.append(chosen.reason)
    return run
  return dataclasses.replace(run, attention=chosen.backend)


def _check_sections(c: Config, problems: ConfigErrors, needs: Needs):
  """Adapters, loss_scale, eval, init and checkpoint, whose numbers have been checked."""
  problems.check(
    needs.of_weights or not c.weights.hf,
    f"weights.hf={c.weights.hf!r} is of evaluate, export, generate, calibrate and sensitivity; "
    "runs start from init.hf",
  )
  problems.extend(checks.lora_problems(c))
  problems.extend(checks.loss_scale_problems(c))
  problems.keys("checkpoint.accept_changes", c.checkpoint.accept_changes, acceptable_changes(c))
  problems.check(
    c.data.heldout_fraction != 0 or c.eval.tokens == 0,
    "data.heldout_fraction=0 leaves nothing to evaluate on; raise it, or set eval.tokens=0",
  )
  problems.check(
    bool(c.init.workdir) or not c.init.weights_only,
    "init.weights_only=True without init.workdir; name the run whose weights training starts from, "
    "or a Hugging Face folder as init.hf",
  )
  if needs.has_steps:  # other jobs start nothing, and may lack the files
    problems.extend(checks.untie_problems(c) + checks.start_problems(c))
  problems.check(
    not c.weights.hf or c.weights.step == -1,
    f"weights.step={c.weights.step} with weights.hf={c.weights.hf!r}, a folder without "
    "checkpoints; empty one of them",
  )
  problems.extend(needs.problems(c))
  pair = c.log.profile
  is_pair = len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)
  problems.check(is_pair, f"log.profile={pair!r} must be two numbers of steps, e.g. (10, 3)")
  names = c.eval.precisions
  if not isinstance(names, (tuple, list)) or not names:
    problems.found.append(
      f"eval.precisions={names!r} names no forward pass; give some of "
      f"{model_config.EVAL_PRECISIONS}"
    )
    return
  for name in names:
    problems.one_of("eval.precisions", name, model_config.EVAL_PRECISIONS)


def _check_spec(spec: TrainSpec, problems: ConfigErrors, needs: Needs):
  """The checks that need everything else: sites and parameters."""
  for phase in range(len(spec.precision.phases)):
    problems.attempt(lambda phase=phase: _check_float16(spec, phase))
  problems.extend(policy_checks.site_problems(spec))
  problems.extend(precision_checks.invariant_problems(spec))
  problems.extend(precision_checks.weight_operand_problems(spec))
  problems.extend(precision_checks.own_teacher_problems(spec) if needs.has_loss else [])
  problems.attempt(lambda: spec.leaves)


def _check_float16(spec: TrainSpec, phase: int):
  """The sites of a phase, none of them on kernels that were written for bfloat16 alone; under
  unit scaling without a loss scale each has its factors."""
  for one in site.flatten(spec.sites(phase=phase)).values():
    backends = sorted(set(one.backends) & set(gemm_api.WITH_QUANTIZER))
    if spec.run.dtype == jnp.float16 and backends:
      raise ValueError(
        f"precision.compute_dtype='float16': site {one.name} is multiplied by "
        f"{', '.join(backends)}, "
        "whose kernels read bfloat16; set precision.compute_dtype='bfloat16', or "
        "kernels.matmul='xla' or "
        "'reference'"
      )
  recipes = site_tree.recipes_of(spec.sites(phase=phase)).items()
  plain = [name for name, r in recipes if not any(getattr(r, p).gain for p in PASSES)]
  if (
    spec.run.dtype == jnp.float16 and spec.loss_scale.kind == "none"
    and spec.model.unit_scaling == "all" and plain
  ):  # fmt: skip
    raise ValueError(
      "model.unit_scaling='all' in float16 without a loss scale: the recipe of "
      f"{plain[0]} has no gain; set precision.rules to (('head', 'unit_head'), ('layers/.*', "
      "'unit_scaling_wide')), or loss_scale.kind='dynamic'"
    )


def read_optim(c: Config, steps: int) -> optimizers.OptimizerConfig:
  """`optim` for a run of so many steps."""
  optim = registry.section(c, optimizers.OptimizerConfig, steps=steps)
  share = optim.warmup_fraction
  return dataclasses.replace(optim, warmup_steps=checks.part_of(share, steps)) if share else optim


def _optim(
  c: Config, steps: int, model: model_config.ModelConfig | None, problems: ConfigErrors
) -> optimizers.OptimizerConfig:
  optim = read_optim(c, steps)
  if model is not None:
    problems.extend(checks.scaling_problems(c, optim, model))
    optim = dataclasses.replace(optim, width=model.hidden_size if optim.base_width else 0)
  share = c.optim.warmup_fraction
  problems.check(
    share <= 1, f"optim.warmup_fraction={share} must be a share of the steps, at most 1"
  )
  problems.extend(optim.problems())
  problems.extend(checks.layerwise_problems(c))
  return optim
