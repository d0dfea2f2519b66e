"""A float32 in two halves: the upper is a BF16 of its own, and both together lose nothing.

Source: BF16 weights with their 16 trailing bits beside them, as in Zamirai et al. 2020
(arXiv:2010.06192) and torchao. There the upper half is the float32 cut off; here it is rounded, so
that what multiplies is off by half a step at most, and the remainder is a signed number.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

_HALF = np.uint32(0x8000)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split:
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
    high = jax.lax.bitcast_convert_type(self.high, jnp.uint16).astype(jnp.uint32) << 16
    # Of a negative number, modulo 2^32, which the sum is too.
    low = self.low.astype(jnp.int32).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(high + low, jnp.float32)


def split(x) -> Split:
  """x of any shape, as float32. Of a NaN whose payload is all ones the upper half alone is -0."""
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  # Half up in the integers: then what is left is in [-2^15, 2^15), which int16 holds.
  high = (bits + _HALF) >> 16
  low = (bits - (high << 16)).astype(jnp.int32).astype(jnp.int16)
  return Split(jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16), low)
