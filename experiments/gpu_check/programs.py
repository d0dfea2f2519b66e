"""What is measured, as functions and the shapes that they take, so that each can also be lowered
for an H200 without one (tests/experiments/gpu_check_test.py).

Only public entry points of the kernels are called.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import formats
from fp8jax.kernels.adamw import api as adamw_api
from fp8jax.kernels.gemm import grouped, tile_config
from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
from fp8jax.kernels.quantize import mosaic_sm90 as quantizer
from fp8jax.kernels.quantize import prologues
from fp8jax.optim import storage
from fp8jax.quantization import bf16_remainder, quantized_tensor
from fp8jax.quantization import scaled_matrix as scaled_matrix_lib
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.recipe import library
from fp8jax.recipe.quant import Scale
from gpu_check import operands

BLOCK = library.RECIPES["block_128"]
GROUPS = 4  # experts
LAYERS = 3
PRODUCERS = {p.name: p for p in (prologues.RMS_NORM, prologues.SWIGLU, prologues.SWIGLU_BACKWARD)}
# Quants by the axis that is contracted, of an input, a weight [in, out] and a gradient.
QUANTS = {
  "x": {1: BLOCK.fwd.lhs, 0: BLOCK.wgrad.lhs},
  "w": {0: BLOCK.fwd.rhs, 1: BLOCK.dgrad.rhs},
  "g": {1: BLOCK.dgrad.lhs, 0: BLOCK.wgrad.rhs},
}
ADAM_RULE = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)


@dataclasses.dataclass(frozen=True)
class Program:
  """Something to run.

  Attributes:
    function: of `arguments`.
    arguments: jax.ShapeDtypeStruct in a tuple of pytrees.
    donates: number of first arguments that become the first results, updated in place.
    make: key -> concrete arguments, where random arrays of the shapes would be no such state.
  """

  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  donates: int = 0
  make: Callable[[Any], Any] | None = None

  def concrete(self, seed: int = 0):
    """Random arguments, made on the device."""
    if self.make is None:
      return operands.concrete(self.arguments, seed)
    return jax.jit(self.make)(jax.random.key(seed))


def array(dtype, *shape) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def scaled_matrix(quant, rows: int, depth: int, *lead: int) -> scaled_matrix_lib.ScaledMatrix:
  """Abstract [*lead, rows, depth] with its scales."""
  scale = array(jnp.float32, *lead, *(-(-n // t) for n, t in zip((rows, depth), quant.tile)))
  return scaled_matrix_lib.ScaledMatrix(
    array(quant.format.dtype, *lead, rows, depth), scale, quant.tile
  )


def out_dtype(product: str):
  """Gradients of weights are float32, as training has them."""
  return jnp.float32 if product == "wgrad" else jnp.bfloat16


def gemm(product, shape, config=None, kind: str = "") -> Program:
  """D [M, N] = A . B' of (M, N, K).

  Args:
    product: "fwd" or "wgrad", whose operands of recipe block_128 are multiplied.
    config: fields of tiles.Config; None takes the kernel's own choice.
    kind: "adds": a sum in the result's dtype is added to, in place. "groups": M tokens are divided
      among GROUPS experts; N and K are an expert's sizes. "layers": B, or the sum that is added to,
      is one layer of a stack of LAYERS, whose number is the last operand. "copied": the same, with
      the layer copied out of its stack, or added to it after the product.
  """
  if kind == "groups":
    return _grouped(product, *shape)
  m, n, k = shape
  spec, dtype = getattr(BLOCK, product), out_dtype(product)
  how = dict(out_dtype=dtype, config=tile_config.Config(**config) if config else None)
  operands = (scaled_matrix(spec.lhs, m, k), scaled_matrix(spec.rhs, n, k))
  if not kind:
    return Program(functools.partial(mosaic_sm90_lib.matmul, **how), operands)
  if kind in ("layers", "copied"):
    return _of_layer(product, shape, operands, how, kind == "copied")

  def add(total, a, b):
    return (mosaic_sm90_lib.matmul(a, b, add_to=total, **how),)

  return Program(add, (array(dtype, m, n), *operands), donates=1)


def _of_layer(product: str, shape, operands, how, is_copied: bool) -> Program:
  (m, n, k), (a, b), number = shape, operands, array(jnp.int32)
  if product == "wgrad":

    def add(sums, a, b, i):
      entry = Entry(sums, i)
      if is_copied:  # in place, too, but by XLA and in a kernel of its own
        return (entry.plus(mosaic_sm90_lib.matmul(a, b, **how)),)
      return (mosaic_sm90_lib.matmul(a, b, add_to=entry, **how),)

    return Program(add, (array(jnp.float32, LAYERS, m, n), a, b, number), donates=1)
  stack = scaled_matrix(getattr(BLOCK, product).rhs, n, k, LAYERS)

  def read(a, b, i):
    entry = Entry(b, i)
    return mosaic_sm90_lib.matmul(a, entry.take() if is_copied else entry, **how)

  return Program(read, (a, stack, number))


def _grouped(product: str, tokens: int, n: int, k: int) -> Program:
  rows = grouped.num_tiles(tokens, GROUPS) * grouped.BLOCK
  layout = grouped.Groups(array(jnp.int32, rows // grouped.BLOCK), array(jnp.int32, tokens))
  spec = getattr(BLOCK, product)
  if product == "fwd":
    multiply = functools.partial(grouped.grouped_matmul, backend="mosaic_sm90")
    weights = scaled_matrix(spec.rhs, n, k, GROUPS)
    return Program(multiply, (scaled_matrix(spec.lhs, rows, k), weights, layout))

  def gradient(a, b, layout):
    return grouped.grouped_weight_gradient(a, b, layout, GROUPS, backend="mosaic_sm90")

  operands = (scaled_matrix(spec.lhs, k, rows), scaled_matrix(spec.rhs, n, rows))
  return Program(gradient, (*operands, layout))


def quantize(
  shape, alongs, tensor: str, watched: bool = False, layers: bool = False, at_once: bool = False
) -> Program:
  """-> ({axis: ScaledMatrix}, amax or None) of a matrix; of a layer of a stack of LAYERS, whose
  number is the last operand; or of all of them. Args: tensor: "x", "w" or "g"."""
  quants = {axis: QUANTS[tensor][axis] for axis in alongs}
  make = functools.partial(quantizer.quantize_matrix, quants=quants, watched=watched)
  dtype = jnp.float32 if tensor == "w" else jnp.bfloat16
  if at_once:
    stack = array(dtype, LAYERS, *shape)
    return Program(functools.partial(quantizer.quantize_stack, quants=quants), (stack,))
  if layers:
    of_layer = lambda stack, i: make(Entry(stack, i))  # noqa: E731
    return Program(of_layer, (array(dtype, LAYERS, *shape), array(jnp.int32)))
  return Program(make, (array(dtype, *shape),))


def cast(shape, format: str, scale: str) -> Program:
  """-> ({axis: ScaledMatrix}, ...) of a float32 matrix and an amax, with scales that are powers of
  two. Args: scale: "given" is one of that amax; "tiles" are of 1x128, then of 128x128."""
  how = dict(format={"e4m3": formats.E4M3, "e5m2": formats.E5M2}[format], scale=Scale.POW2)
  delayed, pow2 = library.RECIPES["tensor_delayed"].fwd.lhs, library.RECIPES["block_128_pow2"].fwd
  kinds = [dataclasses.replace(q, **how)
           for q in ((delayed,) if scale == "given" else (pow2.lhs, pow2.rhs))]  # fmt: skip

  def run(x, amax):
    given = dict(amax=amax) if scale == "given" else {}
    return tuple(quantizer.quantize_matrix(x, {1: q, 0: q}, **given)[0] for q in kinds)

  return Program(run, (array(jnp.float32, *shape), array(jnp.float32)))


def prologue(producer: str, shape) -> Program:
  """-> (a list of {axis: ScaledMatrix}, their amaxes) of BF16 matrices, as training calls it."""
  made = PRODUCERS[producer]
  matrices = [array(jnp.bfloat16, *shape)] * made.matrices
  factors = [array(jnp.float32, shape[axis]) for axis in made.factors]

  def run(matrices, factors):
    quants = [QUANTS["x"]] * made.results
    return quantizer.quantize_produced(made, matrices, factors, quants, watched=True)

  return Program(run, (matrices, factors))


def adam_update(preset: str, is_pair: bool, dtype: str, shape, backend="mosaic_sm90") -> Program:
  """((master, mu, nu), gradient) -> ((master, mu, nu), sums of squares), in place."""
  kept = storage.MOMENTS[preset]

  def state_of(p, m, v):
    mu, nu = (quantized_tensor.pack(x, q) if q else x for x, q in ((m, kept.mu), (v, kept.nu)))
    return bf16_remainder.split(p) if is_pair else p, mu, nu

  def step(state, gradient):
    by = dict(count=jnp.int32(10), rate=jnp.float32(1e-4))
    # An argument of the program, as in training: no constant is folded.
    by["is_applied"] = jnp.isfinite(gradient.reshape(-1)[0])
    *state, squares = adamw_api.update(gradient, *state, **by, **ADAM_RULE, backend=backend)
    return tuple(state), squares

  def arguments(key):
    p, m, v, g = (jax.random.normal(k, shape, jnp.float32) for k in jax.random.split(key, 4))
    return state_of(0.02 * p, 1e-3 * m, jnp.square(1e-3 * v) + 1e-10), (1e-3 * g).astype(dtype)

  shapes = jax.eval_shape(arguments, jax.random.key(0))
  return Program(step, shapes, donates=1, make=arguments)


BUILDERS = {"gemm": gemm, "quantize": quantize, "prologue": prologue, "adam": adam_update}


def num_bytes(tree) -> int:
  """Of all arrays, which may be abstract."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
