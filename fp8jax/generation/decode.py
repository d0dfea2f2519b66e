"""The three programs of generation: prefill of prompts, one decode step, scores of sequences.

All are the model's own forward pass (models/transformer.py) with a cache for a state. B is slots of
the cache, R is prompts that are prefilled together, P is positions that are scored together.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax.generation import cache as cache_lib
from fp8jax.generation import sampling
from fp8jax.generation.sampling import Method
from fp8jax.kernels import choose
from fp8jax.kernels.device import Device
from fp8jax.models import attention_gqa, invariant, transformer
from fp8jax.models.attention_gqa import KEY
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.ops import collectives, cross_entropy
from fp8jax.ops import site as site_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
  """The sequences that are being decoded.

  Attributes:
    cache: of their tokens, all but the newest.
    tokens_B: int32, the newest token of each.
    positions_B: int32, its position.
    seeds_B: uint32, see sampling.row_seed.
    logp_B: float32, log-probability of the newest token under logits / temperature, of the whole
      vocabulary whatever it was drawn from; greedily under the logits.
  """

  cache: cache_lib.KVCache
  tokens_B: jax.Array
  positions_B: jax.Array
  seeds_B: jax.Array
  logp_B: jax.Array

  @classmethod
  def empty(
    cls, cfg: ModelConfig, rows: int, length: int, format_: str, dtype,
    layout: axes.Layout = axes.LOCAL, scales=None,
  ) -> "Slots":  # fmt: skip
    """So many slots without a sequence; see KVCache.zeros."""
    zeros = jnp.zeros(rows, jnp.int32)
    cache = cache_lib.KVCache.zeros(cfg, rows, length, format_, dtype, layout, scales)
    of_tokens = (zeros, zeros + 0, zeros.astype(jnp.uint32), zeros.astype(jnp.float32))
    return cls(cache, *of_tokens).placed()

  def cleared(self, row: int) -> "Slots":
    """These with zeros in a slot: 0 times a NaN that the mask hides would be a NaN for the next."""
    is_row_B = jnp.arange(len(self.tokens_B)) == row

    def zeros(x):  # by position, which moves nothing on a mesh
      is_row = is_row_B.reshape(1, -1, *(1,) * (x.ndim - 2))
      return jnp.where(is_row, jnp.zeros((), x.dtype), x)

    cache, tokens_B = self.cache.of_entries(zeros), jnp.where(is_row_B, 0, self.tokens_B)
    return dataclasses.replace(self, cache=cache, tokens_B=tokens_B).placed()

  def placed(self) -> "Slots":
    """These where they belong, inside a program: all but the cache on every device."""
    whole = lambda x: axes.constrain(x, "S", self.cache.layout)  # noqa: E731
    vectors = map(whole, (self.tokens_B, self.positions_B, self.seeds_B, self.logp_B))
    return Slots(self.cache.placed(), *vectors)


def served(cfg: ModelConfig, run: ComputeConfig, device: Device, length: int) -> ComputeConfig:
  """How a model computes here that computes like `run` elsewhere.

  Args:
    device: hardware, for which attention is chosen.
    length: positions of the cache.
  """
  # A prompt is one sequence, a single document.
  problem = attention_gqa.problem(cfg, run, device, 1, length, is_isolated=False)
  chosen = choose.attention(problem)
  attention = chosen.backend if isinstance(chosen, choose.Choice) else "xla"
  return dataclasses.replace(run, attention=attention, layout=run.layout.served())


def served_sites(sites):
  """The sites where `served` puts their weights."""
  return site_lib.tree_map(lambda s: dataclasses.replace(s, layout=s.layout.served()), sites)


def prefill(
  params, sites, slots: Slots, prompts, temperature, top_p, *, method: Method,
  cfg: ModelConfig, run: ComputeConfig,
):  # fmt: skip
  """(slots that hold the prompts, (int32 [R] their first sampled tokens, float32 [R] logp)).

  Args:
    prompts: {"tokens_RL", "lengths_R", "rows_R", "seeds_R"}: int32 tokens, padded on the right to
      one length; how many count; the slots that they take, each one once.
    temperature, top_p, method: see sampling.sample.
  """
  tokens_RL, lengths_R, rows_R, seeds_R = (
    prompts[k] for k in ("tokens_RL", "lengths_R", "rows_R", "seeds_R")
  )
  positions_RL = jnp.broadcast_to(jnp.arange(tokens_RL.shape[1]), tokens_RL.shape)
  batch = {"tokens_BL": tokens_RL, "positions_BL": positions_RL}
  past = {KEY: cache_lib.NoPast(slots.cache.format, run.layout, slots.cache.scales)}
  h_RLD, aux = transformer.hidden_and_aux(params, sites, batch, cfg, run, past)
  last_RLD = jnp.take_along_axis(h_RLD, lengths_R[:, None, None] - 1, axis=1)
  logits_RLV = transformer.head_logits(last_RLD, params, sites, cfg, run)
  drawn = (seeds_R, lengths_R, temperature, top_p)
  first_R, logp_R = _sampled(logits_RLV[:, 0], *drawn, method=method, run=run)
  return Slots(
    slots.cache.write(aux.states[KEY], rows_R, positions_RL),
    slots.tokens_B.at[rows_R].set(first_R),
    slots.positions_B.at[rows_R].set(lengths_R),
    slots.seeds_B.at[rows_R].set(seeds_R),
    slots.logp_B.at[rows_R].set(logp_R),
  ).placed(), tuple(axes.constrain(x, "R", run.layout) for x in (first_R, logp_R))


def decode(
  params, sites, slots: Slots, temperature, top_p, *, method: Method,
  cfg: ModelConfig, run: ComputeConfig,
) -> Slots:  # fmt: skip
  """The slots after one more token of each; a slot without a sequence decodes nonsense."""
  logits_BV, cache = next_logits(params, sites, slots, cfg, run)
  # An idle slot must not walk out of the cache: rotations and masks are of its positions.
  positions_B = jnp.minimum(slots.positions_B + 1, slots.cache.length - 1)
  drawn = (slots.seeds_B, positions_B, temperature, top_p)
  tokens_B, logp_B = _sampled(logits_BV, *drawn, method=method, run=run)
  return Slots(cache, tokens_B, positions_B, slots.seeds_B, logp_B).placed()


def next_logits(params, sites, slots: Slots, cfg: ModelConfig, run: ComputeConfig):
  """(float32 [B, V] logits after each slot's newest token, the cache that holds this token too)."""
  positions_BL = slots.positions_B[:, None]
  batch = {"tokens_BL": slots.tokens_B[:, None], "positions_BL": positions_BL}
  past = {KEY: slots.cache}
  h_BLD, aux = transformer.hidden_and_aux(params, sites, batch, cfg, run, past)
  rows_B = jnp.arange(positions_BL.shape[0])
  cache = slots.cache.write(aux.states[KEY], rows_B, positions_BL)
  return transformer.head_logits(h_BLD, params, sites, cfg, run)[:, 0], cache


def _sampled(logits_BV, *drawn, method: Method, run: ComputeConfig):
  """(sampling.sample, Slots.logp_B): a device has all of the vocabulary of its rows; those that
  share a row draw the same token."""
  local, layout = functools.partial(sampling.sample, method=method), run.layout
  rows, whole = layout.act_spec("B"), jax.sharding.PartitionSpec()
  in_specs = (layout.act_spec("BS"), rows, rows, whole, whole)
  tokens_B = collectives.on_mesh(local, layout, in_specs, rows)(logits_BV, *drawn)
  temperature = jnp.float32(1) if method.is_greedy else drawn[2]
  of_rows = invariant.of_tokens(cross_entropy.log_probs, run)
  logp_BL = of_rows(temperature, logits_BV[:, None], jnp.maximum(tokens_B, 0)[:, None])
  return tokens_B, logp_BL[:, 0]


def score(params, sites, batch, *, chunk: int, cfg: ModelConfig, run: ComputeConfig):
  """(float32 [B, L] log-probability of every target, bool [B, L] whether it is the best token).

  Args:
    batch: tokens_BL, positions_BL, targets_BL.
    chunk: positions P whose logits exist at a time; divides L.
  """
  h_BLD = transformer.hidden(params, sites, batch, cfg, run)
  run = dataclasses.replace(run, loss_chunk=chunk)
  return transformer.log_probs(h_BLD, params, sites, batch["targets_BL"], cfg, run)
