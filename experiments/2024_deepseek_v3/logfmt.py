"""LogFMT beside E4M3, E5M2 and E5M6 on real activations and gradients.

command: python experiments/2024_deepseek_v3/logfmt.py   (a minute of a core)

x and g of 7 sites of every tenth layer of SmolLM2-135M, as in saved_tensors.py, per 1x128 along
channels, which is how experts would send and receive them (arXiv:2505.09343, section 3.2: LogFMT of
n bits spaces a tile's numbers evenly in log). Scales of the others are float32's. Medians over the
tensors. Writes the part "logfmt" of results.json and prints the table of README.md.
"""

import sys

import jax
import numpy as np
from accumulators import ROOT, record

from fp8jax import formats
from fp8jax.quantization import quantize
from fp8jax.recipe.quant import Quant

sys.path.insert(0, str(ROOT / "experiments" / "lab"))
import tensors  # noqa: E402

FORMATS = ("e4m3", "logfmt8", "e5m2", "e5m6", "logfmt10", "bf16")
EVERY = 10


def errors(x: np.ndarray, name: str) -> dict[str, float]:
  """Of the norm; of the norm of the worst token of 100; share of elements that become 0; length."""
  if name == "bf16":
    y = np.float64(x.astype(formats.BF16.dtype))
  else:
    y = np.float64(_stored(x, Quant(formats.by_name(name), (1, 128))))
  wide = np.float64(x)
  size = np.linalg.norm(wide, axis=1)
  of_token = np.linalg.norm(y - wide, axis=1) / np.maximum(size, 1e-300)
  square = np.sum(wide * wide)
  return {
    "error": float(np.sqrt(np.sum((y - wide) ** 2) / square)),
    "p99 token": float(np.quantile(of_token, 0.99)),
    "to zero": float(np.mean((y == 0)[wide != 0])),
    "length": float(np.sum(wide * y) / square - 1),
  }


_stored = jax.jit(lambda x, quant: quantize.quantize(x, quant).dequantize(), static_argnums=1)


def main():
  rows: dict[str, list] = {}
  for layers in tensors.captured().values():
    for x, _, g in layers[::EVERY]:
      for tensor, one in (("x", x), ("g", g)):
        for name in FORMATS:
          rows.setdefault(f"{name} {tensor}", []).append(errors(np.float32(one), name))
  found = {
    name: {key: float(np.median([of[key] for of in some])) for key in some[0]}
    for name, some in rows.items()
  }
  record("logfmt", found)
  keys = ("error", "p99 token", "to zero", "length")
  table = [
    [f"`{name}`", *(f"{100 * found[f'{name} {t}'][key]:.3g}" for t in "xg" for key in keys)]
    for name in FORMATS
  ]
  print(tensors.markdown(["format", *(f"{t}, {key}" for t in "xg" for key in keys)], table))


if __name__ == "__main__":
  main()
