"""A weight in the form that its forward GEMM multiplies: codes and scales, not quantized again.

A frozen weight is E4M3 codes with one float32 scale per 128x128 (QUANT), 1 byte per parameter: the
format of DeepSeek-V3's checkpoints (arXiv:2412.19437 §3.3; weight = code * weight_scale_inv) and of
both weight operands of the block recipes. A tile is square, so that the forward product and the
data gradient multiply the same codes. Codes may be those of a weight rotated along what the forward
product contracts, in which its activations are rotated too; the data gradient is then rotated back
(HALO, arXiv:2501.02625). For inference a weight is in the format of its recipe.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.formats import E4M3
from fp8jax.quantization import hadamard, quantize, quantized_tensor, scaled_matrix
from fp8jax.recipe.quant import WHOLE, Hadamard, Quant, Scale, Static

TILE = 128
QUANT = Quant(E4M3, (TILE, TILE))


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
  """value = data * scale of the element's tile, rotated where `quant` rotates.

  Attributes:
    data: the weight's shape, in the format's dtype; or, for inference, the matrix [produced,
      contracted], which no kernel has to turn. Perhaps layers in front.
    scale: float32 [layers?, tiles of contracted, tiles of produced]; of a matrix as it lies.
    inputs: number of axes, after that of the layers, that the forward GEMM contracts.
    quant: how the forward GEMM quantizes the weight.
    weight_shape: of the weight, without the layers, where data is a matrix; else None.
    has_values: data is float32, the values themselves, and every scale is 1.
  """

  data: jax.Array
  scale: jax.Array
  inputs: int
  quant: Quant = QUANT
  weight_shape: tuple[int, ...] | None = None
  has_values: bool = False

  @property
  def shape(self) -> tuple[int, ...]:
    return self.weight_shape or self.data.shape

  @property
  def lead(self) -> int:
    """Number of axes in front of the weight's own: 1 for a stack of layers."""
    return len(self.scale.shape) - 2

  def matrix(self, *, is_turned: bool = False) -> scaled_matrix.ScaledMatrix:
    """[produced, contracted] of one layer, or turned [contracted, produced]; rotated as stored."""
    if self.weight_shape is not None:
      values = self.data if self.has_values else None
      matrix = scaled_matrix.ScaledMatrix(self.data, self.scale, self.quant.tile, values)
      return matrix.T if is_turned else matrix
    data = self.data.reshape(math.prod(self.shape[: self.inputs]), -1)
    turned = scaled_matrix.ScaledMatrix(data, self.scale, (self.quant.tile[1], self.quant.tile[0]))
    return turned if is_turned else turned.T

  def unpack(self):
    """float32 of the weight's shape, rotated back; not of a matrix: it has no order of its axes."""
    if self.weight_shape is not None:
      raise TypeError("a weight quantized for inference is multiplied as it is; keep the other")

    def one(data, scale):
      turned = StoredMatrix(data, scale, self.inputs, self.quant).matrix(is_turned=True)
      values, rotation = turned.dequantize(), self.quant.rotation
      return hadamard.rotate(values, rotation, 0, inverse=True) if rotation else values

    run = jax.vmap(one) if self.lead else one
    return run(self.data, self.scale).reshape(self.shape)

  def amax(self):
    """float32 [1]: an upper bound of the largest magnitude of what is stored, rotated or not; exact
    where a tile's amax is the format's largest number."""
    if self.has_values:
      return jnp.max(jnp.abs(self.data))[None]
    return jnp.max(self.scale)[None] * jnp.float32(self.quant.format.max)


def pack(x, inputs: int, lead: int = 0, quant: Quant = QUANT) -> StoredMatrix:
  """A weight in codes, quantized as the forward product of a recipe quantizes it.

  Args:
    x: any float dtype.
    inputs, lead: see StoredMatrix.
    quant: of current scales, rounded to the nearest.

  Raises:
    ValueError: blocks of a rotation do not divide what the forward product contracts.
  """

  def one(w):
    rows = math.prod(w.shape[:inputs])
    made = quantize.quantize(w.reshape(rows, -1), quant, contraction=0).T
    return made.data.reshape(w.shape), made.scale

  data, scale = jax.lax.map(one, x) if lead else one(x)
  return StoredMatrix(data, scale, inputs, quant)


quantized_tensor.register(StoredMatrix, lambda x: x.quant)


def is_compatible(
  quant: Quant | None, stored: Quant = QUANT, rows: Hadamard | None = None, *,
  is_turned: bool = False,
) -> bool:  # fmt: skip
  """Whether a GEMM's weight operand may be what was stored: alike but for the rule of its scales
  (clip, rounding, past amaxes) and the rounding of data, or in the compute dtype, to which it is
  dequantized. One without scales has no others, nor one with the scales of a calibration.

  Args:
    rows: how the GEMM rotates the rows of this operand.
    is_turned: whether these rows, and not the contraction, are what the forward GEMM contracts:
      the axis along which `stored` is rotated.
  """
  if quant is None:
    return True
  along, across = (rows, quant.transform) if is_turned else (quant.transform, rows)

  def kind(q: Quant):
    return q.format, q.tile, q.scale is Scale.ONE, isinstance(q.source, Static)

  return kind(quant) == kind(stored) and along == stored.transform and across is None


def specs(x: StoredMatrix, spec: PartitionSpec) -> StoredMatrix:
  """PartitionSpecs of codes and scales of a weight that lies as `spec`, one entry per axis."""
  names = (*spec, *(None,) * (len(x.shape) - len(spec)))
  # A tile that covers an axis covers it on all devices.
  of_both = zip((names[x.lead], names[x.lead + x.inputs]), x.quant.tile[::-1])
  across = [None if tile == WHOLE else name for name, tile in of_both]
  tiles = PartitionSpec(*names[: x.lead], *across)
  return dataclasses.replace(x, data=spec, scale=tiles)


def shardings(x: StoredMatrix, of: NamedSharding | None) -> StoredMatrix:
  """Where codes and scales of a weight that lies `of` belong."""
  if of is None:
    return jax.tree.map(lambda _: None, x)
  place = lambda spec: NamedSharding(of.mesh, spec)  # noqa: E731
  return jax.tree.map(place, specs(x, of.spec), is_leaf=lambda s: isinstance(s, PartitionSpec))
