"""Scales, casts and tiles against NumPy and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from lattice import lattice

from fp8jax.formats import E4M3, E5M2
from fp8jax.quant import quantize as q
from fp8jax.recipe import WHOLE, Quant, Scale

TILES = [(1, 128), (128, 128), (128, 1), (WHOLE, WHOLE), (1, WHOLE), (16, 32)]
SHAPES = [(256, 256), (72, 576), (130, 200), (1, 3)]


def test_formats_limits_match_ml_dtypes():
  assert (E4M3.max, E4M3.smallest, E4M3.bits) == (448.0, 2.0**-9, 8)
  assert (E5M2.max, E5M2.smallest, E5M2.bits) == (57344.0, 2.0**-16, 8)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("kind", list(Scale), ids=lambda k: k.value)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_equals_numpy_bit_for_bit(rng, shape, tile, kind, fmt):
  x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
  got = jax.jit(lambda x: q.quantize(x, Quant(fmt, tile, kind)))(x)
  data, scale = oracle.quantize(x, fmt.name, tile, kind is Scale.POW2)
  np.testing.assert_array_equal(np.asarray(got.data).view(np.uint8), data.view(np.uint8))
  np.testing.assert_array_equal(
    got.dequantize(), (data.astype(np.float32) * scale).astype(np.float32)
  )


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_quantize_of_transpose_is_transpose_of_quantize(rng, tile):
  x = rng.standard_normal((130, 200)).astype(np.float32)
  a = q.quantize(x, Quant(E4M3, tile), contraction=0)
  b = q.quantize(x.T, Quant(E4M3, tile))
  assert a.shape == b.shape == (200, 130) and a.tile == b.tile == tile
  np.testing.assert_array_equal(a.data, b.data)
  np.testing.assert_array_equal(a.scale, b.scale)


@pytest.mark.parametrize("kind", list(Scale), ids=lambda k: k.value)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_scale_around_every_power_of_two_never_overflows(fmt, kind):
  """Neighbours of fmt.max * 2^e for every e: rounding down by one ulp would double the data."""
  exponents = np.arange(-126 - 20, 128 - 16)
  centre = np.ldexp(np.float64(fmt.max), exponents)
  centre = centre[(centre < 3e38) & (centre > 2.0**-126)].astype(np.float32)
  amax = np.concatenate(
    [centre, np.nextafter(centre, np.float32(np.inf)), np.nextafter(centre, np.float32(0))]
  )
  scale = np.asarray(jax.jit(lambda a: q.amax_to_scale(a, fmt, kind))(amax), np.float64)
  assert np.all(np.isfinite(scale)) and np.all(scale > 0)
  if kind is Scale.POW2:
    assert np.all(np.frexp(scale)[0] == 0.5)
    assert np.all(amax.astype(np.float64) <= scale * fmt.max)
    above_floor = scale > 2.0**-126
    assert np.all(amax[above_floor] > scale[above_floor] * fmt.max / 2)
  else:
    assert np.all(amax / scale <= fmt.max * (1 + 2.0**-22))


@pytest.mark.parametrize("kind", list(Scale), ids=lambda k: k.value)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_special_blocks_give_finite_scales_and_hide_nothing(fmt, kind):
  inf, nan, tiny = np.inf, np.nan, np.float32(1e-44)
  rows = [
    [0, 0, 0, 0],
    [-0.0, 0, 0, 0],
    [tiny, -tiny, 0, 0],  # subnormal
    [2.0**-130, 2.0**-120, 0, 1e-38],
    [inf, 1, -2, 0],
    [-inf, 1e30, 0, 0],
    [nan, 1, 2, 3],
    [3e38, 1e-30, 0, -3e38],  # a lone huge element
  ]
  rows = np.asarray(rows, np.float32)
  got = jax.jit(lambda x: q.quantize(x, Quant(fmt, (1, WHOLE), kind)))(rows)
  scale, data = np.asarray(got.scale), np.asarray(got.data, np.float32)
  assert np.all(np.isfinite(scale)) and np.all(scale >= 2.0**-126)
  np.testing.assert_array_equal(scale[[0, 1, 4, 5], 0], 1.0)
  # NaN does not hide the rest of its tile.
  assert data[6, 3] > fmt.max / 2 and data[6, 3] * scale[6, 0] == pytest.approx(3, rel=2**-22)
  assert not np.isinf(data).any()
  np.testing.assert_array_equal(np.isnan(data), ~np.isfinite(rows))
  assert data[5, 1] == fmt.max
  # Rounding up to a power of two may leave up to half of the range unused.
  assert data[7, 0] >= fmt.max / 2 and data[7, 3] <= -fmt.max / 2


def test_cast_saturates_where_a_bare_cast_gives_nan():
  x = jnp.asarray([449.0, 464.0, 465.0, 1e9, -1e9], jnp.float32)
  np.testing.assert_array_equal(np.asarray(q.cast(x, E4M3), np.float32), [448, 448, 448, 448, -448])
  assert np.isnan(np.float32(465).astype(ml_dtypes.float8_e4m3fn))


def test_cast_rounds_every_bfloat16_as_ml_dtypes_does():
  x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
  for fmt in (E4M3, E5M2):
    is_lost = ~np.isfinite(x)
    want = np.clip(np.where(is_lost, 0, x), -fmt.max, fmt.max).astype(fmt.dtype)
    got = np.asarray(jax.jit(lambda x, f=fmt: q.cast(x, f))(x))
    np.testing.assert_array_equal(got[~is_lost].view(np.uint8), want[~is_lost].view(np.uint8))
    assert np.isnan(got[is_lost].astype(np.float32)).all()


def test_lattice_is_exact_in_every_format_and_tile(rng):
  x = lattice(rng, 130, 200)
  for fmt in (E4M3, E5M2):
    for kind in Scale:
      for tile in TILES:
        for axis in (0, 1):
          got = q.quantize(x, Quant(fmt, tile, kind), contraction=axis)
          np.testing.assert_array_equal(got.dequantize(), x if axis else x.T)


def test_whole_scale_is_global_inside_shard_map(rng):
  x = rng.standard_normal((16, 8)).astype(np.float32)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("data")

  def local(x):
    return q.quantize(x, Quant(E4M3), amax_axes=(("data",), ())).scale

  scales = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(
    x
  )
  np.testing.assert_array_equal(scales, np.full((8, 1), np.abs(x).max() * np.float32(1 / 448)))
