"""What keeping Adam's moments narrow does over thousands of steps, against float64.

Gradients are N(0, 1) * lognormal(0.5), drawn anew for every element and step, times fixed factors
lognormal(1.0) of its row and of its column, times 1e-4: elements that share a scale differ widely.
They are stationary for the first half and shrink twentyfold, evenly per step, over the second.
b1 = 0.9, eps = 1e-8, no bias correction. Reported at the end of each half:

  error   relative L2 distance of m / (sqrt(v) + eps) from float64's
  v       median of v / float64's v: above 1 it came down too slowly
  max     largest |m / (sqrt(v) + eps)| over float64's largest

  python experiments/moments/dynamics.py                 # every preset and what they avoid
  python experiments/moments/dynamics.py --json FILE     # and with provenance to FILE
"""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.formats import BF16, E4M3, E5M2
from fp8jax.optim import storage
from fp8jax.optim.storage import Moments
from fp8jax.quantization import quantized_tensor
from fp8jax.recipe.quant import DynamicRangeExpansion, Quant, Rounding, Scale, SquareRoot

B1, EPS = 0.9, 1e-8
STOCHASTIC = Rounding.STOCHASTIC

# Rows that no preset has: what was published, what scale_by_adam refuses, and variations.
OTHERS = {
  "torchao: e4m3_256, v may become 0 (refused)": Moments(
    Quant(E4M3, (1, 256)), Quant(E4M3, (1, 256))
  ),
  "E4M3/128 and E5M2/128": Moments(
    Quant(E4M3, (1, 128)), Quant(E5M2, (1, 128), keeps_nonzero=True)
  ),
  "coat, both stochastic": Moments(
    Quant(E4M3, (1, 128), transform=DynamicRangeExpansion(), rounding=STOCHASTIC),
    Quant(
      E4M3, (1, 128), transform=DynamicRangeExpansion(), rounding=STOCHASTIC, keeps_nonzero=True
    ),
  ),
  "E4M3/128 and float32": Moments(Quant(E4M3, (1, 128))),
  "float32 and E5M2/128 of powers of two (refused)": Moments(
    None, Quant(E5M2, (1, 128), Scale.POW2)
  ),
  "float32 and root E4M3/128 of powers of two (refused)": Moments(
    None, Quant(E4M3, (1, 128), Scale.POW2, transform=SquareRoot())
  ),
  "float32 and E5M2/128 of powers of two, stochastic": Moments(
    None, Quant(E5M2, (1, 128), Scale.POW2, rounding=STOCHASTIC)
  ),
  "float32 and E4M3 of the tensor, powers of two (refused)": Moments(
    None, Quant(E4M3, scale=Scale.POW2)
  ),
  "float32 and BF16 to the nearest": Moments(None, Quant(BF16, scale=Scale.NONE)),
}


def simulate(rows: dict[str, Moments], b2: float, steps: int, shape, seed: int = 0, eps=EPS):
  """{row: [(error, v, max) at the end of the first and of the second half]}."""
  rng = np.random.default_rng(seed)
  factors = 1e-4 * np.exp(rng.standard_normal((shape[0], 1)) + rng.standard_normal((1, shape[1])))

  @jax.jit
  def move(state, g, t):
    """One step of every row: (new state, its m / (sqrt(v) + eps), its v)."""
    new, updates, seconds, key = {}, {}, {}, jax.random.key(t)
    for n, (name, how) in enumerate(rows.items()):
      m, v = (
        x.unpack() if isinstance(x, quantized_tensor.QuantizedTensor) else x for x in state[name]
      )
      m, v = B1 * m + (1 - B1) * g, b2 * v + (1 - b2) * g * g
      updates[name], seconds[name] = m / (jnp.sqrt(v) + eps), v
      own = jax.random.split(jax.random.fold_in(key, n))
      new[name] = tuple(
        x if quant is None else quantized_tensor.pack(x, quant, key=k)
        for x, quant, k in zip((m, v), (how.mu, how.nu), own)
      )
    return new, updates, seconds

  @jax.jit
  def begin(zero):
    key = jax.random.key(0)
    return {
      name: tuple(
        zero if quant is None else quantized_tensor.pack(zero, quant, key=key)
        for quant in (how.mu, how.nu)
      )
      for name, how in rows.items()
    }

  state = begin(jnp.zeros(shape))
  m, v = np.zeros(shape), np.zeros(shape)
  half, results = steps // 2, {name: [] for name in rows}
  for t in range(steps):
    shrink = 20.0 ** (-max(t - half + 1, 0) / (steps - half))
    g = rng.standard_normal(shape) * np.exp(0.5 * rng.standard_normal(shape)) * factors * shrink
    g = g.astype(np.float32)
    state, updates, seconds = move(state, g, t)
    g = g.astype(np.float64)
    m, v = B1 * m + (1 - B1) * g, b2 * v + (1 - b2) * g * g
    if t + 1 in (half, steps):
      exact = m / (np.sqrt(v) + eps)
      for name in rows:
        # What the next step reads is what was kept: one more update from it, as it stands.
        got = np.asarray(updates[name], np.float64)
        results[name].append(
          (
            float(np.linalg.norm(got - exact) / np.linalg.norm(exact)),
            float(np.median(np.asarray(seconds[name], np.float64) / v)),
            float(np.abs(got).max() / np.abs(exact).max()),
          )
        )
  return results


def on_gradients(rows: dict[str, Moments], gradients, b2: float, eps=EPS):
  """{row: {"error", "largest", "zero"}} of Adam's last step along real gradients.

  Moments are in their formats between steps and start at 0; as in COAT, a step reads its own before
  they are rounded.

  Args:
    gradients: of {name: float32 [layers, ...]}; every layer is a tensor.

  Returns:
    error: L2 distance of m / (sqrt(v) + eps), bias corrected, from float32 moments' over its norm.
    largest: its largest magnitude over theirs.
    zero: share of v that is stored as 0 and is not.
  """
  rows = {"exact": Moments()} | rows

  @jax.jit
  def move(state, g, t):
    new, updates = {}, {}
    for name, how in rows.items():
      pair = (x.unpack() if hasattr(x, "unpack") else x for x in state[name])
      m, v = (b * x + (1 - b) * y for x, y, b in zip(pair, (g, g * g), (B1, b2), strict=True))
      updates[name] = m / (1 - B1**t) / (jnp.sqrt(v / (1 - b2**t)) + eps)
      new[name] = tuple(
        x if q is None else quantized_tensor.pack(x, q, lead=1)
        for x, q in zip((m, v), (how.mu, how.nu), strict=True)
      )
    return new, updates

  states, updates = {}, {}
  for t, of_site in enumerate(gradients, 1):
    for site, g in of_site.items():
      first = {name: (jnp.zeros_like(g),) * 2 for name in rows}
      states[site], updates[site] = move(states.get(site, first), g, float(t))
  results = {}
  for name in rows:
    exact, got = ([np.ravel(updates[s][row]) for s in updates] for row in ("exact", name))
    squares = [(np.sum(np.square(np.float64(a) - b)), np.sum(np.square(np.float64(b))))
               for a, b in zip(got, exact, strict=True)]  # fmt: skip
    off, of = np.sum(squares, axis=0)
    v = [(states[s][name][1], states[s]["exact"][1]) for s in states]
    zero = [np.mean(np.asarray(_code(a) == 0)[np.asarray(b) != 0]) for a, b in v]
    results[name] = {
      "error": float(np.sqrt(off / of)),
      "largest": float(max(map(np.max, map(np.abs, got))) / max(map(np.max, map(np.abs, exact)))),
      "zero": float(np.average(zero, weights=[b.size for _, b in v])),
    }
  del results["exact"]
  return results


def _code(x):
  return x.data.astype(jnp.float32) if isinstance(x, quantized_tensor.QuantizedTensor) else x


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", help="write results and provenance here")
  parser.add_argument("--steps", type=int, default=2000)
  args = parser.parse_args()
  presets = {k: v for k, v in storage.MOMENTS.items() if k != "float32"}
  rows = presets | OTHERS
  found = {}
  for b2 in (0.95, 0.999):
    print(f"\nb2 = {b2}: error / v / max after {args.steps // 2} and {args.steps} steps")
    found[b2] = simulate(rows, b2, args.steps, (128, 1024))
    for name, ends in found[b2].items():
      cells = " | ".join(" / ".join(f"{x:.3g}" for x in end) for end in ends)
      print(f"| {name} | {cells} |", flush=True)
  if args.json:
    from fp8jax.run import provenance as provenance_lib

    provenance = provenance_lib.provenance({}, "synthetic", 0)
    pathlib.Path(args.json).write_text(
      json.dumps({"results": found, "steps": args.steps, "provenance": provenance}, indent=1)
    )


if __name__ == "__main__":
  main()
