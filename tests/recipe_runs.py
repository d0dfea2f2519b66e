"""Recipes as tests run them: operands, the three products, known amaxes and random draws."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from paper_oracle import BITS, F32, fresh_signs

from fp8jax.formats import E4M3
from fp8jax.ops.dots import dot
from fp8jax.quantization import amax_history
from fp8jax.recipe.gemm import Gemm, Recipe
from fp8jax.recipe.papers import PAPERS
from fp8jax.recipe.quant import CURRENT, Hadamard, Quant

LEFT = Gemm(Quant(E4M3), Quant(E4M3), rotate_rows=(Hadamard(16, "none"), None))


def without_backward(name: str) -> Recipe:
  """Its backward products in the compute dtype: what is random is there."""
  return dataclasses.replace(PAPERS[name], dgrad=Gemm(), wgrad=Gemm())


def know_draws(monkeypatch):
  """Random bits and signs that the oracle has, too, wherever an element lies."""
  monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.full(shape, BITS, dtype))
  monkeypatch.setattr(jax.random, "rademacher", lambda key, shape, dtype: fresh_signs(*shape))


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
