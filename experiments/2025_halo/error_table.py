"""HALO's levels on real tensors: errors of the three products of SmolLM2-135M's linear layers.

command: python experiments/2025_halo/error_table.py    (some minutes; make run fetches the weights)

x, w and g of every third layer at 7 sites. y, dx and dw of each recipe against float64 products;
the error is the norm of the difference over the norm of the product. Medians over layers and sites.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "experiments" / "lab"))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import tensors  # noqa: E402

from fp8jax.ops.dots import dot  # noqa: E402

ARMS = ("halo_fp8_0", "halo_int8_0", "halo_int8_2", "halo_fp6_1", "halo_fp4_2")
EVERY = 3


def products(arm: str, x, w, g):
  """(y, dx, dw) of a recipe."""
  y, pull = jax.vjp(lambda x, w: dot("TD,DF->TF", x, w, arm), x, w)
  return y, *pull(g)


def main():
  seen, run = tensors.captured(), jax.jit(products, static_argnums=0)
  found = {arm: [] for arm in ARMS}
  for layers in seen.values():
    for x, w, g in layers[::EVERY]:
      x, w, g = (np.float32(t) for t in (x, w, g))
      wide = [np.float64(t) for t in (x, w, g)]
      exact = (wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2])
      for arm in ARMS:
        got = run(arm, x, w, g)
        found[arm].append([np.linalg.norm(a - b) / np.linalg.norm(b)
                           for a, b in zip(got, exact, strict=True)])  # fmt: skip
  medians = {arm: dict(zip(("y", "dx", "dw"), map(float, np.median(rows, axis=0))))
             for arm, rows in found.items()}  # fmt: skip
  rows = [[f"`{arm}`", *(f"{100 * e:.1f}" for e in one.values())] for arm, one in medians.items()]
  points = [{"arm": arm, "product": p, "error": 100 * e} for arm, one in medians.items()
            for p, e in one.items()]  # fmt: skip
  chart = (
    alt.Chart(alt.Data(values=points)).mark_circle(size=70)
    .encode(x=alt.X("error:Q", title="error, % of the product's norm", scale=alt.Scale(type="log")),
            y=alt.Y("arm:N", sort=list(ARMS), title=None), color=alt.Color("product:N", title=None))
    .properties(width=380, height=160)
  )  # fmt: skip
  tensors.write(HERE, medians, tensors.markdown(["recipe", "y, %", "dx, %", "dw, %"], rows), chart)


if __name__ == "__main__":
  main()
