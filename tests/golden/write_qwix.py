"""Writes qwix.json: the loss of qwix's GPTQ on weights and inputs that a seed makes.

In an environment of its own, with qwix 0.1.8 and jax 0.12.0.1, on a CPU:
  pip install qwix==0.1.8 jax==0.12.0.1
  JAX_PLATFORMS=cpu python tests/golden/write_qwix.py

Its integers have the scale amax / (maximum + 1/2), times a factor that makes it amax / maximum, and
one code more than ours, -8 or -128. A group's scale is that of columns without the updates of their
own block, which is ours where a group is a block.
"""

import json
import pathlib

import numpy as np

SEED, ROWS, COLUMNS, TOKENS, DAMP = 7, 48, 256, 1024, 0.01
# qwix's type: (the group of columns, the factor).
CASES = {"int4": (128, 7.5 / 7), "int8": (COLUMNS, 127.5 / 127), "float8_e4m3fn": (COLUMNS, 1.0)}


def case():
  """(weight [rows, columns], inputs [tokens, columns]), float32: correlated, with loud channels."""
  rng = np.random.default_rng(SEED)
  mix = np.eye(COLUMNS) + rng.standard_normal((COLUMNS, COLUMNS)) / COLUMNS**0.5
  x = rng.standard_normal((TOKENS, COLUMNS)) @ mix
  x[:, :: COLUMNS // 8] *= 10
  return rng.standard_normal((ROWS, COLUMNS)).astype(np.float32), x.astype(np.float32)


def main():
  import importlib.metadata

  import jax.numpy as jnp
  from qwix._src.core import qarray
  from qwix.contrib import gptq_core

  w, x = case()
  losses = {}
  for name, (group, times) in CASES.items():
    tiled = {1: group} if group < COLUMNS else {}
    how = qarray.HowToQuantize(
      qtype=jnp.dtype(name), channelwise_axes=[0], tiled_axes=tiled,
      calibration_method=f"absmax,{times!r}",
    )  # fmt: skip
    gram = gptq_core.compute_hessian(jnp.asarray(x.T))
    made, _ = gptq_core.quantize_weight(jnp.asarray(w), gram, how, 128, DAMP)
    nearest = qarray.quantize(jnp.asarray(w), how)
    losses[name] = {}
    for method, one in (("gptq", made), ("nearest", nearest)):
      error = np.float64(w) - np.float64(qarray.dequantize(one))
      losses[name][method] = float(np.sum((np.float64(x) @ error.T) ** 2))
  about = {"qwix": importlib.metadata.version("qwix"), "jax": importlib.metadata.version("jax")}
  path = pathlib.Path(__file__).parent / "qwix.json"
  path.write_text(json.dumps({"made_by": about, "loss": losses}, indent=1) + "\n")


if __name__ == "__main__":
  main()
