"""MXFP4 as FP8 blocks, against exact rational arithmetic."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from fp8jax.errors import UserError
from fp8jax.quantization.convert import mxfp4_to_block_fp8
from fp8jax.quantization.scaled_matrix import ScaledMatrix

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def _matrix(rng, shape, low, high, smallest=1):
  """Blocks of exponents from low to high, both there; some blocks of zeros far outside."""
  codes = rng.integers(smallest, 8, shape) + 8 * rng.integers(0, 2, shape)
  exponents = rng.integers(low, high + 1, (shape[0], -(-shape[1] // 32)))
  exponents[0, 0], exponents[1, 1] = low, high
  codes[0, 0], codes[1, 33] = 1, 7  # the smallest and the largest number
  exponents[3:5] = 100
  codes[3:5] = 8 * (codes[3:5] > 7)  # zeros of both signs
  data = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
  return ScaledMatrix(data, np.ldexp(np.float32(1), exponents), (1, 32)), codes, exponents


def _exact(codes, exponents):
  sign = np.where(codes > 7, -1, 1)
  return [
    [
      int(sign[i, j]) * Fraction(E2M1[codes[i, j] % 8]) * Fraction(2) ** int(exponents[i, j // 32])
      for j in range(codes.shape[1])
    ]
    for i in range(codes.shape[0])
  ]


@pytest.mark.parametrize("low, high", [(-3, 11), (-126, -112), (106, 120)])
def test_blocks_that_span_14_octaves_are_exact(rng, low, high):
  matrix, codes, exponents = _matrix(rng, (140, 160), low, high)
  made = mxfp4_to_block_fp8(matrix)
  assert made.data.dtype == ml_dtypes.float8_e4m3fn and made.tile == (128, 128)
  assert made.scale.shape == (2, 2) and (np.frexp(made.scale)[0] == 0.5).all()
  want = _exact(codes, exponents)
  for i, j in np.ndindex(140, 160):
    got = Fraction(float(made.data[i, j])) * Fraction(float(made.scale[i // 128, j // 128]))
    assert got == want[i][j]
  zeros = np.asarray(made.data[3:5]).view(np.uint8)
  np.testing.assert_array_equal(zeros, np.where(codes[3:5] > 7, 128, 0))


def test_beyond_14_octaves_the_numbers_decide(rng):
  matrix, *_ = _matrix(rng, (128, 128), -4, 11)
  with pytest.raises(UserError, match="w: the tile of rows from 0 and columns from 0 spans 15"):
    mxfp4_to_block_fp8(matrix, "w")
  # Without its smallest numbers the lowest block is one of multiples of 1.
  data, scale = np.array(matrix.data), np.array(matrix.scale)
  values = data.astype(np.float32)
  data[(values % 1 != 0) & (np.repeat(scale, 32, 1) == 2.0**-4)] = 1
  made = mxfp4_to_block_fp8(ScaledMatrix(data, scale, (1, 32)))
  back = made.data.astype(np.float64) * made.scale.astype(np.float64)
  np.testing.assert_array_equal(back, data.astype(np.float64) * np.repeat(scale, 32, 1))


def test_a_tile_of_zeros_has_scale_1_and_what_is_no_mxfp4_is_refused():
  zeros = np.zeros((4, 64), ml_dtypes.float4_e2m1fn)
  made = mxfp4_to_block_fp8(ScaledMatrix(zeros, np.full((4, 2), 2.0**-90, np.float32), (1, 32)))
  assert made.scale == 1 and not made.data.astype(np.float32).any()
  for scale, tile in ((np.full((4, 2), 3.0, np.float32), (1, 32)), (np.ones((4, 4)), (1, 16))):
    with pytest.raises(ValueError, match="expected float4_e2m1fn with a power of two"):
      mxfp4_to_block_fp8(ScaledMatrix(zeros, scale, tile))
