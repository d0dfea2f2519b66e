"""Recipes drawn from all that the validators accept: their products are their arithmetic."""

import dataclasses

import numpy as np
import pytest
import tolerances
from paper_oracle import F32, products_and_slack
from recipe_runs import given_amaxes, know_draws, operands, products, with_amaxes

from fp8jax import formats
from fp8jax.ops import site as site_lib
from fp8jax.recipe.estimators import Differentiable, TrustMask
from fp8jax.recipe.gemm import Accumulation, Backward, Gain, Gemm, Recipe
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
def test_drawn_recipes_are_their_arithmetic(seed, monkeypatch):
  """Formats, tiles, scales and their sources, clips, roundings, rotations, estimators, gains,
  accumulation and backends."""
  know_draws(monkeypatch)
  recipe, backend = drawn(seed)
  x, w, g = operands(np.random.default_rng(seed))
  # Delayed and static scales: of one tensor too small, of another too large.
  amaxes = [F32(np.abs(t).max() * times) for t, times in zip((x, w, g), (0.6, 1.0, 1.7))]
  site = with_amaxes(site_lib.single(recipe, backend), amaxes)
  site = dataclasses.replace(site, tap=np.zeros((3, 1), F32))
  given = given_amaxes(recipe, amaxes)
  got = products(site, x, w, g)
  wants = products_and_slack(recipe, x, w, g, backend, given)
  for name, one, (want, slack) in zip("y dx dw".split(), got, wants):
    bound = 2 * tolerances.FLOAT32_SUM * np.abs(want).max() + slack
    assert np.all(np.abs(one - want) <= bound), f"{name} of {recipe.to_dict()} by {backend}"
