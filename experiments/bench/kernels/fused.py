"""Products of experts, and what is computed on the way into the quantizer, beside XLA's programs.

Both are what other parts of the package call: kernels/gemm/grouped.py, quantize_produced. XLA's
products of groups are BF16 (jax.lax.ragged_dot); it computes norm and SwiGLU as ops/basic does and
makes the results narrow as quant/quantize does.
"""

import sys

import jax
import jax.numpy as jnp
import rivals
import timing
from rivals import BLOCK

from fp8jax.kernels.gemm import grouped as gm
from fp8jax.kernels.quantize import mosaic_sm90 as quantizer
from fp8jax.kernels.quantize import prologues
from fp8jax.ops import elementwise
from fp8jax.quantization import quantize, scaled_matrix

# Experts of DeepSeek-V3 (arXiv:2412.19437, section 4.2) on a device that has 8: tokens with 8
# experts each; in, out. Rows and columns of a feed-forward layer of InfiR2's 7B.
EXPERTS, TOKENS, SIZES = 8, 32768, (7168, 2048)
MATRIX = (8192, 18944)
DRY = (2, 200, (128, 128)), (128, 256)
BOTH = {1: BLOCK.fwd.lhs, 0: BLOCK.wgrad.lhs}


def measure(bench: timing.Bench, ceilings):
  """A line for each product and producer, ours and XLA's."""
  experts, matrix = DRY if bench.is_dry else ((EXPERTS, TOKENS, SIZES), MATRIX)
  _experts(bench, *experts, ceilings)
  for producer, by_xla in PRODUCERS:
    _producer(bench, producer, by_xla, matrix, ceilings)


def _line(bench, name: str, run, prepared, want, budget, rates, wide=lambda results: results):
  """Checks, then times.

  Args:
    want: what results should be, as `wide` gives them.
    budget: for the distance between them.
    rates: milliseconds -> more for the line.
  """

  def measure():
    got = jax.tree.leaves(jax.jit(lambda *a: wide(run(*a)))(*prepared[0]))
    error = max(rivals.distance(a, b) for a, b in zip(got, want, strict=True))
    if not error <= budget:  # not a number is no small distance
      sys.exit(f"{name}: {error:.3g} away from what it should be")
    found = bench.time(run, *prepared)
    return found | {"error": error} | rates(found["ms"])

  return bench.line(name, measure)["ms"]


def _experts(bench, experts: int, tokens: int, sizes, ceilings):
  """Forward, data gradient, weight gradient of the first of an expert's layers."""
  inner, outer = sizes
  # Uneven, as routers are: the last expert has twice the share of the others.
  shares = [tokens // (experts + 1)] * (experts - 1)
  counts = jnp.asarray([*shares, tokens - sum(shares)], jnp.int32)
  groups = gm.Groups.of(counts, tokens)
  keys = jax.random.split(jax.random.key(0), 3)
  x, g = (timing.normal(key, tokens, n) for key, n in zip(keys, sizes))
  w = timing.normal(keys[2], experts, inner, outer)
  rows = groups.lay_out

  def narrow(w, quant, along):
    made = [quantize.quantize(m, quant, contraction=along) for m in w]
    return scaled_matrix.ScaledMatrix(
      *(jnp.stack(t) for t in zip(*((m.data, m.scale) for m in made))), (128,) * 2
    )

  along_rows = lambda x, q: quantize.quantize(rows(x), q, contraction=0)  # noqa: E731
  multiply, by = gm.grouped_matmul, dict(backend="mosaic_sm90")
  by_groups = lambda a, b: jax.lax.ragged_dot(a, b, counts)  # noqa: E731
  cases = {
    "fwd": (
      lambda a, b: multiply(a, b, groups, **by),
      (quantize.quantize(rows(x), BLOCK.fwd.lhs), narrow(w, BLOCK.fwd.rhs, 0)),
      (by_groups, (x, w)),
    ),
    "dgrad": (
      lambda a, b: multiply(a, b, groups, **by),
      (quantize.quantize(rows(g), BLOCK.dgrad.lhs), narrow(w, BLOCK.dgrad.rhs, 1)),
      (by_groups, (g, w.swapaxes(1, 2))),
    ),
    "wgrad": (
      lambda a, b: gm.grouped_weight_gradient(a, b, groups, experts, **by),
      (along_rows(x, BLOCK.wgrad.lhs), along_rows(g, BLOCK.wgrad.rhs)),
      (lambda x, g: jax.vjp(lambda w: by_groups(x, w), w)[1](g)[0], (x, g)),
    ),
  }  # fmt: skip
  flops = 2 * tokens * inner * outer
  rates = lambda ms: {  # noqa: E731
    "tflops": flops / ms / 1e9,
    "share_of_bf16": flops / ms / 1e9 / ceilings[1],
  }
  for product, (run, prepared, (by_xla, operands)) in cases.items():
    # Rows between groups are nobody's result.
    gather = groups.gather if product != "wgrad" else (lambda d: d)
    want = [by_xla(*(t.astype(jnp.float32) for t in operands))]
    name = f"grouped/{product}"
    wide, fp8 = (rivals.BUDGET[precision] for precision in ("bf16", "fp8"))
    theirs = _line(bench, f"{name}/bf16", by_xla, [operands], want, wide, rates)
    ours = _line(bench, f"{name}/block_ours", run, [prepared], want, fp8, rates, gather)
    print(f"{name:44s} ours: {theirs / ours:.2f} x bf16")


def _norm(x, scale, weight):
  del scale  # a pass of its own, XLA's in both
  return (elementwise.rms_norm(x, weight, 1e-6),)


PRODUCERS = (
  (prologues.RMS_NORM, _norm),
  (prologues.SWIGLU, lambda gate, up: (elementwise.silu_mul(gate, up),)),
  (prologues.SWIGLU_BACKWARD, lambda g, *x: jax.vjp(elementwise.silu_mul, *x)[1](g)),
)


def _producer(bench, producer: prologues.Producer, by_xla, matrix, ceilings):
  def operands(key):
    keys = jax.random.split(key, producer.matrices + 1)
    matrices = [timing.normal(k, *matrix) for k in keys[1:]]
    if producer != prologues.RMS_NORM:
      return tuple(matrices)
    weight = timing.normal(keys[0], matrix[1], dtype=jnp.float32)
    return *matrices, prologues.rms_scale(matrices[0], 1e-6), weight

  def ours(*operands):
    first = producer.matrices
    quants = [BOTH] * producer.results
    return quantizer.quantize_produced(producer, operands[:first], operands[first:], quants)[0]

  def theirs(*operands):
    made = by_xla(*operands)
    return [{a: quantize.quantize(x, q, contraction=a) for a, q in BOTH.items()} for x in made]

  size = matrix[0] * matrix[1]
  prepared = timing.sets(operands, 2 * producer.matrices * size)
  # Read in BF16, written in FP8 twice with their scales.
  moved = size * (2 * producer.matrices + producer.results * 2 * (1 + 4 / 128))
  rates = lambda ms: {  # noqa: E731
    "gb_per_s": moved / ms / 1e6,
    "share_of_copy": moved / ms / 1e6 / ceilings[0],
  }
  want = [x if c == 1 else x.T for x in by_xla(*prepared[0]) for c in sorted(BOTH)]
  wide = lambda results: [r[c].dequantize() for r in results for c in sorted(BOTH)]  # noqa: E731
  rest = (prepared, want, rivals.BUDGET["fp8"], rates, wide)
  ms = {
    name: _line(bench, f"quantize/{producer.name}/{name}", run, *rest)
    for name, run in (("xla", theirs), ("ours", ours))
  }
  print(f"{f'quantize/{producer.name}':44s} ours: {ms['xla'] / ms['ours']:.2f} x xla")
