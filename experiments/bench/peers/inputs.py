"""The operands of the products: seeded, the same for everyone."""

import ml_dtypes
import numpy as np
import worker

SHAPES = {"512x576x1536": (512, 576, 1536), "1024x1024x1024": (1024, 1024, 1024)}  # M, K, N
STANDARD_DEVIATIONS = {"x": 1.0, "w": 0.02, "g": 1e-3}
TIES = worker.UNTIMED  # name of the third case
SEED = 0


def make() -> dict[str, np.ndarray]:
  """{case/x, case/w, case/g: float32 [M, K], [K, N], [M, N]}."""
  rng, found = np.random.default_rng(SEED), {}
  for case, sizes in SHAPES.items():
    for name, t in _normal(rng, sizes):
      # One element in 4096 is 30 times as large: outliers, as activations have them.
      found[f"{case}/{name}"] = t * np.where(rng.random(t.shape) < 1 / 4096, np.float32(30), 1)
  for name, t in _normal(rng, SHAPES["512x576x1536"]):
    found[f"{TIES}/{name}"] = _with_ties(t, STANDARD_DEVIATIONS[name])
  return {name: t.astype(np.float32) for name, t in found.items()}


def _normal(rng, sizes):
  m, k, n = sizes
  for (name, deviation), shape in zip(STANDARD_DEVIATIONS.items(), ((m, k), (k, n), (m, n))):
    yield name, rng.standard_normal(shape, np.float32) * np.float32(deviation)


def _with_ties(t, deviation):
  """Where the last bit of a scale decides: bfloat16 values, and amax = 21 2^i in every tile.

  Divided by 21 / 448 = 3 / 64, every multiple of 3 among numbers of 8 bits gives a number of few
  bits, and one in 16 of these lies half-way between two of E4M3's. A scale, reciprocal or product
  that is off by an ulp takes it to the other neighbour.
  """
  top = np.float32(21 * 2.0 ** np.floor(np.log2(deviation / 4)))
  t = np.clip(t, -top, top).astype(ml_dtypes.bfloat16).astype(np.float32)
  t[::32, ::32] = top  # in every block of 32 of some rows; the others lie below it
  t[:, ::64], t[::64, :] = top, top
  return t
