"""Every tap reaches exactly one `custom_vjp`, read from the program as JAX traces it.

A tap's cotangent is what its site saw: two products behind one tap would add up what they saw.
"""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import pytest
import variants
from jax.extend import core

from fp8jax.models import transformer
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.ops import dots, site_tree
from fp8jax.ops import site as site_lib
from fp8jax.recipe import library

MODEL = ModelConfig(
  architecture="llama", vocab_size=96, hidden_size=128, intermediate_size=256, num_layers=4,
  num_heads=8, num_kv_heads=4, head_dim=16, max_positions=64,
)  # fmt: skip
BATCH = (2, 16)
# What a tap may pass through on its way: the same observations in another form.
_HARMLESS = {"squeeze", "slice", "dynamic_slice", "reshape", "pvary", "pcast", "copy"}


def calls(jaxpr, var) -> int:
  """Calls of custom_vjp functions that `var` enters when the program runs once."""
  places = ((eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.invars) if v is var)
  return sum(_calls_in(eqn, place, jaxpr) for eqn, place in places)


def _calls_in(eqn, place: int, jaxpr) -> int:
  name = eqn.primitive.name
  if name.startswith("custom_vjp_call"):
    return 1
  if name in _HARMLESS:
    return calls(jaxpr, eqn.outvars[0])
  inner = [p for p in eqn.params.values() if isinstance(p, core.Jaxpr | core.ClosedJaxpr)]
  assert len(inner) == 1, f"a tap enters {name}, which this test cannot read"
  body = getattr(inner[0], "jaxpr", inner[0])
  assert len(body.invars) == len(eqn.invars), name
  # What a loop is handed in slices it meets once, the rest in every turn.
  is_whole = name == "scan" and eqn.invars[place].aval.ndim == body.invars[place].aval.ndim
  times = eqn.params["length"] if is_whole else 1
  return times * calls(body, body.invars[place])


def calls_by_site(fn, sites, *args) -> dict[str, int]:
  """{site name: products that see its tap} of fn(sites, *args)."""
  traced = jax.make_jaxpr(lambda taps: fn(site_tree.with_taps(sites, taps), *args))
  jaxpr = traced(site_tree.taps(sites)).jaxpr
  return {name: calls(jaxpr, v) for name, v in zip(site_lib.flatten(sites), jaxpr.invars)}


@pytest.mark.parametrize(
  "recipe, remat, smooth",
  [(r, "linears", "none") for r in library.RECIPES]
  + [("tensor_delayed saved", r, "none") for r in ("none", "operands", "full")]
  + [("tensor_delayed", "linears", form) for form in ("channel", "token")],
)
def test_every_tap_of_a_model_reaches_one_custom_vjp(recipe, remat, smooth):
  # The first layer differs: two runs of layers, one of a single layer.
  recipe, save = variants.split(recipe)
  rules = (("layers/0/mlp/.*", "bf16"), (".*", recipe))
  sites = site_tree.build_sites(transformer.site_params(MODEL), MODEL.dims, rules, save=save)
  run = ComputeConfig(remat=remat, loss_chunk=4, smooth_swiglu=smooth)

  def loss(sites, params, batch):
    return transformer.loss(params, sites, batch, MODEL, run)

  params = harness.init_params(MODEL)
  ids = jnp.zeros(BATCH, jnp.int32)
  names = ("tokens_BL", "targets_BL", "positions_BL", "segments_BL")
  batch = dict.fromkeys(names, ids) | {"weights_BL": jnp.ones(BATCH)}
  found = calls_by_site(loss, sites, params, batch)
  assert len(found) == (8 if recipe == "bf16" else 15)
  assert set(found.values()) == {1}, found


def test_a_tap_that_two_products_share_is_counted_twice():
  """The reading itself: a site that a loop closes over, and one whose mark is wiped off."""
  site = site_lib.single("block_128")
  x, w = jnp.zeros((4, 128)), jnp.zeros((128, 128))

  def in_a_loop(site, x, w):
    def body(x, _):
      return dots.dot("BD,DF->BF", x, w, site), None

    return jax.lax.scan(body, x, None, length=5)[0]

  def twice(site, x, w):
    as_new = dataclasses.replace(site)
    return dots.dot("BD,DF->BF", dots.dot("BD,DF->BF", x, w, site), w, as_new)

  assert calls_by_site(in_a_loop, site, x, w) == {"dot": 5}
  assert calls_by_site(twice, site, x, w) == {"dot": 2}
