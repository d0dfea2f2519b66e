"""The emulated accumulator of Hopper's tensor core: integers of any length are the oracle."""

import dataclasses
import fractions
import functools

import harness
import jax
import jax.numpy as jnp
import matmul_suite as suite
import ml_dtypes
import numpy as np
import pytest
import variants
from lattice import lattice

from fp8jax import axes, mesh
from fp8jax.compiled import fp8_gemms
from fp8jax.formats import E3M4, E4M3, E5M2
from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import emulated_sm90
from fp8jax.ops.dots import dot
from fp8jax.quantization import quantize
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.gemm import PASSES, Accumulation, Gemm
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.quant import WHOLE, Quant

NAME = "emulated_sm90"
# (bits of the fraction, exponent of subnormals) of the operands.
FIELDS = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}
_UNIT = 80  # the oracle counts in 2^-80


def _number(code: int, dtype: str) -> tuple[int, int]:
  """(significand, exponent) of an 8-bit float: significand * 2^exponent, the point after it."""
  bits, least = FIELDS[dtype]
  field, fraction = code >> bits & (1 << 7 - bits) - 1, code & (1 << bits) - 1
  significand = fraction + ((field > 0) << bits)
  return (-significand if code >> 7 else significand), least + max(field - 1, 0) - bits


def _cut(value: int, unit: int) -> int:
  """Toward zero to a multiple of 2^(unit - _UNIT)."""
  return (abs(value) >> unit << unit) * (1 if value > 0 else -1)


def _sum(codes, dtypes) -> int:
  """The accumulator in 2^-80 after all products of pairs of codes, 32 at a time."""
  total, offsets = 0, [FIELDS[d][0] for d in dtypes]
  for start in range(0, len(codes), 32):
    terms = [(total, abs(total).bit_length() - 1 - _UNIT)] if total else []
    for pair in codes[start : start + 32]:
      (x, ex), (y, ey) = (_number(int(c), d) for c, d in zip(pair, dtypes))
      if x * y:
        terms.append((x * y << _UNIT + ex + ey, ex + ey + sum(offsets)))
    unit = max((e for _, e in terms), default=0) - 13 + _UNIT
    total = sum(_cut(value, unit) for value, _ in terms)
    total = _cut(total, max(abs(total).bit_length() - 14, 0))
  return total


def _want(a, b) -> np.ndarray:
  """float64 [M, N] of 8-bit a [M, K] and b [N, K]."""
  dtypes = (a.dtype.name, b.dtype.name)
  a, b = (x.view(np.uint8) for x in (a, b))
  return np.array([[_sum(np.stack([x, y], 1), dtypes) * 2.0**-_UNIT for y in b] for x in a])


def _plain(x) -> ScaledMatrix:
  return ScaledMatrix(jnp.asarray(x), jnp.ones((1, 1)), (WHOLE, WHOLE))


def _multiply(a, b, accumulate=Accumulation.FAST):
  return gemm_api.scaled_matmul(a, b, accumulate=accumulate, backend=NAME)


def _codes(rng, rows, k, dtype):
  """Every finite number alike: exponents far apart, subnormals, zeros; a row of nothing else."""
  x = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
  x = x[np.isfinite(x.astype(np.float32))][rng.integers(0, 247, (rows, k))]
  small = np.abs(x.astype(np.float32)) < 2.0 ** (FIELDS[dtype][1] + 1)
  x[1] = np.where(small[1], x[1], 0)  # mostly zeros, the others subnormal
  x[2] = 0
  return x


PAIRS = [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn"), ("float8_e5m2",) * 2]


def test_sums_are_those_of_the_model_to_the_bit(rng):
  """Partial groups, subnormals, cancellation, zeros; a normal and a wide spread of exponents."""
  cases = []
  for dtypes, k in ((PAIRS[0], 7), *((pair, 200) for pair in PAIRS)):
    a, b = (_codes(rng, rows, k, dtype) for rows, dtype in zip((6, 5), dtypes))
    # What the first half adds, the second takes away: the last bits remain.
    half = k // 2
    a[3, half : 2 * half] = a[3, :half]
    b[3, half : 2 * half] = -b[3, :half]
    a[4], b[4] = (rng.standard_normal(k).astype(x.dtype) for x in (a, b))
    cases.append((a, b))
  got = jax.jit(lambda cases: [_multiply(_plain(a), _plain(b)) for a, b in cases])(cases)
  for (a, b), d in zip(cases, got, strict=True):
    np.testing.assert_array_equal(d, _want(a, b))
    assert not np.array_equal(d, np.float64(a) @ np.float64(b).T) or a.shape[1] == 7


@functools.cache
def _fast():
  return jax.jit(lambda a, b: _multiply(_plain(a), _plain(b)))


@pytest.mark.parametrize("products, want", [
  ({0: 1, 1: 2.0**-13}, 1 + 2.0**-13),
  ({0: 1, 1: 2.0**-14, 2: 2.0**-14}, 1.0),  # below the last bit, each
  ({0: -1, 1: 2.0**-14}, -1.0),  # toward zero, not down
  ({0: 1, 1: 1, 2: 2.0**-13}, 2.0),  # the sum is truncated, too
  ({0: 1, 32: -1, 33: 2.0**-14}, 0),  # aligned to the accumulator
  ({0: 1, 32: -1, 64: 2.0**-14}, 2.0**-14),
  ({31: 2.0**-14, 32: 1}, 1.0),
])  # fmt: skip
def test_what_a_bit_is_worth(products, want):
  a, b = np.zeros((1, 96), E5M2.dtype), np.ones((1, 96), E5M2.dtype)
  for k, value in products.items():
    a[0, k] = value
  np.testing.assert_array_equal(_fast()(a, b), [[want]])


def test_the_exponent_of_a_product_is_the_sum_of_its_factors():
  """1.5 . 1.5 is above 2 and does not move the last bit."""
  a, b = np.zeros((1, 96), E5M2.dtype), np.ones((1, 96), E5M2.dtype)
  a[0, :2], b[0, 0] = (1.5, 2.0**-13), 1.5
  a[0, 32] = -2.25  # E5M2 has 2.5 and 2: rounds to 2
  np.testing.assert_array_equal(_fast()(a, b), [[0.25]])


def test_a_factor_that_is_not_finite_shows():
  a, b = np.ones((2, 96), E5M2.dtype), np.ones((3, 96), E5M2.dtype)
  a[0, 3], b[1, 40] = np.nan, np.inf
  is_nan = np.isnan(_fast()(a, b))
  np.testing.assert_array_equal(is_nan, [[True, True, True], [False, True, False]])


@pytest.mark.parametrize("how, size", [(Accumulation.PRECISE, 128), (64, 64)])
def test_promoted_sums_are_added_in_float32(rng, how, size):
  """Sums of 14 bits, each scaled; powers of two, so that a fused multiply-add changes nothing."""
  k = 300
  a, b = (_codes(rng, rows, k, "float8_e4m3fn") for rows in (4, 5))
  scales = [np.exp2(rng.integers(-9, 9, (n, -(-k // 64)))).astype(np.float32) for n in (4, 5)]
  if how is Accumulation.PRECISE:
    scales = [s[:, :1] for s in scales]
  tile = (1, 64 if how == 64 else WHOLE)
  operands = [ScaledMatrix(jnp.asarray(x), s, tile) for x, s in zip((a, b), scales)]
  want = np.zeros((4, 5), np.float32)
  for i, start in enumerate(range(0, k, size)):
    part = _want(a[:, start : start + size], b[:, start : start + size]).astype(np.float32)
    rows, cols = (s[:, [i % s.shape[1]]] for s in scales)
    want = want + part * rows * cols.T
  np.testing.assert_array_equal(jax.jit(lambda a, b: _multiply(a, b, how))(*operands), want)


@pytest.mark.parametrize("name, recipe", [
  (NAME, "block_128"), (NAME, "rowwise"), ("exact", "block_128")
])  # fmt: skip
def test_scales_are_those_of_every_backend(rng, name, recipe):
  gemm = RECIPES[recipe].wgrad
  suite.check_exact_on_lattice(name, gemm, (16, 16, 256), rng)
  suite.check_extreme_scales_stay_finite(name, gemm, rng)
  suite.check_scales_are_applied_one_after_the_other(name, gemm, rng)


def _is_nearest(got: float, exact: fractions.Fraction) -> bool:
  """Whether float32 has no nearer number, nor one as near whose last bit is 0."""
  got = np.float32(got)
  others = [np.nextafter(got, np.float32(to)) for to in (np.inf, -np.inf)]
  error, *errors = (abs(fractions.Fraction(float(x)) - exact) for x in (got, *others))
  is_even = got.view(np.int32) % 2 == 0
  return all(error < e or (error == e and is_even) for e in errors)


def test_exact_sums_are_rounded_once(rng):
  """Sums of every size, from cancellation to the largest; ties of float32; no order matters."""
  cases = []
  for pair in PAIRS[:2]:
    a, b = (_codes(rng, rows, 300, dtype) for rows, dtype in zip((8, 5), pair))
    half = 150
    a[3, half:], b[3, half:] = a[3, :half], -b[3, :half]
    a[3, 0] = 2.0**-6  # and little else remains
    a[4] = 448  # the largest sums
    # 2^24 and 1, 3, or 1 and a bit far below: two ties and none.
    a[5:], b[4] = 0, 1
    a[5:, :256] = b[4, :256] = 256
    a[5:, 256] = 1, 3, 1
    a[7, 257] = b[4, 257] = 2.0**-9
    # Sums from 2^10 to 2^15 with bits down to the last: every way to round.
    size = np.where(np.arange(300) < half, 20, 2.0**-7)
    more = (rng.standard_normal((8, 300)) * size for _ in range(2))
    a, b = (np.concatenate([x, y.astype(x.dtype)]) for x, y in zip((a, b), more))
    cases.append((a, b))
  run = jax.jit(
    lambda cases: [
      gemm_api.scaled_matmul(_plain(a), _plain(b), accumulate=Accumulation.FAST, backend="exact")
      for a, b in cases
    ]
  )
  got, turned = run(cases), run([(a[:, ::-1], b[:, ::-1]) for a, b in cases])
  for (a, b), d, other in zip(cases, np.asarray(got), np.asarray(turned), strict=True):
    np.testing.assert_array_equal(d, other)
    for i, j in np.ndindex(*d.shape):
      terms = zip(a[i].tolist(), b[j].tolist(), strict=True)
      exact = sum(fractions.Fraction(float(x)) * fractions.Fraction(float(y)) for x, y in terms)
      assert _is_nearest(d[i, j], exact), (i, j, d[i, j], float(exact))
    np.testing.assert_array_equal(d[5:8, 4], 2.0**24 + np.array([0, 4, 2]))


# --- where it is chosen --------------------------------------------------------------------------

DEVICES = [choose.Device("cpu"), *(choose.Device("gpu", n) for n in (0, 80, 89, 90, 100))]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_it_is_taken_by_name_alone(device):
  for recipe in RECIPES.values():
    for gemm in (g for p in PASSES if (g := getattr(recipe, p)).is_quantized):
      problem = choose.GemmProblem(256, 256, 256, gemm, device)
      try:
        assert choose.gemm(problem).backend != NAME
      except ValueError:
        assert device.platform == "gpu"
      if emulated_sm90.supports(problem) is None:
        assert choose.gemm(problem, NAME) == choose.Choice(NAME)
  assert "block_128" not in choose.native_recipes(problem) or device.capability == 90


def test_what_hopper_cannot_do_is_refused():
  def reason(quant, how):
    return emulated_sm90.supports(choose.GemmProblem(8, 8, 64, Gemm(quant, quant, how), DEVICES[0]))

  for quant in (Quant(E4M3), Quant(E5M2), RECIPES["mxfp8"].fwd.lhs):
    assert reason(quant, 32) is None
  assert "one instruction adds 32" in reason(Quant(E4M3), 48)
  assert "one instruction adds 32" in reason(RECIPES["nvfp4"].fwd.lhs, 16)
  assert "not e3m4 by e3m4" in reason(Quant(E3M4), 32)


# --- in a layer, on a mesh, in a step ------------------------------------------------------------


def _three(site, x, w, g):
  def product(x, w, tap):
    return dot("BLD,DF->BLF", x, w, dataclasses.replace(site, tap=tap))

  y, pull = jax.vjp(product, x, w, site.tap)
  return y, *pull(g)[:2]


@pytest.mark.slow  # other backends on meshes: ops/linear_on_mesh_test.py
def test_a_layer_on_a_mesh_is_the_one_on_one_device(rng):
  """To the bit where a device has all of K; where it has a part, sums that 14 bits hold."""
  recipe = "rowwise(accumulate=fast)"
  names = (dict(D="fsdp", F="tensor"), dict(B=("data", "fsdp"), F="tensor"))
  layout = axes.Layout(mesh.make((1, 2, 2)), *map(axes.as_rules, names))
  one = variants.single(recipe, matmul=NAME)
  split = dataclasses.replace(one, layout=layout)
  shapes = ((8, 8, 64), (64, 96), (8, 8, 96))
  exact = [lattice(rng, *shape) for shape in shapes]
  normal = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

  def alone(x, w, g):
    fwd, rows = one.recipe.fwd, x.reshape(-1, 64)
    y = _multiply(quantize.quantize(rows, fwd.lhs), quantize.quantize(w.T, fwd.rhs))
    return *_three(one, x, w, g), y.reshape(8, 8, 96)

  x, w, g = exact
  want = (x @ w, g @ w.T, np.einsum("bld,blf->df", x, g))
  runs = [jax.jit(alone), jax.jit(functools.partial(_three, split))]
  for run in runs:
    for got, one_want in zip(run(*exact), want):
      np.testing.assert_array_equal(got, one_want)
  (y, _, _, product), (on_mesh, *_) = (run(*normal) for run in runs)
  np.testing.assert_array_equal(on_mesh, y)
  np.testing.assert_array_equal(product, y)


def test_a_step_is_called_emulated_and_multiplies_nothing_else(monkeypatch):
  spec = harness.debug_plan("tensor_current", kernels__matmul=NAME)
  rows = harness.strict(spec)
  of_sites = [row for row in rows if row.backend == NAME]
  assert of_sites and all(row.is_emulated and row.unquantized == row.fp8 == 0 for row in of_sites)
  table = fp8_gemms.table(rows)
  assert any("(emulated)" in str(cell) for cell in table.columns[1].cells)
  assert "emulated" in {str(cell) for cell in table.columns[2].cells}
  dequantized = [dataclasses.replace(of_sites[0], unquantized=1, instead="f32 by dot")]
  monkeypatch.setattr(fp8_gemms, "compare", lambda *args: dequantized)
  with pytest.raises(fp8_gemms.NotFp8, match="1 unquantized ones, the first f32 by dot"):
    fp8_gemms.check(spec, "")
