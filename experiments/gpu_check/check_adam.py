"""Correctness of AdamW's kernel against float64 on the host.

Moments are decoded by XLA before and after; what they and the master should be is computed in
float64 from the formula of the paper (arXiv:1711.05101, algorithm 2).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.optim import storage
from fp8jax.quantization import bf16_remainder, quantized_tensor
from fp8jax.recipe import quant as quant_lib
from gpu_check import operands, programs
from gpu_check.worker import Context, Wrong

# Relative in the norm of 128 neighbours: float32 and the hardware's square root; E4M3's rounding, a
# sixteenth of an element and so of a group at most (0.055 where all neighbours are alike); the
# square of a root doubles it. A lost element is 0.088 of its group.
BUDGET = {"float32": 2e-5, "packed": 1 / 16, "root": 0.08}
COUNT, RATE = 3, 0.25


def run(context: Context, preset, is_pair, dtype, shape) -> dict[str, Any]:
  """{"master", "mu", "nu"}: the worst error of a group, of both kinds of operands.

  Raises:
    Wrong: one is above its budget.
  """
  del context
  kept, found = storage.MOMENTS[preset], {}
  for kind, make in operands.MAKERS.items():
    rng = np.random.default_rng(11)
    rows = 2.0 ** rng.integers(-20, 0, (shape[0], 1))
    g, m, v, p = (make(rng, *shape) * rows for _ in range(4))
    state = [quantized_tensor.pack(jnp.asarray(x, jnp.float32), q) if q
             else jnp.asarray(x, jnp.float32)
             for x, q in ((m, kept.mu), (np.square(v), kept.nu))]  # fmt: skip
    gradient, master = jnp.asarray(g, dtype), jnp.asarray(p, jnp.float32)
    master = bf16_remainder.split(master) if is_pair else master
    wanted = expected(*(wide(x) for x in (gradient, master, *state)))
    got = jax.jit(lambda *arrays: _step(*arrays))(gradient, master, *state)
    before = wide(master)
    for name, x, y in zip(("master", "mu", "nu"), got, wanted):
      x, y = (wide(x) - before, y - before) if name == "master" else (wide(x), y)
      found[name] = max(found.get(name, 0.0), _worst(x, y))
      quant = None if name == "master" else getattr(kept, name)
      is_root = quant is not None and isinstance(quant.transform, quant_lib.SquareRoot)
      budget = BUDGET["root" if is_root else "packed" if quant else "float32"]
      # A step that is small beside its parameter is rounded with it.
      budget += 2.0**-22 * _ratio(before, y) if name == "master" else 0
      if not found[name] <= budget:
        raise Wrong(f"{kind}: {name} of {preset} is off by {found[name]:.3g} of a group of 128")
  return found


def _step(gradient, master, mu, nu):
  from fp8jax.kernels.adamw import api as adamw_api

  by = dict(count=jnp.int32(COUNT), rate=jnp.float32(RATE), is_applied=jnp.asarray(True))
  return adamw_api.update(
    gradient, master, mu, nu, **by, **programs.ADAM_RULE, backend="mosaic_sm90"
  )[:3]  # fmt: skip


def wide(x) -> np.ndarray:
  """float64 of an array, a Split or a QuantizedTensor."""
  return np.asarray(x.unpack() if hasattr(x, "unpack") else x, np.float64)


def expected(g, p, m, v) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """float64 (master, mu, nu) after one step."""
  r = programs.ADAM_RULE
  m = r["b1"] * m + (1 - r["b1"]) * g
  v = r["b2"] * v + (1 - r["b2"]) * g * g
  step = (m / (1 - r["b1"] ** COUNT)) / (np.sqrt(v / (1 - r["b2"] ** COUNT)) + r["eps"])
  return p - RATE * (step + r["weight_decay"] * p), m, v


def _groups(x):
  return x.reshape(-1, min(x.size, 128))


def _worst(x, y) -> float:
  x, y = _groups(x), _groups(y)
  size = np.linalg.norm(y, axis=1)
  off = np.linalg.norm(x - y, axis=1) / np.where(size > 0, size, 1)
  return float("inf") if np.isnan(off).any() else float(off.max())


def _ratio(x, y) -> float:
  return float(np.max(np.linalg.norm(_groups(x), axis=1) / np.linalg.norm(_groups(y), axis=1)))
