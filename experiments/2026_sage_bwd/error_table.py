"""Errors of SageBwd's products by arm, with and without QK-norm: results.json, error.svg.

command: JAX_PLATFORMS=cpu python experiments/2026_sage_bwd/error_table.py

One layer's attention with drawn Q, K, V and dO beside the same in float32. The keys of a head share
a mean, drawn three times as large as the rest, and tokens differ in size by factors of
exp(N(0, 1/4)). QK-norm divides every query and key by its root mean square. Prints the table of
README.md; three minutes on two CPU cores.
"""

import dataclasses
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import vl_convert  # noqa: E402

from fp8jax.ops.attention import attention  # noqa: E402
from fp8jax.recipe import attention as attentions  # noqa: E402
from fp8jax.recipe.gemm import Gemm  # noqa: E402
from fp8jax.report import charts, page  # noqa: E402
from fp8jax.run import provenance  # noqa: E402

HERE = pathlib.Path(__file__).parent
SEEDS, LENGTH, HEADS, HEAD = range(3), 1024, 4, 64
RESULTS = ("O", "dQ", "dK", "dV")
# Name -> a factor of Q and of K, or None for the norm.
NORMS = {"none, Q and K x 3": 3.0, "none": 1.0, "QK-norm": None}


def arms() -> dict[str, attentions.Attention]:
  """{arm: value}; the first two are precision.attention="sage_fwd" and "sage_bwd"."""
  six = attentions.SAGE_BWD
  operand = six.scores.fwd.lhs  # a scale per block of 64 tokens
  dp = dataclasses.replace(six.values, dgrad=Gemm(operand, operand))
  no_ds = dataclasses.replace(six.scores, dgrad=Gemm(), wgrad=Gemm())
  return {
    "BF16 backward": attentions.SAGE_FWD,
    "INT8 in 6 of 7": six,
    "INT8 in 7 of 7, dP too": dataclasses.replace(six, values=dp),
    "INT8 in 4 of 7, dS wide": dataclasses.replace(six, scores=no_ds),
    "INT8 in 6 of 7, mean left in K": dataclasses.replace(six, smooth_k=False),
    "INT8 in 6 of 7, Q and K rotated": dataclasses.replace(six, rotation=0),
  }


def draw(seed: int, factor: float | None):
  """(q, k, v, dO), float32 [1, L, H, K]."""
  rng, shape = np.random.default_rng(seed), (1, LENGTH, HEADS, HEAD)
  q, k, v, g = rng.standard_normal((4, *shape))
  k = k + 3 * rng.standard_normal((HEADS, HEAD))
  q, k = (x * np.exp(rng.normal(0, 0.5, (*shape[:3], 1))) for x in (q, k))
  sizes = (np.sqrt(np.mean(x**2, axis=-1, keepdims=True)) for x in (q, k))
  q, k = (x * factor if factor else x / size for x, size in zip((q, k), sizes, strict=True))
  return tuple(x.astype(np.float32) for x in (q, k, v, g))


def program(recipe):
  @jax.jit
  def run(q, k, v, g):
    out, pull = jax.vjp(lambda *x: attention(*x, None, "xla", recipe=recipe), q, k, v)
    return out, *pull(g)

  return run


def compared(got, exact) -> dict[str, dict[str, float]]:
  """{result: {"error": relative to the norm, "cosine"}}."""
  rows = {}
  for name, x, y in zip(RESULTS, got, exact, strict=True):
    x, y = (np.asarray(t, np.float64) for t in (x, y))
    size = np.linalg.norm(y)
    cosine = float((x * y).sum() / np.linalg.norm(x) / size)
    rows[name] = {"error": float(np.linalg.norm(x - y) / size), "cosine": cosine}
  return rows


def measure() -> list[dict]:
  """A row per arm, norm and seed."""
  wide, rows = program(None), []
  for arm, recipe in arms().items():
    run = program(recipe)
    for norm, factor in NORMS.items():
      for seed in SEEDS:
        arrays = draw(seed, factor)
        found = compared(run(*arrays), wide(*arrays))
        rows.append({"arm": arm, "norm": norm, "seed": seed, "results": found})
      print(arm, norm, rows[-1]["results"], flush=True)
  return rows


def mean(rows, arm: str, norm: str, result: str, number: str) -> float:
  chosen = [r for r in rows if (r["arm"], r["norm"]) == (arm, norm)]
  return float(np.mean([r["results"][result][number] for r in chosen]))


def table(rows) -> str:
  head = " | ".join(f"{r}, {n}" for r in RESULTS for n in ("error", "cosine"))
  lines = [f"| arm | norm | {head} |", "|---" * (2 + 2 * len(RESULTS)) + "|"]
  for norm in NORMS:
    for arm in arms():
      cells = [
        f"{mean(rows, arm, norm, r, 'error'):.4f} | {mean(rows, arm, norm, r, 'cosine'):.4f}"
        for r in RESULTS
      ]
      lines.append(f"| {arm} | {norm} | {' | '.join(cells)} |")
  return "\n".join(lines)


def figure(rows) -> alt.Chart:
  """Errors by result and arm, with and without the norm."""
  points = [
    {"arm": arm, "norm": norm, "result": r, "error": mean(rows, arm, norm, r, "error")}
    for arm in arms() for norm in NORMS for r in RESULTS
  ]  # fmt: skip
  axis = alt.Axis(labelLimit=260)
  return (
    alt.Chart(alt.Data(values=points))
    .mark_point(filled=True, size=70)
    .encode(
      x=alt.X("error:Q", title="error relative to the norm", scale=alt.Scale(type="symlog",
              constant=1e-3)),
      y=alt.Y("arm:N", sort=list(arms()), title=None, axis=axis),
      color=alt.Color("result:N", sort=list(RESULTS), title=None),
      shape=alt.Shape("result:N", sort=list(RESULTS), title=None),
      column=alt.Column("norm:N", sort=list(NORMS), title=None),
    )
    .properties(width=260, height=160)
  )  # fmt: skip


def main():
  rows = measure()
  sizes = {"length": LENGTH, "heads": HEADS, "head": HEAD}
  results = {"rows": rows, **sizes, "provenance": provenance.provenance({}, "none", 0)}
  (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
  page.write(str(HERE / "error.svg"), vl_convert.vegalite_to_svg(charts.spec(figure(rows))))
  print(table(rows))


if __name__ == "__main__":
  main()
