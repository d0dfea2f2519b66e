"""Recipes of papers on eight devices: those of one device; shards draw random bits of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from paper_oracle import BITS, F32
from recipe_runs import LEFT, with_amaxes, without_backward

from fp8jax import axes, formats, mesh
from fp8jax.formats import E2M1, E4M3, E4M3_240
from fp8jax.ops import site as site_lib
from fp8jax.ops.dots import dot
from fp8jax.recipe.gemm import Accumulation, Backward, Gemm, Recipe
from fp8jax.recipe.papers import PAPERS
from fp8jax.recipe.quant import WHOLE, Clamp, Largest, LeastError, Quant, Quantile, Rms, Scale

_WIDE = [
  Quant(E4M3, clip=Rms(4.0)), Quant(E4M3, clip=Quantile(0.99)), Quant(E4M3, clip=Clamp(0.98)),
  Quant(E4M3, scale=Scale.POW2, clip=LeastError((1.0, 0.25))),
]  # fmt: skip


def _of(name: str, q: Quant) -> Recipe:
  return Recipe(name, *(Gemm(q, q, WHOLE in q.tile and Accumulation.PRECISE or q.tile[1]),) * 3)


def _mixed(*names: str) -> Gemm:
  lhs, rhs = (Quant(formats.by_name(name), (1, 32)) for name in names)
  return Gemm(lhs, rhs, 32)


ON_MESH = [
  *(PAPERS[n] for n in ("fp4", "munit_scaling", "block_128_requantized", "quartet", "lns8")),
  *(PAPERS[n] for n in ("mask_e8m4", "mask_e7m7", "nvfp4_4or6", "nvfp4_eden", "nvfp4_sr_room")),
  PAPERS["trillion_token"],
  dataclasses.replace(without_backward("quartet"), name="quartet_forward"),
  _of("gaudi2", Quant(E4M3_240, scale=Scale.GAUDI2, clip=Largest(2.0))),
  _of("logfmt8", Quant(formats.LOGFMT8, (1, 32))),
  _of("nvfp4", Quant(E2M1, (1, 16), Scale.E4M3_OVER_F32)),
  # Soft formats, in bfloat16, FP8 and whole numbers.
  Recipe("soft", _mixed("e5m6", "e3m4_30"), _mixed("int4", "int8"), _mixed("e3m2", "e2m3")),
  Recipe("left", LEFT, LEFT, LEFT),
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


@pytest.mark.parametrize(
  "name, of_w, f, d",
  [
    ("halo_int8_2_hq", dict(F=("tensor", "fsdp")), 384, 128),
    pytest.param("nvfp4_eden", dict(D="fsdp", F="tensor"), 128, 192, marks=pytest.mark.slow),
  ],
)
def test_shards_with_parts_of_rotated_blocks_are_gathered_first(rng, monkeypatch, name, of_w, f, d):
  """A shard has 96 rows, or columns, of blocks of 64."""
  same_bits = lambda key, shape, dtype: jnp.full(shape, BITS, dtype)  # noqa: E731
  monkeypatch.setattr(jax.random, "bits", same_bits)
  run, placed, tensors = _on_mesh(PAPERS[name], _normal(rng, f, d), of_w)
  for got, want in zip(run(True, *placed), run(False, *tensors), strict=True):
    bound = 2 * tolerances.FLOAT32_SUM * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


def _normal(rng, f=256, d=256):
  x, w, g = (rng.standard_normal(s).astype(F32) for s in ((8, 64, f), (f, d), (8, 64, d)))
  x[..., 7] *= 20
  return x, w, g


def _on_mesh(recipe: Recipe, tensors, of_w=None):
  """(run(is_split, x, w, g, key=None) -> (y, dx, dw), the tensors on eight devices, the tensors)"""
  eqn, of_w = "BLF,FD->BLD", axes.as_rules(of_w or dict(D="fsdp", F="tensor"))
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
