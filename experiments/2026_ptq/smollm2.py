"""SmolLM2-135M quantized after training: served formats to the nearest, methods in four of them.

what:      KL, share of equal most likely tokens, and loss of folders that servers read
command:   python experiments/2026_ptq/smollm2.py run DIR     (resumes; a file per arm in DIR)
           python experiments/2026_ptq/smollm2.py table DIR   (results.json, the table of README)
needs:     assets/smollm2-135m (make run), assets/corpora/brown (experiments/corpora/prepare.py)
hardware:  two CPU cores, 6 GB; the seconds of an arm stand in the table

An arm is a --job=quantize with 32,768 calibration tokens of the Python manual. Its folder is read
back in its codes and multiplied as a server does, activations quantized, on two texts: held-out
pages of the manual, and Brown, of which no token was calibrated on. Everything is paired by window
with the unquantized model; intervals are bootstraps over windows at 95 % together for the arms of a
format. The noise floor is the folder against itself one ulp away, quantized alike.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent / "lab")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from configs import base, smollm2_cpt  # noqa: E402
from fp8jax import params as params_lib  # noqa: E402
from fp8jax import records, statistics  # noqa: E402
from fp8jax.config import resolve  # noqa: E402
from fp8jax.evaluation import divergence  # noqa: E402
from fp8jax.export import checks, served_pass  # noqa: E402
from fp8jax.export import fp8 as fp8_export  # noqa: E402
from fp8jax.jobs import dispatch  # noqa: E402
from fp8jax.jobs import table as jobs_table  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models.hf import names  # noqa: E402
from fp8jax.models.hf import weights as hf_weights  # noqa: E402
from fp8jax.run import evaluator, provenance  # noqa: E402

MODEL = str(ROOT / "assets/smollm2-135m")
TOKENS, WINDOW, ROWS = 4096, 256, 4  # of a text

NEAREST = (
  "fp8", "fp8_channel_static", "fp8_dynamic", "fp8_240_dynamic", "int8", "int8_static", "w8a16",
  "w4a16_g64", "w4afp8_g64", "mxfp8_ste", "mxfp4a16", "mxfp4_ste", "nvfp4a16", "nvfp4_ste",
  "nvfp4a16_4or6", "nvfp4_ste_4or6",
)  # fmt: skip
_WEIGHTS = ("rotate", "equalize", "awq", "gptq", "learned_rounding", "awq+gptq", "rotate+gptq")
# INT4 and MXFP4 of weights alone; INT8 and NVFP4 of both, which SmoothQuant is for.
METHODS = {
  "w4a16_g64": (*_WEIGHTS, "awq(clip=True)"), "mxfp4a16": _WEIGHTS,
  "int8": ("smooth_quant", *_WEIGHTS, "smooth_quant+gptq"),
  "nvfp4_ste": ("smooth_quant", *_WEIGHTS),
}  # fmt: skip
ARMS = [(recipe, "") for recipe in NEAREST]
ARMS += [(recipe, methods) for recipe, all_ in METHODS.items() for methods in all_]


def config(recipe: str, methods: str):
  c = smollm2_cpt.get_config("bf16")
  c.init.hf, c.weights.hf = "", MODEL
  c.model.preset = "hf"
  c.seq_len, c.eval.batch, c.global_batch = WINDOW, ROWS, ROWS
  c.precision.rules = (("layers/.*", recipe), ("head", "bf16"))
  c.export.format, c.export.max_kl, c.export.gate_tokens = "compressed-tensors", 20.0, 256
  c.quantize.methods = tuple(methods.split("+")) if methods else ()
  return c


def spec_of(recipe: str, folder: str = MODEL):
  c = config(recipe, "")
  c.weights.hf, c.export.requantize = folder, True
  needs = jobs_table.JOBS["export"].needs
  return resolve.resolve(c, 1, choose.current_device(), needs=needs)


def texts(spec, tokens: int = TOKENS) -> dict[str, list[divergence.Batch]]:
  """{"manual", "brown": windows of at least so many tokens}."""
  files = sorted((ROOT / "assets/corpora/brown").glob("*.txt"))[-40:]
  with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
    f.write("\n\n".join(path.read_text() for path in files))
    f.flush()
    brown = divergence.batches(spec, divergence.Wanted(tokens, f.name, "brown_"))
  return {"manual": divergence.batches(spec, divergence.Wanted(tokens, "", "manual_")),
          "brown": brown}  # fmt: skip


# --- measuring -----------------------------------------------------------------------------------


@jax.jit
def sums(source_BLV, made_BLV, tokens_BL, counts_BL):
  """Of every window: KL, equal most likely tokens, tokens, both losses, tokens with a next one."""
  p, q = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (source_BLV, made_BLV))
  same = (jnp.argmax(p, -1) == jnp.argmax(q, -1)) * counts_BL
  kl = jnp.where(counts_BL > 0, divergence.kl(source_BLV, made_BLV), 0.0)
  with_next = (counts_BL > 0).at[:, -1].set(False) & (jnp.roll(counts_BL, -1, 1) > 0)
  index = jnp.roll(tokens_BL, -1, 1)[..., None]
  losses = [-jnp.take_along_axis(x, index, -1)[..., 0] * with_next for x in (p, q)]
  return jnp.stack([x.sum(-1) for x in (kl, same, counts_BL, *losses, with_next)], -1)


def windows(batches, source, made) -> np.ndarray:
  """float64 [windows, 6] of `sums`."""
  rows = [sums(x, y, b.tokens_BL, b.counts_BL) for b, x, y in zip(batches, source, made)]
  return np.concatenate([np.asarray(r, np.float64) for r in rows])


def served(recipe: str, folder: str):
  """(spec, sites, params) of a folder as a server multiplies it."""
  spec = spec_of(recipe, folder)
  entries = names.entries(spec.model)
  stored = fp8_export.of_folder(hf_weights.Folder(folder), entries)
  plan = checks.choose(spec, 0, (), stored)
  plan = fp8_export.with_amaxes(plan, entries, {}, {})
  return spec, served_pass.sites(spec, plan), served_pass.load(spec, folder)


def measure(recipe: str, folder: str, source: dict[str, list[np.ndarray]]) -> dict:
  spec, sites, params = served(recipe, folder)
  found = {}
  for name, batches in texts(spec).items():
    logits = divergence.forward(spec, sites, batches)
    made = [params_lib.on_host(x) for x in logits(params)]
    nudged = windows(batches, made, logits(divergence.nudged(params)))
    found[name] = {
      "windows": windows(batches, source[name], made).tolist(),
      "floor_kl": float(nudged[:, 0].sum() / nudged[:, 2].sum()),
    }
  return found


def unquantized() -> dict[str, list[np.ndarray]]:
  spec = spec_of("bf16")
  params, _ = hf_weights.load_params(MODEL, spec.model)
  return {
    name: [params_lib.on_host(x) for x in
           divergence.forward(spec, spec.sites(evaluator.BF16), batches)(params)]
    for name, batches in texts(spec).items()
  }  # fmt: skip


def run(target: pathlib.Path, wanted: list[str]):
  """Every arm that has no file yet."""
  target.mkdir(parents=True, exist_ok=True)
  source = None
  for recipe, methods in ARMS:
    arm = f"{recipe}-{methods or 'nearest'}"
    path = target / f"{arm}.json"
    if path.exists() or (wanted and not any(arm.startswith(w) for w in wanted)):
      continue
    source = source or unquantized()
    folder, began, cpu = target / "folders" / arm, time.time(), _cpu()
    report = dispatch.call(
      "quantize", config(recipe, methods), base.get_config(), str(target / "work"), out=str(folder)
    )
    seconds, cpu = time.time() - began, _cpu() - cpu
    row = {
      "recipe": recipe, "methods": methods, "seconds": seconds, "cpu_seconds": cpu,
      "bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
      "quantized": report["fp8_matrices"], "calibration_tokens": report["calibration_tokens"],
      "mean_relative_error": report.get("mean_relative_error"),
      "texts": measure(recipe, str(folder), source),
      "provenance": provenance.provenance({}, "assets named in the script", 0),
    }  # fmt: skip
    records.write_atomic(str(path), records.to_json(row))
    for file in folder.glob("*.safetensors"):
      file.unlink()
    print(f"{arm}: {seconds:.0f} s", flush=True)


def _cpu() -> float:
  used = resource.getrusage(resource.RUSAGE_SELF)
  return used.ru_utime + used.ru_stime


# --- the table -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
  """Of an arm on a text: intervals of KL and of the change of the loss in percent."""

  kl: statistics.Interval
  loss: statistics.Interval
  top1: float
  floor: float


def cell(of_text: dict, count: int) -> Cell:
  w = np.array(of_text["windows"])
  w = w[w[:, 2] > 0]
  kl = statistics.bootstrap(w[:, 0], w[:, 2], count=count)
  loss = statistics.bootstrap(100 * (w[:, 4] - w[:, 3]), w[:, 3], count=count)
  return Cell(kl, loss, w[:, 1].sum() / w[:, 2].sum(), of_text["floor_kl"])


def gain(row: dict, nearest: dict, text: str, count: int) -> statistics.Interval:
  """KL of an arm minus that of rounding to the nearest, paired by window, nats per token."""
  mine, its = (np.array(r["texts"][text]["windows"]) for r in (row, nearest))
  return statistics.bootstrap(mine[:, 0] - its[:, 0], its[:, 2], count=count)


def table(target: pathlib.Path):
  import tensors

  rows = [json.loads(p.read_text()) for p in sorted(target.glob("*.json"))]
  by_arm = {(r["recipe"], r["methods"]): r for r in rows}
  head = ["format", "methods", "MB", "s", "KL, manual", "top-1", "loss, %", "KL, Brown", "loss, %",
          "floor, KL", "KL against the nearest, manual", ""]  # fmt: skip
  lines = []
  for recipe, methods in (arm for arm in ARMS if arm in by_arm):
    row, count = by_arm[recipe, methods], len(METHODS.get(recipe, ())) + 1
    manual, brown = (cell(row["texts"][name], count) for name in ("manual", "brown"))
    change, word = "", ""
    if methods and (recipe, "") in by_arm:
      g = gain(row, by_arm[recipe, ""], "manual", count)
      change = _interval(g, "+.4f")
      word = (
        "lower" if g.high < -manual.floor else "higher" if g.low > manual.floor else "no verdict"
      )
    lines.append([
      recipe, methods or "to the nearest", f"{row['bytes'] / 1e6:.0f}", f"{row['seconds']:.0f}",
      _interval(manual.kl, ".4f"), f"{100 * manual.top1:.1f} %", _interval(manual.loss, "+.2f"),
      _interval(brown.kl, ".4f"), _interval(brown.loss, "+.2f"), f"{manual.floor:.1e}",
      change, word,
    ])  # fmt: skip
  made = {"rows": rows}
  (HERE / "results.json").write_text(json.dumps(made) + "\n")
  tensors.write_table(HERE, tensors.markdown(head, lines))


def _interval(i: statistics.Interval, form: str) -> str:
  return f"{i.estimate:{form}} [{i.low:{form}}, {i.high:{form}}]"


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("command", choices=("run", "table"))
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("arms", nargs="*", help="beginnings of arms' names, to run these alone")
  args = parser.parse_args()
  if args.command == "run":
    run(args.folder, args.arms)
  else:
    table(args.folder)
