"""NVFP4's roundings and recipes by their errors: MS-EDEN against stochastic rounding, four or six.

command: python experiments/2025_nvfp4/error_table.py    (three minutes of a core)

Roundings: 2^18 normal numbers, sixteen draws, each rounded twice with keys of its own; and 2^16.8
numbers of x, w and g at 7 sites of every tenth layer of SmolLM2-135M (make run fetches the
weights). Rotations are undone.
Recipes: y, dx and dw of 4 of those sites, 1,024 tokens, and of N(0, 1), against float64's, twice.

Errors and lengths are relative to the mean square. <e1, e2> of two errors with other keys is what
remains of the error in the mean of many roundings: the square of the bias, without bias itself.
"""

import dataclasses
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "experiments" / "lab"))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tensors  # noqa: E402

from fp8jax import statistics  # noqa: E402
from fp8jax.ops import site as site_lib  # noqa: E402
from fp8jax.ops.dots import dot  # noqa: E402
from fp8jax.quantization import hadamard, quantize  # noqa: E402
from fp8jax.recipe.papers import PAPERS  # noqa: E402
from fp8jax.recipe.quant import Hadamard, Largest, Quant  # noqa: E402

SAMPLES, DRAWS, TOKENS, EVERY = 2**18, 16, 1024, 10
# Of a tensor, in rows of a rotation: as many as the smallest weight has.
ROWS, SIZE = 1728, 64
SITES = ("layers/mlp/up", "layers/mlp/down", "layers/attn/q", "layers/attn/o")
_NEAREST = PAPERS["nvfp4_sr"].fwd.lhs
_SR, _EDEN, _ROOM = (PAPERS[name].dgrad.lhs for name in ("nvfp4_sr", "nvfp4_eden", "nvfp4_sr_room"))
EDEN, EDEN_ROOM, SR = "MS-EDEN", "MS-EDEN, room for 17/16", "stochastic, room for 17/16"
NEAREST, FOUR_SIX = "nearest", "four or six"
ROUNDINGS = {
  NEAREST: _NEAREST,
  FOUR_SIX: PAPERS["nvfp4_4or6"].fwd.lhs,
  "stochastic": _SR,
  SR: _ROOM,
  EDEN: _EDEN,
  EDEN_ROOM: dataclasses.replace(_EDEN, clip=Largest(17 / 16)),
  "MS-EDEN, 0.93 x 17/16, its code": dataclasses.replace(_EDEN, clip=Largest(0.93 * 17 / 16)),
  "MS-EDEN, blocks of 128": dataclasses.replace(_EDEN, transform=Hadamard(128, "fresh")),
}
# (candidate, baseline): the factor is the baseline's mean squared error over the candidate's.
FACTORS = ((EDEN, SR), (EDEN_ROOM, SR), (FOUR_SIX, NEAREST))
RECIPES = ("nvfp4", "nvfp4_sr_rht", "nvfp4_rht", "nvfp4_sr", "nvfp4_1d", "nvfp4_4or6",
           "nvfp4_eden", "nvfp4_sr_room", "nvfp4_backward")  # fmt: skip


def rounded(x, quant: Quant, key):
  """x [rows, contraction] as quantization leaves it, in its own basis."""
  elements, signs = jax.random.split(key)
  y = quantize.quantize(x, quant, key=elements, signs_key=signs).dequantize()
  return hadamard.rotate(y, quant.rotation, 1, signs, inverse=True) if quant.rotation else y


def _twice(x, quant: Quant, key):
  """float32 [3]: mean squared error, <e1, e2>, length less 1, over the square of x."""
  both = [rounded(x, quant, jax.random.fold_in(key, n)) for n in range(2)]
  e1, e2 = (y - x for y in both)
  of = jnp.stack([jnp.sum(e1 * e1 + e2 * e2) / 2, jnp.sum(e1 * e2), jnp.sum(x * (e1 + e2)) / 2])
  return of / jnp.sum(x * x)


def normal(quant: Quant, samples: int = SAMPLES, draws: int = DRAWS) -> np.ndarray:
  """float64 [draws, 3] of `_twice`."""

  @jax.jit
  def one(key):
    return _twice(jax.random.normal(key, (samples // 128, 128)), quant, jax.random.fold_in(key, 1))

  return np.float64([one(jax.random.key(seed)) for seed in range(draws)])


def factor(candidate: np.ndarray, baseline: np.ndarray) -> dict[str, float]:
  """Student's interval of the factor between errors, of draw by draw or tensor by tensor."""
  of = statistics.estimate(baseline / candidate)
  return {"factor": of.mean, "low": of.low, "high": of.high}


def _sample(x) -> np.ndarray:
  """float32 [ROWS, SIZE]: runs along the last axis, evenly from all of x."""
  runs = x.reshape(-1, SIZE)
  return np.float32(runs[np.linspace(0, len(runs) - 1, ROWS).astype(int)])


def roundings(seen) -> dict[str, dict[str, float]]:
  of_normal = {name: normal(quant) for name, quant in ROUNDINGS.items()}
  # Contracted last: x in the forward pass, w there, g in the data gradient.
  samples = {"x": [], "w": [], "g": []}
  for layers in seen.values():
    for x, w, g in layers[::EVERY]:
      for kind, one in zip("xwg", (x, w.T, g), strict=True):
        samples[kind].append(_sample(one))
  errors, run = {}, jax.jit(_twice, static_argnums=1)
  for name, quant in ROUNDINGS.items():
    if quant.rotation is None or quant.rotation.size <= SIZE:
      errors[name] = {
        kind: np.float64([run(x, quant, jax.random.key(n))[0] for n, x in enumerate(xs)])
        for kind, xs in samples.items()
      }
  found = {}
  for name, of in of_normal.items():
    error, bias, length = (statistics.estimate(column) for column in of.T)
    found[name] = {
      "normal": error.mean, "bias": bias.mean, "bias half": bias.high - bias.mean,
      "length": length.mean, "length half": length.high - length.mean,
      **{kind: float(np.mean(e)) for kind, e in errors.get(name, {}).items()},
    }  # fmt: skip
  for one, other in FACTORS:
    said = f"{one} against {other}"
    found[f"{said}, N(0, 1)"] = factor(of_normal[one][:, 0], of_normal[other][:, 0])
    for kind in "xwg":
      found[f"{said}, {kind}"] = factor(errors[one][kind], errors[other][kind])
  return found


def products(recipe, x, w, g, key):
  """(y, dx, dw)."""
  site = site_lib.unobserved(recipe, "dequantized", key=key if recipe.is_random else None)
  y, pull = jax.vjp(lambda x, w: dot("TD,DF->TF", x, w, site), x, w)
  return y, *pull(g)


def recipe_errors(run, recipe, x, w, g) -> list[tuple[float, float]]:
  """(error, <e1, e2>) of y, dx and dw, over the product's norm and its square."""
  x, w, g = (np.float32(t) for t in (x[:TOKENS], w, g[:TOKENS]))
  wide = [np.float64(t) for t in (x, w, g)]
  exact = (wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2])
  both = [run(recipe, x, w, g, jax.random.key(n)) for n in range(2)]
  found = []
  for a, b, want in zip(*both, exact, strict=True):
    e1, e2, norm = a - want, b - want, np.linalg.norm(want)
    error = np.sqrt((np.vdot(e1, e1) + np.vdot(e2, e2)) / 2) / norm
    found.append((error, np.vdot(e1, e2) / norm**2))
  return found


def recipes(seen) -> dict[str, dict[str, float]]:
  """{recipe: errors and biases on real tensors, medians, and on N(0, 1)}."""
  rng, (x, w, g) = np.random.default_rng(0), seen[SITES[0]][0]
  drawn = [rng.standard_normal(t.shape) for t in (x, w, g)]
  real = [layer for site in SITES for layer in seen[site][::EVERY]]
  run, found = jax.jit(products, static_argnums=0), {}
  for name in RECIPES:
    recipe = site_lib.rules_lib.recipe_by_name(name)
    of_real = np.median([recipe_errors(run, recipe, *one) for one in real], axis=0)
    found[name] = {}
    for kind, of in (("", of_real), (", N(0, 1)", recipe_errors(run, recipe, *drawn))):
      found[name] |= {f"{p}{kind}": float(e) for p, (e, _) in zip(("y", "dx", "dw"), of)}
      found[name] |= {f"bias of {p}{kind}": float(np.sqrt(max(b, 0)))
                      for p, (_, b) in zip(("dx", "dw"), of[1:], strict=True)}  # fmt: skip
  return found


def _rows(found, names, digits: int, scale: float = 100, quote: str = "") -> list[list[str]]:
  return [[f"{quote}{name}{quote}", *(f"{scale * v:.{digits}f}" for v in found[name].values())]
          for name in names]  # fmt: skip


def main():
  seen = tensors.captured()
  found = roundings(seen) | recipes(seen)
  factors = [name for name in found if " against " in name]
  head = ["rounding", "error on N(0, 1), %", "bias squared, %", "±", "length - 1, %", "±",
          "error on x, %", "w, %", "g, %"]  # fmt: skip
  rows = [[*row, *["-"] * (len(head) - len(row))] for row in _rows(found, ROUNDINGS, 3)]
  of_recipes = ["recipe", *(f"{p}, %" for p in found[RECIPES[0]])]
  table = "\n\n".join((
    tensors.markdown(head, rows),
    tensors.markdown(["factor between mean squared errors", "factor", "from", "to"],
                     _rows(found, factors, 3, 1)),
    tensors.markdown(of_recipes, _rows(found, RECIPES, 1, quote="`")),
  ))  # fmt: skip
  points = [
    {"recipe": name, "product": p, "is": kind, "value": 100 * found[name][key]}
    for name in RECIPES for p in ("dx", "dw")
    for kind, key in (("error", p), ("bias: error of the mean", f"bias of {p}"))
  ]  # fmt: skip
  chart = (
    alt.Chart(alt.Data(values=points)).mark_point(size=70, filled=True)
    .encode(x=alt.X("value:Q", title="% of the product's norm, SmolLM2-135M"),
            y=alt.Y("recipe:N", sort=list(RECIPES), title=None),
            color=alt.Color("product:N", title=None), shape=alt.Shape("is:N", title=None))
    .properties(width=380, height=220)
  )  # fmt: skip
  tensors.write(HERE, found, table, chart)


if __name__ == "__main__":
  main()
