"""The Hadamard rotation of a GEMM operand, applied before quantization.

x' = (x * signs) . H / sqrt(size), in blocks of `size`, with Sylvester's H, for multiples of 12, 20
and 28 times one of Paley's (Kronecker product; HALO, arXiv:2501.02625). The rotation is orthogonal.
Along the contraction both operands get the same one, so that the product does not change and
nothing is undone; along the rows of one operand the product is rotated back. It spreads a lone
large element over its block.

Source: NVFP4 pretraining (arXiv:2509.25149 §4.2 and appendix C). The signs come BEFORE H: after
it they would change no magnitude, and nothing would be random (the bug of Quartet's main branch).
Assumes: the same signs in every block; unless they are fresh in every layer and step too, which
that paper finds enough.
"""

import functools
import hashlib
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.recipe.quant import HADAMARD_ORDERS, Hadamard

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


@functools.cache
def paley(order: int) -> np.ndarray:
  """float32 [order, order] of ±1 with orthogonal rows: 12, 20 by Paley's first construction from
  the squares modulo order - 1, 28 by his second from those modulo 13."""
  prime = order - 1 if order % 8 == 4 and order != 28 else order // 2 - 1
  squares = {k * k % prime for k in range(1, prime)}
  of = np.asarray([0] + [1 if k in squares else -1 for k in range(1, prime)], np.float32)
  jacobsthal = of[(np.arange(prime)[:, None] - np.arange(prime)) % prime]
  bordered = np.zeros((prime + 1, prime + 1), np.float32)
  bordered[0, 1:], bordered[1:, 1:] = 1, jacobsthal
  if prime % 4 == 3:
    bordered[1:, 0] = -1
    return bordered + np.eye(prime + 1, dtype=np.float32)
  bordered[1:, 0] = 1
  return np.kron(bordered, np.asarray([[1, 1], [1, -1]], np.float32)) + np.kron(
    np.eye(prime + 1, dtype=np.float32), np.asarray([[1, -1], [-1, -1]], np.float32)
  )


def rotate(x, how: Hadamard, axis: int, key=None, *, inverse: bool = False):
  """`hadamard` by a value of a recipe.

  Args:
    key: of "fresh" signs: two operands with the same key are rotated alike.

  Raises:
    ValueError: fresh signs without a key.
  """
  vector: Any = {"fixed": signs, "none": np.ones, "fresh": lambda _: None}[how.signs](how.size)
  if vector is None:
    if key is None:
      raise ValueError(f"{how} draws its signs: give a key, such as signs_key=jax.random.key(...)")
    vector = jax.random.rademacher(key, (how.size,), jnp.float32)
  elif how.signs == "none":
    vector = None
  return hadamard(x, how.size, axis, vector, inverse=inverse)


def hadamard(x, size: int, axis: int, vector: Any = "fixed", *, inverse: bool = False):
  """float32 of x's shape, every run of `size` along `axis` rotated.

  Rounds of sums and differences, all in float32 and in one order: the signs are exact, and one
  rounding follows from the factor 1 / sqrt(size) unless size is a power of four.

  Args:
    x: [rows, columns], any float dtype.
    size: divides x.shape[axis]; see recipe.quant.Hadamard.
    vector: [size] of ±1 that multiply x first; "fixed" for `signs(size)`, None for none.
    inverse: whether to rotate back.

  Raises:
    ValueError: where size does not divide. A padded contraction would need padded data in both
      operands.
  """
  x = jnp.moveaxis(x.astype(jnp.float32), axis, -1)
  if x.shape[-1] % size:
    raise ValueError(
      f"K={x.shape[-1]} must be a multiple of Hadamard.size={size}: pad the layer, shard K less, "
      "or use a recipe without a transform"
    )
  vector = signs(size) if isinstance(vector, str) else vector
  y = x.reshape(*x.shape[:-1], -1, size)
  y = y if inverse or vector is None else y * vector
  blocks = y.shape[:-1]
  order = max(n for n in HADAMARD_ORDERS if size % n == 0 and _is_power(size // n))
  if order > 1:
    matrix, parts = paley(order), y.reshape(*blocks, -1, order)
    matrix = matrix.T if inverse else matrix
    terms = [parts[..., k : k + 1] * matrix[k] for k in range(order)]
    y = functools.reduce(operator.add, terms).reshape(*blocks, size)
  for level in range((size // order).bit_length() - 1):
    half = order * 2**level
    a, b = jnp.moveaxis(y.reshape(*blocks, -1, 2, half), -2, 0)
    y = jnp.stack([a + b, a - b], axis=-2).reshape(*blocks, size)
  y = y * np.float32(1 / math.sqrt(size))
  y = y * vector if inverse and vector is not None else y
  return jnp.moveaxis(y.reshape(x.shape), -1, axis)


def _is_power(n: int) -> bool:
  return n & (n - 1) == 0
