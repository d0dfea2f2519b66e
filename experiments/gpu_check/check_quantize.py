"""Correctness of the quantizer and its prologues against NumPy, element by element.

Scales are those of the definition; every element is the nearest number of its format to what the
tile held, which bounds its error; lattices come back to the bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_check import operands, programs
from gpu_check.worker import Context, Wrong

# float32's rounding of amax / 448 and of the hardware's reciprocal.
SCALE_BUDGET = 2.0**-21
E4M3_HALF_STEP, E4M3_SMALLEST_HALF = 2.0**-4, 2.0**-10  # relative; of a scale


def run(
  context: Context, shape, producer="", alongs=(), tensor="x", watched=False, layers=False,
  at_once=False,
):  # fmt: skip
  """{"lattice_wrong", "elements"}; of a prologue {"error"}: the worst in what is allowed.

  Raises:
    Wrong: says which element.
  """
  del context
  if producer:
    return _prologue(producer, tuple(shape))
  program = programs.quantize(tuple(shape), alongs, tensor, watched, layers, at_once)
  function = jax.jit(program.function)
  found: dict[str, Any] = {}
  for kind, make in operands.MAKERS.items():
    x = make(np.random.default_rng(5), *shape)
    given = jnp.asarray(x, program.arguments[0].dtype)
    if layers:  # beyond its rows come another's
      others = [jnp.full_like(given, 1e4)] * (programs.LAYERS - 1)
      stack = jnp.stack([given, *others])
      made, amax = function(stack) if at_once else function(stack, jnp.int32(0))
      if at_once:
        if (amax[1:] != 1e4).any():
          raise Wrong(f"{kind}: amaxes {amax[1:]} instead of 10000")
        made, amax = jax.tree.map(lambda leaf: leaf[0], (made, amax))
    else:
      made, amax = function(given)
    for along, one in made.items():
      what = f"{kind} along {along}"
      want = x if along == 1 else x.T
      if kind == "lattice":
        _exact(np.asarray(one.dequantize()), want, what)
      check_scales(one, want, what)
      found[f"error_{along}"] = check_elements(one, want, np.zeros_like(want), what)
    if watched and float(amax) != np.abs(x).max():
      raise Wrong(f"{kind}: amax {float(amax)} instead of {np.abs(x).max()}")
  return {"lattice_wrong": 0, **found}


def _exact(got, want, what: str):
  if len(wrong := np.argwhere(got != want)):
    i, j = map(int, wrong[0])
    raise Wrong(
      f"{what}: {len(wrong)} of {got.size} elements differ, the first [{i}, {j}] is {got[i, j]} "
      f"instead of {want[i, j]}"
    )


def expanded(made) -> np.ndarray:
  """float64 scale of every element of a ScaledMatrix [rows, contraction]."""
  scale = np.asarray(made.scale, np.float64)
  for axis in (0, 1):
    scale = np.repeat(scale, made.tile[axis], axis)
  return scale[: made.shape[0], : made.shape[1]]


def check_scales(made, want: np.ndarray, what: str):
  """Scales are amax / 448 of their tiles. Raises Wrong."""
  rows, depth = made.tile
  padded = np.pad(
    np.abs(want.astype(np.float64)), [(0, -n % t) for n, t in zip(want.shape, made.tile)]
  )
  tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // depth, depth)
  scale = tiles.max((1, 3)) / 448
  got = np.asarray(made.scale, np.float64)
  if got.shape != scale.shape:
    raise Wrong(f"{what}: scales are {got.shape}, expected {scale.shape}")
  if len(wrong := np.argwhere(~(np.abs(got - scale) <= SCALE_BUDGET * scale))):
    i, j = map(int, wrong[0])
    raise Wrong(
      f"{what}: {len(wrong)} of {scale.size} scales differ, the first [{i}, {j}] is {got[i, j]} "
      f"instead of {scale[i, j]}"
    )


def check_elements(made, want: np.ndarray, slack: np.ndarray, what: str) -> float:
  """The largest error in what rounding to E4M3 explains.

  Args:
    slack: what `want` itself may be off by.

  Raises:
    Wrong: it is above 1.
  """
  want, slack = want.astype(np.float64), slack.astype(np.float64)
  got = np.asarray(made.dequantize(), np.float64)
  allowed = E4M3_HALF_STEP * (np.abs(want) + slack) + E4M3_SMALLEST_HALF * expanded(made)
  off = np.abs(got - want) / (allowed * (1 + 1e-3) + slack)
  if len(wrong := np.argwhere(~(off <= 1))):
    i, j = map(int, wrong[0])
    raise Wrong(
      f"{what}: {len(wrong)} of {got.size} elements are further off than E4M3 explains, the first "
      f"[{i}, {j}] is {got[i, j]} instead of {want[i, j]}"
    )
  return float(off.max())


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


# float64, from the formulas: y = silu(gate) * up and its derivatives.
DEFINITIONS = {
  "rms_norm": lambda x, scale, weight: (x * scale[:, None] * weight,),
  "swiglu": lambda gate, up: (gate * _sigmoid(gate) * up,),
  "swiglu_backward": lambda g, gate, up: (
    g * up * _sigmoid(gate) * (1 + gate * (1 - _sigmoid(gate))), g * gate * _sigmoid(gate)
  ),
}  # fmt: skip


def _prologue(producer: str, shape) -> dict[str, Any]:
  made_by = programs.PRODUCERS[producer]
  function = jax.jit(programs.prologue(producer, shape).function)
  found: dict[str, Any] = {}
  for kind, make in operands.MAKERS.items():
    rng = np.random.default_rng(3)
    matrices = [make(rng, *shape) for _ in range(made_by.matrices)]
    if kind == "normal":  # exponentials of moderate numbers
      matrices = [np.clip(x, -8, 8) for x in matrices]
    factors = [np.abs(rng.standard_normal(shape[a])).astype(np.float32) for a in made_by.factors]
    wanted = DEFINITIONS[producer](*(x.astype(np.float64) for x in (*matrices, *factors)))
    results, amaxes = function([jnp.asarray(x, jnp.bfloat16) for x in matrices],
                               [jnp.asarray(f) for f in factors])  # fmt: skip
    for n, (made, amax, want) in enumerate(zip(results, amaxes, wanted, strict=True)):
      largest = np.abs(want).max()
      # BF16's rounding of the result; float32's cancellation where the derivative crosses zero.
      slack = np.abs(want) * 2.0**-8 + largest * 2.0**-16
      for along, one in made.items():
        wide, off = (want, slack) if along == 1 else (want.T, slack.T)
        error = check_elements(one, wide, off, f"{kind}, result {n} along {along}")
        found["error"] = max(error, found.get("error", 0.0))
      if not abs(float(amax) - largest) <= 2.0**-7 * largest:
        raise Wrong(f"{kind}, result {n}: amax {float(amax)} instead of {largest}")
  return found
