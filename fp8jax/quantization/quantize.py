"""quantize(x, quant) -> ScaledMatrix: tile amax, then scale, then clip and round.

Source: current (just-in-time) scaling. Of the scale rules, amax over the format's maximum and that
rounded up to a power of two are those of DeepSeek-V3 (arXiv:2412.19437) §3.3 and of Transformer
Engine's block recipe, which states them through the inverse; `Scale` cites the others.
Assumes: nothing about x. NaN stays NaN and does not count towards its tile's amax; E2M1, which has
no NaN, stores +0. Infinity saturates (OCP OFP8 v1.0, saturating conversion). A tile whose amax is
0, a float32 subnormal or infinite gets scale 1; one whose amax is too small for a normal float32
scale gets the smallest normal.

Every operation here is one that XLA leaves alone, so that eager, jit, CPU and GPU agree to the bit
(except on float32 subnormals, which some backends flush to 0). It rewrites a division by a constant
or by a broadcast into a multiplication by a rounded reciprocal, off by one ulp about half of the
time, and 1 / (c / x) into x * (1 / c); therefore reciprocals are spelled out, and a clip stands
between two divisions.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.formats import E2M1, E4M3, Format
from fp8jax.quantization import clip, hadamard, rounding, scaled_matrix, vectorized
from fp8jax.recipe.quant import (
  AMAX,
  CURRENT,
  WHOLE,
  Clamp,
  Delayed,
  Largest,
  LeastError,
  Quant,
  Rounding,
  Scale,
  Static,
)

# Smallest normal float32. Scales below it would be flushed to zero by CPUs and GPUs alike.
_MIN_SCALE = np.float32(2.0**-126)
# Largest scale whose reciprocal is normal.
_MAX_SCALE = np.float32(2.0**126)
# Largest encoding factor of a tensor whose tiles, down to E4M3's 2^-9, keep normal scales.
_MAX_ENCODE = np.float32(2.0**117)


def amax_to_scale(amax, format: Format, kind: Scale, margin: int = 0):
  """float32 scale, finite, normal and positive, for a tile of which amax is the largest magnitude.

  F32: amax * (1 / format.max), both roundings float32's, so that amax / scale may exceed format.max
    by an ulp or two (which rounds back).
  POW2: the smallest power of two not below amax / format.max, exactly.
  FLOOR: 2^(floor(log2(amax)) - format.max_exponent). amax / scale is below 2^(max_exponent + 1):
    512 for E4M3, 65536 for E5M2, 16 for E3M4, 8 for E2M1, so that the largest may saturate.
  EVEN: the same after rounding amax to the format's mantissa bits, halves up; amax / scale is
    below 2^(max_exponent + 1) * (1 - 2^-(mantissa_bits + 2)): 496 for E4M3, 61440 for E5M2, 15.75
    for E3M4, 7 for E2M1.
  FLOOR_4_3: 4/3 of FLOOR, rounded to float32, of E2M1: amax / scale stays below 6.
  POW2_DOWN: the largest power of two not above amax / format.max.
  GAUDI2: the smallest of 2^-8, 2^-4, 1, 2^4 not below amax / format.max, at most 2^4.

  Args:
    amax: float32, any shape, in the tensor's own units; may be 0, inf or NaN (gives 1).
    format: that the tile will be stored in.
    kind: any with one scale per tile: not ONE, NONE, nor E4M3_OVER_F32 (`two_levels`).
    margin: the scale is 2^margin times as large, which leaves as much unused above amax; GAUDI2's
      is that of an amax so much larger.
  """
  amax = amax.astype(jnp.float32)
  if kind is Scale.F32:
    scale = amax * _inverse(format)
  elif kind is Scale.FLOOR_4_3:
    scale = _power_of_two(amax, format, Scale.FLOOR) * np.float32(4 / 3)
  elif kind is Scale.GAUDI2:
    # The margin is of the amax: times a power of two, a scale might be none of these.
    scale = sum(
      jnp.where(
        amax > np.float32(format.max * 2.0 ** (k - margin)),
        np.float32(2.0 ** (k + 4) - 2.0**k), 0.0,
      )
      for k in (-8, -4, 0)
    ) + np.float32(2.0**-8)  # fmt: skip
  else:
    scale = _power_of_two(amax, format, kind)
  scale = jnp.maximum(scale, _MIN_SCALE)
  if margin and kind is not Scale.GAUDI2:
    factor = np.float32(2.0 ** np.clip(margin, -126, 126))
    scale = jnp.clip(scale * factor, _MIN_SCALE, _MAX_SCALE)
  is_usable = (amax >= _MIN_SCALE) & (amax < jnp.inf)
  return jnp.where(is_usable, scale, 1.0)


def _inverse(format: Format) -> np.float32:
  """1 / format.max; the smallest normal number where it is below, with 8 exponent bits."""
  return max(np.float32(1 / format.max), _MIN_SCALE)


def _power_of_two(amax, format: Format, kind: Scale):
  """2^(exponent of amax, raised by one where `kind` rounds up, - max_exponent), by its bits."""
  fraction_of_max = round((format.max * 2.0**-format.max_exponent - 1) * 2**23)
  # Added to amax's bits, this carries into the exponent exactly where the rule rounds up, or
  # borrows from it where POW2_DOWN rounds down.
  carry = {
    Scale.POW2: 2**23 - 1 - fraction_of_max,
    Scale.POW2_DOWN: -fraction_of_max,
    Scale.FLOOR: 0,
    Scale.EVEN: 2 ** (22 - format.mantissa_bits),
  }[kind]
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  biased = ((bits + carry) >> 23) - format.max_exponent
  return jax.lax.bitcast_convert_type(jnp.clip(biased, 1, 254) << 23, jnp.float32)


def two_levels(amax, tensor_amax, format: Format, top: float = E4M3.max):
  """(E4M3 numbers like amax, float32 for the tensor), whose products are the scales of NVFP4.

  In this order, each operation rounded to float32 (E4M3's to the nearest, ties to even):
    encode = (top * format.max) / tensor_amax   at most 2^117; 1 if tensor_amax is 0 or infinite
    decode = 1 / encode                         what an exported checkpoint stores for the tensor
    s8     = E4M3(amax * (encode * (1 / format.max)))   within [2^-9, 448]; 1 if amax is 0 or inf
    scale  = s8 * decode
  Elements are then multiplied by 1 / scale, that is divided by the rounded scale. Where s8 was
  rounded down, the tile's largest exceed format.max and saturate: by up to 17/16, or 3/2 where s8
  is subnormal, below tensor_amax / 28672. The paper's appendix B divides amax by 6 first;
  Transformer Engine folds 1/6 into the encoding factor, as here. A tile so small that its E4M3
  number would be 0 keeps the smallest, 2^-9.

  Args:
    amax: float32, any shape, per tile.
    tensor_amax: float32 scalar, of the whole tensor.
    format: of the elements: E2M1 in NVFP4.
    top: the E4M3 number of a tile whose amax is the tensor's; less than 448 leaves room above.
  """
  most = np.float32(min(top * format.max, 2.0**127))
  encode = jnp.minimum(most / tensor_amax, _MAX_ENCODE)
  encode = jnp.where((tensor_amax >= _MIN_SCALE) & (tensor_amax < jnp.inf), encode, 1.0)
  decode = 1.0 / encode
  s8 = rounding.nearest(amax * (encode * _inverse(format)), E4M3)
  s8 = jnp.maximum(s8, np.float32(E4M3.smallest))
  return jnp.where((amax >= _MIN_SCALE) & (amax < jnp.inf), s8, 1.0), decode


def cast(x, format: Format, how: Rounding = Rounding.NEAREST, axes=None):
  """Saturating round-to-nearest-even of float32, or toward zero; infinities saturate too.

  NaN stays NaN, or becomes +0 where the format has none. Clips first: a bare e4m3fn cast turns 465
  into NaN, one to e5m2 turns 61440 into infinity.
  """
  if how is Rounding.TOWARD_ZERO:
    return rounding.toward_zero(x, format, axes).astype(format.dtype)
  # In a loop over small matrices XLA:CPU casts to E2M1 by way of float16: 2.5007 becomes 2.
  is_cast = format.is_native and format != E2M1
  on_grid = rounding.saturate(x, format) if is_cast else rounding.nearest(x, format, axes)
  return on_grid.astype(format.dtype)


def quantize(
  x, quant: Quant, *, contraction: int = 1, amax_axes=((), ()), amax=None, key=None, signs_key=None,
  with_values: bool = False, tensor_amax=None,
) -> scaled_matrix.ScaledMatrix:  # fmt: skip
  """Quantizes the matrix x.

  Args:
    x: [rows, contraction], or its transpose when `contraction` is 0.
    quant: format, tile, scale, clip, rounding and transform.
    contraction: which axis of x is contracted by the GEMM this operand feeds.
    amax_axes: inside `shard_map`, the mesh axes over which (rows, contraction) are split. A WHOLE
      extent takes its amax over all of them, so that the scale is the global one, and so does the
      tensor's amax of E4M3_OVER_F32. Their indices enter the key, so that shards round
      independently.
    amax: float32 scalar from which the scale comes instead of from x, for a source other than
      CURRENT, and for no other. Larger values saturate; 0 and infinity give scale 1. NaN, which
      stands for one that nobody ever saw, makes the scale NaN and all that comes of it. Under two
      levels it is that of the tensor.
    key: a jax.random key, for stochastic rounding.
    signs_key: a jax.random key, for fresh signs: the same for both operands of a product.
    with_values: whether to make ScaledMatrix.values, in float32 from end to end.
    tensor_amax: float32 scalar from which E4M3_OVER_F32's scale of the tensor comes, that of
      several matrices for one; default: x's own.

  Returns:
    ScaledMatrix [rows, contraction]. With contraction=0 its data is a transposed view, which XLA
    folds into the product.

  Raises:
    ValueError: an amax too many or missing; a missing key; a contraction that the transform's size
      does not divide.
  """
  if (amax is None) != (quant.source == CURRENT):
    problem = "needs an amax" if amax is None else "takes its scale from x, so give no amax"
    raise ValueError(f"quantize to {quant}: source={quant.source} {problem}")
  if quant.rounds_randomly and key is None:
    raise ValueError(f"quantize to {quant}: stochastic rounding needs key=jax.random.key(...)")
  x = without_outliers(x, quant, contraction, amax_axes)
  if quant.rotation:
    x = hadamard.rotate(x, quant.rotation, contraction, signs_key)
  is_second = amax is not None and quant.scale is Scale.E4M3_OVER_F32
  amaxes: Any = (None, _remembered(amax, quant)) if is_second else (amax, tensor_amax)
  if contraction == 0 and quant.rounding is Rounding.EDEN:  # its blocks lie along the columns
    made = _cast(x.T, quant, amax_axes, amaxes, key, with_values)
  elif contraction == 0:
    flipped = dataclasses.replace(quant, tile=quant.tile[::-1])
    made = _cast(x, flipped, amax_axes[::-1], amaxes, key, with_values).T
  else:
    made = _cast(x, quant, amax_axes, amaxes, key, with_values)
  if is_second:
    is_unseen = jnp.isnan(amaxes[1])
    made = dataclasses.replace(made, scale=jnp.where(is_unseen, jnp.nan, made.scale))
  return made


def _remembered(amax, quant: Quant):
  """float32 scalar: the amax of the first of two levels, its source's margin included."""
  margin = quant.source.margin if isinstance(quant.source, Delayed | Static) else 0
  return jnp.reshape(jnp.asarray(amax, jnp.float32), ()) * np.float32(2.0**margin)


def without_outliers(x, quant: Quant, contraction: int, amax_axes):
  """x clamped to the quantiles of `Clamp`; as it is with another clip."""
  if not isinstance(quant.clip, Clamp):
    return x
  tile, axes = (t[:: 1 if contraction else -1] for t in (quant.tile, amax_axes))
  return clip.clamped(x, quant.clip, (tile[0] == WHOLE, tile[1] == WHOLE), _shared(tile, axes))


def _shared(tile, amax_axes) -> tuple[str, ...]:
  """The mesh axes that a tile extends over."""
  return tuple(a for t, axes in zip(tile, amax_axes) if t == WHOLE for a in axes)


def _cast(x, quant: Quant, amax_axes, amaxes, key, with_values) -> scaled_matrix.ScaledMatrix:
  """ScaledMatrix of x as it lies; quant.tile and amax_axes are of x's two axes, amaxes are those
  that `quantize` was given."""
  amax, tensor_amax = amaxes
  tiles = tiled(x, quant)
  if quant.scale is Scale.ONE:
    scale = jnp.ones((1, 1))
  elif amax is None:
    tile_amax = (vectorized.tile_amax if with_values else _tile_amax)(tiles)
    scale = _current_scale(tiles, tile_amax, quant, x.shape, amax_axes, tensor_amax)
  else:
    scale = given_scale(amax, quant)
  of_both = scale[0] * scale[1] if isinstance(scale, tuple) else scale
  inverse = 1.0 / of_both
  if with_values:  # once per tile, not per element
    of_both, inverse = jax.lax.optimization_barrier((of_both, inverse))
  values = tiles * inverse[:, None, :, None]
  if quant.rounds_randomly:
    for axis in sorted({a for axes in amax_axes for a in axes}):
      key = jax.random.fold_in(key, jax.lax.axis_index(axis))
  if quant.rounding is Rounding.STOCHASTIC:
    dtype = jnp.float32 if with_values else None
    data = rounding.stochastic(values, quant.format, key, (1, 3), dtype)
  elif with_values and quant.rounding is not Rounding.TOWARD_ZERO:
    data = vectorized.nearest(values, quant.format, (1, 3))
  else:
    data = cast(values, quant.format, quant.rounding, (1, 3))
  if quant.rotation and quant.rounding is Rounding.EDEN:
    of_both = _unbiased(values, data, scale, quant.rotation.size // quant.tile[1], key)
  wide = None
  if with_values:
    wide = as_lies(data.astype(jnp.float32) * of_both[:, None, :, None], x)
  data = as_lies(data, x).astype(quant.format.dtype)
  return scaled_matrix.ScaledMatrix(data, of_both, quant.tile, wide)


def scales(x, quant: Quant, tensor_amax=None) -> Any:
  """float32 [tiles of rows, tiles of contraction]: the scales alone that `quantize` gives x.

  Args:
    x: float32 [rows, contraction], perhaps some of the columns of a matrix.
    quant: of a CURRENT source, without a transform, a Clamp, and the rounding "eden".
    tensor_amax: that E4M3_OVER_F32 takes for the whole matrix's; None: x is the whole matrix.
  """
  if quant.scale is Scale.ONE:
    return jnp.ones((1, 1))
  tiles = tiled(x, quant)
  return _current_scale(tiles, _tile_amax(tiles), quant, x.shape, ((), ()), tensor_amax)


def tiled(x, quant: Quant):
  """float32 [tiles of rows, rows, tiles of columns, columns] of x, padded with zeros."""
  extents = tuple(n if t == WHOLE else t for n, t in zip(x.shape, quant.tile))
  pads = [(0, -n % t) for n, t in zip(x.shape, extents)]
  # Zeros never raise an amax, so a partial last tile is exact.
  padded = jnp.pad(x, pads) if any(after for _, after in pads) else x
  rows, cols = (n // t for n, t in zip(padded.shape, extents))
  return padded.astype(jnp.float32).reshape(rows, extents[0], cols, extents[1])


def as_lies(tiles, x):
  """[tiles, rows, tiles, columns] as the matrix x that they are of, without padding."""
  rows, columns = tiles.shape[0] * tiles.shape[1], tiles.shape[2] * tiles.shape[3]
  return tiles.reshape(rows, columns)[: x.shape[0], : x.shape[1]]


def given_scale(amax, quant: Quant):
  """float32 [1, 1] from an amax that is not x's own, margin included."""
  if quant.scale is Scale.E4M3_OVER_F32:
    scale = tensor_scale(_remembered(amax, quant), quant)
    return jnp.reshape(jnp.where(jnp.isnan(amax), jnp.nan, scale), (1, 1))
  margin = quant.source.margin if isinstance(quant.source, Delayed | Static) else 0
  amax = jnp.reshape(amax, (1, 1))
  scale = amax_to_scale(amax, quant.format, quant.scale, margin)
  return jnp.where(jnp.isnan(amax), jnp.nan, scale)


def _unbiased(values, data, scale, group: int, key):
  """The scales of rotated blocks times <x, x> / <x, rounded x>, their E4M3 numbers rounded
  stochastically: rounding to the nearest would put back some of the bias that the factor takes out.

  Args:
    group: tiles per block.
  """
  s8, decode = scale
  blocks = (s8.shape[0], -1, group)
  wide, rounded = values * s8[:, None, :, None], data.astype(jnp.float32) * s8[:, None, :, None]
  of_x, of_both = (
    jnp.sum(jnp.sum(jnp.where(jnp.isnan(wide), 0.0, wide * y), axis=(1, 3)).reshape(blocks), axis=2)
    for y in (wide, rounded)
  )
  factor = jnp.where((of_both > 0) & (of_x > 0), of_x / jnp.where(of_both > 0, of_both, 1.0), 1.0)
  wanted = (s8.reshape(blocks) * factor[..., None]).reshape(s8.shape)
  # Another key than that of elements elsewhere: these are rounded to the nearest.
  s8 = rounding.stochastic(wanted, E4M3, key).astype(jnp.float32)
  return jnp.maximum(s8, np.float32(E4M3.smallest)) * decode


def _tile_amax(tiles):
  """[tiles of rows, tiles of columns] from [tiles, rows, tiles, columns] of elements.

  A maximum of maxima is the same number in any order, so that XLA takes a large tile's in stages,
  the first where the elements are made if it can: COAT's group scaling (arXiv:2410.19313 §5.2).
  """
  # Whether a maximum passes NaN on depends on the backend (XLA:CPU's does not): leave none to it.
  return jnp.max(jnp.where(jnp.isnan(tiles), 0.0, jnp.abs(tiles)), axis=(1, 3))


def _current_scale(tiles, amax, quant: Quant, shape, amax_axes, tensor_amax=None):
  """float32 scales like the tiles' amaxes; of EDEN's two levels both."""
  shared = _shared(quant.tile, amax_axes)
  if shared:
    amax = jax.lax.pmax(amax, shared)
  if quant.scale is not Scale.E4M3_OVER_F32:
    return _clipped(
      tiles, amax, lambda x: amax_to_scale(x, quant.format, quant.scale), quant, shape, shared
    )
  split = tuple(dict.fromkeys(a for axes in amax_axes for a in axes))
  if tensor_amax is None:
    tensor_amax = jnp.max(amax)
    tensor_amax = jax.lax.pmax(tensor_amax, split) if split else tensor_amax
  tensor_amax = _with_room(tensor_amax, quant)
  top = _top(quant)
  if quant.rounding is Rounding.EDEN:
    return two_levels(
      clip.amax(tiles, amax, quant.clip, shape, shared), tensor_amax, quant.format, top
    )

  def scale_of(x):
    s8, decode = two_levels(x, tensor_amax, quant.format, top)
    return s8 * decode

  return _clipped(tiles, amax, scale_of, quant, shape, shared)


def _with_room(tensor_amax, quant: Quant):
  if isinstance(quant.clip, Largest) and quant.clip != AMAX:
    return tensor_amax * np.float32(quant.clip.times)
  return tensor_amax


def tensor_scale(tensor_amax, quant: Quant):
  """float32: the factor that all scales of E4M3_OVER_F32 of a tensor with this amax have."""
  amax = _with_room(jnp.float32(tensor_amax), quant)
  return two_levels(amax, amax, quant.format, _top(quant))[1]


def _top(quant: Quant) -> float:
  """The E4M3 number of the tensor's largest tile: 448, or the power of two that leaves room for the
  largest factor of LeastError, or, 256, for EDEN's."""
  most = max(quant.clip.times) if isinstance(quant.clip, LeastError) else 1.0
  if quant.rounding is Rounding.EDEN:
    most = max(most, 1.5)
  return E4M3.max if most <= 1 else 2.0 ** (math.frexp(E4M3.max / most)[1] - 1)


def _clipped(tiles, amax, scale_of, quant: Quant, shape, shared):
  """The scales scale_of(amax), the amax by the rule of quant.clip."""
  if quant.clip == AMAX:
    return scale_of(amax)
  if isinstance(quant.clip, LeastError):
    scales = [scale_of(amax * np.float32(times)) for times in quant.clip.times]
    return clip.least_error(tiles, scales, quant.format, shared)
  return scale_of(clip.amax(tiles, amax, quant.clip, shape, shared))
