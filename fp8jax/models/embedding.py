"""The embedding of tokens."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.models import unit_scaling
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.ops import stored_params
from fp8jax.ops.stored_params import Parts


def embedded(w, tokens_BL, cfg: ModelConfig, run: ComputeConfig):
  """[B, L, D] in the compute dtype, of an embedding as it is stored or in training."""
  uses = tokens_BL.size * cfg.hidden_size
  if parts := stored_params.parts_of(w):
    return _in_parts(w, parts, tokens_BL, uses, cfg, run)
  embed = unit_scaling.parameter(stored_params.value(w), uses, cfg, run)
  return jnp.take(embed, tokens_BL, axis=0, mode="clip").astype(run.dtype)


def _in_parts(w, parts: Parts, tokens_BL, uses: int, cfg: ModelConfig, run: ComputeConfig):
  """Every device's tokens from its own copy of the embedding, whose gradients are the terms of w's.

  A part is a share of the batch, so that tokens are [parts, B / parts, L].
  """
  layout = run.layout
  rest = tuple(a for a in layout.act_axes("B") if a not in parts.axes)

  def pinned(x, *spec):
    place = PartitionSpec(parts.axes, *spec)
    return jax.lax.with_sharding_constraint(x, NamedSharding(cast(Any, layout.mesh), place))

  copies = pinned(stored_params.terms(w), *layout.weight_spec("VD"))
  copies = unit_scaling.parameter(copies, parts.count * uses, cfg, run)
  shares = pinned(tokens_BL.reshape(parts.count, -1, tokens_BL.shape[1]), rest)
  take = functools.partial(jnp.take, axis=0, mode="clip")
  return jax.vmap(take)(copies, shares).reshape(*tokens_BL.shape, -1).astype(run.dtype)
