"""Tensor statistics against float64 NumPy: of one tensor, of its parts, of its multiples."""

import jax
import numpy as np
import pytest

from fp8jax import mesh
from fp8jax.quantization import quantize, tensor_stats
from fp8jax.recipe.library import E4M3, RECIPES
from fp8jax.recipe.quant import Quant, Static


def _statistics(x, quant=None, **options):
  """Of a tensor, beside its quantized self if there is one, by one program."""

  @jax.jit
  def run(x):
    narrow = quant and quantize.quantize(x, quant, **options)
    return tensor_stats.statistics(x, narrow, quant)

  return run(x)


def test_statistics_equal_numpy(rng):
  x = (rng.standard_normal((32, 64)) * np.exp(3 * rng.standard_normal((32, 64)))).astype(np.float32)
  x += 2  # a mean of its own
  x[3, 4], x[5] = np.nan, 0.0
  quant = Quant(E4M3, source=Static())
  scale = np.float32(4.0) * np.float32(1 / 448)
  got = tensor_stats.summary(_statistics(x, quant, amax=np.float32(4.0)))
  good = np.where(np.isnan(x), 0, x).astype(np.float64)
  back = np.clip(good / scale, -448, 448).astype(np.float32).astype(E4M3.dtype).astype(np.float64)
  back = back * scale
  assert np.isnan(got["amax"]) and got["nonfinite"] == 1
  assert got["rms"] == pytest.approx(np.sqrt((good**2).mean()), rel=1e-5)
  assert got["mean"] == pytest.approx(good.mean(), abs=1e-6 * got["rms"])
  assert got["variance"] == pytest.approx(good.var(), rel=1e-5)
  assert got["underflow"] == ((good != 0) & (back == 0)).sum() / (good != 0).sum()
  assert got["saturation"] == (np.abs(good) > 464 * scale).sum() / good.size
  want = (good**4).mean() / (good**2).mean() ** 2
  assert got["kurtosis"] == pytest.approx(want, rel=1e-5) and want > 30
  assert got["smallest_scale"] == got["largest_scale"] == scale
  want = 10 * np.log10((good**2).sum() / ((back - good) ** 2).sum())
  assert got["snr_db"] == pytest.approx(want, abs=1e-3)


def test_variance_is_about_the_mean(rng):
  x = (3 + rng.standard_normal((64, 64))).astype(np.float32)
  got = tensor_stats.summary(_statistics(x))
  wide = x.astype(np.float64)
  assert got["mean"] == pytest.approx(wide.mean(), rel=1e-5)
  assert got["variance"] == pytest.approx(wide.var(), rel=1e-4) and got["variance"] < 2


def _numpy_counts(x):
  """By frexp of float64, which has every float32 as a normal number."""
  x = x[np.isfinite(x) & (x != 0)].astype(np.float64)
  exponents = np.frexp(x)[1] - 1
  first, last = tensor_stats.EXPONENTS[0], tensor_stats.EXPONENTS[-1]
  return [np.sum(np.clip(exponents, first, last) == e) for e in tensor_stats.EXPONENTS]


def test_counts_by_exponent_equal_frexp(rng):
  """Powers of two and their neighbours, subnormals, zeros, inf and NaN, of both signs."""
  powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
  edges = [powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))]
  special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1.17e-38, np.finfo(np.float32).max]
  x = np.concatenate([*edges, np.float32(special), rng.standard_normal(500).astype(np.float32)])
  x = np.concatenate([x, -x]).astype(np.float32)
  got = np.asarray(jax.jit(tensor_stats.exponent_counts)(x))
  np.testing.assert_array_equal(got, _numpy_counts(x))
  assert got.sum() == np.sum(np.isfinite(x) & (x != 0))


def test_counts_are_of_whole_rows_at_even_distances(rng):
  x = rng.standard_normal((4096, 64)).astype(np.float32)  # four times the sample
  values = np.asarray(_statistics(x))
  counts = _numpy_counts(x[::4])
  np.testing.assert_array_equal(values[len(tensor_stats.STATISTICS) :], counts)
  found = tensor_stats.exponents(values)
  first = found["first_exponent"] - tensor_stats.EXPONENTS.start
  np.testing.assert_allclose(
    found["shares"], counts[first : first + len(found["shares"])] / np.sum(counts), rtol=5e-3
  )
  assert not any(counts[:first]) and found["shares"][0] > 0 and found["shares"][-1] > 0
  nothing = tensor_stats.exponents(np.asarray(_statistics(0 * x)))
  assert nothing["shares"] == []


def test_statistics_of_parts_combine(rng):
  x = rng.standard_normal((64, 32)).astype(np.float32)
  parts = [_statistics(part) for part in (x[:16], x[16:])]
  whole = _statistics(x)
  combine = jax.jit(tensor_stats.combine)
  np.testing.assert_allclose(combine(*parts), whole, rtol=1e-6)
  combined = jax.jit(tensor_stats.combine_all)(np.stack(parts))
  np.testing.assert_allclose(combined, whole, rtol=1e-6)
  nothing = tensor_stats.nothing((tensor_stats.LOUD,))
  np.testing.assert_array_equal(combine(nothing, parts[0]), parts[0])


@pytest.mark.parametrize("factor", [2.0**15, 2.0**-9])
def test_statistics_of_a_multiple_are_the_rescaled_ones(factor):
  """Powers of two: exactly, in NumPy's float32; gradients are seen under a loss scale."""
  x = np.random.default_rng(0).standard_normal((32, 256), np.float32)
  x[0, 0] = 0
  quant = RECIPES["block_128"].dgrad.lhs
  one, other = (_statistics(y, quant, contraction=1) for y in (x, x * np.float32(factor)))
  np.testing.assert_array_equal(tensor_stats.rescaled(one, factor), other)


@pytest.mark.parametrize("bad", [0, 5])
def test_statistics_over_a_mesh_see_the_nan_of_one_device(rng, bad):
  parts = np.float32(rng.random((8, 4, tensor_stats.LOUD)))
  parts[bad, 1, :3] = np.nan, 2.0, -0.5
  devices, spec = mesh.make((8, 1, 1)), jax.sharding.PartitionSpec("data")
  whole = jax.shard_map(
    lambda x: tensor_stats.over_mesh(x[0], ("data",)), mesh=devices, in_specs=spec,
    out_specs=jax.sharding.PartitionSpec(),
  )  # fmt: skip
  want = np.concatenate([parts[..., :3].max(0), parts[..., 3:].sum(0)], axis=-1)
  want[1, 0] = np.nan
  np.testing.assert_allclose(jax.jit(whole)(parts), want, rtol=1e-6)


def test_counts_are_added_up_in_integers():
  """16,777,217 is no float32: a device that adds one by one in float32 would stop before it."""
  count = jax.make_jaxpr(tensor_stats._count)(np.ones((2, 3), bool))
  (total,) = (eqn for eqn in count.eqns if "reduce_sum" in str(eqn.primitive))
  assert total.outvars[0].aval.dtype == np.int32
  assert count.out_avals[0].dtype == np.float32
