"""The Hadamard rotation of a GEMM operand, applied before quantization.

x' = (x * signs) . H / sqrt(size), in blocks of `size` along the contraction, with Sylvester's H and
a fixed vector of signs. The rotation is orthogonal, and both operands get the same one, so that the
product does not change and nothing is undone. It spreads a lone large element over its block.

Source: NVFP4 pretraining (arXiv:2509.25149 §4.2 and appendix C). The signs come BEFORE H: after
it they would change no magnitude, and nothing would be random (the bug of Quartet's main branch).
Assumes: the same signs in every block, layer and step, which that paper finds enough.
"""

import hashlib
import math

import jax.numpy as jnp
import numpy as np

# Transformer Engine's vector for blocks of 16.
_SIGNS_16 = "+++-+------+-+--"


def signs(size: int) -> np.ndarray:
  """float32 [size] of ±1, the same for ever: Transformer Engine's for 16, else SHAKE-256 bits."""
  if size == 16:
    is_minus = np.asarray([c == "-" for c in _SIGNS_16])
  else:
    digest = hashlib.shake_256(f"hadamard {size}".encode()).digest(-(-size // 8))
    is_minus = np.unpackbits(np.frombuffer(digest, np.uint8))[:size]
  return np.where(is_minus, -1, 1).astype(np.float32)


def hadamard(x, size: int, axis: int):
  """float32 of x's shape, every run of `size` along `axis` rotated.

  log2(size) rounds of sums and differences, all in float32: the signs are exact, and one rounding
  follows from the factor 1 / sqrt(size) unless size is a power of four.

  Args:
    x: [rows, columns], any float dtype.
    size: a power of two that divides x.shape[axis].

  Raises:
    ValueError: where it does not. A padded contraction would need padded data in both operands.
  """
  x = jnp.moveaxis(x.astype(jnp.float32), axis, -1)
  if x.shape[-1] % size:
    raise ValueError(
      f"K={x.shape[-1]} must be a multiple of Hadamard.size={size}: pad the layer, shard K less, "
      "or use a recipe without a transform"
    )
  y = x.reshape(*x.shape[:-1], -1, size) * signs(size)
  blocks = y.shape[:-1]
  for level in range(size.bit_length() - 1):
    half = 2**level
    a, b = jnp.moveaxis(y.reshape(*blocks, -1, 2, half), -2, 0)
    y = jnp.stack([a + b, a - b], axis=-2).reshape(*blocks, size)
  y = y * np.float32(1 / math.sqrt(size))
  return jnp.moveaxis(y.reshape(x.shape), -1, axis)
