"""Refusals of a configuration, section by section."""

import math
from collections.abc import Mapping
from typing import Any

from fp8jax.models.config import ModelConfig
from fp8jax.optim import groups
from fp8jax.optim.optimizers import OptimizerConfig


def part_of(share: float, number: int) -> int:
  """share * number rounded down; what floating point makes of 0.29 * 100 or 1/3 * 300 is whole."""
  return math.floor(round(share * number, 6))


def layerwise_problems(c: Any) -> list[str]:
  """Settings that exclude optim.in_backward, in words."""
  if not c.optim.in_backward:
    return []
  wanted = (
    ("optim.grad_clip_norm", c.optim.grad_clip_norm, 0.0,
     "the global norm is known only after all layers have been updated"),
    ("grad_accum_steps", c.grad_accum_steps, 1,
     "a sum of microbatches is a gradient of all layers"),
    ("memory.remat_policy", c.memory.remat_policy, "full",
     "layers are rematerialised one at a time in the backward pass"),
    ("memory.weight_operands", c.memory.weight_operands, "per_product",
     "layers move before all products are done"),
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


def group_problems(c: Any, optim: OptimizerConfig, named: Mapping[str, list[str]]) -> list[str]:
  """The problems of optim.clip_groups and lr_multipliers, in words.

  Args:
    named: of optim.groups.names; {} where the model is not known.
  """
  problems, keys = [], ("clip_groups", "lr_multipliers")
  for key in keys:
    problems += groups.problems(f"optim.{key}", getattr(optim, key), named)
  used = " and ".join(f"optim.{key}" for key in (*keys, "base_width") if getattr(optim, key))
  if optim.clip_groups and optim.grad_clip_norm:
    problems.append(
      f"optim.grad_clip_norm={optim.grad_clip_norm} with optim.clip_groups: gradients are clipped "
      "together or by groups; set optim.grad_clip_norm=0.0, or optim.clip_groups=()"
    )
  if used and optim.in_backward:
    problems.append(f"{used} with optim.in_backward=True: layers move one by one; leave one out")
  return problems


def lora_problems(c: Any) -> list[str]:
  """Settings that exclude adapters, in words."""
  if not c.model.lora.rank and not c.init.adapters:
    return []
  wanted = (
    ("optim.in_backward", c.optim.in_backward, False, "most of a layer is frozen, nothing to save"),
    ("precision.smooth_swiglu", c.precision.smooth_swiglu, "none",
     "its channel scales belong into weights that are frozen"),
    ("optim.sparsity", c.optim.sparsity, "none", "merged adapters fill zeros of their base"),
  )  # fmt: skip
  return [
    f"{key}={value!r} with model.lora.rank={c.model.lora.rank}: {why}; set {key}={needed!r}, or "
    "model.lora.rank=0"
    for key, value, needed, why in wanted
    if value != needed
  ]


def distill_problems(c: Any) -> list[str]:
  """The problems of a config's distill section, whose weight is set, in words."""
  d, texts = c.distill, []
  if d.weight > 1:
    texts.append(f"distill.weight={d.weight} is a share of the loss, at most 1")
  if not 0 < d.temperature < float("inf"):
    texts.append(f"distill.temperature={d.temperature} must be positive and finite; 1 is plain KL")
  if not (d.teacher or c.init.hf or c.init.workdir):
    texts.append(
      f"distill.weight={d.weight} without a teacher: weights are drawn at random; set init.hf or "
      "init.workdir to weights to start from, distill.teacher to a folder, or distill.weight=0"
    )
  if c.init.adapters and not d.teacher:
    texts.append(
      f"distill.weight={d.weight} with init.adapters={c.init.adapters!r}: the frozen base is not "
      "what training starts from; merge them (--job=export) and set distill.teacher to the folder"
    )
  if c.model.unit_scaling != "none":
    texts.append(
      f"distill.weight={d.weight} with model.unit_scaling={c.model.unit_scaling!r}, whose factors "
      "are of a cross entropy's gradient; set distill.weight=0, or model.unit_scaling='none'"
    )
  return texts


def scaling_problems(c: Any, optim: OptimizerConfig, model: ModelConfig) -> list[str]:
  """Settings under which constants of unit scaling and of rates by width would be wrong."""
  texts = []
  clips = [f"optim.{key}" for key in ("grad_clip_norm", "clip_groups") if getattr(optim, key)]
  if model.unit_scaling != "none" and clips:
    texts.append(
      f"{' and '.join(clips)} with model.unit_scaling={model.unit_scaling!r}: its gradients are "
      "so large that every step would be clipped; set optim.grad_clip_norm=0.0 and "
      "optim.clip_groups=()"
    )
  if optim.base_width and model.lora is not None:
    texts.append(
      f"optim.base_width={optim.base_width} with model.lora.rank={model.lora.rank}: the inner size "
      "of an adapter is its rank, not the width; set optim.base_width=0"
    )
  return texts


def untie_problems(c: Any) -> list[str]:
  """Why init.untie would do nothing, or would move weights that nothing trains."""
  if not c.init.untie:
    return []
  has_weights = c.init.hf or (c.init.workdir and c.init.weights_only)
  reasons = (
    (not has_weights, "and no weights of a checkpoint; set init.hf, or init.workdir with "
     "init.weights_only=True"),
    (c.optim.master_format != "float32", f"and optim.master_format={c.optim.master_format!r}, from "
     "which products read 16 bits; set 'float32'"),
    (c.model.lora.rank or c.init.adapters, "and adapters, beside which these weights do not move; "
     "set init.untie=False"),
  )  # fmt: skip
  return [f"init.untie=True {why}" for is_so, why in reasons if is_so]


def start_problems(c: Any) -> list[str]:
  """Keys about weights to start from that name none: training would start from others."""
  texts = []
  if c.init.step != -1 and not c.init.workdir:
    texts.append(
      f"init.step={c.init.step} without init.workdir: training would start from other weights; "
      "name the run whose checkpoint it is, or set init.step=-1"
    )
  if c.init.requantize and not c.init.hf:
    texts.append(
      "init.requantize=True without init.hf, whose codes it is about; set init.requantize=False"
    )
  return texts


def loss_scale_problems(c: Any) -> list[str]:
  """The problems of a config's loss_scale section, in words."""
  has_factors = c.model.unit_scaling != "none"
  if c.precision.compute_dtype != "float16" or c.loss_scale.kind != "none" or has_factors:
    return []
  return [
    "precision.compute_dtype='float16' with loss_scale.kind='none': gradients below 6e-8 become 0 "
    "and those above 65,504 infinite; set loss_scale.kind='dynamic', or compute in 'bfloat16'"
  ]
