"""What every scaled_matmul backend must pass. A backend's test file names itself and its "
"recipes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import tolerances
from lattice import lattice

from fp8jax.formats import E2M1, E4M3, E5M2
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.gemm import Gemm
from fp8jax.recipe.quant import WHOLE, Quant


def narrow(x, quant: Quant) -> ScaledMatrix:
  """By the oracle: only the product is compiled. A scale that is not current is current here."""
  data, scale = oracle.quantize(x, quant.format.name, quant.tile, quant.scale.value)
  rows, cols = (t if t != WHOLE else n for t, n in zip(quant.tile, x.shape))
  data = data.astype(np.float32).astype(quant.format.dtype)
  return ScaledMatrix(data, scale[::rows, ::cols], quant.tile)


# Recipes that differ in how scales come about share a program.
product = jax.jit(gemm_api.scaled_matmul, static_argnames=("accumulate", "backend"))


def _multiply(backend: str, gemm: Gemm, a, b):
  operands = narrow(a, gemm.lhs), narrow(b, gemm.rhs)
  return product(*operands, accumulate=gemm.accumulate, backend=backend)


def _run(backend: str, gemm: Gemm, a, b):
  return np.asarray(_multiply(backend, gemm, a, b))


def _lattice(gemm: Gemm, rng, *shape):
  return lattice(rng, *shape, fmt="e2m1" if gemm.lhs.format == E2M1 else "e4m3")


def check_exact_on_lattice(backend: str, gemm: Gemm, shape, rng):
  m, n, k = shape
  a, b = _lattice(gemm, rng, m, k), _lattice(gemm, rng, n, k)
  want = a.astype(np.float64) @ b.astype(np.float64).T
  np.testing.assert_array_equal(_run(backend, gemm, a, b), want)


def check_sum_of_quantized_operands(backend: str, gemm: Gemm, shape, rng):
  """Random operands, quantised by an independent oracle, multiplied in float64."""
  m, n, k = shape
  # Magnitudes vary by tile, so that a scale taken from the wrong tile shows.
  a = rng.standard_normal((m, k)) * np.exp(2 * rng.standard_normal((m, 1)))
  b = rng.standard_normal((n, k)) * np.exp(2 * np.sin(np.arange(k) // 64))
  wide = [
    oracle.fake_quantize(x, q.format.name, q.tile, q.scale.value)
    for x, q in ((a, gemm.lhs), (b, gemm.rhs))
  ]
  want = wide[0] @ wide[1].T
  got = _run(backend, gemm, a.astype(np.float32), b.astype(np.float32))
  # Rounding grows with the products' magnitudes, not with their possibly cancelling sum.
  bound = np.abs(wide[0]) @ np.abs(wide[1]).T
  # A row that lies far below the amax of all is 0, and so is its bound.
  assert np.all(np.abs(got - want) <= sum_budget() * bound)


def sum_budget() -> float:
  """Of a product against float64, relative to the products' magnitudes."""
  on_gpu = jax.default_backend() == "gpu"
  return tolerances.TENSOR_CORE_SUM if on_gpu else tolerances.FLOAT32_SUM


def check_extreme_scales_stay_finite(backend: str, gemm: Gemm, rng):
  """A zero block, or a tiny one, against a huge one."""
  a = _lattice(gemm, rng, 16, 256) * np.float32(2.0**-110)
  b = _lattice(gemm, rng, 16, 256) * np.float32(2.0**105)
  a[:, :128] = 0  # 0 times something finite
  want = (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32)
  np.testing.assert_array_equal(_run(backend, gemm, a, b), want)


def tiny(gemm: Gemm, rng):
  """Operands whose scales' product, about 2^-130, is below float32's normal numbers; no result."""
  return [_lattice(gemm, rng, 16, 256) * np.float32(2.0**-59) for _ in range(2)]


def huge(gemm: Gemm, rng):
  """Operands whose scales' product, about 2^140, is beyond float32; every result is 0."""
  a, b = (_lattice(gemm, rng, 16, 256) * np.float32(2.0**76) for _ in range(2))
  a[:, ::2] = b[:, 1::2] = 0
  return a, b


def check_scales_are_applied_one_after_the_other(backend: str, gemm: Gemm, rng):
  """Their product may leave float32 although the result does not."""
  a, b = tiny(gemm, rng)
  want = (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32)
  assert np.abs(want[want != 0]).min() > 2.0**-126
  np.testing.assert_array_equal(_run(backend, gemm, a, b), want)
  np.testing.assert_array_equal(_run(backend, gemm, *huge(gemm, rng)), np.zeros((16, 16)))


def multiplied(gemm: Gemm) -> tuple:
  """The dtypes of its operands in a dot: FP8, or float32 where FP8 lacks a format's numbers."""
  formats = (gemm.lhs.format, gemm.rhs.format)
  # Four bits are multiplied as the eight that hold them exactly.
  dtypes = tuple((E4M3 if f == E2M1 else f).dtype for f in formats)
  is_fp8 = {*dtypes} <= {E4M3.dtype, E5M2.dtype}
  return dtypes if is_fp8 else (jnp.dtype(jnp.float32),) * 2


def check_operands_are_narrow(backend: str, gemm: Gemm):
  """Every dot of the traced program multiplies the narrow formats themselves."""
  operands = narrow(np.zeros((32, 256)), gemm.lhs), narrow(np.zeros((48, 256)), gemm.rhs)
  multiply = functools.partial(gemm_api.scaled_matmul, accumulate=gemm.accumulate, backend=backend)
  program = jax.make_jaxpr(multiply)(*operands)
  dots = [e for e in program.eqns if e.primitive.name == "dot_general"]
  assert dots
  for dot in dots:
    assert tuple(v.aval.dtype for v in dot.invars) == multiplied(gemm)
    assert dot.outvars[0].aval.dtype == jnp.float32
