"""Inputs that every recipe represents exactly: any difference is then plumbing, not rounding.

Integers up to 7 in magnitude with a 7 planted in every run of 16 along both axes and all along the
last row and column, where a partial tile may be short: the amax of every tile is 7, its scale a
power of two (7/448, 7/57344), and every value a narrow number of E4M3 and E5M2 (of E3M4 too, with
a power of two for a scale).
fmt="e2m1" takes E2M1's own grid instead, with 6 planted: the scale is 1, also NVFP4's, of which
every tile has the E4M3 number 448 and the tensor 1/448.
Products and sums stay multiples of 1/4 below 2^22, exact in float32.
"""

import numpy as np

GRIDS = {
  "e4m3": np.arange(8, dtype=np.float32),
  "e2m1": np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32),
}


def grid_of(fmt: str) -> np.ndarray:
  """The magnitudes, the planted one last; integers up to 7 but for E2M1."""
  return GRIDS.get(fmt, GRIDS["e4m3"])


def lattice(rng: np.random.Generator, *shape: int, fmt: str = "e4m3") -> np.ndarray:
  """float32 of `shape`; the pattern runs over the last two axes of its matrix view [-1, last]."""
  grid = grid_of(fmt)
  codes = rng.integers(-7, 8, size=(int(np.prod(shape[:-1])), shape[-1]))
  x = np.sign(codes).astype(np.float32) * grid[np.abs(codes)]
  rows, cols = np.indices(x.shape)
  planted = (rows + cols) % 16 == 0
  planted[-1] = planted[:, -1] = True
  x[planted] = np.where(rng.random(planted.sum()) < 0.5, grid[-1], -grid[-1])
  return x.reshape(shape)
