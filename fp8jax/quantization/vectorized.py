"""The numbers of quantize.py, to the bit, in forms that XLA:CPU turns into vector instructions.

LLVM reorders no maximum of floats and any of integers: magnitudes are compared by their bits. There
are no selects between an array and a constant: JAX moves such constants out of a loop over layers,
where they become arrays as large as the activation, which every layer reads.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.formats import Format
from fp8jax.quantization import rounding

_MAGNITUDE = np.int32(0x7FFFFFFF)
# Added to a magnitude's bits, it makes those of NaN, and no others, negative.
_TO_NAN = np.int32(0x7FFFFFFF - 0x7F800000)
_LANES = 16


def tile_amax(tiles):
  """float32 [rows, columns] of float32 [rows, _, columns, _]: largest magnitudes, NaN left out."""
  bits = (jax.lax.bitcast_convert_type(tiles, jnp.int32) & _MAGNITUDE) + _TO_NAN
  bits = jnp.maximum(_max(bits, (1, 3)), _TO_NAN) - _TO_NAN
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def amax(x):
  """float32 scalar like tensor_stats.amax: NaN if any element is NaN."""
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & _MAGNITUDE
  bits = _max(bits.reshape(-1, bits.shape[-1]), (0,))
  return jax.lax.bitcast_convert_type(jnp.max(bits), jnp.float32)


def _max(x, axes):
  """Maximum over some axes; along the last one vectors are compared with vectors first."""
  while x.shape[-1] % (2 * _LANES) == 0 and x.ndim - 1 in axes:
    x = jnp.maximum(*jnp.split(x, 2, axis=-1))
  return jnp.max(x, axis=axes)


def nearest(x, format: Format, axes=None):
  """`rounding.nearest`."""
  if not format.is_stepped or rounding.has_fine_subnormals(format):
    return rounding.nearest(x, format, axes)
  if format.has_nan:
    x = jax.lax.select(jnp.isnan(x), x, jnp.clip(x, -format.max, format.max))
  else:
    x = rounding.saturate(x, format)
  unit, inverse = rounding.step(x, format)
  return jax.lax.round(x * inverse, jax.lax.RoundingMethod.TO_NEAREST_EVEN) * unit
