"""Formats that no dtype rounds to: integers, floats in a wider dtype; against NumPy, ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden import conformance

import fp8jax
from fp8jax.formats import E2M1, E2M3, E3M2, E4M3, FORMATS, INT4, INT8, Format
from fp8jax.grids import Float
from fp8jax.quantization import clipping, quantize, rounding, tensor_stats
from fp8jax.recipe.gemm import Gemm, Recipe
from fp8jax.recipe.quant import Quant, Scale

E2M1_WIDE = Format("e2m1_in_32", jnp.dtype(jnp.float32), E2M1.grid)
E4M3_240 = Format("e4m3_240_native", jnp.dtype(jnp.float8_e4m3), Float(4, 3, 7, 240.0))
BY_DTYPE = {E3M2: ml_dtypes.float6_e3m2fn, E2M3: ml_dtypes.float6_e2m3fn,
            E2M1_WIDE: ml_dtypes.float4_e2m1fn, E4M3_240: ml_dtypes.float8_e4m3}  # fmt: skip


def _inputs(grid: np.ndarray) -> np.ndarray:
  """All BF16 numbers; the grid, its midpoints and their float32 neighbours; beyond the end."""
  ties = (grid[1:] + grid[:-1]) / 2
  ends = np.array([grid[-1] * 1.25, grid[-1] * 4])
  near = conformance.around(np.concatenate([grid, ties, ends]))
  return np.concatenate([conformance.all_bfloat16("any"), near])


def _as_float(x) -> np.ndarray:
  return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("fmt", BY_DTYPE, ids=str)
def test_a_float_grid_rounds_as_the_dtype_of_these_numbers(fmt):
  dtype = BY_DTYPE[fmt]
  codes = np.arange(2 ** (fmt.bits - 1), dtype=np.uint8).view(dtype).astype(np.float64)
  x = _inputs(codes[np.isfinite(codes)])
  x = x if fmt.has_nan else x[~np.isnan(x)]
  with np.errstate(invalid="ignore"):
    want = np.clip(x, -fmt.max, fmt.max).astype(dtype)
  got = jax.jit(lambda x: quantize.cast(x, fmt))(x)
  assert got.dtype == fmt.dtype
  assert conformance.differences(_as_float(got), _as_float(want)) == 0


@pytest.mark.parametrize("fmt", [INT8, INT4], ids=str)
def test_an_integer_grid_rounds_to_even_and_saturates_symmetrically(fmt):
  most = 2 ** (fmt.bits - 1) - 1
  x = _inputs(np.arange(most + 1, dtype=np.float64))
  finite = np.where(np.isnan(x), 0, x).astype(np.float64)
  want = np.clip(np.rint(np.clip(finite, -2.0 * most, 2.0 * most)), -most, most)
  got = jax.jit(lambda x: quantize.cast(x, fmt))(x)
  assert got.dtype == jnp.int8 and np.array_equal(_as_float(got), want + 0.0)


def test_only_a_dtype_with_these_very_numbers_casts_natively():
  natives = {"e4m3", "e5m2", "e3m4", "e2m1", "e8m0", "bf16", "f16", "f32"}
  assert {f.name for f in FORMATS.values() if f.is_native} == natives
  assert E4M3_240.is_native and not E2M1_WIDE.is_native


def test_numbers_of_an_integer_grid_are_those_of_its_bits():
  got = (INT8.max, INT8.smallest, 2.0**INT8.min_exponent, INT8.max_exponent, INT8.bits)
  assert got == (127.0, 1.0, 64.0, 6, 8) and INT8.is_low_bit
  assert (INT4.max, INT4.smallest, INT4.bits) == (7.0, 1.0, 4)


@pytest.mark.parametrize("fmt", [INT8, E3M2], ids=str)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_in_the_mean(fmt):
  x = jnp.full(2**16, 2.25 if fmt is INT8 else 2.125, jnp.float32)
  got = _as_float(rounding.stochastic(x, fmt, jax.random.key(0)))
  step = 1.0 if fmt is INT8 else 0.5
  assert set(np.unique(got)) == {2.0, 2.0 + step}
  assert abs(got.mean() - float(x[0])) < 4 * step * np.sqrt(0.25 / 2**16)


def test_saturation_counts_what_rounds_beyond_the_last_integer():
  x = jnp.asarray([[127.0, 127.49, 127.51, -128.0, 3.0, 0.4]], jnp.float32)
  quantized = quantize.quantize(x, Quant(INT8, scale=Scale.POW2))
  assert float(quantized.scale[0, 0]) == 2.0  # 128 / 127 rounds up
  assert INT8.rounds_to_max == 127.5 and E4M3.rounds_to_max == 464


def _integers(rng, *shape):
  """Integers up to 127, with a 127 in every row and column: scales of powers of two are 1."""
  x = rng.integers(-127, 128, shape).astype(np.float32)
  x[np.arange(max(shape)) % shape[0], np.arange(max(shape)) % shape[1]] = 127
  return x


@pytest.mark.parametrize("tile", [(0, 0), (1, 0)], ids=["tensor", "row"])
def test_a_recipe_of_int8_multiplies_integers_exactly(rng, tile):
  quant = Quant(INT8, tile=tile, scale=Scale.POW2)
  gemm = Gemm(quant, quant)
  recipe = Recipe("int8", gemm, gemm, gemm)
  x, w, g = _integers(rng, 48, 96), _integers(rng, 96, 32), _integers(rng, 48, 32)

  @jax.jit
  def products(x, w, g):
    y, pull = jax.vjp(lambda x, w: fp8jax.dot("TD,DF->TF", x, w, recipe), x, w)
    return y, *pull(g)

  y, dx, dw = products(x, w, g)
  exact = [a.astype(np.int64) for a in (x, w, g)]
  assert np.array_equal(np.asarray(y), exact[0] @ exact[1])
  assert np.array_equal(np.asarray(dx), exact[2] @ exact[1].T)
  assert np.array_equal(np.asarray(dw), exact[0].T @ exact[2])


def test_a_rounded_int8_product_errs_as_much_as_its_steps_say(rng):
  x, w = (
    rng.normal(size=(64, 256)).astype(np.float32),
    rng.normal(size=(256, 64)).astype(np.float32),
  )
  quant = Quant(INT8, tile=(1, 0))
  recipe = Recipe("int8", *(Gemm(quant, quant),) * 3)
  product = jax.jit(lambda x, w: fp8jax.dot("TD,DF->TF", x, w, recipe))
  y = np.asarray(product(x, w), np.float64)

  def rounded(a, axis):
    scale = np.abs(a).max(axis, keepdims=True).astype(np.float64) / 127
    return np.rint(a / scale) * scale

  want = rounded(x, 1) @ rounded(w, 0)
  # Scales are float32 here, and an element on a tie may fall to either side.
  assert np.linalg.norm(y - want) < 1e-3 * np.linalg.norm(want)


def test_mse_clipping_knows_that_integers_are_rounded_not_truncated():
  """Magnitudes on the integers below 127 lose nothing at amax 127; truncation would."""
  magnitudes = np.arange(1, 128, dtype=np.float32)
  counts = np.asarray(tensor_stats._bin_counts(jnp.asarray(magnitudes)))
  chosen = clipping.amax_of("mse", 99.9, counts, Quant(INT8), 127.0)
  assert chosen > 120


def test_a_wider_dtype_stores_what_it_takes():
  wide = Format("wide", jnp.dtype(jnp.bfloat16), E3M2.grid)
  assert E3M2.dtype == E4M3.dtype and E3M2.dtype.itemsize == 1
  assert quantize.quantize(jnp.ones((4, 8)), Quant(wide)).data.dtype == jnp.bfloat16
