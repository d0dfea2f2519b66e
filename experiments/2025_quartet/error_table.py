"""Quartet's table of errors on N(0, 1): mean squared error and misalignment of MXFP4 projections.

command: python experiments/2025_quartet/error_table.py    (half a minute)

2^20 normal numbers in blocks of 32, sixteen draws. The error is relative to the mean square. Of
misalignment, 1 - E[1/S] with S = <x, x> / <x, q> (EDEN's factor), S is of the whole tensor here.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "experiments" / "lab"))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
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
  values = [{"rule": f"{a}, {b}", "error": one["mse"]} for (a, b), one in found.items()]
  papers = [{"rule": f"{a}, {b}", "error": PAPER[a][0]} for a, b in found]
  base = alt.Chart(alt.Data(values=values)).encode(
    y=alt.Y("rule:N", sort=None, title=None, axis=alt.Axis(labelLimit=320)),
    x=alt.X("error:Q", title="mean squared error on N(0, 1); ticks: the paper's"),
  )
  ticks = base.properties(data=alt.Data(values=papers)).mark_tick(color="#333333", thickness=2)
  chart = alt.layer(base.mark_circle(size=70), ticks).properties(width=420, height=240)
  tensors.write(HERE, {f"{a}, {b}": one for (a, b), one in found.items()}, table, chart)


if __name__ == "__main__":
  main()
