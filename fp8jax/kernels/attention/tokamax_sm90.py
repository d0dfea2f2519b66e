"""tokamax's attention for Hopper: causal, grouped-query, documents by the first key of each query.

The kernels are tokamax's own (Pallas Mosaic GPU, FlashAttention-3's schedule); this file calls them
without tokamax's front door, which asks the default device for its kind while it traces, and would
refuse programs for GPUs that are not there. The functions are private to tokamax, so that exactly
one version is accepted.

The forward pass reads no block of keys before a tile's first key or after its last query. The
backward pass skips by causality alone: blocks of other documents are computed and set to 0.
"""

import functools
import importlib.metadata
import importlib.util

import jax

# Compute capability x 10 of the GPUs that the kernels are chosen for.
CAPABILITY = 90
VERSION = "0.0.17"
# Keys per block: a sequence is a whole number of them, so that no block has padding.
_BLOCK = 128
_HEAD_DIMS = (64, 128)


def lacks() -> str | None:
  """Why the package cannot be used here, or None."""
  if importlib.util.find_spec("tokamax") is None:
    return 'is not installed; pip install "fp8jax[attention]"'
  version = importlib.metadata.version("tokamax")
  if version != VERSION:
    return f"is version {version}, expected {VERSION}; pip install tokamax=={VERSION}"
  return None


def lacks_size(length: int, head_dim: int) -> str | None:
  """Why sequences of this length and heads of this size are refused, or None."""
  if length % _BLOCK:
    return f"needs seq_len to be a multiple of {_BLOCK}, got {length}"
  if head_dim not in _HEAD_DIMS:
    return f"needs model.head_dim to be one of {_HEAD_DIMS}, got {head_dim}"
  return None


def forward(q_BLHK, k_BMGK, v_BMGK, first_key_BL, scale: float):
  """Attention and the residuals of its softmax.

  Args:
    q_BLHK, k_BMGK, v_BMGK: bfloat16 or float16; L equals M.
    first_key_BL: int32, the first key that each query sees; None: key 0.

  Returns:
    (out_BLHK, (float32 [B, H, L] largest scores, float32 [B, H, L] sums of exponentials)).
  """
  from tokamax._src.ops.attention import (  # pyright: ignore[reportMissingImports] extra
    pallas_mosaic_gpu_kernel_sm90 as kernel,
  )

  run = functools.partial(
    kernel.flash_attention_kernel,
    is_causal=True,
    logits_soft_cap=None,
    logits_scale=scale,
    out_dtype=q_BLHK.dtype,
    normalize_output=True,
    return_residuals=True,
    use_stable_softmax=True,
    rescale_threshold=1.0,
    # tokamax's own choice for these sizes, written out: it depends on no cache and no device.
    config=kernel.Config(block_q=64, block_kv=_BLOCK, num_stages=2, persistent=False),
  )

  def one(q, k, v, first_key):
    first = None if first_key is None else first_key[None]
    return run(q, k, v, None, None, first, None)

  return jax.vmap(one)(q_BLHK, k_BMGK, v_BMGK, first_key_BL)


def backward(q_BLHK, k_BMGK, v_BMGK, first_key_BL, out_BLHK, residuals, g_BLHK, scale: float):
  """Gradients of `forward` with respect to q, k and v."""
  from tokamax._src.ops.attention import (  # pyright: ignore[reportMissingImports] extra
    pallas_mosaic_gpu_vjp_kernel_sm90 as kernel,
  )

  run = functools.partial(
    kernel.flash_attention_vjp_kernel,
    is_causal=True,
    logits_soft_cap=None,
    logits_scale=scale,
    ds_dtype=None,
    config=kernel.Config(
      block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64, num_stages=2
    ),
  )

  def one(q, k, v, first_key, out, residuals, g):
    first = None if first_key is None else first_key[None]
    return run(q, k, v, residuals, out, g, None, None, first, None)[:3]

  return jax.vmap(one)(q_BLHK, k_BMGK, v_BMGK, first_key_BL, out_BLHK, residuals, g_BLHK)
