"""Amaxes by percentile and by least squared error, beside the tensors themselves in float64."""

import jax
import numpy as np
import pytest

from fp8jax.quantization import clipping, quantize, tensor_stats
from fp8jax.recipe.library import E4M3, E5M2
from fp8jax.recipe.quant import Quant, Scale, Static


def counted(x):
  return np.asarray(_counted(x))


_counted = jax.jit(lambda x: tensor_stats.statistics(x, None, None, tensor_stats.COUNTED))


@pytest.fixture
def outliers(rng):
  """A normal distribution with zeros, and a few elements a thousand times as large."""
  x = rng.standard_normal((64, 512)).astype(np.float32)
  x[0], x[1, :3] = 0.0, (900.0, -1000.0, 4000.0)
  return x


def test_counts_of_parts_add_and_are_those_of_numpy(outliers):
  counts = counted(outliers)[tensor_stats.LOUD :]
  low, high = clipping.edges()
  keep = np.isfinite(high)
  bins = np.concatenate([low[keep], high[keep][-1:]])
  np.testing.assert_array_equal(counts[keep], np.histogram(np.abs(outliers), bins)[0])
  assert counts.sum() == outliers.size and np.all(high[17:4000] / low[17:4000] <= 1.0625)
  parts = tensor_stats.combine(counted(outliers[:10]), counted(outliers[10:]))
  np.testing.assert_array_equal(parts[tensor_stats.LOUD :], counts)


@pytest.mark.parametrize("percent", [50.0, 90.0, 99.9, 100.0])
def test_percentile_is_numpys_to_the_width_of_a_bin(outliers, percent):
  counts, amax = counted(outliers)[tensor_stats.LOUD :], float(np.abs(outliers).max())
  wanted = np.quantile(np.abs(outliers).astype(np.float64), percent / 100, method="higher")
  found = clipping.percentile(counts, percent, amax)
  assert wanted <= found <= 1.0625 * wanted and found <= amax


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [Scale.F32, Scale.POW2])
def test_least_error_is_that_of_quantizing_the_tensor(rng, format, scale):
  """No other amax that is tried has a smaller error, to the error of taking bins for elements."""
  quant = Quant(format, scale=scale, source=Static())
  x = (rng.standard_normal(4096) * np.exp(rng.standard_normal(4096))).astype(np.float32)
  x[:2] = (1e5, -3e4)
  x = x.reshape(64, 64)
  amax, error = float(np.abs(x).max()), {}
  back_of = jax.jit(lambda amax: quantize.quantize(x, quant, amax=amax).dequantize())
  for tried in amax * 2.0 ** (-np.arange(33) / 4):
    back = np.asarray(back_of(np.float32(tried)), np.float64)
    error[np.float32(tried)] = np.sum((back - x) ** 2)
  found = np.float32(clipping.least_error(counted(x)[tensor_stats.LOUD :], quant, amax))
  assert error[found] <= 1.05 * min(error.values())


def test_amax_of_zeros_and_of_the_largest_stays():
  counts, quant = np.zeros(tensor_stats.BINS), Quant(E4M3, source=Static())
  counts[0] = 10
  assert clipping.amax_of("mse", 99.0, counts, quant, 0.0) == 0.0
  counts[0], counts[2000] = 1e6, 1
  assert clipping.amax_of("percentile", 99.0, counts, quant, 3.0) == 3.0  # of zeros alone: no scale
  assert clipping.amax_of("amax", 99.0, counts, quant, 3.0) == 3.0
