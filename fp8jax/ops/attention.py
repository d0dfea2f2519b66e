"""Causal attention over packed documents."""

from typing import Literal

import jax
import jax.numpy as jnp

Implementation = Literal["xla", "cudnn"]
IMPLEMENTATIONS = ("xla", "cudnn")


@jax.named_scope("attention")
def attention(q_BLHK, k_BMGK, v_BMGK, segments_BL, implementation: Implementation):
  """Causal grouped-query attention; a token sees only its own document.

  Args:
    q_BLHK: queries; H is a multiple of G.
    k_BMGK: keys, one head per group of queries.
    v_BMGK: values.
    segments_BL: int32 document number of each token, or None if documents may see each other.
    implementation: "xla", or "cudnn" (fused, NVIDIA GPU, 16-bit inputs). With cudnn a segment mask
      becomes a [B, 1, L, L] bias.

  Returns:
    [B, L, H, K] in q's dtype; softmax in float32.
  """
  dtype = q_BLHK.dtype
  if implementation == "xla" and dtype == jnp.float16:
    # JAX asks XLA for F16_F16_F32 products, which XLA:CPU does not have.
    q_BLHK, k_BMGK, v_BMGK = (x.astype(jnp.float32) for x in (q_BLHK, k_BMGK, v_BMGK))
  mask = None
  if segments_BL is not None:
    mask = (segments_BL[:, :, None] == segments_BL[:, None, :])[:, None]
  return jax.nn.dot_product_attention(
    q_BLHK,
    k_BMGK,
    v_BMGK,
    mask=mask,
    is_causal=True,
    scale=q_BLHK.shape[-1] ** -0.5,
    implementation=implementation,
  ).astype(dtype)
