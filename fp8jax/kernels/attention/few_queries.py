"""Attention of few queries to many keys on a CPU: one token of a cache."""

import jax
import jax.numpy as jnp


def summed_in_float32(q_BLHK, k_BMGK, v_BMGK, mask):
  """jax.nn.dot_product_attention of few queries, rounded where it rounds; sums are in float32.

  Of one query XLA:CPU adds up in the dtype of the result, and it has no F16_F16_F32 products.
  """
  batch, length, heads, size = q_BLHK.shape
  groups, dtype = k_BMGK.shape[2], q_BLHK.dtype
  q_BLGRK = q_BLHK.reshape(batch, length, groups, heads // groups, size).astype(jnp.float32)
  k_BMGK, v_BMGK = (x.astype(jnp.float32) for x in (k_BMGK, v_BMGK))
  logits_BGLRM = jax.lax.dot_general(q_BLGRK, k_BMGK, (((4,), (3,)), ((0, 2), (0, 2))))
  logits_BGLRM = jnp.where(mask[:, :, :, None], logits_BGLRM * size**-0.5, -jnp.inf)
  shares_BGLRM = jax.nn.softmax(logits_BGLRM, axis=-1).astype(dtype).astype(jnp.float32)
  mixed_BGLRK = jax.lax.dot_general(shares_BGLRM, v_BMGK, (((4,), (1,)), ((0, 1), (0, 2))))
  return jnp.swapaxes(mixed_BGLRK, 1, 2).reshape(q_BLHK.shape).astype(dtype)
