"""COAT on real tensors: expanded moments, saved activations in groups of 16, memory without remat.

command: python experiments/2024_coat/error_table.py    (a minute and a half of a CPU core; make run
fetches the weights)

SmolLM2-135M on held-out tokens of the Python documentation. Moments: of 20 gradients of 256 tokens
at fixed weights, every tenth layer, then rounded once, in groups of 128; the error is of
m / (sqrt(v) + eps). Activations: inputs of norms, gate and up of every fifth layer, 1,024 tokens,
medians. Memory: the whole training step at 4,096 tokens, compiled for this CPU.
"""

import collections
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "experiments" / "lab"), str(HERE.parents[1])]

import altair as alt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tensors  # noqa: E402

from configs import smollm2_cpt  # noqa: E402
from fp8jax.compiled import aot, memory, saved_tensors  # noqa: E402
from fp8jax.config import files as config_files  # noqa: E402
from fp8jax.formats import E4M3, E5M2  # noqa: E402
from fp8jax.models import transformer  # noqa: E402
from fp8jax.ops import prologue  # noqa: E402
from fp8jax.quantization import quantize, quantized_tensor  # noqa: E402
from fp8jax.recipe.quant import DynamicRangeExpansion, Quant, Scale  # noqa: E402
from fp8jax.step import train_step  # noqa: E402

GRADIENTS, B1, B2, EPS, GROUP, EVERY = 20, 0.9, 0.95, 1e-8, 128, 5
# The smallest of a group comes to lie at 2.3 steps of the format, as in the paper's code.
EXPANSIONS = {
  "E4M3": DynamicRangeExpansion(),
  "E5M2": DynamicRangeExpansion(57344 * 2.0**16 * 448 / 2**10),
}
FORMATS = {
  name + "+E" * is_expanded: Quant(
    format, (1, GROUP), transform=EXPANSIONS[name] if is_expanded else None
  )
  for name, format in (("E4M3", E4M3), ("E5M2", E5M2)) for is_expanded in (False, True)
}  # fmt: skip
# arXiv:2410.19313 v2, table 1: mean squared errors of m / sqrt(v), of which the unit is not given.
BEST = "E4M3+E, E4M3+E"
PAPER = {
  "E4M3": (20.10, 18.08, 25.65, 18.16), "E4M3+E": (15.13, 12.31, 21.96, 12.43),
  "E5M2": (37.02, 35.96, 40.30, 36.00), "E5M2+E": (17.79, 15.48, 23.84, 15.57),
}  # fmt: skip


def averages() -> dict[str, tuple[jax.Array, jax.Array]]:
  """{site: (m, v) of Adam}, bias corrected."""
  sums: dict[str, tuple[jax.Array, jax.Array]] = {}
  step = jax.jit(lambda m, v, g: (B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g))
  for of_site in tensors.gradients(GRADIENTS):
    for site, g in of_site.items():
      m, v = sums.get(site, (jnp.zeros_like(g),) * 2)
      sums[site] = step(m, v, g)
  return {s: (m / (1 - B1**GRADIENTS), v / (1 - B2**GRADIENTS)) for s, (m, v) in sums.items()}


@jax.jit
def _pairs(m, v):
  """Squares of {"m, v": error} and of the exact step, and exponents of expansion."""
  exact = m / (jnp.sqrt(v) + EPS)
  packed = {n: [quantized_tensor.pack(x, q) for x in (m, v)] for n, q in FORMATS.items()}
  found = {
    f"{name}, {other}": jnp.sum(jnp.square(a.unpack() / (jnp.sqrt(b.unpack()) + EPS) - exact))
    for name, (a, _) in packed.items() for other, (_, b) in packed.items()
  }  # fmt: skip
  powers = [x.power.astype(jnp.float32) / 16 for x in packed["E4M3+E"]]
  return found, jnp.sum(jnp.square(exact)), powers


def moments() -> tuple[dict, dict]:
  """Errors of the pairs beside the paper's, and quantiles of the exponents of groups."""
  squares: collections.Counter[str] = collections.Counter()
  of, powers = 0.0, ([], [])
  for m, v in averages().values():
    found, exact, of_site = jax.device_get(_pairs(m, v))
    squares.update({name: float(x) for name, x in found.items()})
    of += float(exact)
    for kept, more in zip(powers, of_site, strict=True):
      kept.append(more.ravel())
  published = {
    f"{m}, {v}": x for m, row in PAPER.items() for v, x in zip(FORMATS, row, strict=True)
  }
  rows = {
    name: {"off": (squares[name] / of) ** 0.5, "times": squares[name] / squares[BEST],
           "times paper": paper / published[BEST]}
    for name, paper in published.items()
  }  # fmt: skip
  exponents = {
    name: {f"k {n}": float(np.quantile(np.concatenate(kept), n)) for n in (0.1, 0.5, 0.9)}
    for name, kept in zip("mv", powers, strict=True)
  }
  return rows, exponents


def activations() -> dict[str, dict[str, float]]:
  """Medians over layers of the errors of what COAT saves, by tile."""
  spec, params, (batch,) = tensors.smollm2(length=512, sequences=2)
  seen, norm = [], prologue.rms_norm

  def watched(x, *rest, **more):
    jax.debug.callback(lambda x: seen.append(np.float32(x).reshape(1024, -1)), x, ordered=True)
    return norm(x, *rest, **more)

  prologue.rms_norm = watched
  jax.block_until_ready(
    jax.jit(lambda p: transformer.hidden(p, spec.sites(), batch, spec.model, spec.run))(params)
  )
  jax.effects_barrier()
  prologue.rms_norm = norm
  mlp = jax.device_get(params["layers"]["mlp"])
  found: dict[str, list] = {}
  for n in range(0, spec.model.num_layers, EVERY):
    x, after = seen[2 * n], seen[2 * n + 1]
    h = after / np.sqrt(np.mean(after**2, axis=1, keepdims=True) + spec.model.norm_eps)
    h = h * mlp["norm"][n]
    for name, t in (("input of a norm", x), ("gate", h @ mlp["gate"][n]), ("up", h @ mlp["up"][n])):
      found.setdefault(name, []).append(jax.device_get(_tiles(t)))
  return {name: dict(zip(TILES, map(float, np.median(rows, axis=0)), strict=True))
          for name, rows in found.items()}  # fmt: skip


TILES = {
  "1x16": Quant(E4M3, (1, 16)), "1x16 pow2": Quant(E4M3, (1, 16), Scale.POW2),
  "4x4": Quant(E4M3, (4, 4)), "1x128": Quant(E4M3, (1, 128)), "tensor": Quant(E4M3),
}  # fmt: skip


@jax.jit
def _tiles(x):
  off = (quantize.quantize(x, q).dequantize() - x for q in TILES.values())
  return [jnp.linalg.norm(o) / jnp.linalg.norm(x) for o in off]


ARMS = {
  "`bf16`": ("bf16", {}),
  "COAT's": ("tensor_current", {
    "memory.save_gemm_inputs": "quantized", "memory.save_norm_inputs": "e4m3_16",
    "memory.save_gate_up": "e4m3_16", "optim.moment_format": "coat"}),
}  # fmt: skip
LAYERS, LENGTH, SEQUENCES = 30, 1024, 4


def compiled() -> dict[str, dict[str, float]]:
  """Bytes per token and layer that wait for the backward pass, and GiB of the whole step."""
  found, tokens = {}, LENGTH * SEQUENCES
  for arm, (recipe, changes) in ARMS.items():
    c = config_files.without_files(smollm2_cpt.get_config(recipe))
    c.update_from_flattened_dict({
      "init.hf": "", "model.num_layers": LAYERS, "global_batch": SEQUENCES, "seq_len": LENGTH,
      "eval.batch": 1, "grad_accum_steps": 1, "memory.remat_policy": "none",
      "precision.compute_dtype": "bfloat16", **changes,
    })  # fmt: skip
    spec, devices = aot.resolve(c, "")
    program = aot.lower(spec, devices).compile()
    memory_ = program.memory_analysis()
    params = train_step.abstract_state(spec, 1).params
    saved = memory.saved_by_layers(program.as_text(), spec, params)
    said = saved_tensors.of_layers(spec)
    found[arm] = {
      "bytes declared": sum(item.nbytes for item in said) / LAYERS / tokens,
      "bytes compiled": sum(saved.values()) / LAYERS / tokens,
      "GiB temporaries": memory_.temp_size_in_bytes / 2**30,
      "GiB state": memory_.argument_size_in_bytes / 2**30,
    }
    print(arm, found[arm], flush=True)
  return found


HEADS = {
  "m and v in two formats, rounded once, +E with range expansion": [
    "m, v", "error of the step, %", "its square over that of E4M3+E, E4M3+E", "the paper's"],
  "Exponents of expansion, of groups": ["moment", "10 %", "median", "90 %"],
  "Activations that are saved, E4M3": [
    "tensor", "1x16, %", "1x16, powers of two", "4x4", "1x128", "per tensor"],
  "Memory without remat": [
    "arm", "bytes per token and layer, declared", "compiled", "temporaries, GiB",
    "state and batch, GiB"],
}  # fmt: skip


def main():
  write(*moments(), activations(), compiled())


def write(*parts):
  pairs = parts[0]
  text = tensors.tables(
    {title: (head, rows) for (title, head), rows in zip(HEADS.items(), parts, strict=True)}
  )
  values = [{"pair": name, "whose": whose, "times": row[key]} for name, row in pairs.items()
            for whose, key in (("here", "times"), ("the paper's", "times paper"))]  # fmt: skip
  chart = (
    alt.Chart(alt.Data(values=values)).mark_circle(size=60)
    .encode(x=alt.X("times:Q", scale=alt.Scale(type="log"),
                    title="squared error of the step over that of E4M3+E, E4M3+E"),
            y=alt.Y("pair:N", sort=list(pairs), title="m, v"),
            color=alt.Color("whose:N", title=None))
    .properties(width=380, height=300)
  )  # fmt: skip
  tensors.write(HERE, {k: v for of in parts for k, v in of.items()}, text, chart)


if __name__ == "__main__":
  main()
