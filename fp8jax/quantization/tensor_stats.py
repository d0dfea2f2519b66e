"""Statistics of a tensor and of its quantization error, as a few numbers that combine.

A quiet step asks for the amax alone, a loud one for all of STATISTICS and for a histogram. They are
chosen so that the statistics of parts (microbatches, chunks, devices) combine into those of the
whole: some by sum, the others by maximum. Shares and ratios are derived from them at the end, on
the host.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.quantization import scaled_matrix
from fp8jax.recipe.quant import Quant

STATISTICS = (
  "amax",  # NaN if any element is NaN
  "largest_scale",
  "minus_smallest_scale",
  "elements",
  "nonfinite",  # how many are NaN or infinite
  "nonzero",
  "underflowed",  # not zero before, zero after
  "saturated",  # so large that rounding would have left the format's range
  "squares",  # sum of squares
  "squared_error",  # of dequantised minus original
  "fourth_powers",  # sum of (_FOURTH * x)^4
  "total",  # sum
)
# Of `summary`: what only a quantized tensor has.
_OF_QUANTIZATION = ("underflow", "saturation", "smallest_scale", "largest_scale", "snr_db")
# The first so many combine by maximum, the others by sum.
_MAXIMA = 3
# Then come counts of a sample's elements by exponent e, 2^e <= |x| < 2^(e+1). The first
# has all below too (subnormals of float32 among them, zeros not), the last all finite ones above.
EXPONENTS = range(-48, 16)
# About so many elements are in the sample, whole rows at even distances: this bounds its cost.
_SAMPLED = 2**16
QUIET, LOUD = 1, len(STATISTICS) + len(EXPONENTS)
# A calibration also counts magnitudes, in bins by the exponent and first mantissa bits of float32.
MANTISSA_BITS = 4
BINS = 256 << MANTISSA_BITS
COUNTED = LOUD + BINS
# So that fourth powers of gradients down to 3e-13 and of activations up to 4e6 are float32 numbers.
_FOURTH = 2.0**10


def amax(x):
  """float32 scalar: the largest magnitude, NaN if any element is NaN, on every backend."""
  # A maximum alone may drop NaN: XLA:CPU's does.
  return jnp.where(jnp.isnan(x).any(), jnp.nan, jnp.max(jnp.abs(x)).astype(jnp.float32))


def amax_of_magnitudes(x):
  """float32 scalar: `amax` of float32 numbers without a sign, by one reduction: they are in the
  order of their bits, and every NaN comes after infinity."""
  bits = jnp.max(jax.lax.bitcast_convert_type(x, jnp.int32))
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def statistics(x, quantized, quant: Quant | None, width: int = LOUD):
  """float32 [width]: STATISTICS of the matrix x, then counts of a sample's EXPONENTS.

  A width of COUNTED adds the counts of all elements in bins of magnitude.

  Args:
    x: [rows, contraction], before quantization and in the orientation of `quantized`.
    quantized: x quantized by `quant`, a ScaledMatrix; anything where quant is None.
  """
  x = x.astype(jnp.float32)
  is_finite = jnp.isfinite(x)
  x_ = jnp.where(is_finite, x, 0.0)
  one, zero = jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
  largest, smallest, underflowed, saturated, error = one, one, zero, zero, zero
  if quant is not None:
    back = jnp.where(is_finite, quantized.dequantize(), 0.0)
    largest, smallest = jnp.max(quantized.scale), jnp.min(quantized.scale)
    underflowed = _count((x_ != 0) & (back == 0))
    scale = quantized.scale
    for axis in (0, 1):
      scale = scaled_matrix.expand(scale, axis, quantized.tile[axis], quantized.shape[axis])
    saturated = _count(is_finite & (jnp.abs(x_) > quant.format.rounds_to_max * scale))
    error = jnp.sum((back - x_) ** 2)
  values = jnp.stack([
    amax(x), largest, -smallest, jnp.float32(x.size), _count(~is_finite), _count(x_ != 0),
    underflowed, saturated, jnp.sum(x_ * x_), error, jnp.sum((x_ * _FOURTH) ** 4),
    jnp.sum(x_),
  ])  # fmt: skip
  sample = x[:: max(1, x.size // _SAMPLED)]
  parts = [values, exponent_counts(sample).astype(jnp.float32)]
  return jnp.concatenate([*parts, _bin_counts(x_)] if width == COUNTED else parts)


def with_range_of(x, values):
  """Statistics [LOUD or COUNTED] of rotated numbers -> with the amax and the bins of the tensor x
  itself, as a quiet step has them: scales that start from them are of other products too."""
  x = x.astype(jnp.float32)
  bins = [_bin_counts(jnp.where(jnp.isfinite(x), x, 0.0))] if values.size == COUNTED else []
  return jnp.concatenate([amax(x)[None], values[QUIET:LOUD], *bins])


def _bin_counts(x):
  """float32 [BINS]: how many magnitudes have these leading bits; subnormal numbers count as 0."""
  bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32) >> (23 - MANTISSA_BITS)
  return jnp.zeros(BINS, jnp.int32).at[bits.ravel()].add(1).astype(jnp.float32)


def exponent_counts(x):
  """int32 [len(EXPONENTS)]: how many elements of x have each exponent; zeros, NaN, inf have none.

  By the bits of float32: comparisons may take subnormals for zeros.
  """
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32).reshape(-1) & 0x7FFFFFFF
  field = bits >> 23
  bin_ = jnp.clip(field - 127 - EXPONENTS.start, 0, len(EXPONENTS) - 1)
  bin_ = jnp.where((bits == 0) | (field == 255), -1, bin_)
  return jnp.sum(bin_ == jnp.arange(len(EXPONENTS))[:, None], axis=1, dtype=jnp.int32)


def _count(mask):
  # In integers: float32 would stop at 2^24 if it added one by one.
  return jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)


def combine(a, b):
  """Statistics of two parts [..., S] -> those of the whole; S is QUIET or LOUD."""
  return jnp.concatenate(
    [larger(a[..., :_MAXIMA], b[..., :_MAXIMA]), a[..., _MAXIMA:] + b[..., _MAXIMA:]], axis=-1
  )


def larger(a, b):
  """Elementwise, NaN if either is NaN."""
  return jnp.where(jnp.isnan(a) | jnp.isnan(b), jnp.nan, jnp.maximum(a, b))


def combine_all(x):
  """Statistics of the parts along the first axis -> those of the whole."""
  largest = jnp.where(
    jnp.isnan(x[..., :_MAXIMA]).any(0), jnp.nan, jnp.max(x[..., :_MAXIMA], axis=0)
  )
  return jnp.concatenate([largest, jnp.sum(x[..., _MAXIMA:], axis=0)], axis=-1)


# By which power of a factor on the tensor each of STATISTICS changes.
_POWERS = (1, 1, 1, 0, 0, 0, 0, 0, 2, 2, 4, 1)


def rescaled(values, factor):
  """Statistics [..., S] of a tensor -> those of factor * tensor, its scales rescaled with it.

  Exact where factor is a power of two and nothing leaves float32's range.
  """
  powers = jnp.stack([factor**power for power in _POWERS]).astype(jnp.float32)
  plain = values[..., : len(_POWERS)] * powers[: values.shape[-1]]
  if values.shape[-1] == QUIET:
    return plain
  return jnp.concatenate([plain, _shifted(values[..., len(_POWERS) :], factor)], axis=-1)


def _shifted(counts, factor):
  """Counts by exponent of factor * tensor, factor a power of two; ends collect as they do."""
  bits = jax.lax.bitcast_convert_type(jnp.float32(factor), jnp.int32)
  to = jnp.arange(len(EXPONENTS)) + (bits >> 23) - 127
  to = jnp.clip(to, 0, len(EXPONENTS) - 1)
  return jnp.zeros_like(counts).at[..., to].add(counts)


def nothing(shape):
  """Statistics [..., S] of an empty part: `combine` with them changes nothing."""
  empty = jnp.asarray([0.0, -math.inf, -math.inf] + [0.0] * (COUNTED - _MAXIMA), jnp.float32)
  return jnp.broadcast_to(empty[: shape[-1]], shape)


def over_mesh(x, axes: tuple[str, ...]):
  """Statistics of this device's part -> those of all parts over mesh axes, inside `shard_map`."""
  if not axes:
    return x
  largest, total = x[..., :_MAXIMA], x[..., _MAXIMA:]
  has_nan = jax.lax.pmax(jnp.isnan(largest).astype(jnp.float32), axes)
  largest = jax.lax.pmax(jnp.where(jnp.isnan(largest), -jnp.inf, largest), axes)
  largest = jnp.where(has_nan > 0, jnp.nan, largest)
  return jnp.concatenate([largest, jax.lax.psum(total, axes)], axis=-1) if total.size else largest


def exponents(values) -> dict[str, Any]:
  """One site's counts by exponent [LOUD], on the host, without empty ends.

  Returns:
    {"first_exponent": e, "shares": share of the sample's nonzero finite elements with exponent e,
    e + 1, ...}; no shares where nothing was counted.
  """
  counts = [float(c) for c in values[len(STATISTICS) :]]
  filled = [i for i, c in enumerate(counts) if c > 0]
  if not filled:
    return {"first_exponent": EXPONENTS.start, "shares": []}
  first, last, total = filled[0], filled[-1], sum(counts)
  shares = [float(f"{c / total:.3g}") for c in counts[first : last + 1]]
  return {"first_exponent": EXPONENTS[first], "shares": shares}


def unquantized_summary(values) -> dict[str, float]:
  """`summary` of a tensor that nothing quantizes, without the numbers of a quantization."""
  return {k: v for k, v in summary(values).items() if k not in _OF_QUANTIZATION}


def summary(values) -> dict[str, float]:
  """One site's statistics [LOUD], on the host, as what people read.

  Returns:
    amax, rms, mean (tensor's units), variance (their square; rounding hides what is below some
    1e-7 of the squared mean); underflow (share of nonzero elements that became zero), saturation
    (share of elements clipped); smallest_scale, largest_scale; snr_db, 10 log10 of signal over
    error power (infinite without error); nonfinite (a count); kurtosis, mean fourth power over
    squared mean square: 3 for a normal distribution about 0, `elements` if one holds everything,
    NaN where fourth powers underflow. Elements that are not finite count as 0.
  """
  s = dict(zip(STATISTICS, map(float, values[: len(STATISTICS)]), strict=True))
  elements, nonzero = max(s["elements"], 1.0), max(s["nonzero"], 1.0)
  noise, signal = s["squared_error"], s["squares"]
  if noise > 0 and signal > 0:
    snr = 10 * math.log10(signal / noise)
  else:
    snr = math.inf
  fourth, mean = s["fourth_powers"] / _FOURTH**4, s["total"] / elements
  return {
    "amax": s["amax"],
    "rms": math.sqrt(signal / elements),
    "mean": mean,
    "variance": max(signal / elements - mean**2, 0.0),
    "underflow": s["underflowed"] / nonzero,
    "saturation": s["saturated"] / elements,
    "smallest_scale": -s["minus_smallest_scale"],
    "largest_scale": s["largest_scale"],
    "snr_db": snr,
    "nonfinite": s["nonfinite"],
    "kurtosis": elements * fourth / signal**2 if fourth > 0 else math.nan,
  }
