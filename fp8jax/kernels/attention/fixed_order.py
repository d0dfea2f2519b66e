"""Attention whose bits depend on a query and the keys that it sees, and on nothing else.

Queries come in tiles of QUERIES rows, keys in tiles of KEYS from the first that a query sees. A
query's maximum is over all its tiles before the first exponential, so that later tiles rescale
nothing; then it adds its tiles from the first to the last. Tiles that it does not see leave its
sums alone. Where its document begins in a packed sequence, how long the sequence is padded and
which queries share the tile then make no difference. Plain JAX, for any device; see
ops/row_tiles.py for what keeps a compiler from another order.
"""

import jax
import jax.numpy as jnp

QUERIES, KEYS = 16, 64
_NONE = jnp.iinfo(jnp.int32).max


def forward(q_BLHK, k_BMGK, v_BMGK, first_BL, last_BL):
  """[B, L, H, K] in q's dtype; scores, softmax and sums in float32.

  Args:
    q_BLHK, k_BMGK, v_BMGK: H is a multiple of G.
    first_BL, last_BL: int32, the keys that a query sees, both ends included.
  """
  (batch, length, heads, size), groups = q_BLHK.shape, k_BMGK.shape[2]
  tiles = -(-length // QUERIES)
  padding = tiles * QUERIES - length

  def of_tiles(x, value=0):
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), constant_values=value)
    return x.reshape(batch * tiles, QUERIES, *x.shape[2:])

  q = of_tiles(q_BLHK.reshape(batch, length, groups, heads // groups, size))
  first, last = of_tiles(first_BL, _NONE), of_tiles(last_BL, -1)
  k, v = (jnp.pad(x, [(0, 0), (0, KEYS), (0, 0), (0, 0)]) for x in (k_BMGK, v_BMGK))

  def one(i, out):
    mixed = _tile(q[i], first[i], last[i], k[i // tiles], v[i // tiles])
    return jax.lax.dynamic_update_index_in_dim(out, mixed, i, 0)

  count = jax.lax.optimization_barrier(jnp.int32(batch * tiles))
  out = jax.lax.fori_loop(0, count, one, jnp.zeros(q.shape, q.dtype))
  return out.reshape(batch, tiles * QUERIES, heads, size)[:, :length]


def _dot(a, b, contracted, batch):
  highest = jax.lax.Precision.HIGHEST
  return jax.lax.dot_general(a, b, (contracted, batch), precision=highest)


def _tile(q_QGRK, first_Q, last_Q, k_MGK, v_MGK):
  """The queries of a tile, document by document."""
  q_QGRK = q_QGRK.astype(jnp.float32) * q_QGRK.shape[-1] ** -0.5

  def scores(first, number):
    """(float32 [G, R, Q, KEYS], -inf where a query does not see; values [KEYS, G, K]; where it
    sees)."""
    start = first + number * KEYS
    k, v = (jax.lax.dynamic_slice_in_dim(x, start, KEYS) for x in (k_MGK, v_MGK))
    q, k, v = jax.lax.optimization_barrier((q_QGRK, k.astype(jnp.float32), v.astype(jnp.float32)))
    s = _dot(q, k, ((3,), (2,)), ((1,), (1,)))  # [G, Q, R, KEYS]
    s = jnp.swapaxes(s, 1, 2)
    sees = (first_Q == first)[:, None] & (start + jnp.arange(KEYS) <= last_Q[:, None])
    return jnp.where(sees, s, -jnp.inf), v, sees

  def over_keys(step, start):
    """`step(state, first, number)` for all tiles of keys of all documents."""

    def document(state):
      first, state = state
      end = jnp.max(jnp.where(first_Q == first, last_Q, -1))
      count = (end - first) // KEYS + 1
      one = lambda number, state: step(state, first, number)  # noqa: E731
      state = jax.lax.fori_loop(0, count, one, state)
      return jnp.min(jnp.where(first_Q > first, first_Q, _NONE)), state

    return jax.lax.while_loop(lambda s: s[0] < _NONE, document, (jnp.min(first_Q), start))[1]

  def largest(top_GRQ, first, number):
    s, _, _ = scores(first, number)
    return jnp.maximum(top_GRQ, jax.lax.optimization_barrier(jnp.max(s, axis=-1)))

  rows = (*q_QGRK.shape[1:3], q_QGRK.shape[0])
  top_GRQ = over_keys(largest, jnp.full(rows, -jnp.inf))

  def add(state, first, number):
    total_GRQ, sum_GRQK = state
    s, v, sees = scores(first, number)
    p = jnp.where(sees, jnp.exp(s - top_GRQ[..., None]), 0.0)  # of a NaN it is one
    p = jax.lax.optimization_barrier(p)
    here = jnp.sum(p, axis=-1), _dot(p, v, ((3,), (0,)), ((0,), (1,)))
    here = jax.lax.optimization_barrier(here)
    is_own = first_Q == first
    return (
      jnp.where(is_own, total_GRQ + here[0], total_GRQ),
      jnp.where(is_own[:, None], sum_GRQK + here[1], sum_GRQK),
    )

  start = jnp.zeros(rows), jnp.zeros((*rows, q_QGRK.shape[-1]))
  total_GRQ, sum_GRQK = jax.lax.optimization_barrier(over_keys(add, start))
  total_GRQ = jnp.where(total_GRQ == 0, 1.0, total_GRQ)  # of padding nothing is seen
  out_GRQK = jax.lax.optimization_barrier(sum_GRQK / total_GRQ[..., None])
  return jnp.moveaxis(out_GRQK, 2, 0).astype(v_MGK.dtype)
