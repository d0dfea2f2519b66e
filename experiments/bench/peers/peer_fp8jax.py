"""Ours, and JAX's own product in float32 and bfloat16. A worker, see worker.py."""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import worker

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from fp8jax.formats import E4M3
from fp8jax.ops import dots, site
from fp8jax.quantization import amax_history, quantize
from fp8jax.recipe import library
from fp8jax.recipe.gemm import Gemm, Recipe
from fp8jax.recipe.quant import Quant  # noqa: E402

NUMBERS = (((1,), (0,)), ((), ()))
# Not among the named recipes: qwix's default granularities, which have float32 scales.
_ROW, _TILE = Quant(E4M3, (1, 0)), Quant(E4M3, (1, 128))
ROW_F32 = Recipe("row_f32", *3 * (Gemm(_ROW, _ROW),))
TILE_128 = Recipe("tile_128", *3 * (Gemm(_TILE, _TILE, accumulate=128),))
RECIPES = (
  library.TENSOR_CURRENT,
  library.TENSOR_DELAYED,
  library.ROWWISE,
  library.ROWWISE_GW_HP,
  library.BLOCK_128,
  library.BLOCK_128_POW2,
  library.MXFP8,
  ROW_F32,
  TILE_128,
)


def _site(recipe, x, w, g):
  made = site.single(recipe)
  if made.scaling_state is None:
    return made
  amaxes = [np.abs(t).max() for t in (x, w, g)]
  return dataclasses.replace(made, scaling_state=amax_history.calibrated(recipe, amaxes))


def _codes(recipe, x, w, g):
  current = recipe.with_current_scales()  # of the same operands that delayed scales remember
  uses = {
    "x": (x, current.fwd.lhs, 1),
    "w": (w, current.fwd.rhs, 0),
    "g": (g, current.dgrad.lhs, 1),
  }
  for name, (t, quant, contraction) in uses.items():
    narrow = jax.jit(functools.partial(quantize.quantize, quant=quant, contraction=contraction))
    data = narrow(t).data
    yield f"{name}_codes", np.asarray(data.T if contraction == 0 else data).view(np.uint8)


def product_and_gradients(product, x, w, g):
  """({y, dx, dw}, calls) of a function of (x, w)."""
  forward = jax.jit(product)

  def gradients(x, w, g):
    y, pull = jax.vjp(product, x, w)
    return (y, *pull(g.astype(y.dtype)))

  both = jax.jit(gradients)
  arrays = dict(zip(("y", "dx", "dw"), (np.asarray(t, np.float32) for t in both(x, w, g))))
  calls = {
    "forward": lambda: forward(x, w).block_until_ready(),
    "both": lambda: jax.block_until_ready(both(x, w, g)),
  }
  return arrays, calls


def make(*operands):
  x, w, g = (jnp.asarray(t) for t in operands)
  found = {}
  for name, dtype in (("float32", jnp.float32), ("bfloat16", jnp.bfloat16)):
    narrow = [t.astype(dtype) for t in (x, w, g)]
    found[name] = product_and_gradients(lambda x, w: jax.lax.dot_general(x, w, NUMBERS), *narrow)
  for recipe in RECIPES:
    one = _site(recipe, *operands)
    arrays, calls = product_and_gradients(
      lambda x, w, one=one: dots.dot_general(x, w, NUMBERS, one), x, w, g
    )
    arrays |= _codes(recipe, x, w, g)
    found[recipe.name] = arrays, calls
  return found


if __name__ == "__main__":
  worker.main(make, ("jax", "jaxlib", "numpy"))
