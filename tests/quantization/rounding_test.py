"""Stochastic rounding: neighbours from ml_dtypes' own grid, means from the binomial law."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden import conformance

from fp8jax.formats import BF16, E2M1, E3M4, E4M3, E5M2, F16, FORMATS
from fp8jax.quantization import quantize, rounding
from fp8jax.recipe.quant import WHOLE, Quant, Rounding, Scale

NARROW = [E4M3, E5M2, E3M4, E2M1]
STOCHASTIC = Rounding.STOCHASTIC


_stochastic = jax.jit(rounding.stochastic, static_argnums=1)  # one program for all keys


def draw(x, fmt, seed):
  return _stochastic(jnp.asarray(x, jnp.float32), fmt, jax.random.key(seed))


def neighbours(x, fmt):
  """float64 (below, above) of |x| on the format's grid; equal on the grid and beyond its end."""
  grid = conformance.grid(fmt.name)
  magnitude = np.minimum(np.abs(x.astype(np.float64)), fmt.max)
  above = grid[np.searchsorted(grid, magnitude)]
  below = grid[np.searchsorted(grid, magnitude, side="right") - 1]
  return below, above


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_nearest_on_the_grid_is_the_cast(fmt):
  x = np.concatenate([conformance.midpoints(fmt.name), conformance.random_float32(fmt.name)])
  got, cast = jax.jit(lambda x: (rounding.nearest(x, fmt), quantize.cast(x, fmt)))(x)
  assert conformance.differences(got, cast) == 0


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_stochastic_stays_between_its_neighbours(fmt):
  """Of two million inputs: every magnitude, ties and their neighbours, beyond the end."""
  x = np.concatenate([conformance.midpoints(fmt.name), conformance.random_float32(fmt.name)])
  got = np.asarray(draw(x, fmt, 0)).astype(np.float64)
  x, got = x[np.isfinite(x)], got[np.isfinite(x)]
  below, above = neighbours(x, fmt)
  assert np.all((np.abs(got) == below) | (np.abs(got) == above))
  assert np.all(np.signbit(got) == np.signbit(x))
  is_between = (below < above) & (np.abs(x) > fmt.smallest / 64)
  assert 0.4 < np.mean(np.abs(got[is_between]) == above[is_between]) < 0.6


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_stochastic_is_unbiased_in_every_cell(fmt):
  """4 sigma of the mean of 2^14 draws, at three places of every cell and both signs."""
  grid, num = conformance.grid(fmt.name), 2**14
  cells = np.linspace(0, len(grid) - 2, min(len(grid) - 1, 40)).astype(int)
  below, step = grid[cells], np.diff(grid)[cells]
  sigmas, worst = 4, 0
  for chance in (0.5, 0.0625, 0.9375):
    x = (below + chance * step) * np.where(np.arange(len(cells)) % 2, -1, 1)
    draws = draw(np.broadcast_to(x, (num, len(cells))), fmt, int(1000 * chance))
    error = np.abs(np.asarray(draws).astype(np.float64).mean(0) - x)
    worst = max(worst, np.max(error / (step * np.sqrt(chance * (1 - chance) / num))))
  assert 0.5 < worst < sigmas


@pytest.mark.parametrize("fmt", [BF16, F16], ids=str)
def test_stochastic_in_16_bits_is_unbiased_in_every_binade(fmt):
  """Neighbours by bits of ml_dtypes' and NumPy's own 16-bit numbers, down to float32's smallest."""
  num, chance, bits = 2**12, 0.375, fmt.dtype.itemsize * 8
  smallest = max(fmt.min_exponent, -126 + fmt.mantissa_bits)  # below it the grid is coarser
  exponents = np.arange(smallest, int(np.log2(fmt.max)) + 1)
  below = np.ldexp(1.25, exponents).astype(fmt.dtype)
  codes = below.view(f"uint{bits}")
  above = (codes + 1).view(fmt.dtype)
  low, high = below.astype(np.float64), above.astype(np.float64)
  x = ((1 - chance) * low + chance * high) * np.where(exponents % 2, -1, 1)
  got = np.asarray(draw(np.broadcast_to(x, (num, len(x))), fmt, 5)).astype(np.float64)
  assert np.all((np.abs(got) == low) | (np.abs(got) == high))
  assert np.all(np.signbit(got) == np.signbit(x))
  ups = np.mean(np.abs(got) == high, axis=0)
  assert np.abs(ups - chance).max() < 5 * np.sqrt(chance * (1 - chance) / num)


def test_stochastic_bf16_below_its_finest_float32_step():
  """Between 2^-126 and 2^-119 the neighbours are multiples of 2^-126, and the mean is x."""
  for exponent in range(-126, -118):
    x = np.float32(np.ldexp(1 + 41 / 2**14, exponent))
    got = np.asarray(draw(np.full(2**14, x), BF16, exponent + 200)).astype(np.float64)
    unit = 2.0**-126
    below = np.floor(np.float64(x) / unit) * unit
    assert np.all((got == below) | (got == below + unit)), exponent
    chance = (x - below) / unit
    sigma = np.sqrt(max(chance * (1 - chance), 1e-4) / got.size)
    assert abs(np.mean(got > below) - chance) < 5 * sigma, exponent


def test_stochastic_is_unbiased_far_below_the_smallest():
  """At 2^-16 and 2^-20 of the smallest, where a coarse random number would round up too often."""
  for power, want in ((16, 64), (20, 4)):
    x = np.full(2**22, E4M3.smallest * 2.0**-power)
    ups = np.count_nonzero(np.asarray(draw(x, E4M3, 0)).astype(np.float32))
    assert abs(ups - want) < 4 * np.sqrt(want)
  assert not np.asarray(draw(np.full(2**22, 1e-20), E4M3, 0)).astype(np.float32).any()


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_stochastic_specials(fmt):
  x = np.asarray([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, fmt.max], np.float32)
  nan = np.nan if fmt.has_nan else 0.0
  want = np.asarray([nan, fmt.max, -fmt.max, 0.0, -0.0, fmt.max, -fmt.max, fmt.max], fmt.dtype)
  assert conformance.differences(draw(x, fmt, 0), want) == 0


def test_stochastic_is_a_function_of_the_key(rng):
  x = rng.standard_normal((64, 64)).astype(np.float32)
  make = jax.jit(
    lambda x, key: quantize.quantize(x, Quant(E2M1, (1, 16), rounding=STOCHASTIC), key=key).data
  )
  a, b, c = (np.asarray(make(x, jax.random.key(seed))) for seed in (0, 0, 1))
  np.testing.assert_array_equal(a, b)
  assert 0.1 < np.mean(a != c) < 0.5


def test_stochastic_without_a_key_is_refused():
  with pytest.raises(ValueError, match="key"):
    quantize.quantize(np.ones((4, 4), np.float32), Quant(E4M3, rounding=STOCHASTIC))
  with pytest.raises(ValueError, match="key"):
    rounding.stochastic(jnp.ones(3), E4M3, None)


def test_stochastic_dequantizes_to_the_mean(rng):
  """NVFP4 in both orientations: the mean over 64 keys approaches x where nothing saturates."""
  x = rng.uniform(-1, 1, (32, 48)).astype(np.float32)
  x[::16, ::16] = x.max() * 1.001
  quant = Quant(E2M1, (16, 16), Scale.E4M3_OVER_F32, rounding=STOCHASTIC)
  keys = jax.random.split(jax.random.key(3), 64)
  make = jax.jit(lambda k: [quantize.quantize(x, quant, contraction=i, key=k) for i in (0, 1)])
  drawn = [make(k) for k in keys]
  for axis in (0, 1):
    made = [both[axis] for both in drawn]
    scale = np.asarray(made[0].scale).max()
    data = np.mean([np.asarray(m.data).astype(np.float64) for m in made], axis=0)
    mean = data * np.kron(made[0].scale, np.ones((16, 16)))
    want = x if axis else x.T
    assert np.abs(mean - want).max() < 4 * scale / np.sqrt(64)


def test_stochastic_shards_differ_along_the_axes_that_split():
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  spec = jax.sharding.PartitionSpec("data", "model")
  quant = Quant(E4M3, (WHOLE, WHOLE), rounding=STOCHASTIC)
  x = np.random.default_rng(0).uniform(1, 2, (1, 64)).astype(np.float32)

  def local(x):
    key = jax.random.key(0)
    return [
      quantize.quantize(x if axis else x.T, quant, contraction=axis, amax_axes=axes, key=key).data
      for axis in (0, 1) for axes in ((("data",), ()), (("data",), ("model",)), ((), ()))
    ]  # fmt: skip

  whole = jax.sharding.PartitionSpec(None, None)
  f = jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=spec, check_vma=False)
  made = [np.asarray(data).view(np.uint8).reshape(4, 2, -1) for data in jax.jit(f)(x)]
  for split, both, none in (made[:3], made[3:]):
    np.testing.assert_array_equal(split[:, 0], split[:, 1])
    assert len(np.unique(split[:, 0], axis=0)) == 4
    assert len(np.unique(both.reshape(8, -1), axis=0)) == 8
    assert len(np.unique(none.reshape(8, -1), axis=0)) == 1


def test_e4m3_cast_there_and_back_is_the_oracle_of_the_two_level_scale():
  """`nearest` at every tie of E4M3: NVFP4's scales depend on it."""
  x = conformance.midpoints("e4m3")
  x = x[np.isfinite(x)]
  want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
  got = jax.jit(lambda x: rounding.nearest(x, FORMATS["e4m3"]))(x)
  assert conformance.differences(got, want) == 0
