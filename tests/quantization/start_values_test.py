"""Weights that round to given codes: where there are any, and how far they miss elsewhere."""

import jax
import ml_dtypes
import numpy as np
import oracle
import pytest

from fp8jax.quantization import start_values as start_values_lib
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.quantization.start_values import first_level_amax
from fp8jax.recipe.quant import Quant
from fp8jax.recipe.served import SERVED

start_values = jax.jit(start_values_lib.start_values, static_argnames="quant")
_INT4, _MX4, _NV4 = (SERVED[n].fwd.rhs for n in ("w4a16_g64", "mxfp4a16", "nvfp4a16"))
_GRID = {"int4": np.arange(-7.0, 8), "e2m1": np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1,
                                                       1.5, 2, 3, 4, 6])}  # fmt: skip


def _codes(rng, quant: Quant, largest: float, rows=6, tiles=4):
  """(codes, their float64 values): the largest of every tile is given, the last tile is partial."""
  k, grid = quant.tile[1], _GRID[quant.format.name]
  data = rng.choice(grid[np.abs(grid) <= largest], (rows, tiles * k))
  data[:, ::k] = largest * rng.choice([-1, 1], (rows, tiles))
  data = data[:, : tiles * k - k // 2].astype(quant.format.dtype)
  scale = rng.random((rows, tiles), np.float32) + 0.5
  if quant is _MX4:
    scale = np.ldexp(np.float32(1), rng.integers(-9, 9, (rows, tiles))).astype(np.float32)
  if quant is _NV4:  # as GPTQ keeps them: those of the weights before it
    scale = np.round(scale * 8).astype(np.float32) / 8
    scale[0, 0] = 448 / 256
  wide = np.repeat(scale, k, axis=1)[:, : data.shape[1]]
  return ScaledMatrix(data, scale, quant.tile), data.astype(np.float64) * wide


@pytest.mark.parametrize(
  "quant, largest, differs",
  [
    (_INT4, 7, False), (_INT4, 5, True), (_INT4, 0, False), (_MX4, 6, False), (_MX4, 4, False),
    (_MX4, 3, False), (_MX4, 2, True), (_NV4, 6, False), (_NV4, 4, True),
  ],
)  # fmt: skip
def test_codes_come_back_exactly_where_the_scale_does(rng, quant, largest, differs):
  codes, values = _codes(rng, quant, largest)
  weights, share, error = start_values(codes, quant)
  if not differs:
    np.testing.assert_allclose(weights, values, rtol=2.0**-22)
  rule = quant.scale.value
  data, scale = oracle.quantize(weights, quant.format.name, quant.tile, rule)
  other = data.astype(np.float64) != codes.data.astype(np.float64)
  assert share == pytest.approx(other.mean(), rel=1e-6) and bool(share) == differs
  missed = np.linalg.norm(data.astype(np.float64) * scale - values) / max(np.linalg.norm(values), 1)
  if differs:
    np.testing.assert_allclose(error, missed, rtol=1e-5)
  # Twice E2M1's codes up to 2 are codes too: the same values under half the scale.
  assert bool(error > 1e-6) == (differs and (quant, largest) != (_MX4, 2))


@pytest.mark.parametrize("largest", [6, -8])
def test_of_a_tile_whose_scale_is_lost_one_code_is(rng, largest):
  """6 of INT4 becomes 7, and -8, as others write it, -7: under the given scale, which stays."""
  codes, values = _codes(rng, _INT4, 6)
  data = np.asarray(codes.data, np.int8).copy()
  k = _INT4.tile[1]
  data[:, ::k] = largest
  for at in range(1, k):  # no second element of that size
    part = data[:, at::k]
    part[np.abs(part) >= 6] = 5
  scale = np.repeat(codes.scale, k, axis=1)[:, : data.shape[1]].astype(np.float64)
  weights, share, error = start_values(ScaledMatrix(data, codes.scale, codes.tile), _INT4)
  again, _ = oracle.quantize(weights, "int4", _INT4.tile, "f32")
  want = data.copy()
  want[:, ::k] = np.copysign(7, largest)
  np.testing.assert_array_equal(again.astype(np.int8), want)
  assert share == pytest.approx(codes.scale.size / data.size)
  missed = np.linalg.norm(codes.scale.astype(np.float64))
  np.testing.assert_allclose(error, missed / np.linalg.norm(data * scale), rtol=1e-5)


def test_no_weights_round_to_codes_whose_largest_is_below_the_formats(rng):
  """Of any weights; for powers of two below half of it."""
  w = rng.standard_normal((512, 64)).astype(np.float32) * rng.lognormal(0, 3, (512, 1)).astype("f4")
  for quant, least in ((_INT4, 7), (_MX4, 3)):
    data, _ = oracle.quantize(w, quant.format.name, quant.tile, quant.scale.value)
    tiles = np.abs(data.astype(np.float64)).reshape(512, -1, quant.tile[1])
    assert tiles.max(-1).min() == least


def test_the_amax_of_a_first_level_has_it_to_the_bit(rng):
  for amax in np.float32(2.0 ** rng.uniform(-12, 4, 40)):
    scale = oracle.two_level(amax, amax, "e2m1")[1]
    made = first_level_amax(float(scale), _NV4)
    assert oracle.two_level(made, made, "e2m1")[1] == scale


def test_codes_of_other_tiles_are_refused():
  codes = ScaledMatrix(np.zeros((2, 128), ml_dtypes.int4), np.ones((2, 1), np.float32), (1, 128))
  with pytest.raises(ValueError, match="scale per .1, 128. are no weights of .*expected its tile"):
    start_values(codes, _INT4)
