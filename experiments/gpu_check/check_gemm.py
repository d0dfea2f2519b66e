"""Correctness of the GEMM against float64 on the host: exact on lattices, close on normal numbers.

Operands are quantized by XLA, not by the kernel under test elsewhere.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.kernels.gemm import grouped, tile_config
from fp8jax.quantization import quantize, scaled_matrix
from gpu_check import operands, programs
from gpu_check.worker import Context, Wrong

# Relative, in the norm, of normal numbers. BF16's rounding is 0.0017; a lost step of K is 0.1.
NORM_BUDGET = 0.005


def run(context: Context, product, shape, config=None, kind="") -> dict[str, Any]:
  """{"lattice": number of wrong elements, "norm_error", "sum_error"} of one way to cut up the work.

  Raises:
    Wrong: an element of the lattice differs, or normal numbers are further off than the tensor
      core's 14 bits and the result's rounding explain.
  """
  del context
  program = programs.gemm(product, tuple(shape), config, kind)
  function = jax.jit(program.function)
  found = {}
  case = {"groups": _groups_case, "layers": _layers_case}.get(kind, _case)
  for numbers in ("lattice", "normal"):
    make = functools.partial(operands.MAKERS[numbers], np.random.default_rng(7))
    arguments, want, magnitudes = case(make, product, tuple(shape), kind == "adds")
    got = np.asarray(jax.tree.leaves(function(*arguments))[0].astype(jnp.float32), np.float64)
    is_exact = numbers == "lattice"
    found |= compare(got, want, magnitudes, programs.out_dtype(product), exact=is_exact)
  return found


def compare(got, want, magnitudes, dtype, exact: bool) -> dict[str, float]:
  """How far a product is off.

  Args:
    got, want: float64 results; of the kernel and of the oracle.
    magnitudes: float64, the sum of the magnitudes of what was added up.
    dtype: of the kernel's result.
    exact: whether only the rounding of exact sums to `dtype` is allowed.

  Raises:
    Wrong: see `run`.
  """
  if exact:
    want = want.astype(dtype).astype(np.float64)
    if len(wrong := np.argwhere(got != want)):  # NaN differs from everything
      at = tuple(wrong[0])
      index = [int(i) for i in at]
      raise Wrong(
        f"lattice: {len(wrong)} of {got.size} elements differ from float64, the first {index} is "
        f"{got[at]} instead of {want[at]}"
      )
    return {"lattice_wrong": 0}
  norm = float(np.linalg.norm(got - want) / np.linalg.norm(want))
  slack = tile_config.SUM_ERROR * magnitudes + float(jnp.finfo(dtype).eps) * np.abs(want)
  worst = float(np.max(np.abs(got - want) / np.maximum(slack, 1e-30)))
  if not (norm <= NORM_BUDGET and worst <= 1):
    raise Wrong(
      f"normal numbers: {norm:.3g} from float64 in the norm, at most {NORM_BUDGET} expected; the "
      f"worst element is off by {worst:.3g} of what 14 bits and rounding explain"
    )
  return {"norm_error": norm, "sum_error": worst}


def quantized(x: np.ndarray, quant) -> tuple[scaled_matrix.ScaledMatrix, np.ndarray]:
  """(ScaledMatrix of x [rows, contraction], by XLA, and the float64 matrix that it stands for)."""
  made = jax.jit(lambda x: quantize.quantize(x, quant))(jnp.asarray(x))
  return made, np.asarray(made.dequantize(), np.float64)


def _case(make, product: str, shape, adds: bool):
  """(arguments of the program, float64 result, float64 magnitudes)."""
  m, n, k = shape
  spec = getattr(programs.BLOCK, product)
  (a, wide_a), (b, wide_b) = quantized(make(m, k), spec.lhs), quantized(make(n, k), spec.rhs)
  want = operands.product(wide_a, wide_b)
  magnitudes = operands.product(np.abs(wide_a), np.abs(wide_b))
  if not adds:
    return (a, b), want, magnitudes
  total = make(m, n)
  return (
    (jnp.asarray(total, programs.out_dtype(product)), a, b),
    want + total,
    magnitudes + np.abs(total),
  )


def _layers_case(make, product: str, shape, adds: bool):
  """The same of layer 1 of a stack; the others are left as they were."""
  del adds
  layers, (m, n, _) = programs.LAYERS, shape
  cases = [_case(make, product, shape, product == "wgrad") for _ in range(layers)]
  if product == "wgrad":
    (_, a, b), want, magnitudes = cases[1]
    sums = np.stack([np.asarray(total) for (total, *_), *_ in cases]).astype(np.float64)
    stack = jnp.asarray(sums, jnp.float32)
    magnitudes = np.concatenate([np.abs(sums[0]), magnitudes, np.abs(sums[2])])
    want = np.stack([sums[0], want, sums[2]])
    return (stack, a, b, jnp.int32(1)), want, magnitudes.reshape(layers, m, n)
  (a, _), want, magnitudes = cases[1]
  stack = jax.tree.map(lambda *x: jnp.stack(x), *(b for (_, b), *_ in cases))
  return (a, stack, jnp.int32(1)), want, magnitudes


def _groups_case(make, product: str, shape, adds: bool):
  """The same of experts: none of the tokens for the second, a partial tile for the others."""
  del adds
  tokens, n, k = shape
  shares = np.asarray([tokens // 3 + 5, 0, tokens // 3 - 7], np.int32)
  shares = np.append(shares, tokens - shares.sum()).astype(np.int32)
  layout = grouped.Groups.of(jnp.asarray(shares), tokens)
  expert, place = np.asarray(layout.of_tile), np.asarray(layout.place)
  rows = len(expert) * grouped.BLOCK
  spec = getattr(programs.BLOCK, product)

  def lay_out(x):
    """Tokens in their places, zeros between them."""
    out = np.zeros((rows, x.shape[1]), np.float32)
    out[place] = x
    return out

  if product == "fwd":
    a, wide_a = quantized(lay_out(make(tokens, k)), spec.lhs)
    made = [quantized(make(n, k), spec.rhs) for _ in range(programs.GROUPS)]
    parts = [jnp.stack([getattr(w, part) for w, _ in made]) for part in ("data", "scale")]
    b = scaled_matrix.ScaledMatrix(*parts, spec.rhs.tile)
    blocks = wide_a.reshape(len(expert), grouped.BLOCK, k)
    want, magnitudes = (
      np.concatenate([operands.product(f(x), f(made[e][1])) for x, e in zip(blocks, expert)])
      for f in (np.asarray, np.abs)
    )
    return (a, b, layout), want, magnitudes
  # Rows between groups are zero in one operand alone: that is enough for the product.
  columns = [make(rows, size) for size in (k, n)]
  is_token = np.zeros(rows, bool)
  is_token[place] = True
  columns[1][~is_token] = 0
  (a, wide_a), (b, wide_b) = (
    quantized(np.ascontiguousarray(x.T), q) for x, q in zip(columns, (spec.lhs, spec.rhs))
  )
  steps = np.repeat(expert, grouped.BLOCK)
  want, magnitudes = (
    np.stack([
      operands.product(f(wide_a[:, steps == e]), f(wide_b[:, steps == e]))
      for e in range(programs.GROUPS)
    ])
    for f in (np.asarray, np.abs)
  )  # fmt: skip
  return (a, b, layout), want, magnitudes
