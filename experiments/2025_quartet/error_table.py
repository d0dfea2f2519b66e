"""Quartet's table of errors on N(0, 1): mean squared error and misalignment of MXFP4 projections.

command: python experiments/2025_quartet/error_table.py    (half a minute)

2^20 normal numbers in blocks of 32, sixteen draws. The error is relative to the mean square. Of
misalignment, 1 - E[1/S] with S = <x, x> / <x, q> (EDEN's factor), S is of the whole tensor here.
The error of the first draw, to the nearest, is also split into three (`split`).
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "experiments" / "lab"))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import tensors  # noqa: E402

from fp8jax.formats import E2M1  # noqa: E402
from fp8jax.quantization import quantize  # noqa: E402
from fp8jax.recipe.quant import Quant, Rms, Rounding, Scale  # noqa: E402

SAMPLES, SEEDS, NEAR = 2**20, 16, 0.03
QUEST = Rms(2.92247856, is_centred=True)
# Of version 4, table 2: (mean squared error, misalignment).
PAPER = {
  "stochastic, amax": (2.77e-2, 0.0), "nearest, amax": (1.37e-2, 9.3e-3),
  "QuEST": (1.32e-2, 1.3e-2),
}  # fmt: skip
SR = Rounding.STOCHASTIC
RULES = {
  ("stochastic, amax", "floor times 4/3"): Quant(E2M1, (1, 32), Scale.FLOOR_4_3, rounding=SR),
  ("stochastic, amax", "round up"): Quant(E2M1, (1, 32), Scale.POW2, rounding=SR),
  ("nearest, amax", "floor times 4/3"): Quant(E2M1, (1, 32), Scale.FLOOR_4_3),
  ("nearest, amax", "floor"): Quant(E2M1, (1, 32), Scale.FLOOR),
  ("nearest, amax", "round up"): Quant(E2M1, (1, 32), Scale.POW2),
  ("QuEST", "even"): Quant(E2M1, (1, 32), Scale.EVEN, clip=QUEST),
  ("QuEST", "floor"): Quant(E2M1, (1, 32), Scale.FLOOR, clip=QUEST),
  ("QuEST", "floor of log2(amax / 6), its code"): Quant(E2M1, (1, 32), Scale.POW2_DOWN, clip=QUEST),
}
SPLIT = {
  rule: Quant(E2M1, (1, 32), scale)
  for rule, scale in (("floor", Scale.FLOOR), ("even", Scale.EVEN), ("round up", Scale.POW2))
}


def measure(quant: Quant, samples: int = SAMPLES, seeds: int = SEEDS) -> dict[str, float]:
  """Means over draws."""

  @jax.jit
  def one(key):
    x = jax.random.normal(key, (samples // 128, 128))
    y = quantize.quantize(x, quant, key=jax.random.fold_in(key, 1)).dequantize()
    square = jnp.sum(x * x)
    return jnp.sum(jnp.square(y - x)) / square, 1 - jnp.sum(x * y) / square

  error, misalignment = np.mean([one(jax.random.key(s)) for s in range(seeds)], axis=0)
  return {"mse": float(error), "misalignment": float(misalignment)}


def split(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
  """The error of x in MXFP4, y - x, in three parts that add up to it, after arXiv:2605.20402.

  z is x under each block's own scale, its largest magnitude over 6 instead of a power of two:
    scale      y - z: what the power of two changes, saturation included
    dead zone  z - x where z is 0
    grid       z - x elsewhere

  Args:
    x, y: float32 [n, multiples of 32].

  Returns:
    {part: float64 like x}. In float64 the differences and their sum are exact.
  """
  blocks = x.reshape(-1, 32)
  largest = np.abs(blocks).max(1, keepdims=True) * np.float32(1 / 6)
  own = np.float64(np.where(largest == 0, np.float32(1), largest))
  codes = np.clip(blocks / own, -6, 6).astype(ml_dtypes.float4_e2m1fn)
  z = (np.float64(codes) * own).reshape(x.shape)
  is_dead = (z == 0) & (x != 0)
  rounding = z - x
  return {"scale": y - z, "dead zone": np.where(is_dead, rounding, 0.0),
          "grid": np.where(is_dead, 0.0, rounding)}  # fmt: skip


def shares(quant: Quant, samples: int = SAMPLES) -> dict[str, float]:
  """Mean squares of the parts over that of x; twice the products of scale with the other two; and
  each part along x, which add up to less the misalignment."""
  x = np.random.default_rng(0).standard_normal((samples // 128, 128), np.float32)
  parts = split(x, np.asarray(quantize.quantize(x, quant).dequantize()))
  square = np.sum(np.float64(x) ** 2)
  found = {name: float(np.sum(part**2) / square) for name, part in parts.items()}
  rest = parts["dead zone"] + parts["grid"]
  cross = float(2 * np.sum(parts["scale"] * rest) / square)
  found |= {"cross": cross, "all": float(np.sum((parts["scale"] + rest) ** 2) / square)}
  return found | {f"{k} along x": float(np.sum(x * p) / square) for k, p in parts.items()}


def verdict(name: str, found: dict[str, float]) -> list[str]:
  """Per quantity: within NEAR of the paper's number, or by how much it is beside it."""
  said = []
  for key, paper in zip(("mse", "misalignment"), PAPER[name], strict=True):
    off = found[key] / paper - 1 if paper else found[key]
    is_near = abs(off) <= NEAR if paper else abs(off) < 3e-4
    said.append("reproduced" if is_near else f"{off:+.0%}" if paper else f"{off:+.1e}")
  return said


def main():
  found = {names: measure(quant) for names, quant in RULES.items()}
  rows = []
  for (name, rule), one in found.items():
    near, paper = verdict(name, one), PAPER[name]
    rows.append([name, rule, f"{one['mse']:.3e}", f"{paper[0]:.3g}", near[0],
                 f"{one['misalignment']:.2e}", f"{paper[1]:.2g}", near[1]])  # fmt: skip
  table = tensors.markdown(
    ["projection", "scale", "error", "paper", "", "misalignment", "paper", ""], rows
  )
  splits = {f"split, {rule}": shares(quant) for rule, quant in SPLIT.items()}
  table += "\n\n" + tensors.markdown(
    ["mean squares of the error's parts, %", *next(iter(splits.values()))],
    [[name, *(f"{100 * v:.3f}" for v in one.values())] for name, one in splits.items()],
  )
  values = [{"rule": f"{a}, {b}", "error": one["mse"]} for (a, b), one in found.items()]
  papers = [{"rule": f"{a}, {b}", "error": PAPER[a][0]} for a, b in found]
  base = alt.Chart(alt.Data(values=values)).encode(
    y=alt.Y("rule:N", sort=None, title=None, axis=alt.Axis(labelLimit=320)),
    x=alt.X("error:Q", title="mean squared error on N(0, 1); ticks: the paper's"),
  )
  ticks = base.properties(data=alt.Data(values=papers)).mark_tick(color="#333333", thickness=2)
  chart = alt.layer(base.mark_circle(size=70), ticks).properties(width=420, height=240)
  kept = {f"{a}, {b}": one for (a, b), one in found.items()} | splits
  tensors.write(HERE, kept, table, chart)


if __name__ == "__main__":
  main()
