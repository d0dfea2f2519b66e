"""Master weights: float32, or the same bits in two arrays of 16.

  high        BF16, float32 rounded half up by its bits: the weight that is computed with
  remainder   int16, what is missing: bits of float32 = (bits of high << 16) + remainder

A pair costs what float32 does and saves writing the BF16 weight beside it (Transformer Engine's
store_param_remainders has the same halves). NaN is kept as one NaN: the one that NVIDIA's GPUs
compute, 0x7fffffff, would carry over into the sign when it is rounded, and become -0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Master = jax.Array | tuple[jax.Array, jax.Array]

_NAN = np.int32(0x7FC00000)


def split(x) -> tuple[jax.Array, jax.Array]:
  """(high BF16, remainder int16) of float32 x."""
  bits = jnp.where(x != x, _NAN, lax.bitcast_convert_type(x, jnp.int32))
  high = lax.shift_right_arithmetic(bits + np.int32(2**15), np.int32(16))
  remainder = bits - lax.shift_left(high, np.int32(16))
  high = lax.bitcast_convert_type(high.astype(jnp.int16), jnp.bfloat16)
  return high, remainder.astype(jnp.int16)


def join(high, remainder) -> jax.Array:
  """float32 from its halves."""
  high = lax.bitcast_convert_type(high, jnp.int16).astype(jnp.int32)
  bits = lax.shift_left(high, np.int32(16)) + remainder.astype(jnp.int32)
  return lax.bitcast_convert_type(bits, jnp.float32)


def read(master: Master) -> jax.Array:
  """float32 of either kind."""
  return join(*master) if isinstance(master, tuple) else master


def like(master: Master, x) -> Master:
  """float32 x, kept as `master` is."""
  return split(x) if isinstance(master, tuple) else x


def compute(master: Master) -> jax.Array:
  """The BF16 weight that is computed with."""
  return master[0] if isinstance(master, tuple) else master.astype(jnp.bfloat16)
