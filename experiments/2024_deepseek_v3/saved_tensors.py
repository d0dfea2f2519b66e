"""DeepSeek-V3's second quantization of saved inputs, and gradients in tiles of 128x128.

command: python experiments/2024_deepseek_v3/saved_tensors.py   (make run fetches the weights)

x and g of every linear layer of SmolLM2-135M (30 layers, 7 sites): one backward pass over 2,048
held-out tokens of the Python documentation, linears in float32. All is E4M3 with scales in float32
or rounded up to powers of two; products are float64's of what is stored. Errors are the norm of the
error over the norm of the tensor.

  x   per 1x128 along channels, as the forward pass reads it, then again per 128x1 along tokens, for
      the weight gradient (arXiv:2412.19437, §3.5.2); beside it x itself per 128x1
  g   per 1x128, as the data gradient reads it, and per 128x128 (appendix B.2)
  dw  of tensors with one scale each, in the 14 bits of a tensor core and promoted every 128

Medians over layers. Writes the part "saved_tensors" of results.json and the tables of README.md.
"""

import sys
from collections.abc import Iterator

import jax
import numpy as np
from accumulators import ROOT, record

from fp8jax.formats import E4M3
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.quantization import quantize
from fp8jax.recipe.gemm import Accumulation
from fp8jax.recipe.quant import Quant, Scale

sys.path.insert(0, str(ROOT / "experiments" / "lab"))
import tensors  # noqa: E402

SUMS_EVERY = 10  # layers; products in 14 bits are slow


def _stored(x, tile, scale: Scale, contraction: int = 1):
  """What x is after quantization, as x lies."""
  made = quantize.quantize(x, Quant(E4M3, tile, scale), contraction=contraction).dequantize()
  return made.T if contraction == 0 else made


@jax.jit
def _variants(x, g):
  """{name: what is stored of x or g}."""
  found = {}
  for name, scale in (("f32", Scale.F32), ("pow2", Scale.POW2)):
    once = _stored(x, (1, 128), scale)
    # A barrier: the second quantization reads the numbers of the first.
    once = jax.lax.optimization_barrier(once)
    found[f"x once {name}"] = once
    found[f"x twice {name}"] = _stored(once, (1, 128), scale, contraction=0)
    found[f"x direct {name}"] = _stored(x, (1, 128), scale, contraction=0)
    found[f"g 1x128 {name}"] = _stored(g, (1, 128), scale)
    found[f"g 128x128 {name}"] = _stored(g, (128, 128), scale)
  return found


def _error(got, want) -> float:
  return float(np.linalg.norm(np.float64(got) - want) / np.linalg.norm(want))


def requantized(x, g, stored, name: str) -> dict[str, float]:
  once, twice, direct = (stored[f"x {how} {name}"] for how in ("once", "twice", "direct"))
  dw = x.T @ g
  return {
    "x once": _error(once, x),
    "x direct": _error(direct, x),
    "x twice": _error(twice, x),
    "second rounding": _error(twice, once),
    "changed": float(np.mean((twice != once)[once != 0])),
    "to zero": float(np.mean((twice == 0)[once != 0])),
    "dw direct": _error(direct.T @ g, dw),
    "dw twice": _error(twice.T @ g, dw),
  }


def gradient_tiles(g, stored, name: str) -> dict[str, float]:
  found = {}
  for tile in ("1x128", "128x128"):
    q = np.float64(stored[f"g {tile} {name}"])
    of_token = np.linalg.norm(q - g, axis=1) / np.maximum(np.linalg.norm(g, axis=1), 1e-300)
    found[f"{tile} all"] = _error(q, g)
    found[f"{tile} median token"] = float(np.median(of_token))
    found[f"{tile} p99 token"] = float(np.quantile(of_token, 0.99))
    found[f"{tile} to zero"] = float(np.mean((q == 0)[g != 0]))
  return found


@jax.jit
def _weight_gradients(x, g):
  a, b = (quantize.quantize(t, Quant(E4M3), contraction=0) for t in (x, g))
  arms = {"14 bits": Accumulation.FAST, "promoted every 128": Accumulation.PRECISE}
  products = {
    arm: gemm_api.scaled_matmul(a, b, accumulate=how, backend="emulated_sm90")
    for arm, how in arms.items()
  }
  return products, a.dequantize(), b.dequantize()


def sums(x, g) -> dict[str, float]:
  products, a, b = _weight_gradients(np.float32(x), np.float32(g))
  exact, rms = np.float64(a) @ np.float64(b).T, lambda t: np.sqrt(np.mean(t**2))
  found = {"quantization": _error(exact, x.T @ g)}
  for arm, d in products.items():
    found[arm] = _error(d, exact)
    found[f"{arm}, largest"] = float(np.abs(d - exact).max() / rms(exact))
  return found


def _rows(seen) -> Iterator[tuple[str, str, dict[str, float]]]:
  """(part, site, numbers) of every site and layer, scales in the names of the parts."""
  for site, layers in seen.items():
    for n, (x, _, g) in enumerate(layers):
      stored = {k: np.asarray(v) for k, v in _variants(x, g).items()}
      x, g = np.float64(x), np.float64(g)
      for name in ("f32", "pow2"):
        yield f"requantized {name}", site, requantized(x, g, stored, name)
        yield f"gradient_tiles {name}", site, gradient_tiles(g, stored, name)
      if n % SUMS_EVERY == 0:
        yield "sums", site, sums(x, g)
    print(site, flush=True)


def main():
  found: dict[str, dict[str, list]] = {}
  for part, site, numbers in _rows(tensors.captured()):
    found.setdefault(part, {}).setdefault(site, []).append(numbers)
  medians = {
    part: {
      site: {key: float(np.median([row[key] for row in rows])) for key in rows[0]}
      for site, rows in sites.items()
    }
    for part, sites in found.items()
  }
  record("saved_tensors", medians)
  for part, sites in medians.items():
    keys = list(next(iter(sites.values())))
    print(f"\n{part}\n\n| site | " + " | ".join(keys) + " |\n" + "|---" * (len(keys) + 1) + "|")
    for site, of in sites.items():
      print(f"| {site} | " + " | ".join(f"{100 * of[key]:.3g}" for key in keys) + " |")


if __name__ == "__main__":
  main()
