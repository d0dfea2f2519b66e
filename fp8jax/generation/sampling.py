"""From logits to a token: greedy, or a draw after temperature, top-k and top-p, in this order.

Source: the order and the sets are those of transformers' logits processors (temperature, top-k,
top-p); nucleus sampling is Holtzman et al. 2020 (arXiv:1904.09751) §3.1. Of equal logits at the
border of a set the lower ids stay.

Every row draws with a key of its own, from its seed and its token's position: a completion does not
depend on the rows beside it.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.generation.settings import Sampling

NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Method:
  """The static part of a Sampling; the rest of a greedy one, which takes the best, is unread."""

  is_greedy: bool
  top_k: int
  has_top_p: bool


def method_of(sampling: Sampling) -> Method:
  """The part that programs are compiled for."""
  if sampling.temperature == 0:
    return Method(True, 0, False)
  return Method(False, sampling.top_k, sampling.top_p < 1)


def row_seed(seed: int, prompt: Sequence[int], number: int) -> int:
  """The seed of a row, 32 bits, from a Sampling's seed, the prompt and the sample's number."""
  text = f"{seed}|{number}|{','.join(map(str, prompt))}"
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def sample(logits_BV, seeds_B, positions_B, temperature, top_p, method: Method):
  """int32 [B], one token per row; NO_TOKEN where a logit is not finite, which nothing follows.

  Args:
    logits_BV: float32.
    seeds_B: uint32, see `row_seed`.
    positions_B: int32 position of the sampled token in its sequence.
    temperature, top_p: float32 scalars; unread by a greedy method.
  """
  is_finite_B = jnp.isfinite(logits_BV).all(axis=-1)
  if method.is_greedy:
    return jnp.where(is_finite_B, jnp.argmax(logits_BV, axis=-1), NO_TOKEN).astype(jnp.int32)
  scores_BV, ids_BV = filtered(logits_BV, temperature, top_p, method)

  def draw(seed, position, scores):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.categorical(key, scores)

  chosen_B = jax.vmap(draw)(seeds_B, positions_B, scores_BV)
  if ids_BV is not None:
    chosen_B = jnp.take_along_axis(ids_BV, chosen_B[:, None], axis=1)[:, 0]
  return jnp.where(is_finite_B, chosen_B, NO_TOKEN).astype(jnp.int32)


def filtered(logits_BV, temperature, top_p, method: Method):
  """(scores of the tokens that may be drawn, -inf for others; their ids, or None for all in order).

  With a filter they come by descending score, the first top_k of them.
  """
  scores_BV = logits_BV / temperature
  if not method.top_k and not method.has_top_p:
    return scores_BV, None
  count = min(method.top_k or logits_BV.shape[-1], logits_BV.shape[-1])
  scores_BV, ids_BV = jax.lax.top_k(scores_BV, count)
  if method.has_top_p:
    p_BV = jax.nn.softmax(scores_BV, axis=-1)
    # A token stays if the more probable ones have less than top_p together: the first always does.
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    scores_BV = jnp.where(before_BV < top_p, scores_BV, -np.inf)
  return scores_BV, ids_BV
