"""Casts of the quantizer against ml_dtypes, to the bit, with scales that are powers of two.

Every number of the format, what lies half way between two and the float32 next to that, what is too
large, infinities and NaN. The hardware's conversion saturates; NumPy clips and then converts.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from gpu_check import programs
from gpu_check.worker import Context, Wrong

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
GIVEN = 2.0**3  # the scale of the whole matrix, where one is given


def run(context: Context, shape, format, scale) -> dict[str, Any]:
  """{"casts"}: how many were compared.

  Raises:
    Wrong: says which element.
  """
  del context
  program = programs.cast(tuple(shape), format, scale)
  function = jax.jit(program.function)
  x = matrix(np.random.default_rng(11), tuple(shape), format)
  amax = GIVEN * float(ml_dtypes.finfo(DTYPES[format]).max)
  compared = 0
  for n, made in enumerate(function(jnp.asarray(x), jnp.float32(amax))):
    for along, one in made.items():
      wide = x if along == 1 else x.T
      scales = np.full(wide.shape, GIVEN) if scale == "given" else powers(wide, one.tile, format)
      want = cast(wide / scales, format)
      compare(one, want, scales, f"{format}, kind {n} along {along}")
      compared += want.size
  return {"casts": compared}


def numbers(format: str) -> np.ndarray:
  """float32 [...]: finite numbers of the format, halves between them and their neighbours."""
  codes = np.arange(256, dtype=np.uint8).view(DTYPES[format]).astype(np.float32)
  codes = np.unique(codes[np.isfinite(codes)])
  # The step beyond the largest is the last one: half of it would round to it, or to NaN.
  ends = np.array([2 * codes[-1] - codes[-2]], np.float32)
  grid = np.concatenate([-ends, codes, ends])
  halves = (grid[1:] + grid[:-1]) / 2
  near = [np.nextafter(halves, np.float32(s * np.inf)) for s in (-1, 1)]
  zeros = np.array([0.0, -0.0], np.float32)
  return np.concatenate([codes, halves, *near, zeros])


def matrix(rng: np.random.Generator, shape, format: str) -> np.ndarray:
  """float32: all of `numbers`, again and again in some order, times powers of two; in the first 8
  rows and columns NaN, infinities and what is far too large."""
  values = numbers(format)
  x = np.resize(values, shape[0] * shape[1])
  x = rng.permutation(x).reshape(shape) * 2.0 ** rng.integers(-2, 6, (shape[0], 1))
  # With a given scale all numbers are met as they are, and with that of a tile in such rows.
  x[shape[0] // 2 :] = (
    rng.permutation(np.resize(values, x[shape[0] // 2 :].size)).reshape(x[shape[0] // 2 :].shape)
    * GIVEN
  )
  special = np.array([np.nan, -np.nan, np.inf, -np.inf, 1e30, -1e30, 3e38, -3e38])
  x[:8, :8] = special[(np.arange(8)[:, None] + np.arange(8)) % 8]
  x[8, :128] = np.nan  # a tile of nothing else
  return x.astype(np.float32)


def powers(wide: np.ndarray, tile, format: str) -> np.ndarray:
  """float64: the smallest power of two that is no smaller than amax / max, of every element's tile;
  1 where amax is 0 or infinite. NaN does not count."""
  most = float(ml_dtypes.finfo(DTYPES[format]).max)
  size = np.abs(wide.astype(np.float64))
  size[np.isnan(size)] = 0
  size = np.pad(size, [(0, -n % t) for n, t in zip(wide.shape, tile)])
  split = size.reshape(size.shape[0] // tile[0], tile[0], size.shape[1] // tile[1], tile[1])
  amax = split.max((1, 3))
  fraction, exponent = np.frexp(amax / most)  # 0.5 <= fraction < 1: a power of two has 0.5
  scale = np.ldexp(1.0, exponent - (fraction == 0.5))
  scale = np.where((amax > 0) & np.isfinite(amax), scale, 1.0)
  return np.kron(scale, np.ones(tile))[: wide.shape[0], : wide.shape[1]]


def cast(x: np.ndarray, format: str) -> np.ndarray:
  """Clipped, then rounded to the nearest; NaN stays."""
  most = float(ml_dtypes.finfo(DTYPES[format]).max)
  return np.clip(x, -most, most).astype(np.float32).astype(DTYPES[format])


def compare(made, want: np.ndarray, scales: np.ndarray, what: str):
  """Raises Wrong at the first scale or code that differs; of NaN there are several."""
  scale = np.asarray(made.scale, np.float64)
  for axis in (0, 1):
    scale = np.repeat(scale, made.tile[axis] if made.tile[axis] > 0 else want.shape[axis], axis)
  got = np.asarray(made.data)
  is_nan = np.isnan(want.astype(np.float32))
  same = np.where(is_nan, np.isnan(got.astype(np.float32)),
                  got.view(np.uint8) == want.view(np.uint8))  # fmt: skip
  same &= scale[: want.shape[0], : want.shape[1]] == scales
  if len(wrong := np.argwhere(~same)):
    i, j = map(int, wrong[0])
    raise Wrong(
      f"{what}: {len(wrong)} of {want.size} elements differ, the first [{i}, {j}] is {got[i, j]} "
      f"with scale {scale[i, j]} instead of {want[i, j]} with {scales[i, j]}"
    )
