"""The backend that dequantizes once: its rounding, its operands, and where it is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import matmul_suite as suite
import numpy as np
import oracle
import pytest

from configs import debug
from fp8jax.config import resolve
from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import dequantized
from fp8jax.quantization import quantize, tensor_stats, vectorized
from fp8jax.recipe import library
from fp8jax.recipe.gemm import PASSES, Accumulation, Gemm
from fp8jax.recipe.quant import CURRENT, Rounding, Scale

GEMMS = list(dict.fromkeys(
  gemm for r in library.RECIPES.values() for p in PASSES if (gemm := getattr(r, p)).is_quantized
))  # fmt: skip
QUANTS = list(dict.fromkeys(
  dataclasses.replace(q, source=CURRENT) for gemm in GEMMS for q in (gemm.lhs, gemm.rhs)
))  # fmt: skip


@pytest.mark.parametrize("name", ["block_128", "block_128_pow2", "nvfp4"])
def test_product_is_within_its_bound_of_float64(rng, name):
  """Of operands that the oracle quantizes: K roundings of sums, and two where scales round."""
  gemm: Gemm = library.RECIPES[name].fwd
  m, n, k = 40, 136, 200
  a = rng.standard_normal((m, k)) * np.exp(2 * rng.standard_normal((m, 1)))
  b = rng.standard_normal((n, k)) * np.exp(2 * np.sin(np.arange(k) // 64))
  wide = [
    oracle.fake_quantize(x, q.format.name, q.tile, q.scale.value)
    for x, q in ((a, gemm.lhs), (b, gemm.rhs))
  ]

  @jax.jit
  def run(a, b):
    made = [quantize.quantize(x, q, with_values=True) for x, q in ((a, gemm.lhs), (b, gemm.rhs))]
    return gemm_api.scaled_matmul(*made, accumulate=gemm.accumulate, backend="dequantized")

  got = run(a.astype(np.float32), b.astype(np.float32))
  unit = (k + 2 * (gemm.lhs.scale is not Scale.POW2)) * 2.0**-24
  bound = unit / (1 - unit) * (np.abs(wide[0]) @ np.abs(wide[1]).T)
  assert np.all(np.abs(got - wide[0] @ wide[1].T) <= bound)
  suite.check_exact_on_lattice("dequantized", gemm, (16, 24, 256), rng)
  suite.check_sum_of_quantized_operands("dequantized", gemm, (m, n, k), rng)
  suite.check_extreme_scales_stay_finite("dequantized", gemm, rng)
  suite.check_scales_are_applied_one_after_the_other("dequantized", gemm, rng)


def _awkward(rng):
  """Partial tiles with NaN, infinities, zeros, subnormals and magnitudes from 2^-60 to 2^60."""
  x = np.ldexp(rng.standard_normal((144, 272)), rng.integers(-60, 60, (144, 1))).astype(np.float32)
  x[3, 5:9] = np.nan, -np.nan, np.inf, -np.inf
  x[70], x[71] = 0, np.float32(1e-40)
  return x


@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_values_are_data_times_scale_of_the_same_quantization(rng, quant):
  x, key = jnp.asarray(_awkward(rng)), jax.random.key(3)

  @functools.partial(jax.jit, static_argnums=(1, 2))
  def run(x, contraction, with_values):
    options = {"key": key} if quant.rounding is Rounding.STOCHASTIC else {}
    size = quant.transform.size if quant.transform else 16
    x = x[: 144 // size * size, : 272 // size * size]
    return quantize.quantize(x, quant, contraction=contraction, with_values=with_values, **options)

  for contraction in (0, 1):
    want, got = run(x, contraction, False), run(x, contraction, True)
    assert want.values is None and got.values.shape == want.shape
    for name in ("data", "scale"):
      wide = [np.asarray(getattr(made, name).astype(jnp.float32)) for made in (want, got)]
      np.testing.assert_array_equal(*wide)
    np.testing.assert_array_equal(got.values, want.dequantize())


def test_amax_by_bits_is_the_amax(rng):
  x = _awkward(rng)
  for part in (x, x[10:70], x[70:72, :48], np.where(np.isnan(x), -np.inf, x), x[:1, :1]):
    got, want = jax.jit(lambda x: (vectorized.amax(x), tensor_stats.amax(x)))(part)
    np.testing.assert_array_equal(np.maximum(got, 2.0**-126), np.maximum(want, 2.0**-126))


def test_it_is_taken_by_name_on_a_cpu_and_leaves_no_narrow_array():
  c = debug.get_config("block_128")
  c.kernels.matmul = "dequantized"
  c.model.num_layers, c.seq_len, c.global_batch = 1, 128, 2
  problem = choose.GemmProblem(64, 64, 64, library.RECIPES["tensor_current"].fwd, choose.Device())
  assert all(
    dequantized.supports(dataclasses.replace(problem, gemm=gemm)) is None for gemm in GEMMS
  )
  assert choose.gemm(problem).backend == "xla"
  assert choose.gemm(problem, "dequantized").backend == "dequantized"
  odd = dataclasses.replace(problem.gemm)
  object.__setattr__(odd, "accumulate", "14 bits")
  assert "adds in float32" in dequantized.supports(dataclasses.replace(problem, gemm=odd))
  for how in Accumulation:
    hopper = dataclasses.replace(
      problem,
      device=choose.Device("gpu", 90),
      gemm=dataclasses.replace(problem.gemm, accumulate=how),
    )
    with pytest.raises(ValueError, match="it is for CPUs: elsewhere XLA folds"):
      choose.gemm(hopper, "dequantized")
  import harness

  for save, is_narrow in (("none", False), ("quantized", True)):
    c.memory.save_gemm_inputs = save
    spec = resolve.resolve(c, 1, choose.Device())
    rows = harness.strict(spec)
    assert {row.backend for row in rows if row.recipe == "block_128"} == {"dequantized"}
    assert not any(row.expected or row.fp8 for row in rows)
    from fp8jax.compiled import aot

    text = aot.lower(spec, jax.devices("cpu")[:1]).compile().as_text()
    assert ("f8e4m3fn[" in text) == is_narrow
