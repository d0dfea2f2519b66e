"""A quantized matrix and its scales."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.recipe.quant import WHOLE


def num_tiles(extent: int, tile: int) -> int:
  """How many tiles cover `extent` elements; the last may be partial."""
  return 1 if tile == WHOLE else -(-extent // tile)


def expand(scale, axis: int, tile: int, extent: int):
  """Repeats one scale per tile into one scale per element along `axis`."""
  if tile == 1 or scale.shape[axis] == extent:
    return scale
  if tile == WHOLE:
    return scale  # extent 1: broadcasts
  repeated = jnp.repeat(scale, tile, axis=axis)
  return jax.lax.slice_in_dim(repeated, 0, extent, axis=axis)


def per_element(scale, tile: tuple[int, int], shape):
  """Scales per tile as scales per element of a matrix; an axis that is WHOLE broadcasts."""
  for axis in (0, 1):
    scale = expand(scale, axis, tile[axis], shape[axis])
  return scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledMatrix:
  """A matrix in an 8- or 4-bit format: value = data * scale, always.

  Attributes:
    data: [rows, contraction], an FP8 or FP4 dtype. Or [shards, rows, contraction / shards]: how an
      all-gather along the contraction leaves it, for a kernel that walks from shard to shard.
    scale: float32 [num_tiles(rows), num_tiles(contraction)], finite and positive; NaN
      where the scale comes from an amax that was NaN (quantize.given_scale).
    tile: elements that share one scale, (rows, contraction), WHOLE for the full axis.
    values: float32 [rows, contraction], data * scale, where a quantizer made them from the tensor;
      of a program that reads them alone XLA drops the data. None elsewhere.
  """

  data: jax.Array
  scale: jax.Array
  tile: tuple[int, int] = dataclasses.field(metadata=dict(static=True))
  values: jax.Array | None = None

  @property
  def is_sharded(self) -> bool:
    return self.data.ndim > self.scale.ndim

  @property
  def shape(self) -> tuple[int, int]:
    shards = self.data.shape[0] if self.is_sharded else 1
    rows, contraction = self.data.shape[self.is_sharded :]
    return rows, contraction * shards

  def in_one_piece(self) -> "ScaledMatrix":
    """The same with data [rows, contraction], for which shards are transposed."""
    if not self.is_sharded:
      return self
    return ScaledMatrix(jnp.swapaxes(self.data, 0, 1).reshape(self.shape), self.scale, self.tile)

  @property
  def T(self) -> "ScaledMatrix":
    """The transposed matrix. Exact for any tile: data, scales and tile swap together."""
    rows, contraction = self.tile
    values = None if self.values is None else self.values.T
    return ScaledMatrix(self.in_one_piece().data.T, self.scale.T, (contraction, rows), values)

  def dequantize(self, dtype=jnp.float32):
    """[rows, contraction] = data * scale, computed in float32."""
    if self.values is not None:
      return self.values.astype(dtype)
    scale = per_element(self.scale, self.tile, self.shape)
    return (self.in_one_piece().data.astype(jnp.float32) * scale).astype(dtype)


def taken(x) -> Any:
  """x; of an Entry the entry alone."""
  return x.take() if isinstance(x, Entry) else x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
  """One entry of a stack, for whoever reads or writes it where it lies.

  Attributes:
    stack: an array, a ScaledMatrix or a stored parameter, with an axis more in front.
    index: int32, of the entry.
  """

  stack: Any
  index: Any

  @property
  def shape(self) -> tuple[int, ...]:
    return self.stack.shape[1:]

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def dtype(self):
    """That of a stack which is an array."""
    return self.stack.dtype

  def take(self):
    """The entry alone, for which it is copied out of the stack."""
    return jax.tree.map(
      lambda x: jax.lax.dynamic_index_in_dim(x, self.index, 0, keepdims=False), self.stack
    )

  def plus(self, x):
    """The stack, an array, with x added to this entry."""
    # XLA makes one kernel of it, which adds in place, if slice and update begin at one value and no
    # product may add first. Else the entry is copied out of the stack, or back into it.
    index, x = jax.lax.optimization_barrier((self.index, x))
    first, plain = (index, *[0] * x.ndim), {"allow_negative_indices": False}
    total = jax.lax.dynamic_slice(self.stack, first, (1, *x.shape), **plain) + x
    return jax.lax.dynamic_update_slice(self.stack, total, first, **plain)
