"""A frozen weight as E4M3 codes and one float32 scale per 128x128: 1 byte per parameter.

The format of DeepSeek-V3's checkpoints (arXiv:2412.19437 §3.3; weight = code * weight_scale_inv)
and of both weight operands of the block recipes. A tile is square, so that the forward product and
the data gradient multiply the same codes.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.formats import E4M3
from fp8jax.quantization import quantize, scaled_matrix
from fp8jax.recipe.quant import Quant

TILE = 128
QUANT = Quant(E4M3, (TILE, TILE))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCodes:
  """value = data * scale of the element's tile.

  Attributes:
    data: the weight's shape, float8_e4m3fn; perhaps layers in front.
    scale: float32 [layers?, tiles of contracted, tiles of produced].
    inputs: number of axes, after that of the layers, that the forward GEMM contracts.
  """

  data: jax.Array
  scale: jax.Array
  inputs: int = dataclasses.field(metadata=dict(static=True))

  @property
  def shape(self) -> tuple[int, ...]:
    return self.data.shape

  @property
  def dtype(self):
    return jnp.dtype(jnp.float32)

  @property
  def lead(self) -> int:
    """Number of axes in front of the weight's own: 1 for a stack of layers."""
    return len(self.scale.shape) - 2

  def matrix(self) -> scaled_matrix.ScaledMatrix:
    """[contracted, produced] of one layer."""
    rows = math.prod(self.shape[: self.inputs])
    return scaled_matrix.ScaledMatrix(self.data.reshape(rows, -1), self.scale, QUANT.tile)

  def unpack(self):
    """float32 of the weight's shape."""

    def one(data, scale):
      return BlockCodes(data, scale, self.inputs).matrix().dequantize()

    run = jax.vmap(one) if self.lead else one
    return run(self.data, self.scale).reshape(self.shape)

  def amax(self):
    """float32 [1]: an upper bound of the largest magnitude, exact where a tile's amax is 448."""
    return jnp.max(self.scale)[None] * jnp.float32(E4M3.max)


def pack(x, inputs: int, lead: int = 0) -> BlockCodes:
  """A weight in codes, quantized as the block recipes quantize it.

  Args:
    x: any float dtype.
    inputs, lead: see BlockCodes.
  """

  def one(w):
    rows = math.prod(w.shape[:inputs])
    made = quantize.quantize(w.reshape(rows, -1), QUANT)
    return made.data.reshape(w.shape), made.scale

  data, scale = jax.lax.map(one, x) if lead else one(x)
  return BlockCodes(data, scale, inputs)


def is_compatible(quant: Quant | None) -> bool:
  """Whether a GEMM's weight operand may be codes: E4M3 per 128x128, whatever the scale's rounding,
  or the compute dtype, to which they are dequantized."""
  return quant is None or (
    quant.format is E4M3 and quant.tile == QUANT.tile and quant.transform is None
  )


def specs(x: BlockCodes, spec: PartitionSpec) -> BlockCodes:
  """PartitionSpecs of codes and scales of a weight that lies as `spec`, one entry per axis."""
  names = (*spec, *(None,) * (len(x.shape) - len(spec)))
  tiles = (names[x.lead], names[x.lead + x.inputs])
  return BlockCodes(spec, PartitionSpec(*names[: x.lead], *tiles), x.inputs)  # pyright: ignore


def shardings(x: BlockCodes, of: NamedSharding | None) -> BlockCodes:
  """Where codes and scales of a weight that lies `of` belong."""
  if of is None:
    return jax.tree.map(lambda _: None, x)
  place = lambda spec: NamedSharding(of.mesh, spec)  # noqa: E731
  return jax.tree.map(place, specs(x, of.spec), is_leaf=lambda s: isinstance(s, PartitionSpec))
