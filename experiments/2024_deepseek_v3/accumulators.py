"""The error of Hopper's FP8 accumulator by depth of the sum, and what promotion leaves of it.

command: python experiments/2024_deepseek_v3/accumulators.py   (a minute on two CPU cores)

With "draw" as an argument it does the last two alone, from results.json.

A [512, K] and B [512, K], quantized to E4M3 with a scale per tensor; D = A . B' by the backend
emulated_sm90 against float64's product of the same FP8 numbers, which is exact. Writes the part
"accumulators" of results.json, figure.svg, and the table of README.md.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import vl_convert  # noqa: E402

from fp8jax.formats import E4M3  # noqa: E402
from fp8jax.kernels.gemm import api as gemm_api  # noqa: E402
from fp8jax.quantization import quantize  # noqa: E402
from fp8jax.recipe.gemm import Accumulation  # noqa: E402
from fp8jax.recipe.quant import Quant  # noqa: E402
from fp8jax.report import charts, page  # noqa: E402
from fp8jax.run import provenance  # noqa: E402

RESULTS = HERE / "results.json"
DEPTHS = [2**n for n in range(9, 15)]
ROWS, SEEDS = 512, 3
# arm: (backend, accumulate).
ARMS = {
  "14 bits": ("emulated_sm90", Accumulation.FAST),
  "promoted every 512": ("emulated_sm90", 512),
  "promoted every 128": ("emulated_sm90", 128),
  "promoted every 32": ("emulated_sm90", 32),
  "float32": ("reference", Accumulation.PRECISE),
}
INPUTS = {
  "normal": lambda rng, shape: rng.standard_normal(shape),
  "uniform": lambda rng, shape: rng.random(shape),
}
QUANT = Quant(E4M3)


def record(part: str, value):
  """Writes a part of results.json with the provenance of this process."""
  results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  of_run = provenance.provenance({}, "seeds, or held-out windows of configs/smollm2_cpt.py", 0)
  results[part] = {"results": value, "provenance": of_run}
  RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def errors(d, exact) -> dict[str, float]:
  """Of a product against its exact value, by definitions that people mean by "relative"."""
  error, rms = np.abs(np.float64(d) - exact), np.sqrt(np.mean(exact**2))
  relative = error / np.abs(exact)
  return {
    "rms_by_rms": float(np.sqrt(np.mean(error**2)) / rms),
    "max_by_rms": float(error.max() / rms),
    "max_by_max": float(error.max() / np.abs(exact).max()),
    "median_of_relative": float(np.median(relative)),
    "p99_of_relative": float(np.quantile(relative, 0.99)),
    "max_of_relative": float(relative.max()),
    "shrinkage": float(1 - np.mean(np.abs(d)) / np.mean(np.abs(exact))),
  }


@jax.jit
def _operands(a, b):
  made = [quantize.quantize(x, QUANT) for x in (a, b)]
  return made, [x.dequantize() for x in made]


@jax.jit
def _products(a, b):
  return {
    arm: gemm_api.scaled_matmul(a, b, accumulate=how, backend=backend)
    for arm, (backend, how) in ARMS.items()
  }


def measure(kind: str, depth: int) -> dict[str, dict[str, float]]:
  """{arm: {definition: mean over seeds}}."""
  by_seed = []
  for seed in range(SEEDS):
    rng = np.random.default_rng(seed)
    a, b = (jnp.asarray(INPUTS[kind](rng, (ROWS, depth)), jnp.float32) for _ in range(2))
    made, (x, y) = _operands(a, b)
    exact = np.float64(x) @ np.float64(y).T
    by_seed.append({arm: errors(d, exact) for arm, d in _products(*made).items()})
  return {
    arm: {key: float(np.mean([one[arm][key] for one in by_seed])) for key in by_seed[0][arm]}
    for arm in ARMS
  }


def draw(results: dict):
  points = [
    {"K": int(depth), "inputs": kind, "accumulator": arm, "error": of["max_by_rms"]}
    for kind, by_depth in results.items()
    for depth, arms in by_depth.items()
    for arm, of in arms.items()
  ]
  depth = alt.X("K:Q", title="K").scale(type="log", base=2).axis(values=DEPTHS, format="d")
  error = alt.Y("error:Q", title="largest error / RMS of the result").scale(type="log")
  scale = alt.Scale(domain=list(ARMS), scheme="category10")
  color = alt.Color("accumulator:N", title="accumulator").scale(scale)
  chart = (
    alt.Chart(charts.rows(**{key: [p[key] for p in points] for key in points[0]}))
    .mark_line(point=True)
    .encode(x=depth, y=error.axis(format="~g"), color=color)
    .properties(width=330, height=280)
    .facet(column=alt.Column("inputs:N", title=None))
  )
  legend = dict(orient="bottom", labelFontSize=12, columnPadding=20, symbolSize=250)
  spec = charts.spec(charts.themed(chart).configure_legend(**legend))
  page.write(str(HERE / "figure.svg"), vl_convert.vegalite_to_svg(spec))


def print_table(results: dict):
  for kind, by_depth in results.items():
    print(f"\n{kind}\n\n| K | " + " | ".join(ARMS) + " |")
    print("|---" * (len(ARMS) + 1) + "|")
    for depth, arms in by_depth.items():
      cells = [
        f"{100 * of['max_by_rms']:.2g} / {100 * of['rms_by_rms']:.2g}" for of in arms.values()
      ]
      print(f"| {depth} | " + " | ".join(cells) + " |")


def main(only_draw: bool):
  if not only_draw:
    record("accumulators", {kind: {str(k): measure(kind, k) for k in DEPTHS} for kind in INPUTS})
  results = json.loads(RESULTS.read_text())["accumulators"]["results"]
  draw(results)
  print_table(results)


if __name__ == "__main__":
  main(sys.argv[1:] == ["draw"])
