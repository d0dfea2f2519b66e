"""Trillion-token FP8 on real tensors: pairs of moments, formats, a window of one step, an outlier.

command: python experiments/2024_trillion_token/error_table.py    (four minutes of a CPU core; make
run fetches the weights)

SmolLM2-135M on held-out tokens of the Python documentation. Moments: 16 gradients of 256 tokens at
fixed weights, every tenth layer, Adam's step along them with moments stored between steps. Formats
and window: x, w and g of every tenth layer, 2,048 tokens, scales of powers of two; medians over 7
sites and layers. Outlier: in every layer up's column of one channel times c and down's row over c,
which leaves the model as it is in float32; its forward pass under `trillion_token` over 256 tokens.
"""

import dataclasses
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "experiments" / "lab"), str(HERE.parents[1])]

import altair as alt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tensors  # noqa: E402

from experiments.moments import dynamics  # noqa: E402
from fp8jax.formats import E4M3, E4M3_240, E5M2  # noqa: E402
from fp8jax.models import mlp_swiglu, transformer  # noqa: E402
from fp8jax.ops import site as site_lib  # noqa: E402
from fp8jax.optim import storage  # noqa: E402
from fp8jax.optim.storage import Moments  # noqa: E402
from fp8jax.quantization import quantize  # noqa: E402
from fp8jax.recipe.quant import Delayed, Quant, Rounding, Scale  # noqa: E402

GRADIENTS, B2, EVERY, DRAWS = 16, 0.95, 10, 8
COLUMNS = ("e4m3", "e4m3 zero", "e4m3_240", "e4m3_240 zero", "e5m2", "e5m2 zero", "one",
           "mean of 8", "dw", "dw of 8", "own scale", "step before")  # fmt: skip
JUMPS = (1, 2, 4, 16, 256)
GROWTHS, JUMP = (1, 64, 1024), 16


def pairs() -> dict[str, Moments]:
  """The paper's four, whose v may become 0, and this library's, whose does not."""
  rows = {}
  for m in ("e4m3_240", "e5m2"):
    for v in ("e4m3_240", "e5m2"):
      ours = storage.moments(f"tensor_{m}_{v}")
      rows[f"{m}, {v}"] = Moments(ours.mu, dataclasses.replace(ours.nu, keeps_nonzero=False))
      rows[f"{m}, {v} nonzero"] = ours
  return rows


def moments() -> dict[str, dict[str, float]]:
  rows = pairs()
  found = dynamics.on_gradients(rows, tensors.gradients(GRADIENTS), B2)
  return {
    name: {"times": found[name]["largest"], "zero": found[name]["zero"],
           "step": found[name]["error"], "step nonzero": found[f"{name} nonzero"]["error"]}
    for name in rows if f"{name} nonzero" in rows
  }  # fmt: skip


@jax.jit
def _formats(x, w, g):
  """{row: {column: value}} of the tensors of a layer."""
  found = {}
  for name, t in (("x", x), ("w", w), ("g", g)):
    found[name] = {}
    for column, format in (("e4m3", E4M3), ("e4m3_240", E4M3_240), ("e5m2", E5M2)):
      y = quantize.quantize(t, Quant(format, scale=Scale.POW2)).dequantize()
      found[name] |= {column: _off(y, t), f"{column} zero": jnp.mean((y == 0) & (t != 0))}
  keys, mean = jax.random.split(jax.random.key(0), DRAWS), 0.0
  for name, rounding in (("g nearest", Rounding.NEAREST), ("g stochastic", Rounding.STOCHASTIC)):
    quant = Quant(E5M2, scale=Scale.POW2, rounding=rounding)
    draws = jax.lax.map(lambda k, q=quant: quantize.quantize(g, q, key=k).dequantize(), keys)
    mean = jnp.mean(draws, axis=0)
    found[name] = {
      "one": _off(draws[0], g), "mean of 8": _off(mean, g),
      "dw": _off(x.T @ draws[0], x.T @ g), "dw of 8": _off(x.T @ mean, x.T @ g),
    }  # fmt: skip
  return found


@jax.jit
def _window(x, jump):
  """Errors of x whose largest channel has grown `jump` times since the step before."""
  amax = jnp.max(jnp.abs(x))
  now = x.at[:, jnp.argmax(jnp.max(jnp.abs(x), axis=0))].multiply(jump)
  last = Quant(E4M3_240, scale=Scale.POW2, source=Delayed(steps=1))
  own = Quant(E4M3_240, scale=Scale.POW2)
  return {
    "own scale": _off(quantize.quantize(now, own).dequantize(), now),
    "step before": _off(quantize.quantize(now, last, amax=amax).dequantize(), now),
  }


def _off(got, want):
  return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def formats() -> dict[str, dict[str, float]]:
  """Medians of `_formats` of all sites and of `_window` of down's input."""
  found: dict[str, list] = {}
  for site, layers in tensors.captured().items():
    for x, w, g in layers[::EVERY]:
      rows = _formats(x, w, g)
      if site.endswith("down"):
        rows |= {f"{jump} times": _window(x, float(jump)) for jump in JUMPS}
      for name, row in jax.device_get(rows).items():
        found.setdefault(name, []).append(row)
  return {
    name: {
      k: float(np.median([row[k] for row in rows])) for k in sorted(rows[0], key=COLUMNS.index)
    }
    for name, rows in found.items()
  }


def grown(params, c: float):
  """The same function: in every layer the channel with the largest weights, c times as large."""
  mlp = params["layers"]["mlp"]
  size = np.linalg.norm(mlp["up"], axis=1) * np.linalg.norm(mlp["gate"], axis=1)
  n, at = np.arange(len(size)), size.argmax(axis=1)
  mlp = mlp | {"up": mlp["up"].at[n, :, at].multiply(c), "down": mlp["down"].at[n, at].divide(c)}
  return params | {"layers": params["layers"] | {"mlp": mlp}}


def outlier(forms=tuple(mlp_swiglu.FORMS)) -> dict[str, dict[str, float]]:
  """KL from the float32 model and change of the loss, nats per token, by form and growth."""
  wide, params, (batch,) = tensors.smollm2(length=256, sequences=1)
  weight = batch["weights_BL"] / jnp.sum(batch["weights_BL"])

  def log_p(params, sites, spec):
    logits = transformer.logits(params, sites, batch, spec.model, spec.run)
    return jax.nn.log_softmax(logits)

  exact = jax.jit(lambda p: log_p(p, wide.sites(), wide))(params)
  found = {}
  for form in forms:
    spec, *_ = tensors.smollm2("trillion_token", 256, 1, **{"precision.smooth_swiglu": form})
    current = site_lib.with_current_scales(spec.sites())

    @jax.jit
    def seen(params, spec=spec, current=current):
      def loss(sites):
        return transformer.loss(params, sites, batch, spec.model, spec.run)

      return jax.grad(loss, allow_int=True)(current)  # their keys are no numbers

    @jax.jit
    def apart(params, sites, exact, spec=spec):
      q = log_p(params, sites, spec)
      target = jnp.take_along_axis(exact - q, batch["targets_BL"][..., None], -1)[..., 0]
      return jnp.sum(weight * jnp.sum(jnp.exp(exact) * (exact - q), -1)), jnp.sum(weight * target)

    for c in GROWTHS:
      before = site_lib.calibrated(spec.sites(), seen(grown(params, c / JUMP)))
      now = grown(params, float(c))
      values = [*apart(now, current, exact), *apart(now, before, exact)]
      names = ("KL", "loss", "KL before", "loss before")
      found[f"{form}, {c:,} times"] = dict(zip(names, map(float, values), strict=True))
      print(form, c, found[f"{form}, {c:,} times"], flush=True)
  return found


HEADS = {
  "Moments m and v in two formats, Adam's step along real gradients": [
    "m, v", "largest step over the exact one's", "v at 0, %", "error of the step, %",
    "the same, v never 0"],
  "Formats, scales from the tensor itself": [
    "tensor", "E4M3 to 448, %", "at 0", "E4M3 to 240, %", "at 0", "E5M2, %", "at 0"],
  "Gradients in E5M2": [
    "rounding", "g, %", "mean of 8 draws of g, %", "dw, %", "mean of 8 draws of dw, %"],
  "Input of down in E4M3 to 240, its largest channel grown since the step before": [
    "growth", "scale of this step, %", "scale of the step before, %"],
  "SmolLM2 with an outlier channel in every layer, beside float32, 0.01 nats per token": [
    "Smooth-SwiGLU", "KL", "loss", "KL, scales of the step before", "loss"],
}  # fmt: skip


def main():
  write({"moments": moments(), "outlier": outlier(), "formats": formats()})


def write(found: dict[str, dict[str, dict[str, float]]]):
  window = {f"{n} times": found["formats"][f"{n} times"] for n in JUMPS}
  rounding = {k: v for k, v in found["formats"].items() if k.startswith("g ")}
  plain = {k: found["formats"][k] for k in ("x", "w", "g")}
  parts = (found["moments"], plain, rounding, window, found["outlier"])
  text = tensors.tables(
    {title: (head, rows) for (title, head), rows in zip(HEADS.items(), parts, strict=True)}
  )
  values = [{"form": form, "c": c, "KL": found["outlier"][f"{form}, {c:,} times"][key], "scales": s}
            for form in mlp_swiglu.FORMS for c in GROWTHS
            for key, s in (("KL", "this step's"), ("KL before", "the step before's"))]  # fmt: skip
  chart = (
    alt.Chart(alt.Data(values=values)).mark_line(point=True)
    .encode(x=alt.X("c:Q", scale=alt.Scale(type="log", base=2), title="growth of the channel"),
            y=alt.Y("KL:Q", scale=alt.Scale(type="log"), title="KL, nats per token"),
            color=alt.Color("form:N", title="Smooth-SwiGLU", sort=list(mlp_swiglu.FORMS)),
            strokeDash=alt.StrokeDash("scales:N", title="scales"))
    .properties(width=380, height=200)
  )  # fmt: skip
  tensors.write(HERE, {k: v for of in parts for k, v in of.items()}, text, chart)


if __name__ == "__main__":
  main()
