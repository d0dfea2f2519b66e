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

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.formats import E4M3, Format
from fp8jax.quantization import hadamard, rounding, scaled_matrix, vectorized
from fp8jax.recipe.quant import CURRENT, WHOLE, Delayed, Hadamard, Quant, Rounding, Scale, Static

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

  Args:
    amax: float32, any shape, in the tensor's own units; may be 0, inf or NaN (gives 1).
    format: that the tile will be stored in.
    kind: any but E4M3_OVER_F32, which needs two amaxes: `two_level_scale`.
    margin: the scale is 2^margin times as large, which leaves as much unused above amax.
  """
  amax = amax.astype(jnp.float32)
  if kind is Scale.F32:
    scale = amax * np.float32(1 / format.max)
  else:
    scale = _power_of_two(amax, format, kind)
  scale = jnp.maximum(scale, _MIN_SCALE)
  if margin:
    factor = np.float32(2.0 ** np.clip(margin, -126, 126))
    scale = jnp.clip(scale * factor, _MIN_SCALE, _MAX_SCALE)
  is_usable = (amax >= _MIN_SCALE) & (amax < jnp.inf)
  return jnp.where(is_usable, scale, 1.0)


def _power_of_two(amax, format: Format, kind: Scale):
  """2^(exponent of amax, raised by one where `kind` rounds up, - max_exponent), by its bits."""
  fraction_of_max = round((format.max * 2.0**-format.max_exponent - 1) * 2**23)
  # Added to amax's bits, this carries into the exponent exactly where the rule rounds up.
  carry = {
    Scale.POW2: 2**23 - 1 - fraction_of_max,
    Scale.FLOOR: 0,
    Scale.EVEN: 2 ** (22 - format.mantissa_bits),
  }[kind]
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  biased = ((bits + carry) >> 23) - format.max_exponent
  return jax.lax.bitcast_convert_type(jnp.clip(biased, 1, 254) << 23, jnp.float32)


def two_level_scale(amax, tensor_amax, format: Format):
  """float32 scales like amax: an E4M3 number per tile times one float32 for the tensor (NVFP4).

  In this order, each operation rounded to float32 (E4M3's to the nearest, ties to even):
    encode = (448 * format.max) / tensor_amax   at most 2^117; 1 if tensor_amax is 0 or infinite
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
  """
  encode = jnp.minimum(np.float32(E4M3.max * format.max) / tensor_amax, _MAX_ENCODE)
  encode = jnp.where((tensor_amax >= _MIN_SCALE) & (tensor_amax < jnp.inf), encode, 1.0)
  decode = 1.0 / encode
  s8 = rounding.nearest(amax * (encode * np.float32(1 / format.max)), E4M3)
  s8 = jnp.maximum(s8, np.float32(E4M3.smallest))
  return jnp.where((amax >= _MIN_SCALE) & (amax < jnp.inf), s8, 1.0) * decode


def cast(x, format: Format):
  """Saturating round-to-nearest-even of float32; infinities saturate too.

  NaN stays NaN, or becomes +0 where the format has none. Clips first: a bare e4m3fn cast turns 465
  into NaN, one to e5m2 turns 61440 into infinity.
  """
  on_grid = rounding.saturate(x, format) if format.is_native else rounding.nearest(x, format)
  return on_grid.astype(format.dtype)


def quantize(
  x, quant: Quant, *, contraction: int = 1, amax_axes=((), ()), amax=None, key=None,
  with_values: bool = False,
) -> scaled_matrix.ScaledMatrix:  # fmt: skip
  """Quantizes the matrix x.

  Args:
    x: [rows, contraction], or its transpose when `contraction` is 0.
    quant: format, tile, scale, rounding and transform.
    contraction: which axis of x is contracted by the GEMM this operand feeds.
    amax_axes: inside `shard_map`, the mesh axes over which (rows, contraction) are split. A WHOLE
      extent takes its amax over all of them, so that the scale is the global one, and so does the
      tensor's amax of E4M3_OVER_F32. Their indices enter the key, so that shards round
      independently.
    amax: float32 scalar from which the scale comes instead of from x, for a source other than
      CURRENT, and for no other. Larger values saturate; 0 and infinity give scale 1. NaN, which
      stands for one that nobody ever saw, makes the scale NaN and all that comes of it.
    key: a jax.random key, for stochastic rounding.
    with_values: whether to make ScaledMatrix.values, in float32 from end to end.

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
  if quant.rounding is Rounding.STOCHASTIC and key is None:
    raise ValueError(f"quantize to {quant}: stochastic rounding needs key=jax.random.key(...)")
  if isinstance(quant.transform, Hadamard):
    x = hadamard.hadamard(x, quant.transform.size, contraction)
  if contraction == 0:
    flipped = dataclasses.replace(quant, tile=quant.tile[::-1])
    return _cast(x, flipped, amax_axes[::-1], amax, key, with_values).T
  return _cast(x, quant, amax_axes, amax, key, with_values)


def _cast(x, quant: Quant, amax_axes, amax, key, with_values) -> scaled_matrix.ScaledMatrix:
  """ScaledMatrix of x as it lies; quant.tile and amax_axes are of x's two axes."""
  extents = tuple(n if t == WHOLE else t for n, t in zip(x.shape, quant.tile))
  pads = [(0, -n % t) for n, t in zip(x.shape, extents)]
  # Zeros never raise an amax, so a partial last tile is exact.
  padded = jnp.pad(x, pads) if any(after for _, after in pads) else x
  rows, cols = (n // t for n, t in zip(padded.shape, extents))
  tiles = padded.astype(jnp.float32).reshape(rows, extents[0], cols, extents[1])

  if amax is None:
    tile_amax = (vectorized.tile_amax if with_values else _tile_amax)(tiles)
    scale = _current_scale(tile_amax, quant, amax_axes)
  else:
    scale = given_scale(amax, quant)
  inverse = 1.0 / scale
  if with_values:  # once per tile, not per element
    scale, inverse = jax.lax.optimization_barrier((scale, inverse))
  values = tiles * inverse[:, None, :, None]
  if quant.rounding is Rounding.STOCHASTIC:
    for axis in sorted({a for axes in amax_axes for a in axes}):
      key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    data = rounding.stochastic(values, quant.format, key, jnp.float32 if with_values else None)
  elif with_values:
    data = vectorized.nearest(values, quant.format)
  else:
    data = cast(values, quant.format)
  wide = _as_lies(data * scale[:, None, :, None], x) if with_values else None
  data = _as_lies(data, x).astype(quant.format.dtype)
  return scaled_matrix.ScaledMatrix(data, scale, quant.tile, wide)


def _as_lies(tiles, x):
  """[tiles, rows, tiles, columns] as the matrix x that they are of, without padding."""
  rows, columns = tiles.shape[0] * tiles.shape[1], tiles.shape[2] * tiles.shape[3]
  return tiles.reshape(rows, columns)[: x.shape[0], : x.shape[1]]


def given_scale(amax, quant: Quant):
  """float32 [1, 1] from an amax that is not x's own, margin included."""
  margin = quant.source.margin if isinstance(quant.source, Delayed | Static) else 0
  amax = jnp.reshape(amax, (1, 1))
  scale = amax_to_scale(amax, quant.format, quant.scale, margin)
  return jnp.where(jnp.isnan(amax), jnp.nan, scale)


def _tile_amax(tiles):
  """[tiles of rows, tiles of columns] from [tiles, rows, tiles, columns] of elements.

  A maximum of maxima is the same number in any order, so that XLA takes a large tile's in stages,
  the first where the elements are made if it can: COAT's group scaling (arXiv:2410.19313 §5.2).
  """
  # Whether a maximum passes NaN on depends on the backend (XLA:CPU's does not): leave none to it.
  return jnp.max(jnp.where(jnp.isnan(tiles), 0.0, jnp.abs(tiles)), axis=(1, 3))


def _current_scale(amax, quant: Quant, amax_axes):
  """float32 scales like the tiles' amaxes."""
  shared = tuple(a for t, axes in zip(quant.tile, amax_axes) if t == WHOLE for a in axes)
  if shared:
    amax = jax.lax.pmax(amax, shared)
  if quant.scale is not Scale.E4M3_OVER_F32:
    return amax_to_scale(amax, quant.format, quant.scale)
  split = tuple(dict.fromkeys(a for axes in amax_axes for a in axes))
  tensor_amax = jnp.max(amax)
  tensor_amax = jax.lax.pmax(tensor_amax, split) if split else tensor_amax
  return two_level_scale(amax, tensor_amax, quant.format)
