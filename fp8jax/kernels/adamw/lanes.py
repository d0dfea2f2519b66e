"""quantization/quantized_tensor for rows that a warpgroup holds in registers, a row being a group.

The operations are those of quantized_tensor.pack and QuantizedTensor.unpack, in their order; tests
hold them against each other to the bit. They stand here again because scales must be spread over a
row in the lanes that hold it, and because the guards against XLA would cost instructions here.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.quantization import quantize, quantized_tensor, rounding
from fp8jax.recipe.quant import DynamicRangeExpansion, SquareRoot

# Of DynamicRangeExpansion's exponents: k = power / 16, as quantized_tensor.py has them.
_POWERS = np.float32(16)
_TINY, _LARGEST = np.float32(2.0**-126), np.float32(2.0**126)


def is_grouped(moment) -> bool:
  """Whether it has a scale per group."""
  return isinstance(moment, quantized_tensor.QuantizedTensor) and moment.scale is not None


def unpack(kept, at, layout):
  """float32 [rows, columns] of a moment in shared memory.

  Args:
    kept: QuantizedTensor of refs, or a ref.
    at: ref -> the part of it that holds these rows.
    layout: of [rows, columns] in registers.
  """
  data = kept.data if isinstance(kept, quantized_tensor.QuantizedTensor) else kept
  x = plgpu.load(at(data), layout=layout).astype(jnp.float32)
  if not is_grouped(kept):
    return x
  quant = kept.quant
  if kept.power is not None:
    power = plgpu.load(at(kept.power), layout=layout.reduce(1)).astype(jnp.float32)
    ratio = jnp.abs(x) * np.float32(1 / quant.format.max)
    x = _signed(_power(ratio, _over(_POWERS / power, x)), x)
  x = x * _over(plgpu.load(at(kept.scale), layout=layout.reduce(1)), x)
  return x * x if isinstance(quant.transform, SquareRoot) else x


def pack(x, kept, at):
  """Writes float32 x as quantized_tensor.pack keeps it; see `unpack`."""
  if not isinstance(kept, quantized_tensor.QuantizedTensor):
    at(kept)[...] = x.astype(kept.dtype)
    return
  quant = kept.quant
  x = jnp.sqrt(x) if isinstance(quant.transform, SquareRoot) else x
  if kept.scale is not None:
    magnitude = jnp.where(x != x, 0.0, jnp.abs(x))
    amax = jnp.max(magnitude, axis=1)
    if isinstance(quant.transform, DynamicRangeExpansion):
      scale, power = _expansion(magnitude, amax, quant.transform)
      at(kept.power)[...] = power.astype(jnp.uint8)
      inverse = 1.0 / jnp.where(scale > 0, scale, 1.0)
      ratio = jnp.minimum(jnp.abs(x) * _over(inverse, x), 1.0)
      exponent = power.astype(jnp.float32) * (1 / _POWERS)
      x = _signed(np.float32(quant.format.max) * _power(ratio, _over(exponent, x)), x)
    else:
      scale = quantize.amax_to_scale(amax, quant.format, quant.scale)
      x = x * _over(1.0 / scale, x)
    at(kept.scale)[...] = scale
  if quant.keeps_nonzero:
    # Less than the smallest magnitude may round to 0, more does not.
    least = jnp.maximum(jnp.abs(x), np.float32(quant.format.smallest))
    x = jnp.where(x == 0, x, _signed(least, x))
  if kept.power is None:  # what was expanded is within the format
    x = rounding.saturate(x, quant.format)
  at(kept.data)[...] = x.astype(quant.format.dtype)


def _expansion(magnitude, amax, how: DynamicRangeExpansion):
  """(float32 amax, int32 16 k) of rows."""
  scale = jnp.where(amax >= _TINY, jnp.minimum(amax, _LARGEST), 0.0)
  least = jnp.min(jnp.where(magnitude >= _TINY, magnitude, jnp.inf), axis=1)
  least = jnp.minimum(jnp.maximum(least, _TINY), _LARGEST)
  octaves = jnp.log2(jnp.maximum(scale, _TINY)) - jnp.log2(least)
  power = (_POWERS * np.float32(math.log2(how.target))) / jnp.maximum(octaves, np.float32(1e-6))
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


def _over(of_rows, x):
  """A number per row, for every element of x."""
  return lax.broadcast_in_dim(of_rows, x.shape, [0])
