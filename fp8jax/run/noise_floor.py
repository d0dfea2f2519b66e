"""The noise floor of a forward pass: what weights that are one ulp away change in its predictions.

Rounding to few bits is chaotic: a sum in another order, or a weight one ulp larger, flips codes,
and the flips add up over layers. Two readings of the same weights that differ by no more than this
floor agree.
"""

import jax
import jax.numpy as jnp


def nudged(params):
  """The parameters with every norm's weight one ulp larger; the others are the same arrays."""

  def one(path, x):
    is_norm = any("norm" in str(getattr(key, "key", "")) for key in path)
    return jnp.nextafter(x, jnp.asarray(jnp.inf, x.dtype)) if is_norm else x

  return jax.tree_util.tree_map_with_path(one, params)


def difference(source_BLV, made_BLV, tokens_BL, counts_BL):
  """Sums over the tokens that count of what a token's predictions differ by.

  Args:
    source_BLV, made_BLV: logits.
    tokens_BL: token of each position; the change of log p is that of the token after it.
    counts_BL: float32, 0 for tokens that do not count. The last position has no next token.

  Returns:
    float32 (KL(source || made) in nats, |change of log p| in nats, how often the most likely token
    is the same, tokens, tokens with a next one).
  """
  p_BLV, q_BLV = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (source_BLV, made_BLV))
  kl_BL = jnp.sum(jnp.exp(p_BLV) * (p_BLV - q_BLV), axis=-1)
  same_BL = jnp.argmax(p_BLV, -1) == jnp.argmax(q_BLV, -1)
  change_BL = jnp.take_along_axis(p_BLV - q_BLV, jnp.roll(tokens_BL, -1, 1)[..., None], -1)[..., 0]
  has_next_BL = (counts_BL > 0).at[:, -1].set(False)
  # A NaN of a token that does not count is no news.
  sums = (
    jnp.where(counts_BL > 0, kl_BL, 0.0), jnp.where(has_next_BL, jnp.abs(change_BL), 0.0),
    same_BL * counts_BL, counts_BL, has_next_BL.astype(jnp.float32),
  )  # fmt: skip
  return tuple(map(jnp.sum, sums))


def row(sums) -> dict[str, float]:
  """{"kl", "dlogp", "top1", "tokens"} per token, of the sums of `difference`."""
  kl, change, same, tokens, with_next = map(float, sums)
  return {"kl": kl / tokens, "dlogp": change / max(with_next, 1.0), "top1": same / tokens,
          "tokens": tokens}  # fmt: skip
