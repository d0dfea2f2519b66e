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
from fp8jax.quantization import amax_history, hadamard, quantize, tensor_stats
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import Accumulation, Backward, Differentiable, Gain, Gemm, Recipe, TrustMask
from fp8jax.recipe.papers import PAPERS
from fp8jax.recipe.quant import (
  CURRENT,
  WHOLE,
  Clamp,
  Delayed,
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


# Of LogFMT, whose spacings are cut to 2^-20 octave: relative, a number of its grid.
LOG_SLACK = 2.0**-17
# The tests' own draws: what every random bit is, as a share of 2^32, and signs by size.
BITS = np.uint32(0.37 * 2**32)


def fresh_signs(size: int) -> np.ndarray:
  return np.random.default_rng(size).choice(F32([-1, 1]), size)


@pytest.fixture
def known_draws(monkeypatch):
  """Random bits and signs that the oracle has, too, wherever an element lies."""
  monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.full(shape, BITS, dtype))
  monkeypatch.setattr(jax.random, "rademacher", lambda key, shape, dtype: fresh_signs(*shape))


@functools.cache
def hadamard_matrix(size: int) -> np.ndarray:
  """Sylvester's, times Paley's of order 12, 20 or 28, which hadamard_test proves to be one."""
  order = next((n for n in (28, 20, 12) if size % n == 0), 1)
  h = hadamard.paley(order).astype(np.float64) if order > 1 else np.ones((1, 1))
  while len(h) < size:
    h = np.block([[h, h], [h, -h]])
  return h


def rotated(t, how: Hadamard | None, axis: int = 1, inverse: bool = False):
  """The product with the plain matrix in blocks: of whole numbers exact, then one rounding."""
  if how is None:
    return t
  # hadamard_test records the fixed vector.
  signs = {"none": np.ones, "fixed": hadamard.signs, "fresh": fresh_signs}[how.signs](how.size)
  matrix = signs[:, None] * hadamard_matrix(how.size)
  t = np.moveaxis(np.asarray(t, np.float64), axis, -1)
  blocks = t.reshape(*t.shape[:-1], -1, how.size) @ (matrix.T if inverse else matrix)
  factor = F32(1 / np.sqrt(how.size))
  return np.moveaxis((blocks * np.float64(factor)).reshape(t.shape), -1, axis)


def clamp(t, q: Quant):
  if not isinstance(q.clip, Clamp):
    return t
  assert q.tile == (1, WHOLE)
  n, order = t.shape[1], np.sort(t, axis=1)
  low, high = (int(np.floor(s * n)) for s in (1 - q.clip.share, q.clip.share))
  return np.clip(t, order[:, [low]], order[:, [min(high, n - 1)]])


def largest(q: Quant) -> float:
  return {"lns8": F32(2.0 ** (127 / 8)), "logfmt8": 1.0}.get(q.format.name) or oracle.MAX[
    q.format.name
  ]


def one_scale(tile, q: Quant, tensor_amax, given=None):
  """The candidates of a tile's scale, in float32: (all of it, its E4M3 number if it has one)."""
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
  if given is not None and q.scale is Scale.E4M3_OVER_F32:
    tensor_amax = given
  elif given is not None:
    amax = F32(given)
  return [_scale_of(F32(amax * F32(t)), q, tensor_amax) for t in times]


def _scale_of(amax, q: Quant, tensor_amax):
  if q.scale is Scale.E4M3_OVER_F32:
    most = max(q.clip.times) if isinstance(q.clip, LeastError) else 1.0
    # The paper's 448, or room for what may be larger than the tensor's largest.
    top = 256 if most > 1 or q.rounding is Rounding.EDEN else 448
    room = q.clip.times if isinstance(q.clip, Largest) else 1.0
    encode = F32(top * largest(q)) / F32(F32(tensor_amax) * F32(room))
    s8 = oracle.cast(amax * F32(encode * F32(1 / largest(q))), "e4m3").astype(F32)
    s8, decode = max(s8, F32(2.0**-9)), F32(1) / encode
    return s8 * decode, s8
  margin = getattr(q.source, "margin", 0)
  if q.scale is Scale.GAUDI2:
    amax = np.float64(amax) * 2.0**margin
    fits = [s for s in (2.0**-8, 2.0**-4, 1.0, 16.0) if amax <= s * largest(q)]
    return F32(min(fits, default=16.0)), None
  return F32(_of_one_level(amax, q) * F32(2.0**margin)), None


def _of_one_level(amax, q: Quant):
  if q.scale is Scale.ONE:
    return F32(1)
  if q.scale is Scale.POW2_DOWN:
    return F32(2.0 ** (np.frexp(np.float64(amax) / largest(q))[1] - 1))
  if q.scale is Scale.FLOOR_4_3:
    return oracle.scale_of(amax, q.format.name, "floor") * F32(4 / 3)
  if q.scale is Scale.F32:  # whose factor is a normal number
    return F32(amax * max(F32(1 / largest(q)), oracle.TINY))
  if q.format.name not in oracle.MAX:  # of what is logarithmic
    e, emax = np.frexp(np.float64(amax)), np.frexp(np.float64(largest(q)))
    up = {Scale.FLOOR: 0, Scale.EVEN: e[0] >= 1 - 2.0**-(2 + {"lns8": 3, "logfmt8": 2}[
      q.format.name]), Scale.POW2: e[0] > emax[0]}[q.scale]  # fmt: skip
    return F32(2.0 ** (e[1] - emax[1] + int(up)))
  return oracle.scale_of(amax, q.format.name, q.scale.value)


def neighbours(x, q: Quant):
  """float64 (below, above) of magnitudes within the format's range, toward and away from zero."""
  name = q.format.name
  if name == "lns8":

    def number(k):
      return np.where(k < 0, 0, F32(2.0 ** (k % 8 / 8)) * 2.0 ** (k // 8))

    with np.errstate(divide="ignore"):
      k = np.maximum(np.floor(8 * np.log2(np.maximum(x, 2.0**-1))), -1)
    k += number(k + 1) <= x  # a number itself
    return number(k), number(k + 1)
  if name == "logfmt8":
    positive = x[x > 0]
    if not positive.size:
      return x, x
    ends = np.log2(positive.max()), np.log2(max(positive.min(), positive.max() * 2.0**-32))
    grid = np.concatenate([[0], 2.0 ** np.linspace(ends[1], ends[0], 2**7 - 1)])
    grid[-1] = positive.max()
    place = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    return grid[place], grid[place + 1]
  dtype, _, mantissa, *least = oracle.ROWS[name]
  if np.issubdtype(dtype, np.integer):
    step = np.ones(x.shape)
  else:
    least = least[0] if least else int(ml_dtypes.finfo(dtype).minexp)
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, least) - mantissa)
  below = np.floor(x / step) * step
  return below, below + step


def on_grid(x, q: Quant, how: Rounding):
  """float64 (numbers of the format for a tile of float32 x, how far others may be from them)."""
  name, x = q.format.name, np.asarray(x, F32)
  size = np.minimum(np.abs(x.astype(np.float64)), largest(q))
  below, above = neighbours(size, q)
  gap = np.where(above > below, above - below, 1)
  share = (size - below) / gap
  if how is Rounding.TOWARD_ZERO:
    border, is_up = 1.0, np.zeros(x.shape, bool)
  elif how is Rounding.STOCHASTIC:
    border, is_up = BITS * 2.0**-32, np.floor(share * 2.0**32) > BITS
  elif name == "lns8":
    border = 0.5
    with np.errstate(divide="ignore"):
      is_up = np.where(size < 1, size > 0, 8 * np.log2(np.maximum(size, 1)) % 1 > 0.5)
  elif name == "logfmt8":
    border, is_up = 0.5, share >= 0.5
  else:
    return oracle.cast(x, name).astype(np.float64), np.zeros(x.shape)
  codes = np.sign(x) * np.where(is_up, above, below)
  if name != "logfmt8":
    return codes, np.zeros(x.shape)
  off = LOG_SLACK * size
  is_near = np.abs(size - below - border * gap) <= 2 * off
  is_near |= (how is not Rounding.NEAREST) & (np.minimum(share, 1 - share) * gap <= 2 * off)
  return codes, off + is_near * gap


@dataclasses.dataclass
class Made:
  """An operand [rows, K] in float64, rotated: what is multiplied, t / scale, the codes and scales,
  and how far elements may be from these."""

  values: np.ndarray
  scaled: np.ndarray | None = None
  codes: np.ndarray | None = None
  scale: np.ndarray | None = None
  slack: np.ndarray | float = 0.0


def narrow(t, q: Quant | None, rows: Hadamard | None = None, given=None) -> Made:
  if q is None:
    return Made(np.asarray(t, np.float64))
  t = clamp(np.asarray(rotated(np.asarray(t, F32), rows, 0), F32), q)
  t = np.asarray(rotated(t, q.transform), F32)
  extents = [n if e == WHOLE else e for n, e in zip(t.shape, q.tile)]
  codes, scale, s8, slack = (np.zeros(t.shape) for _ in range(4))
  for r in range(0, t.shape[0], extents[0]):
    for c in range(0, t.shape[1], extents[1]):
      part, best = (slice(r, r + extents[0]), slice(c, c + extents[1])), None
      candidates = one_scale(t[part], q, np.abs(t).max(), given)
      for of_tile, eighth in candidates if len(candidates) > 1 else ():
        x = on_grid(t[part] * (F32(1) / of_tile), q, Rounding.NEAREST)[0] * np.float64(of_tile)
        error = np.sum((x - t[part]) ** 2)
        # "less" by more than a rounding, as LeastError says
        if best is None or error < best[0] * (1 - 2.0**-12):
          best = error, (of_tile, eighth)
      of_tile, eighth = best[1] if best else candidates[0]
      x = t[part] * (F32(1) / of_tile)
      how = Rounding.NEAREST if q.rounding is Rounding.EDEN else q.rounding
      codes[part], slack[part] = on_grid(x, q, how)
      scale[part], s8[part] = of_tile, eighth or 0
  if q.rounding is Rounding.EDEN:
    scale = unbiased(t, codes, scale, s8, q)
  return Made(codes * scale, t / scale, codes, scale, slack * scale)


def unbiased(t, codes, scale, s8, q: Quant):
  """MS-EDEN: E4M3 scales of a block times <x, x> / <x, rounded x>, rounded by the draws."""
  blocks = (t.shape[0], -1, q.rotation.size)
  decode = (scale / s8).astype(F32)
  wide = (t * (F32(1) / scale.astype(F32))).astype(np.float64) * s8
  of_x, of_both = ((wide * y).reshape(blocks).sum(2) for y in (wide, codes * s8))
  factor = np.where((of_both > 0) & (of_x > 0), of_x / np.where(of_both > 0, of_both, 1), 1)
  wanted = (s8.reshape(blocks) * factor[..., None]).reshape(t.shape)
  new = np.maximum(on_grid(wanted, Quant(E4M3), Rounding.STOCHASTIC)[0], 2.0**-9)
  return (new.astype(F32) * decode).astype(np.float64)


def slope(made: Made, q: Quant, estimator):
  magnitude = np.abs(made.scaled)
  is_held = magnitude <= largest(q) * (1 + 2.0**-16)
  if isinstance(estimator, TrustMask):
    return is_held.astype(np.float64)
  magnitude = np.minimum(magnitude, largest(q))
  low, high = neighbours(magnitude, q)
  u = np.abs(2 * (magnitude - low) / (high - low) - 1)
  with np.errstate(divide="ignore"):
    found = np.minimum(u ** (1 / estimator.power - 1) / estimator.power, estimator.largest)
  return np.where(is_held, found, 0)


def tensor_core(a: Made, b: Made, step: int, least):
  """Sums of Hopper's model (arXiv:2511.10909): 32 products a time, cut to 13 bits of fraction."""

  def exponent(x, at_least=-1000):
    return np.where(x == 0, -1000, np.maximum(np.frexp(x)[1] - 1, at_least)).astype(int)

  result = np.zeros((len(a.codes), len(b.codes)))
  for start in range(0, a.codes.shape[1], step):
    total = np.zeros(result.shape)
    for k in range(start, min(start + step, a.codes.shape[1]), 32):
      x, y = (m.codes[:, k : min(k + 32, start + step)] for m in (a, b))
      size = exponent(x, least[0])[:, None] + exponent(y, least[1])
      top = np.maximum(size.max(-1), exponent(total))
      unit = np.ldexp(1.0, np.maximum(top, -500) - 13)
      units = np.trunc(x[:, None] * y / unit[..., None]).sum(-1) + np.trunc(total / unit)
      more = np.ldexp(1.0, np.maximum(np.frexp(units)[1] - 14, 0))
      total = np.trunc(units / more) * more * unit
    result += total * a.scale[:, [start]] * b.scale[:, start]
  return result


def product(a: Made, b: Made, gemm: Gemm, backend: str):
  """float64 (product, how far it may be off), its rows rotated back."""
  y, slack = a.values @ b.values.T, 0.0
  if np.any(a.slack) or np.any(b.slack):
    assert not any(gemm.rotate_rows)
    bs = b.slack + np.zeros(b.values.shape)
    slack = np.abs(a.values) @ bs.T + a.slack @ (np.abs(b.values) + bs).T
  if backend == "emulated_sm90" and gemm.multiplies_codes:
    how = {Accumulation.FAST: a.codes.shape[1], Accumulation.PRECISE: 128}
    least = [-14 if q.format == E5M2 else -6 for q in (gemm.lhs, gemm.rhs)]
    y = tensor_core(a, b, how.get(gemm.accumulate, gemm.accumulate), least)
  for axis, rows in enumerate(gemm.rotate_rows):
    y = rotated(y, rows, axis, inverse=True)
  return y, slack


def products_and_slack(r: Recipe, x, w, g, backend="xla", amaxes=(None,) * 3):
  """float64 [(y, slack), (dx, slack), (dw, slack)] of x [T, D], w [D, F], g [T, F].

  Args:
    amaxes: of (x, w, g), where scales are delayed or static.
  """
  f, d, v = r.fwd, r.dgrad, r.wgrad
  of_x, of_w, of_g = amaxes
  xm = narrow(x, f.lhs, f.rotate_rows[0], of_x)
  wm = narrow(w.T, f.rhs, f.rotate_rows[1], of_w)
  y, y_off = product(xm, wm, f, backend)
  again = r.backward is Backward.DEQUANTIZED
  x_again, w_again = (xm.values, wm.values) if again else (x, w.T)
  if f.compensates:
    rest = x.astype(np.float64) - clamp(x, f.lhs)
    y = y + rest @ w
    x_again = x_again + rest if again else x_again
  lhs = narrow(g, d.lhs, d.rotate_rows[0], of_g)
  dx, dx_off = product(lhs, narrow(w_again.T, d.rhs, d.rotate_rows[1], of_w), d, backend)
  lhs = narrow(x_again.T, v.lhs, v.rotate_rows[0], of_x)
  dw, dw_off = product(lhs, narrow(g.T, v.rhs, v.rotate_rows[1], of_g), v, backend)
  dw, dw_off = dw.T, dw_off.T if np.ndim(dw_off) else dw_off
  if r.estimate_x:
    dx = dx * slope(xm, f.lhs, r.estimate_x)
  if r.estimate_w:
    dw = dw * slope(wm, f.rhs, r.estimate_w)
  if again and f.rhs.transform:
    dx, dw = (rotated(t, f.rhs.transform, inverse=True) for t in (dx, dw))
  sizes = (x.shape[1], w.shape[1], x.shape[0])
  gains = [
    np.prod(np.power(sizes, [m.gain.fan_in, m.gain.fan_out, m.gain.tokens])) if m.gain else 1.0
    for m in (f, d, v)
  ]
  made = ((y, y_off), (dx, dx_off), (dw.T, dw_off.T if np.ndim(dw_off) else dw_off))
  return [(t * gain, off * gain) for (t, off), gain in zip(made, gains)]


def three_products(r: Recipe, x, w, g):
  """float64 y, dx, dw of formats whose numbers are known exactly."""
  return [t for t, _ in products_and_slack(r, x, w, g)]


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


def operands(rng, f: int = 80):
  """Whole numbers, so that rotations are exact, with a channel of outliers and lone ones."""
  shapes = ((64, 192), (192, f), (64, f))
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


def with_amaxes(site, amaxes):
  """The site with these amaxes of (x, w, g), if it remembers any."""
  if not site.recipe.is_stateful:
    return site
  state = dataclasses.replace(site.scaling_state, amax_3=jnp.asarray(amaxes, jnp.float32))
  return dataclasses.replace(site, scaling_state=state)


def given_amaxes(recipe: Recipe, amaxes):
  """Those from which the oracle's scales come; None where a scale is the tensor's own."""
  sources = amax_history.sources(recipe)
  return [None if s in (None, CURRENT) else a for s, a in zip(sources, amaxes)]


# Random rounding and signs, delayed scales: all but Quartet, whose backward products rotate
# numbers that are not whole.
RANDOM = [
  *(r for r in PAPERS.values() if (r.is_random or r.is_stateful) and r.name != "quartet"),
  fp8jax.RECIPES["nvfp4_sr_rht"],
]


@pytest.mark.parametrize(
  "recipe",
  [
    pytest.param(r, id=r.name, marks=[pytest.mark.slow] * (r.name != "trillion_token"))
    for r in RANDOM
  ],
)
def test_random_and_delayed_products_are_those_of_the_paper_at_known_draws(
  rng, recipe, known_draws
):
  """Every random bit, sign and amax is the test's. Of the amaxes one is small, so that operands
  saturate, and one large."""
  x, w, g = operands(rng, 128)
  amaxes = [F32(np.abs(t).max() * times) for t, times in zip((x, w, g), (0.3, 1.0, 5.0))]
  site = with_amaxes(site_lib.single(recipe), amaxes)
  got = products(dataclasses.replace(site, tap=np.zeros((3, 1), F32)), x, w, g)
  wants = products_and_slack(recipe, x, w, g, amaxes=given_amaxes(recipe, amaxes))
  for name, one, (want, _) in zip("y dx dw".split(), got, wants, strict=True):
    assert np.abs(one - want).max() < tolerances.FLOAT32_SUM * np.abs(want).max(), name


FORMATS_DRAWN = (
  "e4m3", "e5m2", "e2m1", "int8", "int4", "e3m2", "e2m3", "e4m3_240", "e3m4", "e3m4_30", "e5m6",
  "e8m3", "e8m4", "e8m5", "e8m6", "e7m7", "lns8", "logfmt8",
)  # fmt: skip
CLIPS_DRAWN = (Largest(1.0), Largest(17 / 16), Rms(3.0), Quantile(0.95), LeastError((1.0, 0.7)))
SCALES_DRAWN = [s for s in Scale if s is not Scale.NONE]
SIZES_DRAWN = (2, 4, 8, 12, 16, 20, 24, 32, 40, 64, 96)
SOURCES_DRAWN = (Delayed(4), Delayed(4, margin=1), Static(), Static(-1))
BACKENDS_DRAWN = ("reference", "xla", "dequantized", "auto", "emulated_sm90", "exact")
# Rows and columns of the operands of the three products.
T, D, F = 64, 192, 80
EXTENTS = ((T, F, D), (T, D, F), (D, F, T))


def _is_exact(size: int) -> bool:
  """Whether a rotation rounds nothing: a second one is then of the same numbers."""
  return size in (4, 16, 64)


class Draw:
  """Parts of a recipe from a seed; what means nothing is refused by its validators."""

  def __init__(self, seed: int):
    self.rng = np.random.default_rng(seed)

  def pick(self, values):
    return values[self.rng.integers(len(values))]

  def rotation(self, n: int) -> Hadamard | None:
    """Of an axis of n, every third time."""
    if self.rng.random() < 2 / 3:
      return None
    return Hadamard(
      self.pick([s for s in SIZES_DRAWN if n % s == 0]), self.pick(("none", "fixed", "fresh"))
    )

  def quant(self, tile, rotation, source, of_hopper: bool) -> Quant:
    names = ("e4m3", "e5m2", "e2m1") if of_hopper else FORMATS_DRAWN
    format, scale = formats.by_name(self.pick(names)), self.pick(SCALES_DRAWN)
    scale = Scale.ONE if format.max > 2.0**50 else scale  # what any other is refused for
    clips = (*CLIPS_DRAWN, Clamp(0.97)) if tile == (1, WHOLE) else CLIPS_DRAWN
    clip = self.pick(clips) if source == CURRENT else Largest()
    rounding = self.pick((*[Rounding.NEAREST] * 3, *Rounding))
    if scale is Scale.ONE:
      tile, clip = (WHOLE, WHOLE), Largest()
    is_eden = rotation and rotation.size % 16 == 0 and tile[1] == 16
    if is_eden and format.max < 2.0**50 and self.rng.random() < 0.5:
      tile, scale, rounding = (1, 16), Scale.E4M3_OVER_F32, Rounding.EDEN
    if isinstance(clip, Rms) and scale is Scale.F32:
      raise ValueError("the last bit of a sum of squares decides on codes")
    return Quant(format, tile, scale, source, rounding, rotation, clip=clip)

  def gemm(self, extents, sources, of_hopper: bool) -> Gemm:
    m, n, contraction = extents
    k = self.pick((16, 32, WHOLE))
    rotation = self.rotation(contraction)
    tiles = [(self.pick((1, 16, WHOLE)), k) if s == CURRENT else (WHOLE, WHOLE) for s in sources]
    lhs, rhs = (self.quant(t, rotation, s, of_hopper) for t, s in zip(tiles, sources))
    how = k or self.pick((Accumulation.PRECISE, Accumulation.FAST, 32))
    rows = (self.rotation(m), self.rotation(n))
    sizes = [r.size for r in (*rows, rotation) if r]
    if any(rows) and not (all(map(_is_exact, sizes)) or len(sizes) == 1):
      raise ValueError("a rotation of numbers that are not whole rounds")
    if any(rows) and "logfmt8" in (lhs.format.name, rhs.format.name):
      raise ValueError("a bound per element is not rotated")
    compensates = isinstance(lhs.clip, Clamp) and rotation is None and rows[0] is None
    return Gemm(lhs, rhs, how, rows, compensates, self.pick((None, Gain(-0.5, 0.25, 0.0))))

  def recipe(self, name: str, of_hopper: bool) -> Recipe:
    x, w, g = (CURRENT if self.rng.random() < 0.7 else self.pick(SOURCES_DRAWN) for _ in "xwg")
    pairs = ((x, w), (g, w), (x, g))
    fwd, dgrad, wgrad = (self.gemm(e, s, of_hopper) for e, s in zip(EXTENTS, pairs))
    dgrad, wgrad = (m if self.rng.random() < 0.8 else Gemm() for m in (dgrad, wgrad))
    backward = self.pick(tuple(Backward))
    rotations = [q.rotation for m in (dgrad, wgrad) for q in (m.lhs, m.rhs) if q]
    rotations += [*dgrad.rotate_rows, *wgrad.rotate_rows]
    is_known = "logfmt8" not in (fwd.lhs.format.name, fwd.rhs.format.name)
    if backward is Backward.DEQUANTIZED and (any(rotations) or not is_known):
      raise ValueError("codes of numbers that are not whole, or not known, may differ")
    of_x, of_w = (self.pick((None, TrustMask(), Differentiable())) for _ in "xw")
    return Recipe(name, fwd, dgrad, wgrad, backward, of_w, of_x)


def drawn(seed: int) -> tuple[Recipe, str]:
  """A recipe that the validators accept, and a backend that supports its products."""
  draw = Draw(seed)
  backend = draw.pick(BACKENDS_DRAWN)
  while True:
    try:
      recipe = draw.recipe(f"drawn {seed}", backend in ("emulated_sm90", "exact"))
      site_lib.single(recipe, backend)
      return recipe, backend
    except ValueError:
      continue


DRAWN_BY_DEFAULT = (1, 3, 6, 9, 16, 21)


@pytest.mark.parametrize(
  "seed",
  [pytest.param(n, marks=[pytest.mark.slow] * (n not in DRAWN_BY_DEFAULT)) for n in range(120)],
)
def test_drawn_recipes_are_their_arithmetic(seed, known_draws):
  """Formats, tiles, scales and their sources, clips, roundings, rotations, estimators, gains,
  accumulation and backends."""
  recipe, backend = drawn(seed)
  x, w, g = operands(np.random.default_rng(seed))
  # Delayed and static scales: of one tensor too small, of another too large.
  amaxes = [F32(np.abs(t).max() * times) for t, times in zip((x, w, g), (0.6, 1.0, 1.7))]
  site = with_amaxes(site_lib.single(recipe, backend), amaxes)
  site = dataclasses.replace(site, tap=np.zeros((3, 1), F32))
  given = given_amaxes(recipe, amaxes)
  got = products(site, x, w, g)
  estimators = (None, recipe.estimate_x, recipe.estimate_w)
  wants = products_and_slack(recipe, x, w, g, backend, given)
  for name, one, (want, slack), estimator in zip("y dx dw".split(), got, wants, estimators):
    bound = 2 * tolerances.FLOAT32_SUM * np.abs(want).max()
    bound = bound * (20 if isinstance(estimator, Differentiable) else 1) + slack
    assert np.all(np.abs(one - want) <= bound), f"{name} of {recipe.to_dict()} by {backend}"


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
  [
    "nvfp4_eden",
    *(
      pytest.param(n, marks=pytest.mark.slow)
      for n in ("trillion_token", "quartet", "nvfp4_sr_room")
    ),
  ],
)
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
    (lambda: Gemm(Quant(formats.E8M3), plain), "beyond float32.*set scale='one'"),
    (lambda: Gemm(plain, Quant(formats.E7M7, (1, 32), Scale.POW2), 32), "beyond float32"),
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


def _of(name: str, q: Quant) -> Recipe:
  return Recipe(name, *(Gemm(q, q, WHOLE in q.tile and Accumulation.PRECISE or q.tile[1]),) * 3)


ON_MESH = [
  *(PAPERS[n] for n in ("fp4", "munit_scaling", "block_128_requantized", "quartet", "lns8")),
  *(PAPERS[n] for n in ("mask_e8m4", "mask_e7m7", "nvfp4_4or6", "nvfp4_eden", "nvfp4_sr_room")),
  PAPERS["trillion_token"],
  dataclasses.replace(_without_backward("quartet"), name="quartet_forward"),
  _of("gaudi2", Quant(E4M3_240, scale=Scale.GAUDI2, clip=Largest(2.0))),
  _of("logfmt8", Quant(formats.LOGFMT8, (1, 32))),
  _of("nvfp4", Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32)),
  Recipe("left", _LEFT, _LEFT, _LEFT),
  Recipe("tensors", *(Gemm(q, _WIDE[3]) for q in _WIDE[:3])),
]


# Row and column scales, compensation and DGE; rotations and masks; scales of whole tensors.
_QUICK = ("fp4", "quartet_forward", "tensors")


@pytest.mark.parametrize(
  "recipe",
  [pytest.param(r, id=r.name, marks=[pytest.mark.slow] * (r.name not in _QUICK)) for r in ON_MESH],
)
def test_on_a_mesh_they_are_what_they_are_on_one_device(rng, recipe, monkeypatch):
  """Row parallel, all axes split: amaxes, orders and sums are those of the whole tensor, and so are
  fresh signs. Shards draw random bits of their own, which are therefore the test's here."""
  same_bits = lambda key, shape, dtype: jnp.full(shape, BITS, dtype)  # noqa: E731
  monkeypatch.setattr(jax.random, "bits", same_bits)
  run, placed, tensors = _on_mesh(recipe, _normal(rng))
  for got, want in zip(run(True, *placed), run(False, *tensors), strict=True):
    bound = 2 * tolerances.FLOAT32_SUM * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


def _normal(rng):
  x, w, g = (rng.standard_normal(s).astype(F32) for s in ((8, 64, 256), (256, 256), (8, 64, 256)))
  x[..., 7] *= 20
  return x, w, g


def _on_mesh(recipe: Recipe, tensors):
  """(run(is_split, x, w, g, key=None) -> (y, dx, dw), the tensors on eight devices, the tensors)"""
  eqn, of_w = "BLF,FD->BLD", axes.as_rules(dict(D="fsdp", F="tensor"))
  acts = axes.as_rules(dict(B=("data", "fsdp"), F="tensor"))
  layout = axes.Layout(mesh.make((2, 2, 2)), of_w, acts)
  site = with_amaxes(site_lib.single(recipe), [np.abs(t).max() for t in tensors])

  @functools.partial(jax.jit, static_argnums=0)
  def run(is_split, x, w, g, key=None):
    mine = dataclasses.replace(
      site, layout=layout if is_split else axes.LOCAL, key=site.key if key is None else key
    )
    y, pull = jax.vjp(lambda x, w: dot(eqn, x, w, dataclasses.replace(mine, tap=mine.tap)), x, w)
    return y, *pull(g)

  places = (layout.act_spec("BLF"), layout.weight_spec("FD"), layout.act_spec("BLD"))
  placed = [jax.device_put(t, jax.NamedSharding(layout.mesh, p)) for t, p in zip(tensors, places)]
  return run, placed, tensors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4_eden", "nvfp4_sr_room"])
def test_shards_round_with_bits_of_their_own_and_right_in_the_mean(rng, name):
  """Sequences that are alike are rounded otherwise on every device, so that errors average out; the
  mean over keys is the gradient, within four standard errors of its length."""
  recipe = dataclasses.replace(PAPERS[name], fwd=Gemm(), backward=Backward.UNQUANTIZED,
                               estimate_x=None, estimate_w=None)  # fmt: skip
  x, w, g = _normal(rng)
  x, g = (np.tile(t[:2], (4, 1, 1)) for t in (x, g))  # two sequences a device
  run, placed, _ = _on_mesh(recipe, (x, w, g))
  lengths, n = [], 24
  want = g.astype(np.float64) @ w.T
  for key in jax.random.split(jax.random.key(0), n):
    dx = np.asarray(run(True, *placed, key)[1], np.float64).reshape(4, 2, *x.shape[1:])
    assert all(np.mean(dx[0] != other) > 0.9 for other in dx[1:])
    dx = dx.reshape(want.shape)
    lengths.append(np.vdot(dx, want) / np.vdot(want, want))
    error = np.linalg.norm(dx - want) / np.linalg.norm(want)
    assert 0.02 < error < 0.3
  standard_error = np.std(lengths, ddof=1) / np.sqrt(n)
  assert abs(np.mean(lengths) - 1) < 4 * standard_error < 2e-3


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
