"""The FP4 paper's table of clamping and compensation, on activations of SmolLM2-135M.

command: python experiments/2025_fp4/snr_table.py    (two minutes; make run fetches the weights)

x of every linear layer (30 layers, 7 sites), E2M1 with a scale per token; clamped at quantiles of
the token, what was clamped added back or not. Means over tensors, as in the paper's table 1: cosine
similarity, squared error relative to the mean square, signal to noise ratio in dB.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "experiments" / "lab"))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import tensors  # noqa: E402

from fp8jax.formats import E2M1  # noqa: E402
from fp8jax.quantization import quantize  # noqa: E402
from fp8jax.recipe.quant import AMAX, WHOLE, Clamp, Quant  # noqa: E402

# (clamped share, compensated) -> the paper's (cosine in %, MSE, SNR), LLaMA-1.3B.
PAPER = {
  (None, False): (92.19, 0.1055, 8.31),
  (0.999, False): (98.83, 0.0366, 14.25),
  (0.999, True): (99.61, 0.0245, 15.31),
  (0.99, True): (100.0, 0.0099, 18.38),
  (0.97, True): (100.0, 0.0068, 20.88),
}


def measure(x, share: float | None, is_compensated: bool):
  """(cosine, relative squared error, SNR in dB)."""
  quant = Quant(E2M1, (1, WHOLE), clip=Clamp(share) if share else AMAX)
  y = quantize.quantize(x, quant).dequantize()
  if is_compensated:
    y = y + x - quantize.without_outliers(x, quant, 1, ((), ()))
  x, y = x.astype("float32"), y
  square, noise = (x * x).sum(), ((y - x) ** 2).sum()
  cosine = (x * y).sum() / (square * (y * y).sum()) ** 0.5
  return cosine, noise / square, 10 * jax.numpy.log10(square / noise)


def main():
  seen = tensors.captured()
  run = jax.jit(measure, static_argnums=(1, 2))
  found, rows, points = {}, [], []
  for (share, adds), paper in PAPER.items():
    each = [run(x, share, adds) for layers in seen.values() for x, _, _ in layers]
    cosine, error, ratio = (float(t) for t in np.mean(np.float64(each), axis=0))
    name = f"clamped at {share}" + ", compensated" * adds if share else "not clamped"
    found[name] = {"cosine": cosine, "error": error, "snr": ratio}
    mine = [f"{100 * cosine:.2f}", f"{error:.4f}", f"{ratio:.2f}"]
    rows.append([name, *mine, *map(str, paper)])
    points += [{"arm": name, "of": "SmolLM2-135M", "snr": ratio},
               {"arm": name, "of": "the paper, LLaMA-1.3B", "snr": paper[2]}]  # fmt: skip
  head = ["activations", "cosine, %", "error", "SNR, dB", "paper: cosine", "error", "SNR"]
  chart = (
    alt.Chart(alt.Data(values=points)).mark_circle(size=70)
    .encode(x=alt.X("snr:Q", title="signal to noise ratio, dB"),
            color=alt.Color("of:N", title=None),
            y=alt.Y("arm:N", sort=list(found), title=None, axis=alt.Axis(labelLimit=260)))
    .properties(width=380, height=160)
  )  # fmt: skip
  tensors.write(HERE, found, tensors.markdown(head, rows), chart)


if __name__ == "__main__":
  main()
