"""The backend that dequantizes once: its rounding, its operands, and where it is refused."""

import dataclasses
import itertools

import harness
import jax
import jax.numpy as jnp
import matmul_suite as suite
import numpy as np
import oracle
import pytest
import variants

from configs import debug
from fp8jax.config import resolve
from fp8jax.formats import E2M1, E4M3, E5M2
from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import dequantized
from fp8jax.ops.dots import dot
from fp8jax.quantization import quantize, tensor_stats, vectorized
from fp8jax.recipe import library
from fp8jax.recipe.gemm import PASSES, Accumulation, Gemm
from fp8jax.recipe.quant import Quant, Rounding, Scale

GEMMS = list(dict.fromkeys(
  gemm for r in library.RECIPES.values() for p in PASSES if (gemm := getattr(r, p)).is_quantized
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


def test_values_are_data_times_scale_of_the_same_quantization(rng):
  """Both are made in one program, in both orientations; as many kinds of tiles as there are."""
  quants = [
    Quant(E4M3, (1, 128)), Quant(E4M3, (128, 128), Scale.POW2), Quant(E5M2),
    Quant(E4M3, (1, 32), Scale.EVEN), Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32),
    Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32, rounding=Rounding.STOCHASTIC),
  ]  # fmt: skip
  key = jax.random.key(3)

  @jax.jit
  def run(x):
    made = []
    for (n, quant), with_values in itertools.product(enumerate(quants), (False, True)):
      contraction = n % 2  # by turns
      random = {"key": key} if quant.rounding is Rounding.STOCHASTIC else {}
      made.append(
        quantize.quantize(x, quant, contraction=contraction, with_values=with_values, **random)
      )
    return made

  made = run(_awkward(rng))
  dequantize = jax.jit(lambda made: [x.dequantize() for x in made])
  for want, got, product in zip(made[::2], made[1::2], dequantize(made[::2]), strict=True):
    assert want.values is None and got.values.shape == want.shape
    for name in ("data", "scale"):
      wide = [np.asarray(getattr(x, name)).astype(np.float32) for x in (want, got)]
      np.testing.assert_array_equal(*wide)
    assert not np.all(product == 0)
    np.testing.assert_array_equal(got.values, product)
    np.testing.assert_array_equal(got.T.values, product.T)


def test_amax_by_bits_is_the_amax(rng):
  x = _awkward(rng)
  for part in (x, x[10:70], x[70:72, :48], np.where(np.isnan(x), -np.inf, x), x[:1, :1]):
    got, want = jax.jit(lambda x: (vectorized.amax(x), tensor_stats.amax(x)))(part)
    np.testing.assert_array_equal(np.maximum(got, 2.0**-126), np.maximum(want, 2.0**-126))


def test_it_is_taken_by_name_on_a_cpu():
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
    gemm = dataclasses.replace(problem.gemm, accumulate=how)
    hopper = dataclasses.replace(problem, device=choose.Device("gpu", 90), gemm=gemm)
    with pytest.raises(ValueError, match="it is for CPUs: elsewhere XLA folds"):
      choose.gemm(hopper, "dequantized")


@pytest.mark.parametrize("variant", ["block_128", "block_128 saved"])
def test_only_a_residual_is_narrow(variant):
  """No array of 8 bits in the program of the three products but X_WGRAD where it is kept."""
  x, w = jnp.ones((128, 256)), jnp.ones((256, 384))
  site = variants.single(variant, matmul="dequantized")

  def multiply(x, w):
    return dot("td,df->tf", x, w, dataclasses.replace(site))

  def both_passes(x, w):
    y, vjp = jax.vjp(multiply, x, w)
    return vjp(y)

  kept = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(multiply, x, w)[1], x, w))
  of_x = sorted(r.dtype.name for r in kept if r.size == x.size)
  assert of_x == ["float8_e4m3fn" if "saved" in variant else "float32"]
  text = jax.jit(both_passes).lower(x, w).compile().as_text()
  assert ("f8e4m3fn[" in text) == ("saved" in variant)


def test_a_run_with_it_has_no_fp8_gemms_to_prove():
  c = debug.get_config("block_128")
  c.kernels.matmul = "dequantized"
  rows = harness.strict(resolve.resolve(c, 1, choose.Device()))
  assert {row.backend for row in rows if row.recipe == "block_128"} == {"dequantized"}
  assert not any(row.expected or row.fp8 for row in rows)
