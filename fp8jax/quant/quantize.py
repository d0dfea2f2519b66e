"""quantize(x, quant) -> Scaled: tile amax, then scale, then clip and round.

Source: current (just-in-time) scaling. The scale rule, amax over the format's maximum or that
rounded up to a power of two, is the one of DeepSeek-V3 (arXiv:2412.19437) §3.3 and of Transformer
Engine's block recipe, which states it through the inverse.
Assumes: nothing about x. NaN stays NaN and does not count towards its tile's amax. Infinity becomes
NaN: any number in its place would hide it from whoever watches the loss. A tile whose amax is 0 or
infinite gets scale 1; one whose amax is too small for a normal float32 scale gets the smallest
normal.

Every operation here is one that XLA leaves alone, so that eager, jit, CPU and GPU agree to the bit.
It rewrites a division by a constant or by a broadcast into a multiplication by a rounded
reciprocal, off by one ulp about half of the time; therefore both reciprocals are spelled out.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.formats import Format
from fp8jax.quant import scaled
from fp8jax.recipe import WHOLE, Quant, Scale

# Smallest normal float32. Scales below it would be flushed to zero by CPUs and GPUs alike.
_MIN_SCALE = np.float32(2.0**-126)


def amax_to_scale(amax, format: Format, kind: Scale):
  """float32 scale, finite and positive, that brings amax to at most format.max.

  Args:
    amax: float32, any shape, in the tensor's own units; may be 0, inf or NaN (gives 1).
    format: the narrow format that the tile will be stored in.
    kind: F32: amax * (1 / format.max), both roundings float32's, so that amax / scale may exceed
      format.max by an ulp or two (which rounds back). POW2: the smallest power of two not below
      amax / format.max, exactly.
  """
  amax = amax.astype(jnp.float32)
  scale = _power_of_two(amax, format) if kind is Scale.POW2 else amax * np.float32(1 / format.max)
  is_usable = (amax > 0) & (amax < jnp.inf)
  return jnp.where(is_usable, jnp.maximum(scale, _MIN_SCALE), 1.0)


def _power_of_two(amax, format: Format):
  """2^ceil(log2(amax / format.max)) by comparing bits; `exp2` and `log2` are inexact on CPU."""
  mantissa, exponent = math.frexp(format.max)
  fraction_of_max = round((2 * mantissa - 1) * 2**23)
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  is_above = (bits & 0x7FFFFF) > fraction_of_max
  biased = (bits >> 23) - (exponent - 1) + is_above
  return jax.lax.bitcast_convert_type(jnp.clip(biased, 1, 254) << 23, jnp.float32)


def cast(x, format: Format):
  """Saturating round-to-nearest-even; NaN for what is not finite.

  Clips first: a bare e4m3fn cast turns 465 into NaN.
  """
  clipped = jnp.clip(x, -format.max, format.max)
  return jnp.where(jnp.isinf(x), jnp.nan, clipped).astype(format.dtype)


def quantize(x, quant: Quant, *, contraction: int = 1, amax_axes=((), ())) -> scaled.Scaled:
  """Makes the matrix x narrow.

  Args:
    x: [rows, contraction], or its transpose when `contraction` is 0.
    quant: format, tile and scale kind.
    contraction: which axis of x is contracted by the GEMM this operand feeds.
    amax_axes: inside `shard_map`, the mesh axes over which (rows, contraction) are split. A WHOLE
      extent takes its amax over all of them, so that the scale is the global one.

  Returns:
    Scaled [rows, contraction]. With contraction=0 its data is a transposed view, which XLA folds
    into the product.
  """
  tile = quant.tile
  if contraction == 0:
    transposed = Quant(quant.format, (tile[1], tile[0]), quant.scale)
    return quantize(x, transposed, amax_axes=amax_axes[::-1]).T

  extents = tuple(n if t == WHOLE else t for n, t in zip(x.shape, tile))
  pads = [(0, -n % t) for n, t in zip(x.shape, extents)]
  # Zeros never raise an amax, so a partial last tile is exact.
  padded = jnp.pad(x, pads) if any(after for _, after in pads) else x
  rows, cols = (n // t for n, t in zip(padded.shape, extents))
  tiles = padded.astype(jnp.float32).reshape(rows, extents[0], cols, extents[1])

  # Whether a maximum passes NaN on depends on the backend (XLA:CPU's does not): leave none to it.
  amax = jnp.max(jnp.where(jnp.isnan(tiles), 0.0, jnp.abs(tiles)), axis=(1, 3))
  shared = tuple(a for t, axes in zip(tile, amax_axes) if t == WHOLE for a in axes)
  if shared:
    amax = jax.lax.pmax(amax, shared)
  scale = amax_to_scale(amax, quant.format, quant.scale)
  data = cast(tiles * (1.0 / scale)[:, None, :, None], quant.format)
  data = data.reshape(padded.shape)[: x.shape[0], : x.shape[1]]
  return scaled.Scaled(data, scale, tile)
