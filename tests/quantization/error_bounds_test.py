"""Errors of dequantize(quantize(x)) against the bounds that a format and a scale rule promise."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tolerances import QUANTIZE_SLACK

from fp8jax.formats import FORMATS
from fp8jax.quantization import quantize, scaled_matrix
from fp8jax.recipe.quant import WHOLE, Quant, Rounding, Scale

SHAPE = (5, 40)
# Partial last tiles along either axis, and one tile.
TILES = [(1, 16), (3, 32), (WHOLE, WHOLE)]
# Those of FP8 recipes; papers_test has the papers'.
KINDS = [Scale.F32, Scale.POW2, Scale.FLOOR, Scale.EVEN, Scale.E4M3_OVER_F32]
NARROW = [FORMATS[name] for name in ("e4m3", "e5m2", "e3m4", "e2m1", "int8", "e3m4_30")]


def largest_ratio(fmt, kind: Scale, scale, tensor_amax) -> np.ndarray:
  """amax / (scale * fmt.max) that the rule allows; above 1, the largest elements saturate."""
  binade = 2.0 ** (fmt.max_exponent + 1) / fmt.max
  if kind is Scale.E4M3_OVER_F32:
    s8 = scale * 448 * fmt.max / tensor_amax  # 0 / 0 for zeros, which err nowhere
    return np.where(s8 < 2.0**-6 * 1.01, 1.5, 17 / 16)
  limits = {Scale.FLOOR: binade, Scale.EVEN: binade * (1 - 2.0 ** -(fmt.mantissa_bits + 2))}
  return np.asarray(max(limits.get(kind, 1.0), 1.0))


def arrays():
  """Tiny to huge float32, many equal elements, no subnormals (which XLA:CPU flushes)."""
  number = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
  near = st.floats(-8, 8, width=32, allow_subnormal=False)
  return hnp.arrays(np.float32, SHAPE, elements=number | near, fill=near)


# With other numbers of bits: slow.
LIKE_E4M3 = ("e5m2", "e3m4", "e3m4_30")


# EDEN moves scales: tests/recipe/papers_test.py.
@pytest.mark.parametrize(
  "rounding", [r for r in Rounding if r is not Rounding.EDEN], ids=lambda r: r.value
)
@pytest.mark.parametrize("fmt", [
  pytest.param(f, marks=[pytest.mark.slow] * (f.name in LIKE_E4M3)) for f in NARROW
], ids=str)  # fmt: skip
@hypothesis.settings(max_examples=30, deadline=None, derandomize=True, database=None)
@hypothesis.given(
  x=arrays(), kind=st.sampled_from(KINDS), tile=st.sampled_from(TILES), seed=st.integers(0, 9)
)
def test_error_is_within_the_formats_bound(fmt, rounding, x, kind, tile, seed):
  """Half a step of the grid under the tile's scale; a whole one but to the nearest."""
  quant = Quant(fmt, tile, kind, rounding=rounding)
  made = quantize.quantize(jnp.asarray(x), quant, key=jax.random.key(seed))  # compiled op by op
  scale = np.asarray(made.scale, np.float64)
  assert np.all((scale >= 2.0**-126) & np.isfinite(scale))
  tiles = np.asarray(made.data).astype(np.float64)
  for axis in (0, 1):
    scale = np.asarray(scaled_matrix.expand(scale, axis, made.tile[axis], SHAPE[axis]))
  scale = np.broadcast_to(scale, SHAPE).astype(np.float64)
  value, x = tiles * scale, x.astype(np.float64)

  magnitude, steps = np.abs(x), 0.5 if rounding is Rounding.NEAREST else 1.0
  bound = np.maximum(2.0**-fmt.mantissa_bits * magnitude, fmt.smallest * scale) * steps
  excess = np.maximum(magnitude - fmt.max * scale, 0)
  assert np.all(np.abs(value - x) <= (bound + excess) * (1 + QUANTIZE_SLACK))
  with np.errstate(invalid="ignore", divide="ignore"):
    allowed = largest_ratio(fmt, kind, scale, magnitude.max())
  # Scales at their smallest belong to tiles that are too small for any other.
  assert np.all(magnitude <= scale * fmt.max * allowed * (1 + QUANTIZE_SLACK))
  assert np.all((value == 0) | (np.sign(value) == np.sign(x)))


@pytest.mark.parametrize("fmt", NARROW, ids=str)
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True, database=None)
@hypothesis.given(x=arrays(), power=st.integers(-20, 20), tile=st.sampled_from(TILES))
def test_powers_of_two_pass_through(fmt, x, power, tile):
  """quantize(x * 2^k) = quantize(x) * 2^k where neither meets the smallest scale."""
  x = np.where(np.abs(x) < 2.0**-60, 0, x).astype(np.float32)
  factor = np.float32(2.0**power)
  for kind in KINDS:
    quant = Quant(fmt, tile, kind)
    a, b = (quantize.quantize(jnp.asarray(t), quant) for t in (x, x * factor))
    np.testing.assert_array_equal(a.data, b.data)
    used = np.asarray(a.scale) != 1  # zeros have scale 1, or 1 / encode
    np.testing.assert_array_equal(np.where(used, a.scale * factor, 0), np.where(used, b.scale, 0))
