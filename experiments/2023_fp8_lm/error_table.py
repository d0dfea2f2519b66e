"""FP8-LM on real gradients: sums in 8 bits by factor, its masters and moments, bytes.

command: python experiments/2023_fp8_lm/error_table.py    (three minutes of a CPU core; make run
fetches the weights)

SmolLM2-135M, held-out tokens of the Python documentation, 256 a microbatch, fixed weights. Sums:
microbatches of layers 0 and 15 in E4M3 under one scale per tensor, the largest element of all at
`factor` times 448, added one after the other in E4M3. Masters: 50 equal steps of Adam on
layer 0's up, rounded after each. Moments: Adam's step along 20 gradients, every tenth layer.
"""

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
from fp8jax.compiled import memory  # noqa: E402
from fp8jax.formats import BF16, E4M3, F16  # noqa: E402
from fp8jax.optim import gradients, storage  # noqa: E402
from fp8jax.optim.storage import Moments  # noqa: E402
from fp8jax.quantization import quantize, quantized_tensor, rounding  # noqa: E402
from fp8jax.recipe.quant import Quant, Rounding, Scale  # noqa: E402

GRADIENTS, B2, COUNTS, UPDATES = 20, 0.95, (4, 16), 50
FACTORS = tuple(2.0**-n for n in range(7))


@jax.jit
def _summed(gs, factor, key):
  """{"nearest" or "stochastic": [squared error, not 0 but summed to 0, saturated]}, and <sum, sum>.

  Args:
    gs: microbatches of a tensor, [A, elements].
  """
  exact = jnp.sum(gs, axis=0)
  scale = jnp.max(jnp.abs(gs)) / E4M3.max / factor
  codes = quantize.cast(gs / scale, E4M3).astype(jnp.float32)
  found = {}
  for how in ("nearest", "stochastic"):

    def add(total, at, how=how):
      both, n = total + codes[at], jax.random.fold_in(key, at)
      if how == "nearest":
        return quantize.cast(both, E4M3).astype(jnp.float32), None
      return rounding.stochastic(both, E4M3, n, dtype=jnp.float32), None

    total, _ = jax.lax.scan(add, codes[0], jnp.arange(1, len(gs)))
    found[how] = jnp.stack([
      jnp.sum(jnp.square(total * scale - exact)), jnp.mean((total == 0) & (exact != 0)),
      jnp.mean(jnp.abs(total) >= E4M3.max),
    ])  # fmt: skip
  return found, jnp.sum(jnp.square(exact))


def sums() -> tuple[dict, dict]:
  """({"A, rule": numbers}, {"A": facts of the automatic factor})."""
  collected: dict[str, list] = {}
  for of_site in tensors.gradients(max(COUNTS), every=15):
    for site, g in of_site.items():
      for n, layer in enumerate(g):
        collected.setdefault(f"{site} {n}", []).append(np.asarray(layer).ravel())
  rows, facts = {}, {}
  for count in COUNTS:
    stacks = [jnp.asarray(np.stack(layers[:count])) for layers in collected.values()]
    start = float(gradients.init_grad_autoscale(storage.GRADIENTS["e4m3"], count)["mu"])
    rules = {"post-scaling": 1.0, "pre-scaling": 1 / count, "1/sqrt(A), its code": count**-0.5}
    at = {f: _measured(stacks, f) for f in sorted({*FACTORS, *rules.values(), start})}
    for name, factor in (*rules.items(), ("automatic, at first", start)):
      for how in ("nearest", "stochastic"):
        rows[f"{count}, {name}, {how}"] = {"times factor": factor} | at[factor][how]
    # Where the controller turns around: the largest factor of which too few elements saturate.
    turns = max(f for f in at if at[f]["stochastic"]["saturated"] <= gradients._OVERFLOW)
    first, then = (at[f]["stochastic"]["dB"] for f in (start, turns))
    steps = np.log(turns / start) / np.log(4) * gradients._STEPS
    facts[f"{count} microbatches"] = {
      "times first": start, "times turn": turns, "times steps": float(steps), "dB first": first,
      "dB turn": then}  # fmt: skip
    facts[f"{count} microbatches"]["curve"] = {f: at[f]["stochastic"]["dB"] for f in FACTORS}
  return rows, facts


def _measured(stacks, factor: float) -> dict[str, dict[str, float]]:
  """Means over tensors; the signal-to-noise ratio in dB."""
  found = jax.device_get([_summed(gs, factor, jax.random.key(n)) for n, gs in enumerate(stacks)])
  sizes = [gs[0].size for gs in stacks]
  rows = {}
  for how in ("nearest", "stochastic"):
    ratios = [10 * np.log10(of / by_rule[how][0]) for by_rule, of in found]
    zero, saturated = np.average([by_rule[how][1:] for by_rule, _ in found], 0, sizes)
    rows[how] = {"dB": float(np.mean(ratios)), "zero": float(zero), "saturated": float(saturated)}
  return rows


MASTERS = {
  "F16 under a power of two": Quant(F16, scale=Scale.POW2), "BF16": Quant(BF16, scale=Scale.NONE),
  "E4M3 under a power of two": Quant(E4M3, scale=Scale.POW2),
}  # fmt: skip


def masters() -> dict[str, dict[str, float]]:
  """Errors of a weight, and of how far 50 updates of 1e-5 and 1e-4 times Adam's step move it."""
  _, params, _ = tensors.smollm2()
  w = params["layers"]["mlp"]["up"][0]
  grads = [g["mlp/up"][0] for g in tensors.gradients(4, every=30)]
  update = sum(grads) / jnp.sqrt(len(grads) * sum(g * g for g in grads) + 1e-16)  # of size 1
  found = {}
  for name, quant in MASTERS.items():
    for how in (Rounding.NEAREST, Rounding.STOCHASTIC):
      q = Quant(quant.format, quant.tile, quant.scale, rounding=how)

      @jax.jit
      def run(rate, w, update, q=q):
        def move(kept, key):
          return kept.repack(kept.unpack() - rate * update, key), None

        keys = jax.random.split(jax.random.key(0), UPDATES)
        start = quantized_tensor.pack(w, q, key=jax.random.key(1))
        end, _ = jax.lax.scan(move, start, keys)
        moved, want = end.unpack() - start.unpack(), -UPDATES * rate * update
        return _off(start.unpack(), w), jnp.vdot(moved, want) / jnp.vdot(want, want)

      (error, small), (_, large) = (run(rate, w, update) for rate in (1e-5, 1e-4))
      found[f"{name}, {how.value}"] = {
        "off": float(error), "moved 1e-5": float(small), "moved 1e-4": float(large)}  # fmt: skip
  return found


def _off(got, want):
  return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def moments() -> dict[str, dict[str, float]]:
  """Rows of the paper's table 6 that differ in moments."""
  ours = storage.MOMENTS["fp8lm"]
  e4m3 = Quant(E4M3, scale=Scale.POW2)
  rows = {
    "E4M3, F16 (#2a)": ours, "E4M3, E4M3 (#4)": Moments(ours.mu, e4m3),
    "E4M3, E4M3, v never 0": Moments(ours.mu, Quant(E4M3, scale=Scale.POW2, keeps_nonzero=True)),
  }  # fmt: skip
  found = dynamics.on_gradients(rows, tensors.gradients(GRADIENTS), B2)
  return {name: {"times": row["largest"], "zero": row["zero"], "step": row["error"]}
          for name, row in found.items()}  # fmt: skip


LEVELS = {"float32": ("float32",) * 3, "O1": ("f16", "e4m3", "float32"),
          "O2": ("f16", "e4m3", "fp8lm")}  # fmt: skip


def sizes() -> dict[str, dict[str, float]]:
  """Bytes per parameter of SmolLM2-135M's state as it is allocated, and of its gradients."""
  found = {}
  for name, formats in LEVELS.items():
    keys = ("master_format", "grad_format", "moment_format")
    changes = {f"optim.{k}": v for k, v in zip(keys, formats, strict=True)}
    spec, params, _ = tensors.smollm2("fp8lm", **changes)
    count = sum(x.size for x in jax.tree.leaves(params))
    declared = {row.kind: row.declared for row in memory.declared(spec)}
    row = {
      f"bytes {part}": sum(n for kind, n in declared.items() if kind.startswith(part)) / count
      for part in ("masters", "moments")
    } | {"bytes gradient": spec.optim.bytes_per_parameter()["gradient"]}
    found[name] = row | {"bytes": sum(row.values())}
  return found


HEADS = {
  "Sums of A microbatches' gradients in E4M3": [
    "A, rule, rounding", "factor", "SNR, dB", "made 0, %", "saturated, %"],
  "The automatic factor, stochastic sums": [
    "A", "factor at first", "where it turns around", "steps until there", "SNR at first, dB",
    "SNR there, dB"],
  "Masters": ["master", "error, %", "50 updates of 1e-5: moved, %", "of 1e-4: moved, %"],
  "Moments m and v, Adam's step along real gradients": [
    "m, v", "largest step over the exact one's", "v at 0, %", "error of the step, %"],
  "Bytes per parameter": ["level", "master", "moments", "gradient", "all"],
}  # fmt: skip


def main():
  of_sums, facts = sums()
  curves = {name: row.pop("curve") for name, row in facts.items()}
  parts = (of_sums, facts, masters(), moments(), sizes())
  text = tensors.tables(
    {title: (head, rows) for (title, head), rows in zip(HEADS.items(), parts, strict=True)}
  )
  values = [{"A": name, "factor": f, "dB": dB} for name, curve in curves.items()
            for f, dB in curve.items()]  # fmt: skip
  chart = (
    alt.Chart(alt.Data(values=values)).mark_line(point=True)
    .encode(x=alt.X("factor:Q", scale=alt.Scale(type="log", base=2),
                    title="largest element of a microbatch over 448"),
            y=alt.Y("dB:Q", title="SNR of the sum, dB", scale=alt.Scale(zero=False)),
            color=alt.Color("A:N", title=None))
    .properties(width=380, height=200)
  )  # fmt: skip
  tensors.write(HERE, {k: v for of in parts for k, v in of.items()}, text, chart)


if __name__ == "__main__":
  main()
