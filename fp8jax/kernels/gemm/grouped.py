"""Products of many matrices with as many weights, of which each takes as many rows as it gets.

In a mixture of experts every token goes through a few of G experts. Tokens are sorted by expert;
how many each has is known only when the program runs. Here a group begins at a multiple of 128 rows
and zeros fill it up: 128 is what one tile of a GEMM covers and, along tokens, what one scale of the
weight gradient covers, so that no tile and no scale ever belongs to two experts. (DeepGEMM's
"contiguous" and "K-grouped" layouts, github.com/deepseek-ai/DeepGEMM.) Every group has at least one
tile, so that an expert without tokens gets a weight gradient of zeros.

  forward           x [T, D] -> lay_out -> rows [M, D] . w[group of the row] [D, F] -> [M, F]
  data gradient     the same with g and w'
  weight gradient   dw[e] [D, F] = sum over the rows of e of x' . g

M is num_tiles(T, G) * 128: T rounded up and a tile more per group, whoever gets them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fp8jax.kernels.gemm import grouped_reference, mosaic_sm90
from fp8jax.quantization import scaled_matrix

BLOCK = 128
# In order of preference for "auto"; kernels/choose.py chooses.
BACKENDS = {"mosaic_sm90": mosaic_sm90, "reference": grouped_reference}


def num_tiles(tokens: int, num_groups: int) -> int:
  """Tiles of 128 rows that any division of `tokens` among the groups fits in."""
  return tokens // BLOCK + num_groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
  """Where the rows of every group lie.

  Attributes:
    of_tile: int32 [tiles], ascending: which group 128 rows belong to. The last group also has the
      tiles that nobody needs.
    place: int32 [T]: row of each token, tokens sorted by group.
  """

  of_tile: jax.Array
  place: jax.Array

  @classmethod
  def of(cls, sizes, tokens: int) -> "Groups":
    """Args: sizes: int32 [G], tokens per group, adding up to `tokens`, which is T."""
    ends = jnp.cumsum(jnp.maximum(-(-sizes // BLOCK), 1))
    tiles = jnp.arange(num_tiles(tokens, sizes.shape[0]))
    last = sizes.shape[0] - 1
    of_tile = jnp.minimum(jnp.searchsorted(ends, tiles, side="right"), last)
    token = jnp.arange(tokens)
    group = jnp.minimum(jnp.searchsorted(jnp.cumsum(sizes), token, side="right"), last)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]]) * BLOCK
    place = starts[group] + token - (jnp.cumsum(sizes) - sizes)[group]
    return cls(of_tile.astype(jnp.int32), place.astype(jnp.int32))

  def lay_out(self, x):
    """[T, ...] -> [M, ...]: every token in its place, zeros between."""
    rows = jnp.zeros((self.of_tile.shape[0] * BLOCK, *x.shape[1:]), x.dtype)
    return rows.at[self.place].set(x, unique_indices=True)

  def gather(self, rows):
    """[M, ...] -> [T, ...]: what became of every token."""
    return jnp.take(rows, self.place, axis=0, mode="clip")


def grouped_matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, groups: Groups, *, backend: str,
  out_dtype=jnp.bfloat16,
):  # fmt: skip
  """[M, N] in out_dtype: rows of A, each with the B of its group.

  Args:
    a: [M, K], scales per 1x128, laid out by `groups`.
    b: data [G, N, K], scale [G, N / 128, K / 128].
    backend: a key of BACKENDS.

  Raises:
    ValueError: sizes that do not go together.
  """
  (m, k), (_, n, depth) = a.data.shape, b.data.shape
  if (m, k) != (groups.of_tile.shape[0] * BLOCK, depth):
    raise ValueError(
      f"A is [{m}, {k}] and B [G, {n}, {depth}] with {groups.of_tile.shape[0]} tiles of rows; "
      f"expected A [tiles x {BLOCK}, K] from Groups.lay_out and the same K in B"
    )
  check_backend(backend)
  if backend == "mosaic_sm90":
    return mosaic_sm90.matmul(a, b, out_dtype=out_dtype, groups=groups.of_tile)
  return grouped_reference.grouped_matmul(a, b, groups.of_tile, out_dtype)


def grouped_weight_gradient(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, groups: Groups, num_groups: int, *,
  backend: str, add_to=None,
):  # fmt: skip
  """float32 [G, D, F]: for every group the product over its rows, plus `add_to`.

  Args:
    a: [D, M], scales per 1x128 along the rows laid out by `groups`.
    b: [F, M], likewise.
    num_groups: G.
    backend: a key of BACKENDS.
    add_to: float32 [G, D, F], the sum so far.

  Raises:
    ValueError: sizes that do not go together.
  """
  rows = groups.of_tile.shape[0] * BLOCK
  if a.data.shape[1] != rows or b.data.shape[1] != rows:
    raise ValueError(
      f"A is {list(a.data.shape)}, B {list(b.data.shape)}; expected {rows} rows of tokens last in "
      "both, as Groups.lay_out makes them"
    )
  check_backend(backend)
  if backend == "mosaic_sm90":
    return mosaic_sm90.matmul(
      a, b, out_dtype=jnp.float32, groups=groups.of_tile, num_groups=num_groups, add_to=add_to
    )
  return grouped_reference.grouped_weight_gradient(a, b, groups.of_tile, num_groups, add_to)


def check_backend(backend: str):
  """Raises ValueError if there is no such backend."""
  if backend not in BACKENDS:
    raise ValueError(f"backend {backend!r} multiplies no groups; expected one of {(*BACKENDS,)}")
