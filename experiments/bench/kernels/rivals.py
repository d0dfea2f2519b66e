"""Who is timed beside whom: ours, XLA's, and every rival that can be had on the machine.

A rival multiplies one product from operands that are ready (`gemm`), or quantizes and multiplies
all three of a linear layer (`layer`), or both. Where it cannot run, it says why.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import timing

from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
from fp8jax.kernels.gemm import tile_config
from fp8jax.kernels.quantize import mosaic_sm90 as quantizer
from fp8jax.quantization import quantize
from fp8jax.recipe import library

BLOCK, TENSOR = library.RECIPES["block_128"], library.RECIPES["tensor_current"]
# Largest distance to the float32 result, in the norm. Normal numbers are 0.003 away in BF16, 0.038
# in E4M3 and 0.059 with gradients in E5M2 (experiments/bench/peers); a wrong layout or scale is
# above 1.
BUDGET = {"bf16": 0.01, "fp8": 0.08}


class Absent(Exception):
  """A rival, or one of its two parts, cannot be had here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Call:
  """Something to time.

  Attributes:
    prepare: operands in BF16, a [M, K] and b [N, K] or x, w and g -> what `run` takes; not timed.
    run: -> D [M, N], or (y, dx, dw).
    is_ours: whether `run` takes two ScaledMatrix and adds up as kernels/scaled_matmul says it does.
  """

  prepare: Callable[..., tuple]
  run: Callable[..., Any]
  is_ours: bool = False


@dataclasses.dataclass(frozen=True)
class Rival:
  """One implementation.

  Attributes:
    name: as results have it.
    gemm: (product, out_dtype) -> Call. Raises Absent if there is none.
    layer: () -> Call. Raises Absent if there is none.
    time: (bench, run, *sets) -> milliseconds, by the means of its framework.
    to_jax: one of its results -> an array of JAX.
    precision: whose budget it has.
    compile: of `run`, before it is called.
  """

  name: str
  gemm: Callable[[str, Any], Call]
  layer: Callable[[], Call]
  time: Callable[..., dict[str, float]] = timing.Bench.time
  to_jax: Callable[[Any], Any] = jnp.asarray
  precision: str = "fp8"
  compile: Callable[..., Callable] = jax.jit


def without(why: str) -> Callable[..., Call]:
  """A part that a rival does not have."""

  def part(*_):
    raise Absent(why)

  return part


def need(module: str, *names: str):
  """A module that has these names (dots lead further in).

  Raises:
    Absent: it cannot be imported, or has them not.
  """
  try:
    found = importlib.import_module(module)
  except Exception as e:  # a broken installation raises anything
    raise Absent(f"not importable: {_first_line(e)}") from e
  for name in names:
    try:
      functools.reduce(getattr, name.split("."), found)
    except AttributeError as e:
      version = getattr(importlib.import_module(module.partition(".")[0]), "__version__", "?")
      raise Absent(f"API not found: {module} of version {version} has no {name}") from e
  return found


def find(makers: dict[str, Callable[[], Rival]]) -> tuple[list[Rival], dict[str, str]]:
  """(rivals that can run here, why each of the others cannot)."""
  found, absent = [], {}
  for name, make in makers.items():
    try:
      found.append(make())
    except Absent as e:
      absent[name] = str(e)
  return found, absent


def parts(found: list[Rival], absent: dict[str, str]) -> dict[str, dict[str, str]]:
  """Name -> {"gemm", "layer"}: "yes", or why not."""
  listed = {name: dict.fromkeys(("gemm", "layer"), why) for name, why in absent.items()}
  for rival in found:
    makes = {"gemm": lambda r=rival: r.gemm("fwd", jnp.bfloat16), "layer": rival.layer}
    listed[rival.name] = {part: _reason(make) or "yes" for part, make in makes.items()}
  return listed


def _reason(make: Callable[[], Call]) -> str:
  try:
    make()
  except Absent as e:
    return str(e)
  return ""


# --- ours and XLA's ------------------------------------------------------------------------------


def own() -> Iterator[Rival]:
  """BF16 first: the others are measured by it."""
  yield Rival("bf16", _bf16, _bf16_layer, precision="bf16")
  layer = functools.partial(_layer, TENSOR, _quantize_by_xla, "xla")
  yield Rival("tensor_xla", functools.partial(_narrow, TENSOR, "xla"), layer)
  # Its GEMM alone is tensor_xla's.
  layer = functools.partial(_layer, TENSOR, _quantize_by_us, "xla_sm90")
  yield Rival("tensor_ours", without("cuBLASLt's, see tensor_xla"), layer)
  layer = functools.partial(_layer, BLOCK, _quantize_by_us, "mosaic_sm90")
  yield Rival("block_ours", functools.partial(_narrow, BLOCK, "mosaic_sm90"), layer)


def _bf16(product: str, out) -> Call:
  del product
  return Call(
    lambda a, b: (a, b),
    lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=out),
  )


def _bf16_layer() -> Call:
  def run(x, w, g):
    w = w.astype(jnp.bfloat16)
    return x @ w, g @ w.T, jax.lax.dot_general(
      x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)  # fmt: skip

  return Call(lambda *operands: operands, run)


@functools.cache
def narrow_operands(recipe, product: str) -> Callable:
  """(a [M, K], b [N, K]) -> both ScaledMatrix, as the recipe has them in this product."""
  spec = getattr(recipe, product)
  return jax.jit(lambda a, b: (quantize.quantize(a, spec.lhs), quantize.quantize(b, spec.rhs)))


def _narrow(recipe, backend: str, product: str, out, **how) -> Call:
  run = functools.partial(mosaic_sm90_lib.matmul, out_dtype=out, **how)
  if backend != "mosaic_sm90":
    accumulate = getattr(recipe, product).accumulate
    run = functools.partial(
      gemm_api.scaled_matmul, accumulate=accumulate, backend=backend, out_dtype=out
    )
  return Call(narrow_operands(recipe, product), run, is_ours=backend == "mosaic_sm90")


def ours(product: str, out, config) -> Call:
  """Our GEMM cut up in another way."""
  return _narrow(BLOCK, "mosaic_sm90", product, out, config=config)


def _quantize_by_xla(x, quants):
  return {along: quantize.quantize(x, q, contraction=along) for along, q in quants.items()}


def _quantize_by_us(x, quants):
  return quantizer.quantize_matrix(x, quants)[0]


def _layer(recipe, make, backend: str) -> Call:
  """Args: make: (x, {axis: how}) -> {axis: ScaledMatrix}."""

  def multiply(product, a, b, out):
    accumulate = getattr(recipe, product).accumulate
    return gemm_api.scaled_matmul(a, b, accumulate=accumulate, backend=backend, out_dtype=out)

  def run(x, w, g):
    xs = make(x, {1: recipe.fwd.lhs, 0: recipe.wgrad.lhs})
    gs = make(g, {1: recipe.dgrad.lhs, 0: recipe.wgrad.rhs})
    ws = make(w, {0: recipe.fwd.rhs, 1: recipe.dgrad.rhs})
    return (multiply("fwd", xs[1], ws[0], jnp.bfloat16),
            multiply("dgrad", gs[1], ws[1], jnp.bfloat16),
            multiply("wgrad", xs[0], gs[0], jnp.float32))  # fmt: skip

  return Call(lambda *operands: operands, run)


# --- check, then time ----------------------------------------------------------------------------


def gemm_in_float32(a, b):
  """[M, N] of a [M, K] and b [N, K]."""
  return _product(a, b.T)


def layer_in_float32(x, w, g):
  """(y, dx, dw)."""
  return _product(x, w), _product(g, w.T), _product(x.T, g)


@jax.jit
def _product(a, b):
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def distance(got, want) -> float:
  """Relative, in the norm."""
  return float(_distance(got, want))


@jax.jit
def _distance(got, want):
  got, want = got.astype(jnp.float32), want.astype(jnp.float32)
  return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


@jax.jit
def _sum_error(d, a, b):
  """Largest error of D = A . B' of ScaledMatrices, in what is explained; infinity for NaN."""
  a, b = a.dequantize(), b.dequantize()
  want, magnitudes = _product(a, b.T), _product(jnp.abs(a), jnp.abs(b).T)
  slack = tile_config.SUM_ERROR * magnitudes + jnp.finfo(d.dtype).eps * jnp.abs(want)
  off = jnp.abs(d.astype(jnp.float32) - want) / jnp.maximum(slack, jnp.finfo(jnp.float32).tiny)
  return jnp.max(jnp.where(jnp.isnan(off), jnp.inf, off))


def measure(bench: timing.Bench, rival: Rival, call: Call, sets, want) -> dict[str, Any]:
  """{"ms", "spread_ms", "error"}, or {"failed": why} without a time.

  Args:
    sets: operands, in turn.
    want: operands -> what the result, or each of them, should be, in float32.
  """
  try:
    prepared = [call.prepare(*operands) for operands in sets]
    run = rival.compile(call.run)
    got = jax.tree.leaves(run(*prepared[0]))
    wanted = jax.tree.leaves(want(*sets[0]))
    error = max(distance(rival.to_jax(a), b) for a, b in zip(got, wanted, strict=True))
    # Not a number is no small distance.
    if not error <= BUDGET[rival.precision]:
      return {"failed": f"{error:.3g} away from the float32 result"}
    if call.is_ours and (off := _sum_error(got[0], *prepared[0])) > 1:
      return {"failed": f"a sum is off by {off:.3g} of what the tensor core and rounding explain"}
    return rival.time(bench, run, *prepared) | {"error": error}
  except Exception as e:  # a rival that breaks must not end the others' run
    return {"failed": _first_line(e)}


def _first_line(e: Exception) -> str:
  return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
