"""The sections of a ConfigDict as their types, unchecked: config/resolve.py checks them."""

import dataclasses
from typing import Any

from fp8jax.config.files import Config
from fp8jax.evaluation import catalog
from fp8jax.generation.sampling import Sampling
from fp8jax.optim.factory import OptimizerConfig
from fp8jax.step import config as step_config


def read(c: Config, alarms: tuple[step_config.Alarm, ...], steps: int) -> dict[str, Any]:
  """The fields of RunSpec that need no device, model or file.

  Args:
    c: the whole configuration.
    alarms: log.alarms, read.
    steps: of the run, by c.steps or data.epochs.

  Returns:
    Keyword arguments of RunSpec.
  """
  checkpoint, log = c.checkpoint, c.log
  return dict(
    global_batch=c.global_batch,
    grad_accum_steps=c.grad_accum_steps,
    steps=steps,
    seed=c.seed,
    verify_fp8_gemms=c.precision.verify_fp8_gemms,
    calibration=c.precision.calibration,
    init=step_config.InitConfig(**c.init),
    kernels=step_config.KernelsConfig(c.kernels.matmul, c.kernels.optimizer, c.kernels.attention),
    loss_scale=step_config.LossScaleConfig(**c.loss_scale),
    eval=read_eval(c),
    checkpoint=step_config.CheckpointConfig(
      **{**checkpoint, "accept_changes": tuple(checkpoint.accept_changes)}
    ),
    log=step_config.LogConfig(**{**log, "alarms": alarms}),
    export=step_config.ExportConfig(**c.export),
    calibrate=step_config.CalibrateConfig(**c.calibrate),
    generate=read_generate(c),
    sensitivity=step_config.SensitivityConfig(
      **{**c.sensitivity, "groups": tuple(c.sensitivity.groups)}
    ),
  )


def read_generate(c: Config) -> step_config.GenerateConfig:
  """`generate`, its sampling apart, and the chat template that `data` names."""
  section = c.generate.items()
  values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in section}
  values |= dict(chat_template=c.data.chat_template, template_date=c.data.template_date)
  names = [field.name for field in dataclasses.fields(Sampling)]
  sampling = Sampling(**{name: values.pop(name) for name in names})
  return step_config.GenerateConfig(**values, sampling=sampling)


def read_optim(c: Config, steps: int) -> OptimizerConfig:
  """`optim` for a run of so many steps."""
  values = dict(c.optim)
  if share := values.pop("warmup_fraction"):
    values["warmup_steps"] = int(share * steps)
  for key in ("clip_groups", "lr_multipliers"):
    stated = values[key]
    pairs = stated if isinstance(stated, (tuple, list)) else (stated,)
    values[key] = tuple(tuple(p) if isinstance(p, (tuple, list)) else p for p in pairs)
  return OptimizerConfig(**values, steps=steps)


def read_eval(c: Config) -> step_config.EvalConfig:
  """`eval`, the options of its tasks together."""
  e = c.eval
  return step_config.EvalConfig(
    tokens=e.tokens,
    batch=e.batch,
    every=e.every,
    precisions=tuple(e.precisions),
    hf=e.hf,
    step=e.step,
    tasks=e.tasks,
    options=read_task_options(c),
    chat=e.chat,
    seed=e.seed,
    compare_with=e.compare_with,
  )


def read_task_options(c: Config) -> catalog.Options:
  """The settings of `eval` that all tasks have in common."""
  e = c.eval
  return catalog.Options(
    data_dir=e.data_dir,
    train_data=e.train_data,
    allow_code=e.allow_code_execution,
    questions=e.questions,
    samples=e.samples,
    temperature=e.temperature,
    max_new_tokens=e.max_new_tokens,
  )
