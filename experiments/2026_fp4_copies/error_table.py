"""Copies for the backward pass in BF16, E4M3 and MXFP4: compiled bytes, errors of gradients.

command: JAX_PLATFORMS=cpu python experiments/2026_fp4_copies/error_table.py    (three minutes)
         ... error_table.py --page    writes the page's tables of both results.json again

Inputs of norms, gate and up are kept in the format (memory.save_norm_inputs, memory.save_gate_up).

  bytes   that the backward pass reads of all layers, per token and layer, as XLA compiled the lab's
          step of 0.8M parameters for this CPU; of 7B's shape and for an H200 in
          memory_pareto/results.json (memory_pareto/pareto.py)
  errors  of all gradients of SmolLM2-135M, two batches of 128 held-out tokens, beside those without
          copies in float32; per weight the norm of the difference over the norm, median and
          largest of the layers' weights; of norms' gains; in % (make run fetches the weights)
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "experiments" / "lab"))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import tensors  # noqa: E402

from configs import pretrain_tiny  # noqa: E402
from fp8jax import params as params_lib  # noqa: E402
from fp8jax.compiled import aot, memory  # noqa: E402
from fp8jax.config import files as config_files  # noqa: E402
from fp8jax.config import resolve  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models import transformer  # noqa: E402

KEYS = ("save_norm_inputs", "save_gate_up")
COPIES = ("none", "bf16", "e4m3_16", "mxfp4")
# (recipe, copies) beside "bf16" in float32 without copies.
ARMS = (*(("bf16", f) for f in COPIES[1:]), ("block_128", "none"), ("block_128", "mxfp4"))
TOKENS, BATCHES = 128, 2


def _of(copies: str, prefix: str = "") -> dict[str, str]:
  return {prefix + key: copies for key in KEYS}


def small_step(copies: str) -> dict[str, float]:
  """Bytes per token and layer of the lab's step, and its temporaries in MiB."""
  c = config_files.without_files(pretrain_tiny.get_config("0p8m"))
  c.update_from_flattened_dict(_of(copies, "memory."))
  spec = resolve.resolve(c, 1, choose.current_device())
  _, found = memory.compiled(spec, aot.lower(spec, jax.devices()))
  tokens = c.global_batch * c.seq_len * c.model.num_layers
  return {"bytes": found["saved_compiled"] / tokens,
          "declared": found["saved_declared"] / tokens,
          "temporaries, MiB": found["temporaries_compiled"] / 2**20}  # fmt: skip


def gradients(recipe: str, copies: str) -> list[dict[str, np.ndarray]]:
  """{parameter: gradient} of every batch."""
  spec, params, batches = tensors.smollm2(
    recipe, TOKENS, 1, BATCHES, **_of(copies, "memory."),
    **{"memory.remat_policy": "none", "kernels.matmul": "dequantized"},
  )  # fmt: skip

  @jax.jit
  def run(params, batch):
    loss = lambda p: transformer.loss(p, spec.sites(), batch, spec.model, spec.run)  # noqa: E731
    return jax.grad(loss)(params)

  return [{k: np.asarray(v) for k, v in params_lib.flatten(run(params, batch)).items()}
          for batch in batches]  # fmt: skip


def errors(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, float]:
  norm = lambda x: float(np.linalg.norm(np.float64(x)))  # noqa: E731
  of_weights, of_norms = [], []
  for name, exact in want.items():
    if name.startswith("layers/"):
      of = [norm(a - b) / norm(b) for a, b in zip(got[name], exact, strict=True)]
      (of_norms if exact.ndim == 2 else of_weights).extend(of)
  square = {name: norm(got[name] - want[name]) ** 2 for name in want}
  whole = np.sqrt(sum(square.values()) / sum(norm(x) ** 2 for x in want.values()))
  return {"all": float(whole), "weights, median": float(np.median(of_weights)),
          "weights, largest": max(of_weights),
          "gains, median": float(np.median(of_norms))}  # fmt: skip


def of_7b() -> str:
  """The table of 7B's shape: block_128, inputs of linears in FP8, copies beside them."""
  kept = json.loads((HERE.parent / "memory_pareto" / "results.json").read_text())
  arms = [one for one in kept["results"] if one["copies"].get("save_gemm_inputs") == "quantized"]
  return tensors.markdown(
    ["7B's shape, copies", "bytes", "declared", "temporaries, GiB"],
    [[f"7B, {one['copies'].get('save_gate_up', 'none')}", f"{one['bytes_compiled']:.1f}",
      f"{one['bytes_declared']:.1f}", f"{one['temporaries'] / 2**30:.2f}"]
     for one in arms if (one["recipe"], one["remat"]) == ("block_128", "operands")],
  )  # fmt: skip


def tables(found: dict[str, dict[str, float]]) -> str:
  of_arms = [name for name in found if name not in COPIES]
  return "\n\n".join((
    tensors.markdown(["copies", *found["none"]],
                     [[f"`{f}`", *(f"{v:.1f}" for v in found[f].values())] for f in COPIES]),
    of_7b(),
    tensors.markdown(["products, copies", *(f"{k}, %" for k in found[of_arms[0]])],
                     [[name, *(f"{100 * v:.2f}" for v in found[name].values())]
                      for name in of_arms]),
  ))  # fmt: skip


def measured() -> dict[str, dict[str, float]]:
  found: dict[str, dict[str, float]] = {}
  for copies in COPIES:
    found[copies] = small_step(copies)
    print(copies, found[copies], flush=True)
  exact = gradients("bf16", "none")
  for recipe, copies in ARMS:
    both = [errors(*pair) for pair in zip(gradients(recipe, copies), exact, strict=True)]
    name = "float32" if recipe == "bf16" else recipe
    for n, one in enumerate(both):
      found[f"{name}, copies {copies}, batch {n + 1}"] = one
    print(name, copies, both, flush=True)
  return found


def main():
  if sys.argv[1:] == ["--page"]:
    tensors.write_table(HERE, tables(json.loads((HERE / "results.json").read_text())["results"]))
    return
  found = measured()
  of_arms = [name for name in found if name not in COPIES]
  points = [{"arm": name.rpartition(", ")[0], "of": key, "error": 100 * found[name][key]}
            for name in of_arms for key in ("all", "weights, median", "gains, median")]  # fmt: skip
  order = list(dict.fromkeys(p["arm"] for p in points))
  chart = (
    alt.Chart(alt.Data(values=points)).mark_circle(size=70)
    .encode(x=alt.X("error:Q", title="error of gradients, %, two batches",
                    scale=alt.Scale(type="log")),
            y=alt.Y("arm:N", sort=order, title=None), color=alt.Color("of:N", title=None))
    .properties(width=380, height=180)
  )  # fmt: skip
  tensors.write(HERE, found, tables(found), chart)


if __name__ == "__main__":
  main()
