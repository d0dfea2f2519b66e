"""A site whose recipe is data: each option is its own recipe, forward and backward."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.ops import dots, site, switch
from fp8jax.recipe import rules

OPTIONS = ("e2m1_dynamic", "int8", "w4a16", "bf16")


def test_every_option_is_its_recipe_in_one_program():
  rng = np.random.default_rng(0)
  x, w, g = (rng.standard_normal(n).astype(np.float32) for n in ((2, 4, 128), (128, 8), (2, 4, 8)))
  options, base = [rules.recipe_by_name(name) for name in OPTIONS], site.single("fp8_dynamic")
  traced = []

  def of(x, w, recipe):
    y, back = jax.vjp(lambda x, w: dots.dot("BLD,DF->BLF", x, w, recipe), x, w)
    return y, *back(g)

  @jax.jit
  def chosen(choice, x, w):
    traced.append(choice)
    return of(x, w, switch.with_options(base, options, choice))

  found = [chosen(jnp.int32(i), x, w) for i in range(len(options))]
  assert len(traced) == 1
  wanted = jax.jit(lambda x, w: [of(x, w, name) for name in OPTIONS])(x, w)
  for name, ours, theirs in zip(OPTIONS, found, wanted, strict=True):
    for mine, exact in zip(ours, theirs, strict=True):  # the same numbers, summed in another order
      atol = 1e-6 * np.abs(exact).max() * 8
      np.testing.assert_allclose(mine, exact, rtol=0, atol=atol, err_msg=name)
  for one, other in itertools.combinations(found, 2):
    assert np.abs(one[0] - other[0]).max() > 0.02 and np.abs(one[1] - other[1]).max() > 1e-3
  assert np.isnan(chosen(jnp.int32(0), x * np.inf, w)[0]).any()  # codes saturate, and hide it


@pytest.mark.parametrize(
  ("name", "why"),
  [
    ("block_128", "backward pass of its own"),
    ("bf16_dge", "backward pass of its own"),
    ("fp8", "scales from past steps"),
    ("munit_head", "multiplies by a gain"),
  ],
)
def test_options_that_a_switch_cannot_be_are_refused(name, why):
  with pytest.raises(ValueError, match=why):
    switch.with_options(site.single(), [rules.recipe_by_name(name)], jnp.int32(0))
