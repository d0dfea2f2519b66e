"""Tensor statistics against float64 NumPy: of one tensor, of its parts, of its multiples."""

import numpy as np
import pytest

from fp8jax.quantization import quantize, tensor_stats
from fp8jax.recipe.library import E4M3, RECIPES
from fp8jax.recipe.quant import Quant, Static


def test_statistics_equal_numpy(rng):
  x = (rng.standard_normal((32, 64)) * np.exp(3 * rng.standard_normal((32, 64)))).astype(np.float32)
  x[3, 4], x[5] = np.nan, 0.0
  quant = Quant(E4M3, source=Static())
  scale = np.float32(4.0) * np.float32(1 / 448)
  narrow = quantize.quantize(x, quant, amax=np.float32(4.0))
  got = tensor_stats.summary(tensor_stats.statistics(x, narrow, quant))
  good = np.where(np.isnan(x), 0, x).astype(np.float64)
  back = np.clip(good / scale, -448, 448).astype(np.float32).astype(E4M3.dtype).astype(np.float64)
  back = back * scale
  assert np.isnan(got["amax"]) and got["nonfinite"] == 1
  assert got["rms"] == pytest.approx(np.sqrt((good**2).mean()), rel=1e-5)
  assert got["underflow"] == ((good != 0) & (back == 0)).sum() / (good != 0).sum()
  assert got["saturation"] == (np.abs(good) > 464 * scale).sum() / good.size
  want = (good**4).mean() / (good**2).mean() ** 2
  assert got["kurtosis"] == pytest.approx(want, rel=1e-5) and want > 30
  assert got["smallest_scale"] == got["largest_scale"] == scale
  want = 10 * np.log10((good**2).sum() / ((back - good) ** 2).sum())
  assert got["snr_db"] == pytest.approx(want, abs=1e-3)


def test_statistics_of_parts_combine(rng):
  x = rng.standard_normal((64, 32)).astype(np.float32)
  parts = [tensor_stats.statistics(part, None, None) for part in (x[:16], x[16:])]
  whole = tensor_stats.statistics(x, None, None)
  np.testing.assert_allclose(tensor_stats.combine(*parts), whole, rtol=1e-6)
  np.testing.assert_allclose(tensor_stats.combine_all(np.stack(parts), 0), whole, rtol=1e-6)
  np.testing.assert_array_equal(
    tensor_stats.combine(tensor_stats.nothing((tensor_stats.LOUD,)), parts[0]), parts[0]
  )


@pytest.mark.parametrize("factor", [2.0**15, 2.0**-9])
def test_statistics_of_a_multiple_are_the_rescaled_ones(factor):
  """Powers of two: exactly, in NumPy's float32; gradients are seen under a loss scale."""
  x = np.random.default_rng(0).standard_normal((32, 256), np.float32)
  x[0, 0] = 0
  quant = RECIPES["block_128"].dgrad.lhs
  one, other = (
    tensor_stats.statistics(y, quantize.quantize(y, quant=quant, contraction=1), quant)
    for y in (x, x * np.float32(factor))
  )
  np.testing.assert_array_equal(tensor_stats.rescaled(one, factor), other)
