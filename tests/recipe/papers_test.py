"""Recipes of papers against float64 arithmetic written from the papers, sharing no code."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from paper_oracle import F32, narrow, products_and_slack, rotated, three_products
from recipe_runs import (
  LEFT,
  given_amaxes,
  know_draws,
  operands,
  products,
  with_amaxes,
  without_backward,
)

import fp8jax
from fp8jax import formats
from fp8jax.formats import E2M1, E4M3, E4M3_240, E5M2
from fp8jax.ops import multiplied
from fp8jax.ops import site as site_lib
from fp8jax.ops.dots import dot
from fp8jax.quantization import quantize, tensor_stats
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe import rules
from fp8jax.recipe.estimators import Differentiable, SlopeAlone, TrustMask
from fp8jax.recipe.gemm import Accumulation, Backward, Gain, Gemm, Recipe
from fp8jax.recipe.papers import PAPERS
from fp8jax.recipe.quant import (
  WHOLE,
  Clamp,
  Hadamard,
  Largest,
  LeastError,
  Quant,
  Quantile,
  Rms,
  Rounding,
  Scale,
  Static,
)
from fp8jax.recipe.served import MEASURED, SERVED

# --- products -------------------------------------------------------------------------------------

_HALO = Quant(E4M3, scale=Scale.F32, transform=Hadamard(16, "none"))

# The other served ones differ by a tile or a format.
_SERVED = {"w4a16", "int8", "w4afp8", "nvfp4a16_4or6"}
_OTHERS = [
  pytest.param(r, marks=pytest.mark.slow) if name not in _SERVED else r
  for name, r in (SERVED | MEASURED).items() if not r.is_stateful
]  # fmt: skip

# What others do: "halo_int8_2_hq" rotates as "halo_int8_2" and rows of w, "nvfp4_sr_rht" at known
# draws as "nvfp4_rht", "nvfp4a16_4or6" and "fp4_w4a4" scale and clip as their namesakes.
_RARE = ("halo_int8_2", "halo_fp6_1_hq", "halo_fp6_1", "nvfp4_rht", "nvfp4_4or6", "fp4_w4a8", "rms",
         "mse")  # fmt: skip
# Everything that rounds to the nearest and draws no signs.
CASES = [
  *(r for r in PAPERS.values() if not (r.is_random or r.is_stateful)),
  without_backward("quartet"),
  without_backward("nvfp4_4or6"),
  Recipe("halo", Gemm(_HALO, _HALO), LEFT, Gemm(Quant(E4M3), Quant(E4M3))),
  Recipe("left forward", LEFT),
  Recipe("back-off", *(Gemm(*[Quant(E4M3, scale=Scale.GAUDI2, clip=Largest(4.0))] * 2),) * 3),
  Recipe("quantile", *(Gemm(*[Quant(E4M3, (1, WHOLE), clip=Quantile(0.9))] * 2),) * 3),
  Recipe("rms", *(Gemm(*[Quant(E4M3, (1, 32), Scale.POW2, clip=Rms(4.0))] * 2, 32),) * 3),
  Recipe(
    "mse", *(Gemm(*[Quant(E2M1, (1, WHOLE), clip=LeastError((1.0, 0.8, 0.6)))] * 2),) * 3
  ),
]  # fmt: skip


@pytest.mark.parametrize(
  "recipe",
  [*(pytest.param(r, marks=[pytest.mark.slow] * (r.name in _RARE), id=r.name) for r in CASES),
   *_OTHERS],
  ids=lambda r: r.name,
)  # fmt: skip
def test_three_products_are_those_of_the_paper(rng, recipe):
  x, w, g = operands(rng)
  for name, got, want in zip(
    "y dx dw".split(), products(recipe, x, w, g), three_products(recipe, x, w, g)
  ):
    bound = tolerances.FLOAT32_SUM * np.abs(want).max()
    assert np.abs(got - want).max() < bound, f"{name}: {np.abs(got - want).max()} >= {bound}"


# Random rounding and signs, delayed scales: all but Quartet, whose backward products rotate
# numbers that are not whole.
RANDOM = [
  *(r for r in PAPERS.values() if (r.is_random or r.is_stateful) and r.name != "quartet"),
  fp8jax.RECIPES["nvfp4_sr_rht"],
]


# A window of delayed scales; NVFP4's method; Quartet II's backward products.
_DRAWN = ("trillion_token", "nvfp4_sr_rht", "nvfp4_eden")


@pytest.mark.parametrize(
  "recipe",
  [pytest.param(r, id=r.name, marks=[pytest.mark.slow] * (r.name not in _DRAWN)) for r in RANDOM],
)
def test_random_and_delayed_products_are_those_of_the_paper_at_known_draws(
  rng, recipe, monkeypatch
):
  """Every random bit, sign and amax is the test's. Of the amaxes one is small, so that operands
  saturate, and one large."""
  know_draws(monkeypatch)
  x, w, g = operands(rng, 128)
  amaxes = [F32(np.abs(t).max() * times) for t, times in zip((x, w, g), (0.3, 1.0, 5.0))]
  site = with_amaxes(site_lib.single(recipe), amaxes)
  got = products(dataclasses.replace(site, tap=np.zeros((3, 1), F32)), x, w, g)
  wants = products_and_slack(recipe, x, w, g, amaxes=given_amaxes(recipe, amaxes))
  for name, one, (want, _) in zip("y dx dw".split(), got, wants, strict=True):
    assert np.abs(one - want).max() < tolerances.FLOAT32_SUM * np.abs(want).max(), name


def test_fresh_signs_are_those_of_both_operands_and_of_this_key(rng):
  """Different signs for the operands would leave nothing of the product."""
  x, w, g = operands(rng)
  q = Quant(E4M3, (1, 16), Scale.POW2, transform=Hadamard(16, "fresh"))
  recipe = Recipe("fresh", Gemm(q, q, 16), Gemm(q, q, 16), Gemm(q, q, 16))
  assert recipe.is_random
  exact = (x.astype(np.float64) @ w, g.astype(np.float64) @ w.T, x.T.astype(np.float64) @ g)
  one, other = (products(recipe, x, w, g, jax.random.key(k)) for k in (1, 2))
  for a, b, want in zip(one, other, exact):
    assert not np.array_equal(a, b)
    for got in (a, b):
      assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)
  left = dataclasses.replace(LEFT, rotate_rows=(Hadamard(16, "fresh"), Hadamard(16, "fresh")))
  (y, *_), (again, *_) = (
    products(Recipe("left", left), x, w, g, jax.random.key(k)) for k in (1, 2)
  )
  assert not np.array_equal(y, again)
  assert np.linalg.norm(y - exact[0]) < 0.05 * np.linalg.norm(exact[0])
  with pytest.raises(ValueError, match="signs_key"):
    quantize.quantize(x, q)
  with pytest.raises(ValueError, match="key"):
    dot("TD,DF->TF", x, w, recipe)


@pytest.mark.slow  # at known draws: above
@pytest.mark.parametrize("name", ["nvfp4_eden", "trillion_token", "quartet", "nvfp4_sr_room"])
def test_the_mean_of_random_gradients_is_the_gradient(rng, name):
  """The length along it: of EDEN and stochastic rounding within four standard errors, of Quartet's
  nearest rounding within the paper's misalignment (1.3 %). Trillion-token training rounds x and w
  to the nearest: the mean is that of a product of these."""
  x, w, g = (rng.standard_normal(s).astype(F32) for s in ((128, 128), (128, 128), (128, 128)))
  recipe = dataclasses.replace(PAPERS[name], fwd=Gemm(), backward=Backward.UNQUANTIZED,
                               estimate_x=None, estimate_w=None)  # fmt: skip
  n, amaxes = 64, [np.abs(t).max() for t in (x, w, g)]
  site = with_amaxes(site_lib.unobserved(recipe), amaxes)

  @jax.jit
  def run(keys):
    def one(key):
      mine = dataclasses.replace(site, key=key)
      _, pull = jax.vjp(lambda x, w: dot("TD,DF->TF", x, w, mine), x, w)
      return pull(g)

    return jax.lax.map(one, keys)

  if name == "trillion_token":
    x = narrow(x.T, recipe.wgrad.lhs, given=amaxes[0]).values.T
    w = narrow(w, recipe.dgrad.rhs, given=amaxes[1]).values
  for got, want in zip(run(jax.random.split(jax.random.key(0), n)),
                       (g.astype(np.float64) @ w.T, x.T.astype(np.float64) @ g)):  # fmt: skip
    got = np.asarray(got, np.float64)
    length = np.array([np.vdot(t, want) for t in got]) / np.vdot(want, want)
    standard_error = length.std(ddof=1) / np.sqrt(n)
    if name == "quartet":
      assert 1e-4 < abs(length.mean() - 1) < 0.04
    else:
      assert abs(length.mean() - 1) < 4 * standard_error < 2e-3


SCALES = {
  # Exact at the borders and one float32 step to either side.
  "pow2_down": (E2M1, [(6.0, 1.0), (12.0, 2.0), (1.5, 0.25)]),
  "gaudi2": (E4M3, [(448.0, 1.0), (28.0, 2.0**-4), (1.75, 2.0**-8)]),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_at_their_borders(name):
  fmt, borders = SCALES[name]
  for amax, scale in borders:
    below, above = (np.nextafter(F32(amax), F32(side)) for side in (0, 1e9))
    got = quantize.amax_to_scale(np.array([below, amax, above], F32), fmt, Scale(name))
    step = 0.5 if name == "pow2_down" else 1.0
    up = 1.0 if name == "pow2_down" else 16.0
    np.testing.assert_array_equal(got, np.array([step, 1, up]) * scale)
  huge = quantize.amax_to_scale(np.array([1e30, 1e-30, 0, np.inf, np.nan], F32), fmt, Scale(name))
  assert np.all(np.isfinite(huge)) and np.all(huge[2:] == 1)
  assert name != "gaudi2" or (huge[0], huge[1]) == (16, 2.0**-8)


def test_gaudis_scales_of_a_calibration_leave_their_back_off_and_stay_the_hardwares():
  """float64: of the hardware's scales the least under which 2^margin times amax does not saturate,
  where powers of two times the scale without back-off would be none of these."""
  quant = Quant(E4M3_240, scale=Scale.GAUDI2, source=Static(2))
  borders = 240 * 2.0 ** np.array([-10, -6, -2, 2])
  amax = np.concatenate([np.nextafter(F32(borders), F32(to)) for to in (0, 1e9)] + [F32(borders)])
  wants = [min([s for s in (2.0**-8, 2.0**-4, 1.0) if 4.0 * float(a) <= 240 * s], default=16.0)
           for a in amax]  # fmt: skip
  got = [float(quantize.given_scale(a, quant)[0, 0]) for a in amax]
  assert got == wants and set(got) == {2.0**-8, 2.0**-4, 1.0, 16.0}
  with pytest.raises(ValueError, match="gaudi2, got floor"):
    dataclasses.replace(quant, scale=Scale.FLOOR)


def test_four_thirds_of_floor_saturates_nothing():
  amax = np.exp2(np.linspace(-3, 3, 4001)).astype(F32)
  ratio = amax / np.asarray(quantize.amax_to_scale(amax, E2M1, Scale.FLOOR_4_3))
  assert 3 - 1e-5 < ratio.min() < 3.01 and 5.99 < ratio.max() < 6 + 1e-6


@pytest.mark.parametrize("shape", [(5, 70), (1, 20)], ids=str)
@pytest.mark.parametrize("clip", [Largest(2.0), Rms(3.0), Rms(3.0, True), Quantile(0.75),
                                  LeastError((1.0, 0.5)), Clamp(0.9)], ids=str)  # fmt: skip
def test_partial_tiles_count_no_padding_and_transposes_are_equal(rng, clip, shape):
  x = (rng.standard_normal(shape) + 2).astype(F32)
  tile = (1, WHOLE) if isinstance(clip, Clamp) else (2, 32)
  q = Quant(E4M3, tile, clip=clip)
  got, turned = jax.jit(
    lambda x: (quantize.quantize(x, q), quantize.quantize(x.T, q, contraction=0))
  )(x)
  np.testing.assert_allclose(got.dequantize(), narrow(x, q).values, rtol=1e-6)
  # Sums of squares come in another order.
  rtol = 1e-6 if isinstance(clip, Rms) else 0
  np.testing.assert_allclose(got.dequantize(), turned.dequantize(), rtol=rtol)


REFUSED = [
  (dict(scale=Scale.ONE, tile=(1, 128)), "scale='one'"),
  (dict(scale=Scale.ONE, clip=Rms(2.0)), "clip="),
  (dict(clip=Quantile(0.0)), "share"),
  (dict(clip=Clamp(0.4)), "share"),
  (dict(clip=Clamp(0.9), tile=(1, 128)), "of a row, a column or a tensor"),
  (dict(clip=LeastError(())), "times"),
  (dict(clip=Largest(-1.0)), "times"),
  (dict(scale=Scale.FLOOR_4_3), "floor_4_3"),
  (dict(rounding=Rounding.EDEN), "eden"),
  (dict(transform=Hadamard(16, "none"), scale=Scale.NONE), "scale='none'"),
]


@pytest.mark.parametrize("changes, words", REFUSED, ids=str)
def test_values_that_mean_nothing_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    Quant(E4M3, **changes)


def test_recipes_that_mean_nothing_are_refused():
  plain = Quant(E4M3)
  for make, words in [
    (lambda: Gemm(plain, plain, compensates=True), "compensates"),
    (lambda: Gemm(rotate_rows=(Hadamard(16), None)), "rotate_rows"),
    (lambda: Gemm(Quant(formats.E8M3), plain), "lhs=e8m3.* reach 2.128; set scale='one'"),
    (lambda: Gemm(plain, Quant(formats.E7M7, (1, 32), Scale.POW2), 32), "rhs=e7m7.*tile"),
    (lambda: Gemm(plain, Quant(formats.E5M6, (0, 0), Scale.NONE)), "rhs=.*a range of its own"),
    (lambda: dataclasses.replace(PAPERS["fp4"].fwd, rotate_rows=(Hadamard(16), None)), "clamped"),
    (lambda: Recipe("r", estimate_w=TrustMask()), "compute dtype"),
    (lambda: Gemm(plain), "rhs=None: no matrix unit"),
    (lambda: Gemm(None, Quant(E4M3, transform=Hadamard(16))), "a rotated operand and one"),
    (lambda: Gemm(None, plain, Accumulation.FAST), "FP8 operands"),
    (
      lambda: Gemm(*[Quant(E4M3, source=Static(), transform=Hadamard(16))] * 2),
      "lhs=.*of the tens",
    ),
    (
      lambda: Gemm(
        *[Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32, transform=Hadamard(16), is_joint=True)] * 2, 16
      ),
      "lhs=.*is joint",
    ),
    (lambda: Gemm(plain, Quant(E4M3, source=Static()), rotate_rows=(None, Hadamard(16))), "rhs=.*"),
    (lambda: Recipe("r", Gemm(None, plain), estimate_x=TrustMask()), "fwd rounds no lhs"),
    (lambda: Recipe("r", wgrad=Gemm(None, plain)), "wgrad quantizes rhs alone"),
    (lambda: Differentiable(power=0.5), "power"),
    (lambda: SlopeAlone(format="lns8"), "steps between numbers"),
    (lambda: Recipe("r", Gemm(plain, plain), estimate_w=SlopeAlone()), "does not round"),
    (lambda: Recipe("r", estimate_x=SlopeAlone()), "compute dtype"),
    (lambda: Recipe("r", estimate_w=SlopeAlone(), estimate_x=SlopeAlone()), "None for x"),
    (lambda: dataclasses.replace(PAPERS["lns8"], estimate_w=Differentiable()), "logarithmic"),
    (lambda: Hadamard(48 + 2), "12, 20 or 28"),
    (lambda: Hadamard(16, "random"), "fresh"),
  ]:
    with pytest.raises(ValueError, match=words):
      make()


@pytest.mark.parametrize("recipe", [*PAPERS.values(), *CASES[-6:]], ids=lambda r: r.name)
def test_recipes_survive_json_and_are_found_by_name(recipe):
  assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
  if recipe.name in PAPERS:
    assert rules.recipe_by_name(recipe.name) == recipe
    assert recipe.name not in fp8jax.RECIPES


def test_generation_keeps_a_weight_that_compensation_multiplies(rng):
  w = rng.standard_normal((64, 32)).astype(F32)
  kept, codes = (
    multiplied.as_multiplied(w, site_lib.single(PAPERS[name]), "TD,DF->TF", "bfloat16")
    for name in ("fp4_occ", "fp4_w4a4")
  )
  np.testing.assert_array_equal(kept, w)
  assert isinstance(codes, StoredMatrix)


def test_gains_are_of_the_whole_sizes_also_in_the_compute_dtype(rng):
  x, w, _ = operands(rng)
  recipe = Recipe("gain", Gemm(gain=Gain(-0.5, 0.25, -1.0)))
  want = x.astype(np.float64) @ w * 192**-0.5 * 80**0.25 / 64
  got = dot("TD,DF->TF", x, w, recipe)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_observers_see_the_error_of_rotated_operands_and_the_range_of_the_tensor(rng):
  """Not a difference of spaces, and the amax of a quiet step."""
  x, w, g = operands(rng)
  q = Quant(E5M2, transform=Hadamard(16, "none"))
  site = site_lib.fresh(
    Recipe("seen", Gemm(q, q)), "dot", statistics=tensor_stats.LOUD, backends=("xla",) * 3
  )

  def loss(site):
    return jnp.sum(dot("TD,DF->TF", x, w, site) * g)

  seen = np.asarray(jax.jit(jax.grad(loss))(site).tap)
  turned = rotated(x, q.transform)
  error = np.sum((narrow(turned, dataclasses.replace(q, transform=None)).values - turned) ** 2)
  at = tensor_stats.STATISTICS.index
  np.testing.assert_allclose(seen[0, at("squared_error")], error, rtol=1e-6)
  largest = np.abs(x).max()
  assert seen[0, at("amax")] == largest != np.abs(turned).max()
