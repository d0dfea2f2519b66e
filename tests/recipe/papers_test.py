"""Recipes of papers against float64 arithmetic written from the papers, sharing no code."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import tolerances

import fp8jax
from fp8jax import axes, formats, mesh
from fp8jax.formats import E2M1, E4M3, E4M3_240, E5M2
from fp8jax.ops import multiplied
from fp8jax.ops import site as site_lib
from fp8jax.ops.dots import dot
from fp8jax.quantization import hadamard, quantize, tensor_stats
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import Accumulation, Backward, Differentiable, Gain, Gemm, Recipe, TrustMask
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

F32 = np.float32


# --- the oracle ----------------------------------------------------------------------------------


def sylvester(n: int) -> np.ndarray:
  h = np.ones((1, 1))
  while len(h) < n:
    h = np.block([[h, h], [h, -h]])
  return h


def rotated(t, how: Hadamard | None, axis: int = 1):
  """The product with the plain matrix in blocks: of whole numbers exact, then one rounding."""
  if how is None:
    return t
  # hadamard_test records the fixed vector.
  signs = {"none": 1.0, "fixed": hadamard.signs(how.size)}[how.signs]
  t = np.moveaxis(np.asarray(t, np.float64), axis, -1)
  blocks = (t.reshape(*t.shape[:-1], -1, how.size) * signs) @ sylvester(how.size)
  factor = F32(1 / np.sqrt(how.size))
  return np.moveaxis((blocks * np.float64(factor)).reshape(t.shape), -1, axis)


def clamp(t, q: Quant):
  if not isinstance(q.clip, Clamp):
    return t
  assert q.tile == (1, WHOLE)
  n, order = t.shape[1], np.sort(t, axis=1)
  low, high = (int(np.floor(s * n)) for s in (1 - q.clip.share, q.clip.share))
  return np.clip(t, order[:, [low]], order[:, [min(high, n - 1)]])


def one_scale(tile, q: Quant, tensor_amax):
  """The candidates of a tile's scale, in float32."""
  amax = F32(np.abs(tile).max())
  times = (1.0,)
  if isinstance(q.clip, LeastError):
    times = q.clip.times
  elif isinstance(q.clip, Largest):
    times = (q.clip.times,)
  elif isinstance(q.clip, Rms):
    centre = tile.astype(np.float64).mean() if q.clip.is_centred else 0
    amax = F32(q.clip.times * np.sqrt(np.mean((tile.astype(np.float64) - centre) ** 2)))
  elif isinstance(q.clip, Quantile):
    order = np.sort(np.abs(tile).ravel())
    amax = order[int(q.clip.share * (order.size - 1))]
  return [_scale_of(F32(amax * F32(t)), q, tensor_amax, max(times)) for t in times]


def _scale_of(amax, q: Quant, tensor_amax, most):
  if q.scale is Scale.ONE:
    return F32(1)
  if q.scale is Scale.E4M3_OVER_F32:
    top = 448 if most <= 1 else 256
    encode = F32(top * q.format.max) / F32(tensor_amax)
    s8 = oracle.cast(amax * F32(encode * F32(1 / q.format.max)), "e4m3").astype(F32)
    return max(s8, F32(2.0**-9)) * (F32(1) / encode)
  if q.scale is Scale.POW2_DOWN:
    return F32(2.0 ** (np.frexp(np.float64(amax) / q.format.max)[1] - 1))
  if q.scale is Scale.FLOOR_4_3:
    return oracle.scale_of(amax, q.format.name, "floor") * F32(4 / 3)
  if q.scale is Scale.GAUDI2:
    fits = [s for s in (2.0**-8, 2.0**-4, 1.0, 16.0) if amax <= s * q.format.max]
    return F32(min(fits, default=16.0))
  if q.format.name == "lns8":
    return F32(amax * F32(1 / F32(2.0 ** (127 / 8))))
  return oracle.scale_of(amax, q.format.name, q.scale.value)


def on_grid(x, q: Quant):
  """float64 numbers of the format nearest to float32 x, or toward zero where the mask cuts."""
  name, x = q.format.name, np.asarray(x, F32)
  if name == "lns8":
    with np.errstate(divide="ignore"):
      k = np.clip(np.rint(8 * np.log2(np.abs(x.astype(np.float64)))), 0, 127)
    return np.where(x == 0, 0, np.sign(x) * 2.0 ** (k / 8))
  if name.startswith("e8m"):
    assert q.rounding is Rounding.TOWARD_ZERO
    kept = x.view(np.uint32) & np.uint32(0xFFFFFFFF << (23 - int(name[3])) & 0xFFFFFFFF)
    return kept.view(F32).astype(np.float64)
  if name == "e7m7":
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)  # of operands far from its borders
  return oracle.cast(x, name).astype(np.float64)


def narrow(t, q: Quant | None, rows: Hadamard | None = None):
  """float64 (dequantized, t / scale), both rotated, of [rows, K]."""
  if q is None:
    return np.asarray(t, np.float64), None
  t = clamp(np.asarray(rotated(np.asarray(t, F32), rows, 0), F32), q)
  t = np.asarray(rotated(t, q.transform), F32)
  extents = [n if e == WHOLE else e for n, e in zip(t.shape, q.tile)]
  back, scaled = np.zeros(t.shape), np.zeros(t.shape)
  for r in range(0, t.shape[0], extents[0]):
    for c in range(0, t.shape[1], extents[1]):
      part = (slice(r, r + extents[0]), slice(c, c + extents[1]))
      made = []
      for scale in one_scale(t[part], q, np.abs(t).max()):
        codes = on_grid(t[part] * (F32(1) / scale), q)
        made.append((codes * np.float64(scale), t[part] / np.float64(scale)))
      errors, best = [np.sum((b - t[part]) ** 2) for b, _ in made], 0
      for i, error in enumerate(errors):  # "less" by more than a rounding, as LeastError says
        best = i if error < errors[best] * (1 - 2.0**-12) else best
      back[part], scaled[part] = made[best]
  return back, scaled


def slope(scaled, q: Quant, estimator):
  magnitude = np.abs(scaled)
  if isinstance(estimator, TrustMask):
    return (magnitude <= q.format.max * (1 + 2.0**-16)).astype(np.float64)
  assert q.format == E2M1
  grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  low = grid[np.clip(np.searchsorted(grid, magnitude, side="right") - 1, 0, 6)]
  width = grid[np.clip(np.searchsorted(grid, magnitude, side="right"), 1, 7)] - low
  u = np.abs(2 * (magnitude - low) / width - 1)
  with np.errstate(divide="ignore"):
    found = np.minimum(u ** (1 / estimator.power - 1) / estimator.power, estimator.largest)
  return np.where(magnitude <= q.format.max * (1 + 1e-7), found, 0)


def three_products(r: Recipe, x, w, g):
  """float64 y, dx, dw of x [T, D], w [D, F], g [T, F]."""
  f, d, v = r.fwd, r.dgrad, r.wgrad
  xq, x_scaled = narrow(x, f.lhs, f.rotate_rows[0])
  wq, w_scaled = narrow(w.T, f.rhs, f.rotate_rows[1])
  y = rotated(rotated(xq @ wq.T, f.rotate_rows[0], 0), f.rotate_rows[1], 1)
  again = r.backward is Backward.DEQUANTIZED
  x_again, w_again = (xq, wq) if again else (x, w.T)
  if f.compensates:
    rest = x.astype(np.float64) - clamp(x, f.lhs)
    y = y + rest @ w
    x_again = x_again + rest if again else x_again
  dx = narrow(g, d.lhs, d.rotate_rows[0])[0] @ narrow(w_again.T, d.rhs, d.rotate_rows[1])[0].T
  dx = rotated(rotated(dx, d.rotate_rows[0], 0), d.rotate_rows[1], 1)
  dw = narrow(x_again.T, v.lhs, v.rotate_rows[0])[0] @ narrow(g.T, v.rhs, v.rotate_rows[1])[0].T
  dw = rotated(rotated(dw, v.rotate_rows[0], 0), v.rotate_rows[1], 1).T
  if r.estimate_x:
    dx = dx * slope(x_scaled, f.lhs, r.estimate_x)
  if r.estimate_w:
    dw = dw * slope(w_scaled, f.rhs, r.estimate_w)
  if again and f.rhs.transform:
    dx, dw = rotated(dx, f.rhs.transform), rotated(dw, f.rhs.transform)
  sizes = (x.shape[1], w.shape[1], x.shape[0])
  gains = [
    np.prod(np.power(sizes, [m.gain.fan_in, m.gain.fan_out, m.gain.tokens])) if m.gain else 1.0
    for m in (f, d, v)
  ]
  return y * gains[0], dx * gains[1], dw.T * gains[2]


# --- the tests -----------------------------------------------------------------------------------

_HALO = Quant(E4M3, scale=Scale.F32, transform=Hadamard(16, "none"))
_LEFT = Gemm(Quant(E4M3), Quant(E4M3), rotate_rows=(Hadamard(16, "none"), None))


def _without_backward(name: str) -> Recipe:
  """Its backward products in the compute dtype: what is random is there."""
  return dataclasses.replace(PAPERS[name], dgrad=Gemm(), wgrad=Gemm())


# The other served ones differ by a tile or a format.
_SERVED = {"w4a16", "int8", "w4afp8", "nvfp4a16_4or6"}
_OTHERS = [
  pytest.param(r, marks=pytest.mark.slow) if name not in _SERVED else r
  for name, r in (SERVED | MEASURED).items() if not r.is_stateful
]  # fmt: skip

# Everything that rounds to the nearest and draws no signs.
CASES = [
  *(r for r in PAPERS.values() if not (r.is_random or r.is_stateful)),
  _without_backward("quartet"),
  _without_backward("nvfp4_4or6"),
  Recipe("halo", Gemm(_HALO, _HALO), _LEFT, Gemm(Quant(E4M3), Quant(E4M3))),
  Recipe("left forward", _LEFT),
  Recipe("back-off", *(Gemm(*[Quant(E4M3, scale=Scale.GAUDI2, clip=Largest(4.0))] * 2),) * 3),
  Recipe("quantile", *(Gemm(*[Quant(E4M3, (1, WHOLE), clip=Quantile(0.9))] * 2),) * 3),
  Recipe("rms", *(Gemm(*[Quant(E4M3, (1, 32), Scale.POW2, clip=Rms(4.0))] * 2, 32),) * 3),
  Recipe(
    "mse", *(Gemm(*[Quant(E2M1, (1, WHOLE), clip=LeastError((1.0, 0.8, 0.6)))] * 2),) * 3
  ),
]  # fmt: skip


def operands(rng):
  """Whole numbers, so that rotations are exact, with a channel of outliers and lone ones."""
  shapes = ((64, 192), (192, 80), (64, 80))
  x, w, g = (np.rint(100 * rng.standard_normal(s)).astype(F32) for s in shapes)
  x[:, 7] *= 30
  x[5, 150], w[11, 13], g[17, 19] = 6001.0, -801.0, 5003.0
  return x, w, g


@functools.cache
def _program(recipe: Recipe):
  return jax.jit(functools.partial(_three, recipe))


def _three(recipe, x, w, g, key):
  y, pull = jax.vjp(lambda x, w: dot("TD,DF->TF", x, w, recipe, key=key), x, w)
  return y, *pull(g)


def products(recipe, x, w, g, key=None):
  """float64 y, dx, dw; of a recipe one program for all keys."""
  run = _program(recipe) if isinstance(recipe, Recipe) else jax.jit(_three)
  site = () if isinstance(recipe, Recipe) else (recipe,)
  return [np.asarray(t, np.float64) for t in run(*site, x, w, g, key)]


@pytest.mark.parametrize("recipe", [*CASES, *_OTHERS], ids=lambda r: r.name)
def test_three_products_are_those_of_the_paper(rng, recipe):
  x, w, g = operands(rng)
  for name, got, want in zip(
    "y dx dw".split(), products(recipe, x, w, g), three_products(recipe, x, w, g)
  ):
    bound = tolerances.FLOAT32_SUM * np.abs(want).max()
    # The slope magnifies the rounding of w / scale: twentyfold where it is about to be cut off.
    bound *= 20 if name == "dw" and isinstance(recipe.estimate_w, Differentiable) else 1
    assert np.abs(got - want).max() < bound, f"{name}: {np.abs(got - want).max()} >= {bound}"


FORMATS_DRAWN = ("e4m3", "e5m2", "e2m1", "int8", "int4", "e3m2", "e2m3", "e4m3_240", "e3m4")
CLIPS_DRAWN = (Largest(1.0), Largest(17 / 16), Rms(3.0), Quantile(0.95), LeastError((1.0, 0.7)))
SCALES_DRAWN = [s for s in Scale if s not in (Scale.NONE, Scale.E4M3_OVER_F32)]


def drawn(seed: int) -> tuple[Recipe, str]:
  """A recipe that the validators accept, and a backend that supports its products."""
  rng = np.random.default_rng(seed)

  def pick(values):
    return values[rng.integers(len(values))]

  def quant(tile, rotation):
    format, scale = formats.by_name(pick(FORMATS_DRAWN)), pick(SCALES_DRAWN)
    clips = (*CLIPS_DRAWN, Clamp(0.97)) if tile == (1, WHOLE) else CLIPS_DRAWN
    clip = pick(clips)
    if isinstance(clip, Rms) and scale is Scale.F32:
      raise ValueError("the last bit of a sum of squares decides on codes")
    return Quant(format, tile, scale, clip=clip, transform=rotation)

  def gemm():
    k = pick((16, 32, WHOLE))
    rotation = pick((None, None, Hadamard(16, "none")))
    lhs, rhs = (quant((pick((1, 16, WHOLE)), k), rotation) for _ in range(2))
    how = k or pick((Accumulation.PRECISE, Accumulation.FAST, 32))
    rows = tuple(pick((None, None, Hadamard(16, "none"))) for _ in range(2))
    compensates = isinstance(lhs.clip, Clamp) and rotation is None and rows[0] is None
    return Gemm(lhs, rhs, how, rows, compensates, pick((None, Gain(-0.5, 0.25, 0.0))))

  while True:
    try:
      fwd, dgrad, wgrad = gemm(), gemm(), gemm()
      dgrad, wgrad = (g if rng.random() < 0.8 else Gemm() for g in (dgrad, wgrad))
      backward = pick(tuple(Backward))
      rotations = [q.rotation for m in (dgrad, wgrad) for q in (m.lhs, m.rhs) if q]
      rotations += [*dgrad.rotate_rows, *wgrad.rotate_rows]
      if backward is Backward.DEQUANTIZED and any(rotations):
        continue  # of numbers that are not whole a rotation is not exact, and codes may differ
      estimate_x = pick((None, TrustMask()))
      recipe = Recipe(
        f"drawn {seed}", fwd, dgrad, wgrad, backward, pick((None, TrustMask())), estimate_x
      )
      backend = pick(("reference", "xla", "dequantized", "auto"))
      site_lib.single(recipe, backend)
      return recipe, backend
    except ValueError:
      continue


@pytest.mark.parametrize(
  "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= 6)) for n in range(120)]
)
def test_drawn_recipes_are_their_arithmetic(seed):
  """Formats, tiles, scales, clips, rotations, estimators, gains, accumulation and backends."""
  recipe, backend = drawn(seed)
  x, w, g = operands(np.random.default_rng(seed))
  site = dataclasses.replace(site_lib.single(recipe, backend), tap=np.zeros((3, 1), F32))
  got = products(site, x, w, g)
  for name, one, want in zip("y dx dw".split(), got, three_products(recipe, x, w, g)):
    bound = 2 * tolerances.FLOAT32_SUM * np.abs(want).max()
    assert np.abs(one - want).max() <= bound, f"{name} of {recipe.to_dict()} by {backend}"


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
  left = dataclasses.replace(_LEFT, rotate_rows=(Hadamard(16, "fresh"), Hadamard(16, "fresh")))
  (y, *_), (again, *_) = (
    products(Recipe("left", left), x, w, g, jax.random.key(k)) for k in (1, 2)
  )
  assert not np.array_equal(y, again)
  assert np.linalg.norm(y - exact[0]) < 0.05 * np.linalg.norm(exact[0])
  with pytest.raises(ValueError, match="signs_key"):
    quantize.quantize(x, q)
  with pytest.raises(ValueError, match="key"):
    dot("TD,DF->TF", x, w, recipe)


@pytest.mark.parametrize(
  "name",
  ["nvfp4_eden", *(pytest.param(n, marks=pytest.mark.slow) for n in ("quartet", "nvfp4_sr_room"))],
)
def test_the_mean_of_random_gradients_is_the_gradient(rng, name):
  """Of EDEN and of stochastic rounding with room within four standard errors, per element; of
  Quartet's nearest rounding within the paper's misalignment (1.3 % of the length)."""
  x, w, g = (rng.standard_normal(s).astype(F32) for s in ((128, 128), (128, 128), (128, 128)))
  recipe = dataclasses.replace(PAPERS[name], fwd=Gemm(), backward=Backward.UNQUANTIZED,
                               estimate_x=None, estimate_w=None)  # fmt: skip
  n = 64

  @jax.jit
  def run(keys):
    def one(key):
      _, pull = jax.vjp(lambda x, w: dot("TD,DF->TF", x, w, recipe, key=key), x, w)
      return pull(g)

    return jax.lax.map(one, keys)

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
  np.testing.assert_allclose(got.dequantize(), narrow(x, q)[0], rtol=1e-6)
  # Sums of squares come in another order.
  rtol = 1e-6 if isinstance(clip, Rms) else 0
  np.testing.assert_allclose(got.dequantize(), turned.dequantize(), rtol=rtol)


REFUSED = [
  (dict(scale=Scale.ONE, tile=(1, 128)), "scale='one'"),
  (dict(scale=Scale.ONE, clip=Rms(2.0)), "clip="),
  (dict(clip=Quantile(0.0)), "share"),
  (dict(clip=Clamp(0.4)), "share"),
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
    (lambda: dataclasses.replace(PAPERS["fp4"].fwd, rotate_rows=(Hadamard(16), None)), "clamped"),
    (lambda: Recipe("r", estimate_w=TrustMask()), "compute dtype"),
    (lambda: Gemm(plain), "rhs=None: no matrix unit"),
    (lambda: Gemm(None, Quant(E4M3, transform=Hadamard(16))), "a rotated operand and one"),
    (lambda: Gemm(None, plain, Accumulation.FAST), "FP8 operands"),
    (lambda: Recipe("r", Gemm(None, plain), estimate_x=TrustMask()), "fwd rounds no lhs"),
    (lambda: Recipe("r", wgrad=Gemm(None, plain)), "wgrad quantizes rhs alone"),
    (lambda: Differentiable(power=0.5), "power"),
    (lambda: dataclasses.replace(PAPERS["lns8"], estimate_w=Differentiable()), "logarithmic"),
    (lambda: Hadamard(48 + 2), "12, 20 or 28"),
    (lambda: Hadamard(16, "random"), "fresh"),
  ]:
    with pytest.raises(ValueError, match=words):
      make()


_WIDE = [
  Quant(E4M3, clip=Rms(4.0)), Quant(E4M3, clip=Quantile(0.99)), Quant(E4M3, clip=Clamp(0.98)),
  Quant(E4M3, scale=Scale.POW2, clip=LeastError((1.0, 0.25))),
]  # fmt: skip
ON_MESH = [
  *(PAPERS[n] for n in ("fp4", "munit_scaling", "block_128_requantized")),
  *map(_without_backward, ("quartet", "nvfp4_4or6")),
  Recipe("left", _LEFT, _LEFT, _LEFT),
  Recipe("tensors", *(Gemm(q, _WIDE[3]) for q in _WIDE[:3])),
]


# Row and column scales, compensation and DGE; rotations and masks; scales of whole tensors.
_QUICK = ("fp4", "quartet", "tensors")


@pytest.mark.parametrize(
  "recipe",
  [pytest.param(r, id=r.name, marks=[pytest.mark.slow] * (r.name not in _QUICK)) for r in ON_MESH],
)
def test_on_a_mesh_they_are_what_they_are_on_one_device(rng, recipe):
  """Row parallel, all axes split: amaxes, orders and sums are those of the whole tensor."""
  eqn, of_w = "BLF,FD->BLD", axes.as_rules(dict(D="fsdp", F="tensor"))
  acts = axes.as_rules(dict(B=("data", "fsdp"), F="tensor"))
  layout = axes.Layout(mesh.make((2, 2, 2)), of_w, acts)
  x, w, g = (rng.standard_normal(s).astype(F32) for s in ((8, 64, 256), (256, 256), (8, 64, 256)))
  x[..., 7] *= 20

  def run(layout, *tensors):
    site = dataclasses.replace(site_lib.single(recipe), layout=layout)

    def all_three(x, w, g):
      y, pull = jax.vjp(lambda x, w: dot(eqn, x, w, dataclasses.replace(site, tap=site.tap)), x, w)
      return y, *pull(g)

    return jax.jit(all_three)(*tensors)

  places = (layout.act_spec("BLF"), layout.weight_spec("FD"), layout.act_spec("BLD"))
  placed = [jax.device_put(t, jax.NamedSharding(layout.mesh, p)) for t, p in zip((x, w, g), places)]
  for got, want in zip(run(layout, *placed), run(axes.LOCAL, x, w, g), strict=True):
    bound = 2 * tolerances.FLOAT32_SUM * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


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


def test_observers_see_rotated_operands(rng):
  """The error that a site observes is that of the rotated tensor, not a difference of spaces."""
  x, w, g = operands(rng)
  q = Quant(E5M2, transform=Hadamard(16, "none"))
  site = site_lib.fresh(
    Recipe("seen", Gemm(q, q)), "dot", statistics=tensor_stats.LOUD, backends=("xla",) * 3
  )

  def loss(site):
    return jnp.sum(dot("TD,DF->TF", x, w, site) * g)

  plain = dataclasses.replace(site, recipe=Recipe("plain", Gemm(*[Quant(E5M2)] * 2)))
  seen, of_plain = (np.asarray(jax.jit(jax.grad(loss))(s).tap) for s in (site, plain))
  largest = np.abs(rotated(x, q.transform)).max()
  np.testing.assert_allclose(seen[0, 0], largest, rtol=1e-6)
  assert of_plain[0, 0] == np.abs(x).max() != seen[0, 0]
