"""Amaxes that clip: from counts of magnitudes, by percentile or by least squared error.

A scale from the largest magnitude spends the format's range on outliers. A smaller amax saturates
these and leaves more of the format to the rest. Sources: percentile calibration of Wu et al. 2020
(arXiv:2004.09602 §3.3); the least squared error of Banner et al. 2019 (arXiv:1810.05723), searched
instead of solved, since FP8 is no uniform grid. On the host, in float64.
"""

import numpy as np

from fp8jax.quantization import quantize, rounding
from fp8jax.quantization.tensor_stats import BINS, MANTISSA_BITS
from fp8jax.recipe.quant import Quant

METHODS = ("amax", "percentile", "mse")
# Amaxes that are tried: steps of a quarter of a binade, over eight binades below the largest.
_TRIED = 2.0 ** (-np.arange(33) / 4)
_POINTS = 4  # magnitudes that stand for those of a bin


def edges() -> tuple[np.ndarray, np.ndarray]:
  """(lowest magnitude, first one beyond) of each bin, float64 [BINS], at most infinite."""
  infinity = np.float32(np.inf).view(np.uint32)
  bits = np.arange(BINS + 1, dtype=np.uint32) << np.uint32(23 - MANTISSA_BITS)
  values = np.minimum(bits, infinity).view(np.float32).astype(np.float64)
  return values[:-1], values[1:]


def percentile(counts: np.ndarray, percent: float, amax: float) -> float:
  """The magnitude below which so many percent of all elements are, to a bin's width (6 %).

  Args:
    counts: float [BINS], of tensor_stats.
    percent: 0 to 100.
  """
  total = np.cumsum(np.asarray(counts, np.float64))
  index = int(np.searchsorted(total, percent / 100 * total[-1]))
  if index < 1 << MANTISSA_BITS:  # zeros
    return 0.0
  return min(float(edges()[1][min(index, BINS - 1)]), amax)


def least_error(counts: np.ndarray, quant: Quant, amax: float) -> float:
  """The amax whose scale leaves the least squared error of quantization.

  Args:
    counts: float [BINS], of tensor_stats.
    quant: format and kind of scale.
  """
  counts = np.asarray(counts, np.float64)
  used = np.flatnonzero(counts)
  low, high = (x[used, None] for x in edges())
  points = low + (high - low) * (np.arange(_POINTS) + 0.5) / _POINTS
  points = np.minimum(points, amax)
  tried = (amax * _TRIED).astype(np.float32)
  scales = np.asarray(quantize.amax_to_scale(tried, quant.format, quant.scale), np.float64)
  errors = []
  for scale in scales:
    scaled = np.minimum(points / scale, quant.format.max).astype(np.float32)
    back = np.asarray(rounding.nearest(scaled, quant.format), np.float64) * scale
    errors.append(np.sum(counts[used] * np.mean((back - points) ** 2, axis=1)))
  return float(tried[int(np.argmin(errors))])


def amax_of(method: str, percent: float, counts: np.ndarray, quant: Quant, amax: float) -> float:
  """The amax that a calibration method chooses; that of a tensor of zeros is 0."""
  if method == "amax" or not amax > 0 or not np.isfinite(amax):
    return amax
  if method == "mse":
    return least_error(counts, quant, amax)
  return percentile(counts, percent, amax) or amax
