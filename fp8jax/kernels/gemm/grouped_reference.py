"""Grouped products in plain JAX, 128 rows at a time: what the kernels must equal."""

import jax
import jax.numpy as jnp

from fp8jax.kernels.gemm import reference
from fp8jax.quantization import scaled_matrix

BLOCK = 128


def supports(problem) -> str | None:
  """Scales per 128 of K, promoted as often: what the kernels multiply."""
  gemm = problem.gemm
  tiles = (gemm.lhs.tile[1], gemm.rhs.tile[1])
  if tiles != (BLOCK, BLOCK) or gemm.accumulate != BLOCK:
    return f"multiplies scales per {BLOCK} of K, promoted every {BLOCK}; not {gemm}"
  return None


def grouped_matmul(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, of_tile, out_dtype
):
  """See the package."""

  def one(tile):
    start, group = tile
    rows = _cut(a, start, 0)
    weight = scaled_matrix.ScaledMatrix(b.data[group], b.scale[group], b.tile)
    return reference.scaled_matmul(rows, weight, BLOCK, out_dtype)

  d = jax.lax.map(one, (jnp.arange(of_tile.shape[0]), of_tile))
  return d.reshape(a.data.shape[0], b.data.shape[1])


def grouped_weight_gradient(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, of_tile, num_groups: int, add_to
):
  """See the package."""
  if add_to is None:
    add_to = jnp.zeros((num_groups, a.data.shape[0], b.data.shape[0]), jnp.float32)

  def step(total, tile):
    start, group = tile
    product = reference.scaled_matmul(_cut(a, start, 1), _cut(b, start, 1), BLOCK, jnp.float32)
    return total.at[group].add(product), None

  return jax.lax.scan(step, add_to, (jnp.arange(of_tile.shape[0]), of_tile))[0]


def _cut(x: scaled_matrix.ScaledMatrix, tile, axis: int) -> scaled_matrix.ScaledMatrix:
  """128 rows or columns of x, with 1x128 tiles."""
  data = jax.lax.dynamic_slice_in_dim(x.data, tile * BLOCK, BLOCK, axis)
  count = BLOCK // x.tile[axis]
  scale = jax.lax.dynamic_slice_in_dim(x.scale, tile * count, count, axis)
  return scaled_matrix.ScaledMatrix(data, scale, x.tile)
