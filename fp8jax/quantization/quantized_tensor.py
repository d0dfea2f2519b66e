"""A quantized tensor of any shape: optimizer moments, masters, gradients, residuals.

The codes have the tensor's shape, so that they are split over a mesh like it. A tile is one of

  (WHOLE, WHOLE)  the tensor, or each of those that its first axes number (layers of a stack);
  (1, G)          G neighbours along the last axis, or along the last axes together where the last
                  is shorter than G. A last group may be smaller.

Source: group scaling of optimizer states: COAT (arXiv:2410.19313 §4), whose groups run through the
flattened tensor; ours end with a row, so that they can be split like it.
Assumes: nothing about x; what is NaN stays NaN. float32 subnormals count as 0. Infinity saturates.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.formats import E2M1
from fp8jax.quantization import quantize, rounding
from fp8jax.recipe.quant import (
  AMAX,
  CURRENT,
  WHOLE,
  DynamicRangeExpansion,
  Hadamard,
  Quant,
  Rounding,
  Scale,
  SquareRoot,
)

# The largest number that an infinity is stored as: it saturates.
MOST = np.finfo(np.float32).max
# Of DynamicRangeExpansion's exponents: k = power / _POWERS.
_POWERS = 16
# Scales of which a byte says everything.
_POWERS_OF_TWO = (Scale.POW2, Scale.FLOOR, Scale.EVEN)


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
  """value = data * scale, then the transform undone.

  A pytree of its arrays. The key of the codes says how to read them ("data_e4m3_1x128_f32"): a
  checkpoint, which has no `quant`, cannot be restored into a tensor that would read other numbers.

  Attributes:
    data: the tensor's shape, in the format's dtype.
    scale: one per tile: [first axes..., groups], or of the first axes for (WHOLE, WHOLE); None for
      Scale.NONE. float32, or for powers of two their biased exponent in uint8 (OCP E8M0). With
      DynamicRangeExpansion it is the group's amax, and value = scale * (|data| / format.max)^(1/k)
      with data's sign.
    power: uint8 like scale, 16 k, with DynamicRangeExpansion; else None.
  """

  data: jax.Array
  scale: jax.Array | None
  power: jax.Array | None
  quant: Quant

  @property
  def shape(self) -> tuple[int, ...]:
    return self.data.shape

  @property
  def nbytes(self) -> int:
    """Bytes of codes, scales and exponents."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))

  @property
  def is_stack(self) -> bool:
    """Whether no scale is shared along the first axis: then slices are QuantizedTensors too."""
    if self.scale is None or self.quant.tile[1] == WHOLE:
      return self.scale is None or self.scale.ndim > 0
    return group_axes(self.shape, self.quant.tile[1]) > 0

  def unpack(self):
    """float32 of the tensor's shape."""
    quant, x = self.quant, self.data.astype(jnp.float32)
    if self.scale is not None:
      groups = _grouped(x, self.scale.ndim, quant)
      if self.power is not None:
        inverse = np.float32(_POWERS) / self.power.astype(jnp.float32)
        ratio = jnp.abs(groups) * np.float32(1 / quant.format.max)
        groups = jnp.copysign(_power(ratio, inverse[..., None]), groups)
      x = _ungrouped(groups * _decoded(self.scale)[..., None], self.shape)
    return jnp.square(x) if isinstance(quant.transform, SquareRoot) else x

  def repack(self, x, key=None) -> "QuantizedTensor":
    """x, of the same shape, quantized by the same Quant."""
    lead = self.scale.ndim if self.scale is not None and self.quant.tile[1] == WHOLE else 0
    return pack(x, self.quant, lead=lead, key=key)


def reading(quant: Quant) -> str:
  """All of a Quant on which the values of codes depend, in letters, digits and "_"."""
  words, transform = [str(quant.format)], quant.transform
  if quant.scale is not Scale.NONE:
    words.append("tensor" if quant.tile == (WHOLE, WHOLE) else "x".join(map(str, quant.tile)))
    words.append("e8m0" if quant.scale in _POWERS_OF_TWO else "f32")
  if isinstance(transform, Hadamard):
    words.append(f"hadamard_{transform.size}_{transform.signs}")
  elif transform is not None:
    words.append(type(transform).__name__)
  return re.sub(r"\W", "_", "_".join(words))


def register(cls, quant: Callable[[Any], Quant]):
  """A dataclass of codes as a pytree: arrays first, then what is static.

  The key of `data` has what `reading` says of its Quant, where that has scales or a transform.
  """
  fields = [field.name for field in dataclasses.fields(cls)]
  arrays = [name for name in fields if name in ("data", "scale", "power")]
  static = [name for name in fields if name not in arrays]

  def flat(x):
    return [getattr(x, name) for name in arrays], tuple(getattr(x, name) for name in static)

  def with_keys(x):
    leaves, rest = flat(x)
    own = quant(x)
    # Of numbers without scale and transform the dtype says everything.
    says = own.scale is not Scale.NONE or own.transform is not None
    names = [name + f"_{reading(own)}" * (says and name == "data") for name in arrays]
    return [*zip(map(jax.tree_util.GetAttrKey, names), leaves, strict=True)], rest

  jax.tree_util.register_pytree_with_keys(
    cls, with_keys, lambda rest, leaves: cls(*leaves, *rest), flat
  )


register(QuantizedTensor, lambda x: x.quant)


def pack(
  x, quant: Quant, *, lead: int = 0, key=None, autoscale=None, amax=None
) -> QuantizedTensor:  # fmt: skip
  """Quantizes x.

  Args:
    x: any float dtype and shape; not negative for a SquareRoot.
    quant: source CURRENT; tile (WHOLE, WHOLE) or (1, G); transform None, SquareRoot or
      DynamicRangeExpansion.
    lead: so many first axes number tensors of their own; matters for tile (WHOLE, WHOLE).
    key: a jax.random key, for stochastic rounding.
    autoscale: float32 scalar, 1 if None: a tile's largest element comes to lie at so many times the
      format's maximum. Not for DynamicRangeExpansion.
    amax: float32 scalar, of more than x, from which the scale of a tile (WHOLE, WHOLE) is made.

  Raises:
    ValueError: another quant, stochastic rounding without a key, or an amax for smaller tiles.
  """
  check(quant)
  if amax is not None and quant.tile[1] != WHOLE:
    raise ValueError(f"an amax of the whole for tiles {quant.tile}: expected (WHOLE, WHOLE)")
  x = x.astype(jnp.float32)
  y = jnp.sqrt(x) if isinstance(quant.transform, SquareRoot) else x
  if quant.scale is Scale.NONE:
    return QuantizedTensor(_rounded(y, quant, key), None, None, quant)
  axes = lead if quant.tile[1] == WHOLE else group_axes(x.shape, quant.tile[1]) + 1
  groups = _grouped(y, axes, quant)
  # Whether a maximum passes NaN on depends on the backend: leave none to it.
  magnitude = jnp.where(jnp.isnan(groups), 0.0, jnp.abs(groups))
  if amax is None:
    amax = jnp.max(magnitude, axis=-1) if x.size else jnp.zeros(magnitude.shape[:-1])
  if isinstance(quant.transform, DynamicRangeExpansion):
    scale, power = _expansion(magnitude, amax, quant.transform)
    inverse = 1.0 / jnp.where(scale > 0, scale, 1.0)
    ratio = jnp.minimum(jnp.abs(groups) * inverse[..., None], 1.0)
    exponent = power.astype(jnp.float32) * np.float32(1 / _POWERS)
    values = np.float32(quant.format.max) * _power(ratio, exponent[..., None])
    values = jnp.copysign(values, groups)
  else:
    # Of a group with an infinity, too: 1 would be its scale, and the infinity 448 from then on.
    amax = jnp.minimum(amax, MOST)
    scale, power = quantize.amax_to_scale(amax, quant.format, quant.scale), None
    scale = scale if autoscale is None else jnp.maximum(scale / autoscale, np.float32(2.0**-126))
    values = groups * (1.0 / scale)[..., None]
  data = _rounded(values, quant, key)
  return QuantizedTensor(_ungrouped(data, x.shape), _encoded(scale, quant.scale), power, quant)


def zeros(shape: tuple[int, ...], quant: Quant, *, lead: int = 0) -> QuantizedTensor:
  """`pack` of zeros, without reducing them, which XLA would do while it compiles, for
  minutes where a model is large."""
  key = jax.eval_shape(jax.random.key, 0)
  abstract = jax.ShapeDtypeStruct(shape, jnp.float32)
  made = jax.eval_shape(lambda x, key: pack(x, quant, lead=lead, key=key), abstract, key)
  tile = pack(jnp.zeros((1, 1)), quant, key=jax.random.key(0))
  return jax.tree.map(lambda one, all_: jnp.full(all_.shape, one.reshape(-1)[0]), tile, made)


def on_grid(x, scale, like: QuantizedTensor, key) -> QuantizedTensor:
  """x quantized like another that has no transform, under given scales.

  Values beyond the scales saturate. Rounding is stochastic.
  """
  values = _grouped(x.astype(jnp.float32), scale.ndim, like.quant) * (1.0 / scale)[..., None]
  data = _ungrouped(rounding.stochastic(values, like.quant.format, key), x.shape)
  return QuantizedTensor(data, scale, None, like.quant)


def check(quant: Quant):
  """Raises ValueError for a Quant that tensors cannot be stored in."""
  rows, group = quant.tile
  if (rows, group) != (WHOLE, WHOLE) and (rows != 1 or group == WHOLE):
    raise ValueError(
      f"tile={quant.tile} of a stored tensor must be ({WHOLE}, {WHOLE}) or (1, group)"
    )
  if quant.source != CURRENT or isinstance(quant.transform, Hadamard):
    raise ValueError(
      f"{quant}: a stored tensor takes its scale from itself and is not rotated; set "
      "source=CURRENT and transform None, SquareRoot() or DynamicRangeExpansion()"
    )
  if quant.format.is_per_tile:
    raise ValueError(f"{quant}: a grid per tile is for GEMM operands; take lns8 or a float format")
  if quant.scale in (Scale.E4M3_OVER_F32, Scale.ONE) or quant.clip != AMAX:
    raise ValueError(
      f"{quant}: two-level scales, a scale of one and clips are for GEMM operands; set scale='f32' "
      "and leave clip out"
    )


def nbytes(quant: Quant) -> float:
  """Bytes per element of a large tensor."""
  if quant.scale is Scale.NONE:
    per_tile = 0
  elif isinstance(quant.transform, DynamicRangeExpansion):
    per_tile = 5
  else:
    per_tile = 1 if quant.scale in _POWERS_OF_TWO else 4
  group = quant.tile[1]
  # XLA packs two numbers of four bits into a byte.
  per_element = 0.5 if quant.format.dtype == E2M1.dtype else quant.format.dtype.itemsize
  return per_element + (per_tile / group if group != WHOLE else 0.0)


def shardings(x: QuantizedTensor, of: NamedSharding | None) -> QuantizedTensor:
  """Where codes and scales of a tensor that lies `of` belong.

  A group that would straddle two devices leaves its scales whole on both.
  """
  if of is None:
    return jax.tree.map(lambda _: None, x)
  spec = (*of.spec, *(None,) * (len(x.shape) - len(of.spec)))
  whole, scale = x.quant.tile[1], None
  if x.scale is not None:
    axes = x.scale.ndim
    if whole == WHOLE:
      scale = spec[:axes]
    else:
      first, names = axes - 1, spec[axes - 1]
      shards = math.prod(of.mesh.shape[a] for a in np.atleast_1d(names)) if names else 1
      is_aligned = (math.prod(x.shape[first:]) // shards) % whole == 0
      alone = not any(spec[axes:])
      scale = (*spec[:first], names if is_aligned and alone else None)
    scale = NamedSharding(of.mesh, PartitionSpec(*scale))
  data = NamedSharding(of.mesh, PartitionSpec(*spec))
  return QuantizedTensor(data, scale, scale if x.power is not None else None, x.quant)  # type: ignore


def group_axes(shape: tuple[int, ...], group: int) -> int:
  """The axis from which on a tensor is read as one row: the last, or more if that is short."""
  first = len(shape) - 1
  while first > 0 and math.prod(shape[first:]) < group:
    first -= 1
  return max(first, 0)


def _grouped(x, axes: int, quant: Quant):
  """[*scale's shape, elements of a tile], zeros after the last."""
  if quant.tile[1] == WHOLE:
    return x.reshape(*x.shape[:axes], -1)
  group, outer = quant.tile[1], x.shape[: axes - 1]
  rows = x.reshape(*outer, -1)
  missing = -rows.shape[-1] % group
  if missing:
    rows = jnp.pad(rows, [(0, 0)] * len(outer) + [(0, missing)])
  return rows.reshape(*outer, -1, group)


def _ungrouped(groups, shape: tuple[int, ...]):
  """The inverse of `_grouped`."""
  if groups.size == math.prod(shape):
    return groups.reshape(shape)
  outer = groups.shape[:-2]
  return groups.reshape(*outer, -1)[..., : math.prod(shape[len(outer) :])].reshape(shape)


def _encoded(scale, kind: Scale):
  """As it is stored: of a normal power of two the exponent's bits, nothing else."""
  if kind not in _POWERS_OF_TWO:
    return scale
  return (jax.lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)


def _decoded(scale):
  if scale.dtype != jnp.uint8:
    return scale
  return jax.lax.bitcast_convert_type(scale.astype(jnp.uint32) << 23, jnp.float32)


def _rounded(values, quant: Quant, key):
  if quant.rounding is Rounding.STOCHASTIC:
    data = rounding.stochastic(values, quant.format, key)
  else:
    data = quantize.cast(values, quant.format, quant.rounding)
  if not quant.keeps_nonzero:
    return data
  smallest = jnp.copysign(np.float32(quant.format.smallest), values).astype(quant.format.dtype)
  is_lost = (values != 0) & (data.astype(jnp.float32) == 0)
  return jnp.where(is_lost, smallest, data)


def _expansion(magnitude, amax, how: DynamicRangeExpansion):
  """(float32 amax, uint8 16 k) of groups; a group of zeros has amax 0, and 2^126 is the largest.

  16 k is rounded down, so that the smallest stays at or above max / target, and at most 255: of
  equal magnitudes there is nothing to spread.
  """
  # Their reciprocals are normal.
  tiny, largest = np.float32(2.0**-126), np.float32(2.0**126)
  scale = jnp.where(amax >= tiny, jnp.minimum(amax, largest), 0.0)
  least = jnp.min(jnp.where(magnitude >= tiny, magnitude, jnp.inf), axis=-1)
  octaves = jnp.log2(jnp.maximum(scale, tiny)) - jnp.log2(jnp.clip(least, tiny, largest))
  power = np.float32(_POWERS * math.log2(how.target)) / jnp.maximum(octaves, np.float32(1e-6))
  return scale, jnp.clip(jnp.floor(power), 1, 255).astype(jnp.uint8)


def _power(x, exponent):
  """x^exponent of x in [0, 1], NaN for NaN."""
  return jnp.where(x == 0, 0.0, jnp.exp2(exponent * jnp.log2(jnp.where(x == 0, 1.0, x))))
