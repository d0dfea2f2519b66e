"""quantize(x, quant) -> Scaled: tile amax, then scale, then clip and round.

Source: current (just-in-time) scaling. The scale rule `amax / max` and its power-of-two variant
are those of DeepSeek-V3 (arXiv:2412.19437) §3.3 and Transformer Engine's block recipe, which states
them through the inverse.
Assumes: nothing about x. A tile whose amax is 0, infinite or NaN gets scale 1; one whose amax is too
small for a normal float32 scale gets the smallest normal. NaN stays NaN, infinity saturates.
"""

import jax
import jax.numpy as jnp

from fp8jax.formats import Format
from fp8jax.quant import scaled
from fp8jax.recipe import WHOLE, Quant, Scale

# Smallest normal float32. Scales below it would be flushed to zero by CPUs and GPUs alike.
_MIN_SCALE = 2.0**-126


def amax_to_scale(amax, format: Format, kind: Scale):
  """float32 scale, finite and positive, with amax / scale <= format.max.

  Args:
    amax: float32, any shape, in the tensor's own units; may be 0, inf or NaN (gives 1).
    format: the narrow format that the tile will be stored in.
    kind: F32 keeps the quotient; POW2 rounds it up to a power of two.
  """
  scale = jnp.maximum(amax.astype(jnp.float32) / format.max, _MIN_SCALE)
  if kind is Scale.POW2:
    scale = round_up_to_power_of_two(scale)
  is_usable = (amax > 0) & (amax < jnp.inf)
  return jnp.where(is_usable, scale, 1.0)


def round_up_to_power_of_two(x):
  """Smallest power of two >= x, for positive normal float32.

  Works on the bits: `exp2` and `log2` are inexact on CPU and miss by a factor of two.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  has_fraction = (bits & 0x7FFFFF) != 0
  # Biased exponent 254 is the largest finite one; no amax / format.max comes near it.
  exponent = jnp.minimum((bits >> 23) + has_fraction, 254)
  return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


def cast(x, format: Format):
  """Saturating round-to-nearest-even. The clip comes first: a bare e4m3fn cast turns 465 into NaN."""
  return jnp.clip(x, -format.max, format.max).astype(format.dtype)


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
    transposed = Quant(quant.format, tile[::-1], quant.scale)
    return quantize(x, transposed, amax_axes=amax_axes[::-1]).T

  extents = tuple(n if t == WHOLE else t for n, t in zip(x.shape, tile))
  pads = [(0, -n % t) for n, t in zip(x.shape, extents)]
  # Zeros never raise an amax, so a partial last tile is exact.
  padded = jnp.pad(x, pads) if any(after for _, after in pads) else x
  rows, cols = (n // t for n, t in zip(padded.shape, extents))
  tiles = padded.astype(jnp.float32).reshape(rows, extents[0], cols, extents[1])

  amax = jnp.max(jnp.abs(tiles), axis=(1, 3))
  shared = tuple(a for t, axes in zip(tile, amax_axes) if t == WHOLE for a in axes)
  if shared:
    amax = jax.lax.pmax(amax, shared)
  scale = amax_to_scale(amax, quant.format, quant.scale)
  data = cast(tiles / scale[:, None, :, None], quant.format)
  data = data.reshape(padded.shape)[: x.shape[0], : x.shape[1]]
  return scaled.Scaled(data, scale, tile)
