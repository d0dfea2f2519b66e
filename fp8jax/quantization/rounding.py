"""Rounding of float32 to a format's numbers: to the nearest, stochastically, or toward zero.

Source: OCP OFP8 v1.0, saturating conversion. Stochastic rounding for FP8 training: Wang et al. 2018
(arXiv:1812.08011); where it is needed: NVFP4's gradients (arXiv:2509.25149 §4.4).
Assumes: x is float32. The grid is found by its exponent bits, so that every step here is exact:
`log2` and `exp2` are not, and `lax.reduce_precision` rounds to IEEE formats without subnormals,
which turns 256 to 448 into NaN for E4M3. Logarithmic grids are tables, made on the host, and
comparisons with them. float32 subnormals count as 0, which some backends make of them anyway.

`axes` are those of x over which a tile extends: of a format with a grid per tile (LogTile), and of
no other.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.formats import Format
from fp8jax.grids import Float, Log, LogTile


def saturate(x, format: Format):
  """x within ±format.max, infinities too. NaN stays NaN, or +0 where the format has none."""
  clipped = jnp.clip(x, -format.max, format.max)
  return jnp.where(jnp.isnan(x), jnp.nan if format.has_nan else 0.0, clipped)


def step(x, format: Format):
  """(s, 1 / s), float32 powers of two: x lies between two neighbouring multiples of s.

  Args:
    x: float32 within ±format.max. At a power of two, s is the distance to the next larger. s is
      at least 2^-126: BF16's own steps below 2^-119 are float32 subnormals.
  """
  exponent = (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF
  least = max(127 + format.min_exponent, 1 + format.mantissa_bits)
  biased = jnp.maximum(exponent, least) - format.mantissa_bits
  powers = (biased << 23, (254 - biased) << 23)
  return tuple(jax.lax.bitcast_convert_type(p, jnp.float32) for p in powers)


def nearest(x, format: Format, axes=None):
  """float32 on the format's grid, ties to even, saturating: what `saturate` and a cast give.

  A cast there and back says the same, but XLA:GPU may drop such a pair of converts.
  """
  x = saturate(x, format)
  if isinstance(format.grid, Log | LogTile):
    below, above, is_up = _around(jnp.abs(x), format.grid, axes)
    return jnp.copysign(jnp.where(is_up, above, below), x)
  if has_fine_subnormals(format):
    bits, drop = jax.lax.bitcast_convert_type(x, jnp.int32), 23 - format.mantissa_bits
    half = (1 << drop - 1) - 1 + ((bits >> drop) & 1)
    return _without(bits + half, drop, x)
  unit, inverse = step(x, format)
  return jax.lax.round(x * inverse, jax.lax.RoundingMethod.TO_NEAREST_EVEN) * unit


def toward_zero(x, format: Format, axes=None):
  """float32 on the format's grid: the largest magnitude not beyond |x|; saturating.

  Of BF16 with fewer mantissa bits this masks bits out (arXiv:2405.18710). The mean is biased.
  """
  x = saturate(x, format)
  if isinstance(format.grid, Log | LogTile):
    return jnp.copysign(_around(jnp.abs(x), format.grid, axes)[0], x)
  if has_fine_subnormals(format):
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return _without(bits, 23 - format.mantissa_bits, x)
  unit, inverse = step(x, format)
  return jnp.trunc(x * inverse) * unit


def has_fine_subnormals(format: Format) -> bool:
  """Whether numbers are finer than those of `step`: with 8 exponent bits, but for float32's."""
  return (
    format.smallest < 2.0**-126 and isinstance(format.grid, Float) and format.mantissa_bits < 23
  )


def _without(bits, drop: int, x):
  """float32 of int32 `bits` with the last `drop` of them cleared; NaN where x is."""
  kept = jax.lax.bitcast_convert_type(bits & -(1 << drop), jnp.float32)
  return jnp.where(jnp.isnan(x), x, kept)


def _around(magnitude, grid: Log | LogTile, axes):
  """(the number at or below, the next above, whether the second is the nearer) on a log grid."""
  if isinstance(grid, LogTile):
    return _around_in_tile(magnitude, grid, axes)
  numbers, limits = grid.octave
  bits = jax.lax.bitcast_convert_type(jnp.maximum(magnitude, 1.0), jnp.int32)
  power = jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
  fraction = jax.lax.bitcast_convert_type(bits & 0x7FFFFF | 127 << 23, jnp.float32)
  how = "compare_all" if len(limits) <= 64 else "scan_unrolled"
  place = jnp.searchsorted(numbers[1:-1], fraction, side="right", method=how)
  below, above, limit = (jnp.asarray(t)[p] * power for t, p in (
    (numbers, place), (numbers, place + 1), (limits, place)))  # fmt: skip
  is_small = magnitude < 1
  is_up = jnp.where(is_small, magnitude > 0, magnitude >= limit)
  return jnp.where(is_small, 0.0, below), jnp.where(is_small, 1.0, above), is_up


# LogTile counts an octave as 2^20 units; two tables give 2^-units, one its upper half.
_UNITS = 20
_EXP = [(2.0 ** -(np.arange(1024) / scale)).astype(np.float32) for scale in (2**10, 2**_UNITS)]
_LOG = np.round(np.log2(1 + np.arange(1025) / 1024) * 2**_UNITS).astype(np.int32)


def _log2(x):
  """int32, 2^20 log2 x to within 1: a table of 1024 pieces of an octave, straight between."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  piece, rest = (bits >> 13) & 1023, bits & 8191
  left, right = (jnp.asarray(_LOG)[p] for p in (piece, piece + 1))
  return (((bits >> 23) - 127) << _UNITS) + left + ((right - left) * rest >> 13)


def _around_in_tile(magnitude, grid: LogTile, axes):
  """`_around` in a LogTile's grid, whose numbers a search by halves compares."""
  if axes is None:
    raise ValueError("LogFMT has a grid per tile: give the axes over which a tile extends")
  top = jnp.max(magnitude, axes, keepdims=True)
  least = jnp.min(jnp.where(magnitude > 0, magnitude, np.inf), axes, keepdims=True)
  top = jnp.where(top > 0, top, 1.0)
  least = jnp.maximum(jnp.minimum(least, top), top * np.float32(grid.smallest))
  spaces = 2 ** (grid.bits - 1) - 2
  whole, rest = jnp.divmod(_log2(top) - _log2(least) + 2, spaces)

  def number(place):
    """Descending from `top` at 0; 0 behind the last."""
    units = whole * place + rest * place // spaces
    coarse, fine = (jnp.asarray(t)[(units >> s) & 1023] for t, s in zip(_EXP, (10, 0)))
    power = jax.lax.bitcast_convert_type((127 - (units >> _UNITS)) << 23, jnp.float32)
    return jnp.where(place > spaces, 0.0, top * (coarse * fine * power))

  def halve(i, first):
    """The first place whose number is at or below lies less than twice `size` behind `first`."""
    size = 1 << (grid.bits - 2 - i)
    return jnp.where(number(first + size - 1) > magnitude, first + size, first)

  first = jax.lax.fori_loop(0, grid.bits - 1, halve, jnp.zeros(magnitude.shape, jnp.int32))
  below, above = number(first), number(jnp.maximum(first - 1, 0))
  return below, above, above - magnitude <= magnitude - below


def stochastic(x, format: Format, key, axes=None, dtype=None):
  """x in format.dtype or `dtype`, one of its two neighbours on the grid, with mean x; saturating.

  Up with probability (x - below) / (above - below), rounded down to a multiple of 2^-32: the mean
  is exact for x of a normal magnitude, and within 2^-32 of a step of x otherwise. Below 2^-119
  the neighbours are multiples of 2^-126, of BF16 too, whose grid is finer there. On a logarithmic
  grid the mean is within 2^-22 of x.

  Args:
    x: float32, any shape. A number on the grid, and one beyond it, has one neighbour.
    key: a jax.random key. The result is a function of it, the shape and x.

  Raises:
    ValueError: without a key.
  """
  if key is None:
    raise ValueError("stochastic rounding needs a key: give quantize(..., key=jax.random.key(...))")
  bounded = saturate(x, format)
  magnitude = jnp.where(jnp.isnan(x), 0.0, jnp.abs(bounded))
  if isinstance(format.grid, Log | LogTile):
    below, above, _ = _around(magnitude, format.grid, axes)
    share = (magnitude - below) / jnp.where(above > below, above - below, 1.0)
    is_up = _is_up(share, key)
    return jnp.copysign(jnp.where(is_up, above, below), bounded).astype(dtype or format.dtype)
  unit, inverse = step(magnitude, format)
  steps = magnitude * inverse
  below = jnp.floor(steps)
  is_up = _is_up(steps - below, key)
  rounded = jnp.copysign((below + is_up) * unit, bounded)
  return jnp.where(jnp.isnan(bounded), bounded, rounded).astype(dtype or format.dtype)


def _is_up(share, key):
  chance = (share * np.float32(2.0**32)).astype(jnp.uint32)
  return jax.random.bits(key, share.shape, jnp.uint32) < chance
