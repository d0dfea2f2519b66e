"""Refusals of a configuration, section by section."""

import math
import os
from collections.abc import Mapping
from typing import Any

from fp8jax.errors import ConfigErrors
from fp8jax.evaluation import catalog
from fp8jax.generation.settings import Generate
from fp8jax.optim import groups
from fp8jax.optim.optimizers import OptimizerConfig
from fp8jax.step.job_settings import SENSITIVITY_GROUPS
from fp8jax.step.loss_scale import LARGEST, SMALLEST


def layerwise_problems(c: Any) -> list[str]:
  """Settings that exclude optim.in_backward, in words."""
  if not c.optim.in_backward:
    return []
  wanted = (
    ("optim.grad_clip_norm", c.optim.grad_clip_norm, 0.0,
     "the global norm is known when every layer has moved"),
    ("grad_accum_steps", c.grad_accum_steps, 1,
     "a sum of microbatches is a gradient of all layers"),
    ("memory.remat_policy", c.memory.remat_policy, "full",
     "every layer is computed again when it is its turn"),
    ("optim.grad_format", c.optim.grad_format, "float32", "only one layer has gradients at a time"),
    ("optim.on_nonfinite", c.optim.on_nonfinite, "stop", "layers move before another's is seen"),
    ("loss_scale.kind", c.loss_scale.kind, "none", "layers move before an overflow is seen"),
  )  # fmt: skip
  return [
    f"{key}={value!r} with optim.in_backward=True: {why}; set {key}={needed!r}, or "
    "optim.in_backward=False"
    for key, value, needed, why in wanted
    if value != needed
  ]


def calibrate_problems(c: Any) -> list[str]:
  """The problems of a config's calibrate section, in words."""
  collected, method, percent = ConfigErrors(), c.calibrate.method, c.calibrate.percentile
  collected.check(
    50 <= percent <= 100, f"calibrate.percentile={percent} must be a percentage from 50 to 100"
  )
  collected.check(
    method == "amax" or c.loss_scale.kind == "none",
    f"calibrate.method={method!r} counts gradients as they are; set loss_scale.kind='none' for "
    "--job=calibrate, or calibrate.method='amax'",
  )
  return collected.found


def group_problems(c: Any, optim: OptimizerConfig, named: Mapping[str, list[str]]) -> list[str]:
  """The problems of optim.clip_groups and lr_multipliers, in words.

  Args:
    c: the whole configuration.
    optim: its section, read.
    named: of optim.groups.names; {} where the model is not known.
  """
  found, keys = [], ("clip_groups", "lr_multipliers")
  for key in keys:
    found += groups.problems(f"optim.{key}", getattr(optim, key), named)
  used = " and ".join(f"optim.{key}" for key in keys if getattr(optim, key))
  if optim.clip_groups and optim.grad_clip_norm:
    found.append(
      f"optim.grad_clip_norm={optim.grad_clip_norm} with optim.clip_groups: gradients are clipped "
      "together or by groups; set optim.grad_clip_norm=0.0, or optim.clip_groups=()"
    )
  if used and optim.in_backward:
    found.append(f"{used} with optim.in_backward=True: layers move one by one; leave one out")
  if used and c.kernels.optimizer != "xla":
    found.append(
      f"{used} with kernels.optimizer={c.kernels.optimizer!r}: the kernel has one rate and one "
      "norm for all; set kernels.optimizer='xla'"
    )
  return found


def lora_problems(c: Any) -> list[str]:
  """Settings that exclude adapters, in words."""
  if not c.model.lora.rank and not c.init.adapters:
    return []
  wanted = (
    ("optim.in_backward", c.optim.in_backward, False, "most of a layer is frozen, nothing to save"),
    ("precision.smooth_swiglu", c.precision.smooth_swiglu, "none",
     "its channel scales belong into weights that are frozen"),
  )  # fmt: skip
  return [
    f"{key}={value!r} with model.lora.rank={c.model.lora.rank}: {why}; set {key}={needed!r}, or "
    "model.lora.rank=0"
    for key, value, needed, why in wanted
    if value != needed
  ]


def loss_scale_problems(c: Any, compute: str) -> list[str]:
  """The problems of a config's loss_scale section, in words.

  Args:
    compute: precision.compute_dtype.
  """
  found = []
  if not SMALLEST <= c.start <= LARGEST or math.frexp(c.start)[0] != 0.5:
    found.append(f"loss_scale.start={c.start} must be a power of two from 2^-24 to 2^24")
  if compute == "float16" and c.kind == "none":
    found.append(
      "precision.compute_dtype='float16' with loss_scale.kind='none': gradients below 6e-8 "
      "become 0 and "
      "those above 65,504 infinite; set loss_scale.kind='dynamic', or compute in 'bfloat16'"
    )
  return found


def generate_problems(c: Generate) -> list[str]:
  """The problems of a config's generate section, in words."""
  collected = ConfigErrors()
  collected.extend(c.sampling.problems("generate."))
  remedy = "name a file with a prompt per line, or JSON lines with 'prompt' or 'messages'"
  collected.file("generate.prompts", c.prompts, remedy)
  taken = bool(c.out) and os.path.exists(os.path.expanduser(c.out))
  collected.check(not taken, f"generate.out={c.out!r} exists; move it away or name another file")
  return collected.found


def sensitivity_problems(c: Any) -> list[str]:
  """The problems of a config's sensitivity section, in words."""
  collected = ConfigErrors()
  if isinstance(c.groups, (tuple, list)):
    for name in c.groups:
      collected.one_of("sensitivity.groups", name, SENSITIVITY_GROUPS)
  else:
    collected.found.append(
      f"sensitivity.groups={c.groups!r} is no sequence; give some of {SENSITIVITY_GROUPS}, or ()"
    )
  collected.check(c.tokens >= 2, f"sensitivity.tokens={c.tokens} must be at least 2: two halves")
  collected.check(
    c.max_loss >= 0, f"sensitivity.max_loss={c.max_loss} must be percent, at least 0; 0 is none"
  )
  collected.check(
    0 <= c.min_fp8 <= 1, f"sensitivity.min_fp8={c.min_fp8} must be a share from 0 to 1; 0 is none"
  )
  return collected.found


def task_problems(c: Any, options: catalog.Options) -> list[str]:
  """The problems of eval.tasks and of the settings that belong to it, in words.

  Args:
    c: the whole configuration.
    options: those of eval that all tasks have in common.
  """
  found = catalog.problems(c.eval.tasks, options)
  if not 0 <= c.eval.seed < 2**63:
    found.append(f"eval.seed={c.eval.seed} must be from 0 to 2**63 - 1")
  if options.temperature != -1 and not 0 <= options.temperature < math.inf:
    found.append(
      f"eval.temperature={options.temperature} must be 0 (greedy) or positive; -1 is the task's own"
    )
  other = c.eval.compare_with
  if other and not os.path.isdir(os.path.expanduser(other)):
    found.append(
      f"eval.compare_with={other!r} does not exist; name the workdir of an evaluated run, or ''"
    )
  return found
