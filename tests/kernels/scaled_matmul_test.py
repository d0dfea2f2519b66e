"""The suite, for each backend that plain XLA provides."""

import dataclasses
import functools
import itertools

import jax
import matmul_suite as suite
import ml_dtypes
import numpy as np
import oracle
import pytest
import shapes

from fp8jax.formats import E2M1, E3M4, E4M3, E5M2, FORMATS, INT8, Format
from fp8jax.grids import Float
from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import xla
from fp8jax.quantization import quantize
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe import library
from fp8jax.recipe.gemm import Accumulation, Gemm
from fp8jax.recipe.quant import CURRENT, WHOLE, Quant, Rounding, Scale

NARROW = [r for r in library.RECIPES.values() if r.fwd.is_quantized]
CPU = choose.Device("cpu")


def _as_multiplied(gemm: Gemm) -> Gemm:
  """The same product to a backend on a CPU: scales are given, and sums are not fast there."""
  lhs, rhs = (dataclasses.replace(q, source=CURRENT) for q in (gemm.lhs, gemm.rhs))
  how = gemm.accumulate if isinstance(gemm.accumulate, int) else Accumulation.PRECISE
  return dataclasses.replace(gemm, lhs=lhs, rhs=rhs, accumulate=how)


def _cases():
  for name in ("reference", "xla"):
    seen = set()
    for recipe in NARROW:
      for which in ("fwd", "dgrad", "wgrad"):
        gemm: Gemm = getattr(recipe, which)
        if not gemm.is_quantized or gemm.lhs.rounding is Rounding.STOCHASTIC:
          continue  # rounding is no matter of the product
        if gemm.rhs.rounding is Rounding.STOCHASTIC or gemm.lhs.transform:
          continue
        problem = choose.GemmProblem(64, 64, 64, gemm, CPU)
        module = gemm_api.BACKENDS[name]
        gemm = _as_multiplied(gemm)
        if module.supports(problem) is None and gemm not in seen:
          seen.add(gemm)
          yield pytest.param(name, gemm, id=f"{name}-{recipe.name}-{which}")


CASES = list(_cases())


def test_every_narrow_gemm_has_a_case():
  def formats(gemm):
    promotes = gemm.accumulate if isinstance(gemm.accumulate, int) else None
    return (gemm.lhs.format, gemm.lhs.tile, gemm.rhs.format, gemm.rhs.tile, promotes)

  gemms = {getattr(r, w) for r in NARROW for w in ("fwd", "dgrad", "wgrad")}
  narrow = {formats(g) for g in gemms if g.is_quantized}
  assert {formats(gemm) for _, gemm in (c.values for c in CASES)} == narrow


def _by_turns(sizes):
  """Every product with one of the eight shapes; the rest under the marker `slow`.

  Every recipe's sums beside the oracle's at an odd shape: ops/linear_test.py, on both backends.
  """
  return [
    pytest.param(*case.values, shape, id=f"{shape}-{case.id}", marks=[pytest.mark.slow] * odd)
    for i, case in enumerate(CASES)
    for j, shape in enumerate(sizes)
    for odd in [(i + j) % 8 > 0]
  ]


@pytest.mark.parametrize("name, gemm, shape", _by_turns(shapes.GEMM))
def test_scaled_matmul_is_exact_on_lattice_and_sums_what_the_oracle_quantizes(
  rng, name, gemm, shape
):
  suite.check_exact_on_lattice(name, gemm, shape, rng)
  if shape not in shapes.SMALL:
    suite.check_sum_of_quantized_operands(name, gemm, shape, rng)


TILES = [(WHOLE, WHOLE), (1, WHOLE), (1, 32), (16, 16), (128, 128)]


@pytest.mark.parametrize("name", ["reference", "xla"])
@pytest.mark.parametrize(
  "format",
  [
    pytest.param(f, id=str(f), marks=[pytest.mark.slow] * (f in (E5M2, E3M4, INT8)))
    for f in (E4M3, E5M2, E3M4, E2M1, INT8)
  ],
)
def test_what_supports_accepts_runs(rng, name, format):
  """Every format in every tile: float64's product of what is stored, to float32's rounding. Beside
  E4M3 they are multiplied below."""
  a, b = (rng.standard_normal((n, 80)).astype(np.float32) for n in (24, 40))
  tried = 0
  for tile in TILES:
    promotes = tile[1] or Accumulation.PRECISE
    gemm = Gemm(Quant(format, tile), Quant(format, tile), promotes)
    problem = choose.GemmProblem(24, 40, 80, gemm, CPU)
    if gemm_api.BACKENDS[name].supports(problem) is not None:
      continue
    tried += 1
    x, y = suite.narrow(a, gemm.lhs), suite.narrow(b, gemm.rhs)
    d = suite.product(x, y, accumulate=gemm.accumulate, backend=name)
    lhs, rhs = (
      np.float64(oracle.fake_quantize(z, q.format.name, q.tile, q.scale.value))
      for z, q in ((a, gemm.lhs), (b, gemm.rhs))
    )
    error = np.abs(d - lhs @ rhs.T)
    assert np.all(error <= 2.0**-20 * np.abs(lhs) @ np.abs(rhs).T), gemm
  assert tried >= (5 if name == "reference" else 2)


# The numbers of these have no definition in NumPy here (tests/quantization/grids_test.py).
_cast = jax.jit(functools.partial(quantize.cast, axes=(1,)), static_argnums=1)


@pytest.mark.parametrize("name, tile", [("reference", (1, 32)), ("xla", (1, WHOLE))])
def test_every_format_is_multiplied_exactly(rng, name, tile):
  """float64's product of what is stored, beside itself and beside E4M3."""
  x = rng.standard_normal((2, 8, 64)).astype(np.float32)
  pairs = []
  for one, other in itertools.product((f for f in FORMATS.values() if f.is_operand), range(2)):
    is_wide = one.max > 2.0**58  # has no scale
    if (one.is_per_tile and WHOLE in tile) or (is_wide and WHOLE not in tile):
      continue
    quant = Quant(one, scale=Scale.ONE) if is_wide else Quant(one, tile)
    gemm = Gemm(quant, (quant, Quant(E4M3, tile))[other], tile[1] or Accumulation.FAST)
    assert gemm_api.BACKENDS[name].supports(choose.GemmProblem(8, 8, 64, gemm, CPU)) is None
    pairs.append(gemm)

  def operand(x, quant):
    top, format = np.float32(min(quant.format.max, 2.0**20) / 4), quant.format
    if format.name in oracle.ROWS:
      data = oracle.cast(x * top, format.name).astype(np.float32).astype(format.dtype)
    else:
      data = _cast(x * top, format)
    tiles = [n // t if t else 1 for n, t in zip(x.shape, quant.tile)]
    return ScaledMatrix(data, np.ones(tiles, np.float32) / top, quant.tile)

  for gemm in pairs:
    ab = operand(x[0], gemm.lhs), operand(x[1], gemm.rhs)
    d = suite.product(*ab, accumulate=gemm.accumulate, backend=name)
    a, b = (np.asarray(t.data).astype(np.float64) * np.float64(t.scale[0, 0]) for t in ab)
    assert np.all(np.abs(d - a @ b.T) <= 2.0**-20 * np.abs(a) @ np.abs(b).T), gemm
  assert len(pairs) >= 2 * (22 if name == "xla" else 18)


@pytest.mark.parametrize("tile", [(1, 32), (1, 128), (1, WHOLE), (WHOLE, WHOLE)], ids=str)
def test_a_gpu_is_given_emulation_by_name_alone(tile):
  """Whatever the tile, "auto" says which backend lacks the format, and how to emulate it."""
  native = {"e4m3", "e5m2", "e2m1"}
  for format in (f for f in FORMATS.values() if f.is_operand and f.name not in native):
    is_wide = format.max > 2.0**58  # has no scale
    if (format.is_per_tile and WHOLE in tile) or (is_wide and tile != (WHOLE, WHOLE)):
      continue
    quant = Quant(format, tile, scale=Scale.ONE if is_wide else Scale.F32)
    how = tile[1]
    if how == WHOLE:
      whole = dataclasses.replace(quant, tile=(WHOLE, WHOLE))
      how = Accumulation.PRECISE if xla.is_fp8(Gemm(whole, whole)) else Accumulation.FAST
    gemm = Gemm(quant, quant, how)
    problem = choose.GemmProblem(128, 128, 128, gemm, choose.Device("gpu", 90))
    assert choose.gemm_backends(problem) == ["reference"], format
    with pytest.raises(ValueError, match="kernels.matmul='reference' emulates") as e:
      choose.gemm(problem)
    assert f"mosaic_sm90: lhs is {format}; it reads e4m3 and e5m2" in str(e.value)
    assert choose.gemm(problem, "reference") == choose.Choice("reference")


@pytest.mark.parametrize("name, grid", [
  ("float6_e2m3fn", Float(2, 3, 1, 7.5, False, False)),
  ("float6_e3m2fn", Float(3, 2, 3, 28.0, False, False)),
])  # fmt: skip
def test_dtype_that_xla_compiles_nothing_with_is_refused(rng, name, grid):
  dtype = np.dtype(getattr(ml_dtypes, name))
  with pytest.raises(ValueError, match=f"nothing with {name}; take a wider dtype"):
    Format("narrow", dtype, grid)
  x = rng.standard_normal((8, 8)).astype(np.float32)  # all of its numbers are E4M3's
  cast = jax.jit(quantize.cast, static_argnums=1)
  wide = cast(x, Format("narrow", E4M3.dtype, grid))
  np.testing.assert_array_equal(np.float32(wide), np.float32(x.astype(dtype)))


@pytest.mark.parametrize("name, gemm", CASES)
def test_scaled_matmul_survives_extreme_scales(rng, name, gemm):
  suite.check_extreme_scales_stay_finite(name, gemm, rng)
  suite.check_scales_are_applied_one_after_the_other(name, gemm, rng)


@pytest.mark.parametrize("name, gemm", CASES)
def test_scaled_matmul_multiplies_narrow_operands(name, gemm):
  suite.check_operands_are_narrow(name, gemm)
