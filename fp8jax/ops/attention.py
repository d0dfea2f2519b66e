"""Causal attention over packed documents."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fp8jax import axes
from fp8jax.kernels.attention import few_queries, fixed_order, reference, tokamax_sm90
from fp8jax.ops import collectives, derivative
from fp8jax.recipe.attention import Attention

Implementation = Literal["xla", "cudnn", "tokamax", "fixed_order"]


@jax.named_scope("attention")
def attention(
  q_BLHK, k_BMGK, v_BMGK, segments_BL, implementation: Implementation,
  layout: axes.Layout = axes.LOCAL, recipe: Attention | None = None,
):  # fmt: skip
  """Causal grouped-query attention; a token sees only its own document.

  Args:
    q_BLHK: queries; H is a multiple of G.
    k_BMGK: keys, one head per group of queries.
    segments_BL: int32 document number of each token, or None if documents may see each other. With
      "tokamax" the tokens of a document are neighbours.
    implementation: "xla"; "cudnn" (fused, NVIDIA GPU, 16-bit inputs), where a segment mask becomes
      a [B, 1, L, L] bias; "tokamax" (fused, Hopper, 16-bit inputs), without such an array; or
      "fixed_order" (kernels/attention/fixed_order.py), which has no gradient.
    layout: of activations. XLA splits its own attention; of the others a device has its query heads
      and the keys that those read.
    recipe: of quantized products, which are emulated (kernels/attention/reference.py) whatever the
      implementation is; None for those of the dtype.

  Returns:
    [B, L, H, K] in q's dtype; softmax in float32.
  """
  on_devices = functools.partial(_on_devices, layout, k_BMGK.shape[2])
  if recipe is not None:
    local = functools.partial(_quantized, recipe)
    return on_devices(local)(q_BLHK, k_BMGK, v_BMGK, segments_BL)
  if implementation == "tokamax":
    first_key_BL = None if segments_BL is None else first_keys(segments_BL)
    return on_devices(_tokamax)(q_BLHK, k_BMGK, v_BMGK, first_key_BL)
  if implementation == "fixed_order":
    return on_devices(_fixed_order)(q_BLHK, k_BMGK, v_BMGK, segments_BL)
  local = functools.partial(_of_jax, implementation)
  if implementation == "cudnn" and lies_apart(layout):
    local = on_devices(local)  # its partitioner takes queries and keys that are split alike
  return local(q_BLHK, k_BMGK, v_BMGK, segments_BL)


def lies_apart(layout: axes.Layout) -> bool:
  """Whether a device may have other keys than those of its own queries."""
  queries, keys = layout.act_axes("H"), layout.act_axes("G")
  return not layout.is_manual and queries != keys and layout.size((*queries, *keys)) > 1


def key_heads_per_device(heads: int, key_heads: int, shards: int) -> int:
  """Key heads beside a device's query heads, of which each of `shards` has as many.

  Keys are split as queries are where the mesh divides them. Else a device has the one head that all
  of its queries read, or one head per query.
  """
  if key_heads % shards == 0:
    return key_heads // shards
  own = max(heads // shards, 1)
  return 1 if (heads // key_heads) % own == 0 else own


def keys_of_queries(x, axis: int, own: int, layout: axes.Layout):
  """The key heads that the query heads of this device read, of all; inside a region.

  Args:
    axis: of the key heads.
    own: query heads of the device.
  """
  over, key_heads = layout.act_axes("H"), x.shape[axis]
  heads = own * layout.size(over)
  count = key_heads_per_device(heads, key_heads, heads // own)
  query_heads = jax.lax.axis_index(over) * own + jnp.arange(count) * (own // count)
  return jnp.take(x, query_heads * key_heads // heads, axis=axis)


def _on_devices(layout: axes.Layout, key_heads: int, local):
  """`local` on the sequences and query heads of each device, with the keys of those queries."""
  queries = layout.act_spec("BLHK")
  is_split = key_heads % layout.size(layout.act_axes("H")) == 0
  keys = queries if is_split else PartitionSpec(queries[0])
  specs = (queries, keys, keys, layout.act_spec("BL"))

  def of_own(q_BLHK, k_BMGK, v_BMGK, per_token_BL):
    k_BMGK, v_BMGK = (keys_of_queries(x, 2, q_BLHK.shape[2], layout) for x in (k_BMGK, v_BMGK))
    return local(q_BLHK, k_BMGK, v_BMGK, per_token_BL)

  has_own = is_split or layout.is_manual
  return collectives.on_mesh(local if has_own else of_own, layout, specs, queries)


@jax.named_scope("attention")
def cached_attention(q_BLHK, k_BGMK, v_BGMK, positions_BL, implementation: Implementation = "xla"):
  """Grouped-query attention of new tokens to a cache that holds their own keys already.

  Args:
    q_BLHK: queries; H is a multiple of G.
    k_BGMK, v_BGMK: keys and values by position in the sequence; what lies beyond a token is unread.
    positions_BL: int32 position of each query: it sees the first position + 1 keys.
    implementation: "fixed_order"; any other is XLA's.

  Returns:
    [B, L, H, K] in q's dtype; softmax in float32.
  """
  k_BMGK, v_BMGK = (jnp.swapaxes(x, 1, 2) for x in (k_BGMK, v_BGMK))  # XLA's products move nothing
  if implementation == "fixed_order":
    first_BL = jnp.zeros_like(positions_BL)
    return fixed_order.forward(q_BLHK, k_BMGK, v_BMGK, first_BL, positions_BL)
  mask = jnp.arange(k_BMGK.shape[1]) <= positions_BL[:, None, :, None]
  attend = functools.partial(
    jax.nn.dot_product_attention, mask=mask, scale=q_BLHK.shape[-1] ** -0.5, implementation="xla"
  )

  on_cpu = functools.partial(few_queries.summed_in_float32, mask=mask)
  return jax.lax.platform_dependent(q_BLHK, k_BMGK, v_BMGK, cpu=on_cpu, default=attend)


def _of_jax(implementation, q_BLHK, k_BMGK, v_BMGK, segments_BL):
  dtype = q_BLHK.dtype
  if implementation == "xla" and dtype == jnp.float16:
    # JAX asks XLA for F16_F16_F32 products, which XLA:CPU does not have.
    q_BLHK, k_BMGK, v_BMGK = (x.astype(jnp.float32) for x in (q_BLHK, k_BMGK, v_BMGK))
  mask = None
  if segments_BL is not None:
    mask = (segments_BL[:, :, None] == segments_BL[:, None, :])[:, None]
  scale = q_BLHK.shape[-1] ** -0.5
  return jax.nn.dot_product_attention(
    q_BLHK, k_BMGK, v_BMGK, mask=mask, is_causal=True, scale=scale, implementation=implementation
  ).astype(dtype)


def _fixed_order(q_BLHK, k_BMGK, v_BMGK, segments_BL):
  last_BL = jnp.broadcast_to(jnp.arange(q_BLHK.shape[1], dtype=jnp.int32), q_BLHK.shape[:2])
  first_BL = jnp.zeros_like(last_BL) if segments_BL is None else first_keys(segments_BL)
  return fixed_order.forward(q_BLHK, k_BMGK, v_BMGK, first_BL, last_BL)


def first_keys(segments_BL):
  """int32 [B, L]: the position of the first token of each token's document.

  Together with causality this is the whole mask: a query sees the keys from its first key to
  itself. Tokens of one document are neighbours, and a number that comes back is a new document.
  """
  positions_L = jnp.arange(segments_BL.shape[1], dtype=jnp.int32)
  is_new_BL = segments_BL[:, 1:] != segments_BL[:, :-1]
  starts_BL = jnp.pad(jnp.where(is_new_BL, positions_L[1:], 0), [(0, 0), (1, 0)])
  return jax.lax.cummax(starts_BL, axis=1)


@jax.custom_vjp
def _tokamax(q_BLHK, k_BMGK, v_BMGK, first_key_BL):
  return _forward(q_BLHK, k_BMGK, v_BMGK, first_key_BL)[0]


def _forward(q_BLHK, k_BMGK, v_BMGK, first_key_BL):
  args = (q_BLHK, k_BMGK, v_BMGK, first_key_BL)
  out_BLHK, softmax = tokamax_sm90.forward(*args, scale=q_BLHK.shape[-1] ** -0.5)
  return out_BLHK, (*args, out_BLHK, softmax)


def _backward(residuals, g_BLHK):
  q, k, v, first_key, out, softmax = residuals
  scale = g_BLHK.shape[-1] ** -0.5
  dq, dk, dv = tokamax_sm90.backward(q, k, v, first_key, out, softmax, g_BLHK, scale)
  return dq, dk, dv, None


_tokamax.defvjp(_forward, _backward)


def _quantized(recipe: Attention, q_BLHK, k_BMGK, v_BMGK, segments_BL):
  """Of whole sequences and heads, so that scales of a tile, head and document are local."""
  if recipe.smooth_k:
    k_BMGK = reference.without_mean(k_BMGK, segments_BL)
  return _emulated(recipe, q_BLHK, k_BMGK, v_BMGK, segments_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _emulated(recipe: Attention, q_BLHK, k_BMGK, v_BMGK, segments_BL):
  return reference.forward(q_BLHK, k_BMGK, v_BMGK, segments_BL, recipe)


def _emulated_forward(recipe, *args):
  out_BLHK = _emulated(recipe, *args)
  return out_BLHK, (*args, out_BLHK)


def _emulated_backward(recipe, residuals, g_BLHK):
  q, k, v, segments, out = residuals
  dq, dk, dv = reference.backward(q, k, v, segments, out, g_BLHK, recipe)
  made = dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
  message = (
    f"attention {recipe.name!r}: its gradients are differentiated, and the rounding in them has no "
    "derivative; set precision.attention='wide'"
  )
  return *derivative.refused(made, message), None


_emulated.defvjp(_emulated_forward, _emulated_backward)
