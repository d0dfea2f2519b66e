"""A float32 in two halves: the upper is a BF16 of its own, and both together lose nothing.

Source: BF16 weights with their 16 trailing bits beside them, as in Zamirai et al. 2020
(arXiv:2010.06192), torchao and Transformer Engine's store_param_remainders. There the upper half is
the float32 cut off; here it is rounded, so that what multiplies is off by half a step at most, and
the remainder is a signed number.
Assumes: nothing, but a NaN comes back as the one with bits 0x7FC00000. The one that NVIDIA's GPUs
compute, 0x7FFFFFFF, would carry over into the sign when it is rounded, and become -0.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_NAN = np.int32(0x7FC00000)
_HALF, _BITS = np.int32(2**15), np.int32(16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitFloat32:
  """bits of the float32 = (bits of high << 16) + low.

  Attributes:
    high: bfloat16, the float32 rounded to the nearest, ties away from zero.
    low: int16 of the same shape.
  """

  high: jax.Array
  low: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.high.shape

  def unpack(self):
    """The float32, to the bit."""
    high = lax.bitcast_convert_type(self.high, jnp.int16).astype(jnp.int32)
    bits = lax.shift_left(high, _BITS) + self.low.astype(jnp.int32)
    return lax.bitcast_convert_type(bits, jnp.float32)


# Operations are of arrays and of what a GPU kernel holds in registers alike.


def split(x) -> SplitFloat32:
  """x of any shape, as float32."""
  x = x.astype(jnp.float32)
  bits = jnp.where(x != x, _NAN, lax.bitcast_convert_type(x, jnp.int32))
  # Half up in the integers: then what is left is in [-2^15, 2^15), which int16 holds.
  high = lax.shift_right_arithmetic(bits + _HALF, _BITS)
  low = (bits - lax.shift_left(high, _BITS)).astype(jnp.int16)
  return SplitFloat32(lax.bitcast_convert_type(high.astype(jnp.int16), jnp.bfloat16), low)


def to_float32(stored):
  """float32 of a SplitFloat32, or of a float32 array."""
  return stored.unpack() if isinstance(stored, SplitFloat32) else stored


def like(x, stored):
  """float32 x in the format of `stored`: a SplitFloat32 or float32."""
  return split(x) if isinstance(stored, SplitFloat32) else x
