"""Quantized attention in plain JAX: the seven products of recipe/attention.py, emulated exactly.

A quantized product is kernels/gemm/reference.py's, of one sequence and key head: codes are
multiplied exactly and added in float32 over `accumulate` of the contraction (128 where the Gemm
names none); such sums are scaled and added in float32. Those of 8-bit integers have no rounding at
all. Hopper's FP8 unit, which keeps about 14 bits of a sum, is not emulated.

All between the products is float32. P is relative to the largest score of its whole row, where a
fused kernel has the largest of the blocks that it has read. O is divided by the sum of P before
rounding, as in these kernels. In the backward pass dS = P * (dP - D). Where S is computed as in the
forward pass, D is rowsum(dO * O) with the output of that pass, as fused kernels have it. Where S is
in the dtype, P is its softmax and D is rowsum(P * dP): with all other products in the dtype this is
the gradient of unquantized attention, straight through the rounding of the forward pass.

A sequence's scores are an array of [H, L, M]; sequences come one after the other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fp8jax.kernels.gemm import reference
from fp8jax.quantization import hadamard, quantize
from fp8jax.recipe.attention import Attention
from fp8jax.recipe.gemm import Gemm
from fp8jax.recipe.quant import CURRENT


def forward(q_BLHK, k_BMGK, v_BMGK, segments_BL, recipe: Attention):
  """The output [B, L, H, K], in v's dtype.

  Args:
    q_BLHK, k_BMGK, v_BMGK: any float dtype; unquantized products have v's. L equals M.
    segments_BL: int32 document of each token, or None.

  Raises:
    ValueError: recipe.rotation does not divide the head.
  """
  heads = q_BLHK.shape[2]
  parts = _by_key_head(recipe, k_BMGK.shape[2], (q_BLHK,), (k_BMGK, v_BMGK))
  shared = heads // k_BMGK.shape[2]
  one = functools.partial(_forward, recipe=recipe, dtype=v_BMGK.dtype, shared=shared)
  out = _each_sequence(one, parts, segments_BL)
  return _to_queries(out, q_BLHK.shape[1], heads).astype(v_BMGK.dtype)


def backward(q_BLHK, k_BMGK, v_BMGK, segments_BL, out_BLHK, g_BLHK, recipe: Attention):
  """float32 (dq, dk, dv) from what `forward` had and gave, and the gradient of its result."""
  queries, keys = (q_BLHK, out_BLHK, g_BLHK), (k_BMGK, v_BMGK)
  parts = _by_key_head(recipe, k_BMGK.shape[2], queries, keys)
  shared = q_BLHK.shape[2] // k_BMGK.shape[2]
  one = functools.partial(_backward, recipe=recipe, dtype=v_BMGK.dtype, shared=shared)
  dq, dk, dv = _each_sequence(one, parts, segments_BL)
  dq_BLHK = _to_queries(dq, *q_BLHK.shape[1:3])
  return dq_BLHK, *(jnp.swapaxes(x, 1, 2) for x in (dk, dv))


def without_mean(k_BMGK, segments_BL):
  """float32 keys less the mean of their document's, which is a constant for the gradient.

  A softmax does not change with what is subtracted from all scores of one query: from its keys one
  vector, so that it is the document's, later keys included, and not that of the keys seen so far.
  The rows of dS add up to 0 for the same reason, and dK needs no correction (SageBwd).
  """
  k_BMGK = k_BMGK.astype(jnp.float32)
  if segments_BL is None:
    return k_BMGK - jax.lax.stop_gradient(jnp.mean(k_BMGK, axis=1, keepdims=True))
  same_BMM = (segments_BL[:, :, None] == segments_BL[:, None, :]).astype(jnp.float32)
  sums = jax.lax.dot_general(
    same_BMM, k_BMGK, (((2,), (1,)), ((0,), (0,))), precision=jax.lax.Precision.HIGHEST
  )
  return k_BMGK - jax.lax.stop_gradient(sums / jnp.sum(same_BMM, -1)[..., None, None])


def _by_key_head(recipe: Attention, groups: int, queries, keys):
  """Queries as [B, G, rows, K], heads of a group below one another; keys as [B, G, M, K]."""

  def of_queries(x_BLHK):
    batch, length, heads, size = x_BLHK.shape
    shared = heads // groups
    x = jnp.moveaxis(x_BLHK.reshape(batch, length, groups, shared, size), 1, 3)
    if after := -length % recipe.query_block if shared > 1 else 0:
      x = jnp.pad(x, [(0, 0)] * 3 + [(0, after), (0, 0)])
    return x.reshape(batch, groups, -1, size)

  return *map(of_queries, queries), *(jnp.swapaxes(x, 1, 2) for x in keys)


def _to_queries(x_BGRK, length: int, heads: int):
  """The inverse of `_by_key_head` for queries: [B, L, H, K]."""
  batch, groups, _, size = x_BGRK.shape
  x = x_BGRK.reshape(batch, groups, heads // groups, -1, size)[..., :length, :]
  return jnp.moveaxis(x, 3, 1).reshape(batch, length, heads, size)


def _each_sequence(one, arrays, segments_BL):
  """`one` of (a sequence's arrays, its segments): key heads together, sequences in turn."""

  def sequence(of):
    arrays, segments_L = of
    return jax.vmap(lambda *x: one(*x, segments_L))(*arrays)

  return jax.lax.map(sequence, (arrays, segments_BL))


def _forward(q, k, v, segments_L, *, recipe: Attention, dtype, shared: int):
  """[rows, K] of one key head; k and v are [M, K]."""
  s = _scores(recipe.scores.fwd, q, k, recipe, dtype)
  p, total = _exponentials(s, _mask(s, shared, segments_L))
  return _product(recipe.values.fwd, p, v.T, dtype, recipe.p_scale) / total


def _backward(q, out, g, k, v, segments_L, *, recipe: Attention, dtype, shared: int):
  """(dq [rows, K], dk [M, K], dv [M, K]) of one key head."""
  scores, values, scale = recipe.scores, recipe.values, q.shape[-1] ** -0.5
  s = _scores(recipe.products["S again"], q, k, recipe, dtype)
  p, total = _exponentials(s, _mask(s, shared, segments_L))
  p, g = p / total, g.astype(jnp.float32)
  dv = _product(values.wgrad, p.T, g.T, dtype, recipe.p_scale)
  dp = _product(values.dgrad, g, v, dtype)
  weighed = g * out.astype(jnp.float32) if recipe.recompute_quantized else p * dp
  ds = p * (dp - jnp.sum(weighed, axis=-1, keepdims=True))
  turn, back = _rotations(scores.dgrad, recipe, k.shape[1])
  dq = back(_product(scores.dgrad, ds, turn(k).T, dtype))
  turn, back = _rotations(scores.wgrad, recipe, k.shape[1])
  dk = back(_product(scores.wgrad, turn(q).T, ds.T, dtype).T)
  return dq * scale, dk * scale, dv


def _exponentials(s, seen):
  """(P = exp(S - largest S of a row), its sums [rows, 1]); 0 and 1 for a row that sees nothing."""
  s = jnp.where(seen, s, -jnp.inf)
  largest = jnp.where(seen.any(-1, keepdims=True), jnp.max(s, axis=-1, keepdims=True), 0.0)
  p = jnp.exp(s - largest)
  total = jnp.sum(p, axis=-1, keepdims=True)
  return p, jnp.where(total == 0, 1.0, total)


def _mask(s, shared: int, segments_L):
  """bool [rows, M] like s: the keys that a query sees; none where a row pads a block of queries."""
  rows, length = s.shape
  positions = jnp.arange(length)
  seen = positions[None, :] <= positions[:, None]
  if segments_L is not None:
    seen &= segments_L[:, None] == segments_L[None, :]
  return jnp.tile(jnp.pad(seen, [(0, rows // shared - length), (0, 0)]), (shared, 1))


def _scores(gemm: Gemm, q, k, recipe: Attention, dtype):
  """float32 [rows, M]: Q K' / sqrt(K)."""
  turn, _ = _rotations(gemm, recipe, k.shape[1])
  return _product(gemm, turn(q), turn(k), dtype) * q.shape[-1] ** -0.5


def _rotations(gemm: Gemm, recipe: Attention, head_dim: int):
  """(rotation of [rows, K] for a product, its inverse, which is its transpose)."""
  size = recipe.rotation_size(head_dim) if gemm.is_quantized else None
  if size is None:
    return (lambda x: x), (lambda x: x)

  def turn(x):
    return hadamard.hadamard(x, size, 1)

  def back(x):
    return jax.linear_transpose(turn, jax.ShapeDtypeStruct(x.shape, jnp.float32))(x)[0]

  return turn, back


def _product(gemm: Gemm, a, b, dtype, p_scale: float | None = None):
  """float32 [rows of a, rows of b]; a is P where there is a p_scale."""
  if gemm.lhs is None or gemm.rhs is None:
    a, b = (x.astype(dtype).astype(jnp.float32) for x in (a, b))
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
  amax = None
  if p_scale is not None and gemm.lhs.source != CURRENT:
    amax = jnp.float32(p_scale * gemm.lhs.format.max)
  a, b = quantize.quantize(a, gemm.lhs, amax=amax), quantize.quantize(b, gemm.rhs)
  return reference.scaled_matmul(_in_float32(a), _in_float32(b), gemm.accumulate, jnp.float32)


def _in_float32(x):
  """The same codes in float32: no dot of the program has 8-bit operands, nor pretends to.

  The barrier keeps the cast there and back, which a GPU's compiler may drop.
  """
  return dataclasses.replace(x, data=jax.lax.optimization_barrier(x.data).astype(jnp.float32))
