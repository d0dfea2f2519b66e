"""Statistics of every parameter in a step, layer by layer: of its gradient, update and value."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax import patterns
from fp8jax.optim import gradients, groups
from fp8jax.optim.optimizers import OptimizerConfig

LEVELS = ("off", "groups", "params")
_REST = "all others"


def observed(declaration, gradient, squares: Mapping[str, Any]) -> dict[str, Any]:
  """{parameter: float32 [N, 4] of a stack of layers, else [4]} of those that are trained.

  The four are squares of the gradient, of the update and of the parameter before it, and the number
  of elements of the gradient that are not finite.

  Args:
    gradient: tree of gradients, or of a part of them, before clipping.
    squares: {parameter: float32 [N, 2] or [2]}, of update.update_params.
  """
  norms, declared = {}, params_lib.flatten(declaration)
  for path, g in params_lib.flatten(gradient).items():
    if declared[path].trainable:
      g = gradients.dequantize(g)
      axes = tuple(range(squares[path].ndim - 1, g.ndim))
      bad = jnp.sum(~jnp.isfinite(g), axis=axes, dtype=jnp.int32).astype(jnp.float32)
      own = jnp.sum(jnp.square(g), axis=axes)
      norms[path] = jnp.stack([own, *jnp.moveaxis(squares[path], -1, 0), bad], axis=-1)
  return norms


def summary(
  stats: Mapping[str, Any], level: str, optim: OptimizerConfig, declaration
) -> dict[str, dict[str, float]]:
  """{parameter of one layer, "layers/3/mlp/up", or group: its statistics}, on the host.

  Args:
    stats: of `observed`.
    level: one of LEVELS; a group has the parameters that the same rules of optim.clip_groups and
      optim.lr_multipliers match.
  """
  layers = max((len(x) for x in stats.values() if x.ndim > 1), default=0)
  sums: dict[str, Any] = {}
  for path, names in groups.names(declaration, layers).items():
    for name, values in zip(names, np.atleast_2d(np.float64(stats[path])), strict=True):
      key = name if level == "params" else group_of(optim, name)
      sums[key] = sums.get(key, 0) + values
  norms_of = {}
  for name, (gradient, update, param, bad) in sums.items():
    ratio = math.sqrt(update / param) if param else math.nan
    norms_of[name] = dict(
      grad_norm=math.sqrt(gradient), update_norm=math.sqrt(update), param_norm=math.sqrt(param),
      update_ratio=ratio, nonfinite=float(bad),
    )  # fmt: skip
  return norms_of


def group_of(optim: OptimizerConfig, name: str) -> str:
  """The rules of a parameter's clipping and rate, as "clip layers/.*, rate .*/up"."""
  kinds = {"clip": optim.clip_groups, "rate": optim.lr_multipliers}
  chosen = {kind: patterns.first(pairs, name) for kind, pairs in kinds.items()}
  words = [f"{kind} {kinds[kind][i][0]}" for kind, i in chosen.items() if i >= 0]
  return ", ".join(words) or _REST


def problems(c: Any, optim: OptimizerConfig) -> list[str]:
  """Settings that exclude log.param_stats, in words."""
  level, texts = c.log.param_stats, []
  if level == "off" or level not in LEVELS:
    return []
  if not c.log.tensor_stats_every:
    texts.append("is written with the tensor statistics, and log.tensor_stats_every=0 takes none; "
                 "set log.tensor_stats_every=100")  # fmt: skip
  if level == "groups" and not (optim.clip_groups or optim.lr_multipliers):
    texts.append("has one group without optim.clip_groups and optim.lr_multipliers: its norms are "
                 "grad_norm, update_norm and param_norm; set log.param_stats='params'")  # fmt: skip
  return [f"log.param_stats={level!r} {problem}" for problem in texts]
