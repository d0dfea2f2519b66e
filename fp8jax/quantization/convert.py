"""From MXFP4 to FP8 blocks without a rounding."""

import math

import numpy as np

from fp8jax.errors import UserError
from fp8jax.formats import E2M1, E4M3
from fp8jax.quantization.scaled_matrix import ScaledMatrix, num_tiles

_BLOCK = 128


def mxfp4_to_block_fp8(matrix: ScaledMatrix, name: str = "the matrix") -> ScaledMatrix:
  """The same numbers as E4M3 in blocks of 128x128, with scales that are powers of two.

  A block of MXFP4 with exponent e has numbers m * 2^e, and m of E2M1 is a multiple of 1/2 up to 6,
  of at most two significant bits. Of a tile whose largest number is at least 2^k and below 2^(k+1)
  the scale is 2^(k - 8): E4M3 reaches 448 = 1.75 * 2^8, and the largest is 2^k or 1.5 * 2^k. E4M3
  has all multiples of 2^-9 with four significant bits, so that a number is exact where it is a
  multiple of 2^(k - 17). With the exponents e of blocks that are not all zero from e0 to e1 it is
  at least 2^(e0 - 1), and k <= e1 + 2: every number is exact where e1 - e0 <= 14. Beyond that it
  depends on the numbers, and each is checked.

  Args:
    matrix: [rows, columns] of E2M1, NumPy or JAX, with a power of two per 1x32.
    name: for the message.

  Returns:
    NumPy's arrays, the scale 1 for a tile of zeros.

  Source: OCP MX v1.0 §6.3 (MXFP4); weight blocks of DeepSeek-V3 (arXiv:2412.19437) §3.3.

  Raises:
    ValueError: another format, tile, or scales that are no powers of two.
    UserError: a tile has a number that E4M3 has not under the tile's scale; names it.

  Example:
    >>> import jax.numpy as jnp, fp8jax
    >>> from fp8jax.recipe.served import SERVED
    >>> q = fp8jax.quantize(jnp.linspace(-3, 3, 128).reshape(1, 128), SERVED["mxfp4a16"].fwd.rhs)
    >>> blocks = fp8jax.mxfp4_to_block_fp8(q)
    >>> blocks.tile, bool((fp8jax.dequantize(blocks) == fp8jax.dequantize(q)).all())
    ((128, 128), True)
  """
  values, grid = _values(matrix, name)
  rows, columns = values.shape
  tiles = tuple(num_tiles(n, _BLOCK) for n in (rows, columns))
  codes, scales = np.zeros((rows, columns), E4M3.dtype), np.ones(tiles, np.float32)
  for row, column in np.ndindex(*tiles):
    part = tuple(slice(i * _BLOCK, (i + 1) * _BLOCK) for i in (row, column))
    one = values[part]
    largest = float(np.abs(one).max())
    shift = 0 if largest == 0 else max(math.frexp(largest)[1] - 1 - 8, -126)
    made = np.ldexp(one, -shift)
    codes[part] = made.astype(E4M3.dtype)
    if (lost := codes[part].astype(np.float64) != made).any():
      first, used = one[lost][0], grid[part][one != 0]
      span = used.max() - used.min()
      raise UserError(
        f"{name}: the tile of rows from {row * _BLOCK} and columns from {column * _BLOCK} spans "
        f"{span} octaves of block exponents, and {first:.6g} is no E4M3 number times its scale "
        f"2^{shift}; {lost.sum()} of {one.size} are not. Dequantize the matrix instead"
      )
    scales[row, column] = np.ldexp(np.float32(1), shift)
  return ScaledMatrix(codes, scales, (_BLOCK, _BLOCK))  # pyright: ignore  (NumPy's arrays)


def _values(matrix: ScaledMatrix, name: str) -> tuple[np.ndarray, np.ndarray]:
  """(float64 numbers, exponents of their blocks) [rows, columns]; raises as its caller."""
  data, scale = np.asarray(matrix.data), np.asarray(matrix.scale, np.float32)
  mantissa, exponent = np.frexp(scale)
  if matrix.tile != (1, 32) or data.dtype != E2M1.dtype or not (mantissa == 0.5).all():
    raise ValueError(
      f"{name}: {data.dtype} with tile={matrix.tile}; expected float4_e2m1fn with a power of two "
      "per (1, 32)"
    )
  # In float64 no product is rounded or leaves the range.
  grid = np.repeat(exponent.astype(np.int64) - 1, 32, 1)[:, : data.shape[1]]
  return np.ldexp(data.astype(np.float64), grid), grid
