"""A folder in servers: scales of keys and values, and the degrees of tensor parallelism."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.evaluation.divergence import Batch
from fp8jax.export.fp8 import Plan
from fp8jax.formats import E4M3
from fp8jax.generation.cache import NoPast
from fp8jax.generation.settings import COMPUTE
from fp8jax.models import transformer
from fp8jax.models.attention_gqa import KEY
from fp8jax.models.config import ModelConfig
from fp8jax.models.hf import kv_scales as kv_scales_lib
from fp8jax.recipe.quant import WHOLE
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.step.train_spec import TrainSpec

# Weights that are cut along their inputs; the others along their outputs.
_BY_INPUTS = ("o_proj", "down_proj")
_MOST = 64


def kv_scales(params, spec: TrainSpec, texts: list[Batch], method: str) -> dict[str, float]:
  """{name of a tensor: amax / 448 of a layer's keys, turned by their positions, or values}.

  Args:
    params: of the unquantized model.
    texts: whose tokens that count give the ranges.
    method: quant_method of the folder.
  """
  sites = spec.sites(evaluator_lib.BF16)
  largest = np.zeros((2, spec.model.num_layers), np.float32)

  @functools.partial(jax.jit, static_argnames="run")
  def amaxes(params, inputs, counts_BL, run):
    past = {KEY: NoPast(COMPUTE)}
    aux = transformer.hidden_and_aux(params, sites, inputs, spec.model, run, past)[1]
    cache, used = aux.states[KEY], (counts_BL > 0)[None, :, :, None, None]
    return jnp.stack([
      jnp.max(jnp.where(used, jnp.abs(x.data.astype(jnp.float32)), 0.0), axis=(1, 2, 3, 4))
      for x in (cache.k, cache.v)
    ])  # fmt: skip

  for b in texts:
    largest = np.maximum(
      largest, jax.device_get(amaxes(params, b.inputs, b.counts_BL, spec.plain.run))
    )
  return {
    kv_scales_lib.name(i, kv, method): float(amax / np.float32(E4M3.max)) or 1.0
    for kv, of_layers in zip("kv", largest, strict=True)
    for i, amax in enumerate(of_layers)
  }


def degrees(plan: Plan | None, cfg: ModelConfig) -> list[int]:
  """The tensor-parallel degrees, up to 64, at which servers can load a folder.

  Shards have whole heads (several may share a head of keys and values), whole columns of the
  feed-forward layer, and whole tiles and packed words of every quantized matrix.
  """
  return [n for n in range(1, _MOST + 1) if _divides(n, plan, cfg)]


def _divides(n: int, plan: Plan | None, cfg: ModelConfig) -> bool:
  kv = cfg.num_kv_heads
  if cfg.num_heads % n or cfg.intermediate_size % n or (kv % n and n % kv):
    return False
  sizes = {
    "q_proj": cfg.num_heads * cfg.head_dim, "o_proj": cfg.num_heads * cfg.head_dim,
    "gate_proj": cfg.intermediate_size, "up_proj": cfg.intermediate_size,
    "down_proj": cfg.intermediate_size,
  }  # fmt: skip
  for name, matrix in (plan.matrices if plan else {}).items():
    last = name.split(".")[-2]
    # A head of keys and values that several shards need is in each of them.
    size = sizes[last] // n if last in sizes else max(kv // n, 1) * cfg.head_dim
    tile = matrix.scheme.tile[last in _BY_INPUTS]
    words = matrix.scheme.per_word if last in _BY_INPUTS else 1
    if (tile != WHOLE and size % tile) or size % words:
      return False
  return True
