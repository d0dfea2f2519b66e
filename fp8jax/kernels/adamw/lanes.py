"""quantization/quantized_tensor for rows that a warpgroup holds in registers, a row being a group.

The operations are those of quantized_tensor.pack and QuantizedTensor.unpack, in their order; tests
hold them against each other to the bit. They stand here again because scales must be spread over a
row in the lanes that hold it, and because the guards against XLA would cost instructions here.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.kernels.mosaic import plgpu
from fp8jax.quantization import quantize, quantized_tensor, rounding
from fp8jax.recipe.quant import DynamicRangeExpansion, SquareRoot

# Of DynamicRangeExpansion's exponents: k = power / 16, as quantized_tensor.py has them.
_POWERS = np.float32(16)
_TINY, _LARGEST = np.float32(2.0**-126), np.float32(2.0**126)


def is_grouped(moment) -> bool:
  """Whether it has a scale per group."""
  return isinstance(moment, quantized_tensor.QuantizedTensor) and moment.scale is not None


def unpack(stored, at, layout):
  """float32 [rows, columns] of a moment in shared memory.

  Args:
    stored: QuantizedTensor of refs, or a ref.
    at: ref -> the part of it that holds these rows.
    layout: of [rows, columns] in registers.
  """
  data = stored.data if isinstance(stored, quantized_tensor.QuantizedTensor) else stored
  x = plgpu.load(at(data), layout=layout).astype(jnp.float32)
  if not is_grouped(stored):
    return x
  quant = stored.quant
  if stored.power is not None:
    power = plgpu.load(at(stored.power), layout=layout.reduce(1)).astype(jnp.float32)
    ratio = jnp.abs(x) * np.float32(1 / quant.format.max)
    x = _signed(_power(ratio, _broadcast(_POWERS / power, x)), x)
  x = x * _broadcast(plgpu.load(at(stored.scale), layout=layout.reduce(1)), x)
  return x * x if isinstance(quant.transform, SquareRoot) else x


def pack(x, stored, at):
  """Writes float32 x as quantized_tensor.pack stores it; see `unpack`."""
  if not isinstance(stored, quantized_tensor.QuantizedTensor):
    at(stored)[...] = x.astype(stored.dtype)
    return
  quant = stored.quant
  x = jnp.sqrt(x) if isinstance(quant.transform, SquareRoot) else x
  if stored.scale is not None:
    magnitude = jnp.where(x != x, 0.0, jnp.abs(x))
    amax = jnp.max(magnitude, axis=1)
    if isinstance(quant.transform, DynamicRangeExpansion):
      scale, power = _expansion(magnitude, amax, quant.transform)
      at(stored.power)[...] = power.astype(jnp.uint8)
      inverse = 1.0 / jnp.where(scale > 0, scale, 1.0)
      ratio = jnp.minimum(jnp.abs(x) * _broadcast(inverse, x), 1.0)
      exponent = power.astype(jnp.float32) * (1 / _POWERS)
      x = _signed(np.float32(quant.format.max) * _power(ratio, _broadcast(exponent, x)), x)
    else:
      scale = quantize.amax_to_scale(
        jnp.minimum(amax, quantized_tensor.MOST), quant.format, quant.scale
      )
      x = x * _broadcast(1.0 / scale, x)
    at(stored.scale)[...] = scale
  if quant.keeps_nonzero:
    # Less than the smallest magnitude may round to 0, more does not.
    least = jnp.maximum(jnp.abs(x), np.float32(quant.format.smallest))
    x = jnp.where(x == 0, x, _signed(least, x))
  if stored.power is None:  # what was expanded is within the format
    x = rounding.saturate(x, quant.format)
  at(stored.data)[...] = x.astype(quant.format.dtype)


def _expansion(magnitude, amax, expansion: DynamicRangeExpansion):
  """(float32 amax, int32 16 k) of rows."""
  scale = jnp.where(amax >= _TINY, jnp.minimum(amax, _LARGEST), 0.0)
  least = jnp.min(jnp.where(magnitude >= _TINY, magnitude, jnp.inf), axis=1)
  least = jnp.minimum(jnp.maximum(least, _TINY), _LARGEST)
  octaves = jnp.log2(jnp.maximum(scale, _TINY)) - jnp.log2(least)
  power = (_POWERS * np.float32(math.log2(expansion.target))) / jnp.maximum(
    octaves, np.float32(1e-6)
  )
  # Conversion rounds towards 0, which is down.
  return scale, jnp.minimum(jnp.maximum(power, 1.0), 255.0).astype(jnp.int32)


def _power(x, exponent):
  """x^exponent of x in [0, 1] and positive exponents: 0 is 2^-inf."""
  return jnp.exp2(exponent * jnp.log2(x))


def _signed(magnitude, x):
  """A magnitude with the sign of x, by their bits."""
  sign = lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**31))
  bits = lax.bitcast_convert_type(magnitude, jnp.int32) | sign
  return lax.bitcast_convert_type(bits, jnp.float32)


def _broadcast(row_values, x):
  """A number per row, for every element of x."""
  return lax.broadcast_in_dim(row_values, x.shape, [0])
