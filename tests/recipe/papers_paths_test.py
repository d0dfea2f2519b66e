"""Papers' recipes on the ways of a run: saved operands, frozen weights, evaluation, export."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.errors import UserError
from fp8jax.formats import E4M3
from fp8jax.ops import site as site_lib
from fp8jax.ops.dots import dot, dots
from fp8jax.ops.residuals import GemmInput
from fp8jax.optim import optimizers
from fp8jax.params import Param
from fp8jax.quantization import quantize, stored_matrix
from fp8jax.recipe import attention, library, rules
from fp8jax.recipe.estimators import TrustMask
from fp8jax.recipe.gemm import Backward, Gain, Gemm, Recipe
from fp8jax.recipe.papers import PAPERS
from fp8jax.recipe.quant import (
  WHOLE,
  Clamp,
  Delayed,
  LeastError,
  Quant,
  Quantile,
  Rounding,
  Scale,
)

F32 = np.float32
_PLAIN = Quant(E4M3)
_CODES = Quant(E4M3, (128, 128))
_ROW = Quant(E4M3, (1, 128))


def _normal(rng, *shapes):
  return [rng.standard_normal(s).astype(F32) for s in shapes]


@pytest.mark.parametrize(
  "names",
  [("quartet",), ("block_128", "block_128_requantized"), ("block_128_requantized", "block_128")],
  ids=str,
)
def test_saved_operands_are_a_sites_own(rng, names):
  """Gradients with operands saved are those without, also beside another recipe at the same x."""
  x, w, g = _normal(rng, *[(128, 128)] * 3)
  recipes = [rules.recipe_by_name(n) for n in names]

  def gradients(save):
    sites = [
      dataclasses.replace(site_lib.unobserved(r, key=jax.random.key(1)), save=save) for r in recipes
    ]

    def loss(x, ws):
      return sum(jnp.sum(y * g) for y in dots(("TD,DF->TF",) * len(sites), x, ws, sites))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, (w,) * len(sites))

  saved, plain = (jax.tree.leaves(gradients(s)) for s in GemmInput)
  for a, b in zip(saved, plain, strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_mask_of_x_needs_x_beside_a_frozen_weight_in_codes(rng):
  """dx is that of the mask: 0 where x saturated, else the product's."""
  x, w, g = _normal(rng, *[(128, 128)] * 3)
  row = dataclasses.replace(_ROW, clip=Quantile(0.5))
  block = Gemm(row, _CODES, 128), Gemm(_ROW, _CODES, 128), Gemm(_ROW, _ROW, 128)
  codes = stored_matrix.pack(jnp.asarray(w), 1, 0)

  def dx(recipe):
    return jax.jit(jax.grad(lambda x: jnp.sum(dot("TD,DF->TF", x, codes, recipe) * g)))(x)

  masked, plain = dx(Recipe("masked", *block, estimate_x=TrustMask())), dx(Recipe("plain", *block))
  limit = np.sort(np.abs(x), axis=1)[:, [63]]
  np.testing.assert_array_equal(masked, np.where(np.abs(x) <= limit, plain, 0))


def test_an_estimator_of_current_scales_stands_beside_delayed_ones(rng):
  """The amax of the gradient's history is none of w's."""
  x, w, g = _normal(rng, *[(64, 64)] * 3)
  late = Quant(E4M3, source=Delayed(1))
  recipe = Recipe(
    "mixed", Gemm(_PLAIN, _PLAIN), Gemm(late, _PLAIN), Gemm(_PLAIN, late), estimate_w=TrustMask()
  )
  loss = jax.jit(lambda site, w: jnp.sum(dot("TD,DF->TF", x, w, site) * g))
  site = site_lib.calibrate(site_lib.single(recipe), lambda site: loss(site, w))
  dw = jax.grad(loss, argnums=1)(site, w)
  exact = x.T.astype(np.float64) @ g
  assert np.linalg.norm(dw - exact) < 0.06 * np.linalg.norm(exact)


def test_padding_of_a_tile_that_devices_share_is_no_element():
  """144 rows in tiles of 128, the columns on two devices: the median of the second is no zero."""
  x = np.random.default_rng(0).uniform(1, 2, (144, 128)).astype(F32)
  q = Quant(E4M3, (128, WHOLE), clip=Quantile(0.5))
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("a",))
  spec = jax.sharding.PartitionSpec
  run = jax.shard_map(
    lambda x: quantize.quantize(x, q, amax_axes=((), ("a",))).scale,
    mesh=mesh, in_specs=spec(None, "a"), out_specs=spec(), check_vma=False,
  )  # fmt: skip
  order = [np.sort(part.ravel()) for part in (x[:128], x[128:])]
  want = [t[(t.size - 1) // 2] * F32(1 / 448) for t in order]
  np.testing.assert_array_equal(np.ravel(jax.jit(run)(x)), want)


MUNIT = (("head", "munit_head"), ("layers/.*", "munit_scaling"))


def test_the_bf16_forward_pass_keeps_gains_and_no_export_drops_them(monkeypatch):
  """Without them it would be another network; models without gains have one recipe, as before."""
  config = harness.tiny_config(**{"precision.rules": MUNIT})
  spec = harness.tiny_spec(config)
  names = {s.recipe.name for s in site_lib.flatten(spec.sites("bf16")).values()}
  assert names == {"munit_head", "munit_scaling_wide"}
  assert not any(s.recipe.is_quantized for s in site_lib.flatten(spec.sites("bf16")).values())
  with pytest.raises(UserError, match="by gains"):
    harness.tiny_spec(config, job="export")
  plain = harness.tiny_spec(harness.tiny_config("block_128"))
  assert {s.recipe.name for s in site_lib.flatten(plain.sites("bf16")).values()} == {"bf16"}
  odd = Recipe("odd", Gemm(gain=Gain(fan_out=1.0)), Gemm(_PLAIN, _PLAIN))
  monkeypatch.setitem(library.RECIPES, "odd", odd)
  with pytest.raises(ValueError, match="no recipe of papers.PAPERS"):
    rules.unquantized("odd")


def test_what_would_be_ignored_is_refused(rng):
  rounded = dict(scale=Scale.E4M3_OVER_F32, rounding=Rounding.EDEN)
  eden = PAPERS["nvfp4_eden"].dgrad.lhs
  scores = attention.FA3.scores
  for make, words in [
    (lambda: Quant(E4M3, (1, 1), **rounded), "eden"),
    (lambda: dataclasses.replace(eden, clip=LeastError((1.0, 1.5))), "eden"),
    (lambda: Gain(fan_in=float("nan")), "exponents"),
    (lambda: _attention(scores=_with(scores, fwd=_with(scores.fwd, gain=Gain(1.0)))), "gain"),
    (lambda: _attention(scores=_with(scores, backward=Backward.DEQUANTIZED)), "estimator"),
  ]:
    with pytest.raises(ValueError, match=words):
      make()
  x, w = _normal(rng, (2, 16, 32), (2, 32, 16))
  row = Quant(E4M3, (1, WHOLE), clip=Clamp(0.9))
  with pytest.raises(ValueError, match="batch letters"):
    dot("BTD,BDF->BTF", x, w, Recipe("r", Gemm(row, Quant(E4M3, (1, WHOLE)), compensates=True)))
  optim = optimizers.OptimizerConfig("madam", steps=9)
  with pytest.raises(UserError, match="starts at 0"):
    optimizers.leaves(optim, {"b": Param("F", init="zeros", decay=False)})


_with = dataclasses.replace


def _attention(**parts):
  return dataclasses.replace(attention.FA3, **parts)
