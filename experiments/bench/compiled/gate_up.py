"""The products of gate and up as two and as one, compiled for an H200 that is not there.

command: python experiments/bench/compiled/gate_up.py    results/gate-up-jax-VERSION.json

The 7B's, 8,192 tokens, in blocks of 128: codes of x in both orientations, of both weights in both
orientations, and of the gradients of gate and up are there before. The program makes gate and up,
SwiGLU's codes of them, the data gradient, and adds the weight gradients to their sums. "one" has
the weights, the gradients and the sums of both side by side; SwiGLU's quantizer reads two arrays,
so that gate and up are cut out of one. "one, read in place" leaves SwiGLU's quantizer out of both
sides: what kernels that read halves of an array would reach at best.
"""

import functools

import run as bench  # first: it finds the library

# isort: split
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from fp8jax.compiled import aot  # noqa: E402
from fp8jax.kernels.gemm import mosaic_sm90 as gemm  # noqa: E402
from fp8jax.kernels.quantize import mosaic_sm90 as quantizer  # noqa: E402
from fp8jax.kernels.quantize import prologues  # noqa: E402
from fp8jax.quantization.scaled_matrix import ScaledMatrix, num_tiles  # noqa: E402
from fp8jax.recipe import library  # noqa: E402

TOKENS, HIDDEN, INNER = 8192, 3584, 18944
COUNTED = ("launches", "bytes")
RECIPE = library.RECIPES["block_128_pow2"]
OUT = {"fwd": jnp.bfloat16, "dgrad": jnp.bfloat16, "wgrad": jnp.float32}


def _codes(side, rows: int, depth: int) -> ScaledMatrix:
  """An abstract operand."""
  tiles = num_tiles(rows, side.tile[0]), num_tiles(depth, side.tile[1])
  data = jax.ShapeDtypeStruct((rows, depth), side.format.dtype)
  return ScaledMatrix(data, jax.ShapeDtypeStruct(tiles, jnp.float32), side.tile)


def _arguments(parts: int) -> dict:
  """Of as many products: x and its codes for the weight gradient, and of each product the weight
  twice, the gradient twice, and the sum."""
  fwd, dgrad, wgrad = RECIPE.fwd, RECIPE.dgrad, RECIPE.wgrad
  width = 2 * INNER // parts
  return {
    "x": (_codes(fwd.lhs, TOKENS, HIDDEN), _codes(wgrad.lhs, HIDDEN, TOKENS)),
    "weights": [(_codes(fwd.rhs, width, HIDDEN), _codes(dgrad.rhs, HIDDEN, width))] * parts,
    "gradients": [(_codes(dgrad.lhs, TOKENS, width), _codes(wgrad.rhs, width, TOKENS))] * parts,
    "sums": [jax.ShapeDtypeStruct((HIDDEN, width), jnp.float32)] * parts,
  }


def _program(has_swiglu: bool, x, weights, gradients, sums):
  multiply = {name: functools.partial(gemm.matmul, out_dtype=out) for name, out in OUT.items()}
  made = [multiply["fwd"](x[0], w) for w, _ in weights]
  dx = None
  for (_, w), (g, _) in zip(weights, gradients, strict=True):
    dx = multiply["dgrad"](g, w, add_to=dx)
  sums = [
    multiply["wgrad"](x[1], g, add_to=total) for (_, g), total in zip(gradients, sums, strict=True)
  ]
  if not has_swiglu:
    return made, dx, sums
  gate_up = made if len(made) == 2 else jnp.split(made[0], 2, axis=1)
  quants = {1: RECIPE.fwd.lhs, 0: RECIPE.wgrad.lhs}
  codes = quantizer.quantize_produced(prologues.SWIGLU, gate_up, [], [quants])
  return made, dx, sums, codes  # gate and up are saved, too


ARMS = {
  "two": (2, True), "one": (1, True), "two, products alone": (2, False),
  "one, read in place": (1, False),
}  # fmt: skip


def measure(parts: int, has_swiglu: bool) -> dict:
  """{"launches", "bytes"} of a program, as run.py counts them."""
  there = SingleDeviceSharding(aot.devices_of("h200", 1)[0])
  own = aot.put(_arguments(parts), there)
  function = jax.jit(functools.partial(_program, has_swiglu), donate_argnames="sums")
  text = function.lower(**own).compile().as_text()
  by_kind = bench.count(text, 0)["step"]
  return {n: sum(k[n] for k in by_kind.values()) for n in COUNTED}


if __name__ == "__main__":
  bench.record("gate-up", ARMS, measure)
