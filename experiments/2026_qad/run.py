"""Recovers SmolLM2-135M in servers' formats -> results/ARM.json, a table with intervals.

command: python experiments/2026_qad/run.py [--workdir DIR] [--steps N] [ARM ...]
         python experiments/2026_qad/run.py --table       the table of the results that are there

An arm is METHOD-RECIPE-seedS, of a method without seeds METHOD-RECIPE; none named is all of them.
Finished arms are not repeated, an interrupted one goes on. Every arm ends in the same evaluation:
held-out cross entropy and KL to the unquantized weights, in nats per token, of the forward pass
that a server computes. --steps ends training early, to measure its time: nothing is written then.

  ptq    the released weights, rounded to nearest
  gptq   GPTQ's codes, of a folder that --job=quantize writes to DIR/gptq-RECIPE
  qat    trained on the text through the rounding; qad: trained towards the unquantized model. From
         GPTQ's codes; with 20 steps, and as released_qad, from the released weights

Static scales of activations are those of a --job=calibrate of the released weights, over eight
batches of training text: DIR/calibrated-RECIPE.json.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import config  # noqa: E402

from configs import base  # noqa: E402
from fp8jax import console as console_lib  # noqa: E402
from fp8jax import records  # noqa: E402
from fp8jax import statistics as intervals  # noqa: E402
from fp8jax.config import named, resolve  # noqa: E402
from fp8jax.data import loader  # noqa: E402
from fp8jax.jobs import dispatch, start  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models.hf import weights as hf_weights  # noqa: E402
from fp8jax.run import evaluator, provenance, restore  # noqa: E402
from fp8jax.sweeps import run as sweep  # noqa: E402

RESULTS, SEEDS = HERE / "results", (0, 1, 2)
CONFIG = "experiments/2026_qad/config.py"
RELEASED = "released_qad"
METHODS = (*config.METHODS, RELEASED)
ARMS = (
  *(f"{method}-{recipe}" for recipe in config.LONG for method in ("ptq", "gptq")),
  *(f"{method}-{r}-seed{s}" for s in SEEDS for r in config.LONG for method in config.METHODS),
  *(f"{RELEASED}-{r}-seed{s}" for s in SEEDS for r in config.LONG),
  *(f"ptq-{recipe}" for recipe in config.SHORT),
  *(f"{method}-{recipe}-seed0" for recipe in config.SHORT for method in config.METHODS),
)
# Of a --job=quantize; the evaluation judges what comes out.
QUANTIZED = {
  "init.hf": "", "weights.hf": config.MODEL, "quantize.methods": ("gptq",),
  "export.format": "compressed-tensors", "export.max_kl": 20.0,
}  # fmt: skip
KEPT = ("commit", "dirty", "versions", "devices", "data_fingerprint")


def split(arm: str) -> tuple[str, str, int]:
  """(method, recipe, seed)."""
  method, recipe, *seed = arm.split("-")
  return method, recipe, int(seed[0].removeprefix("seed")) if seed else 0


def trial(arm: str, root: pathlib.Path) -> tuple[str, dict]:
  """("FILE:ARM" of the configuration, changes): without a method of training, that of qat."""
  method, recipe, seed = split(arm)
  changes: dict = {"seed": seed}
  if recipe in config.LONG and method in config.METHODS:
    changes["init.hf"] = str(gptq(recipe, root))
  method = method.removeprefix("released_") if method in METHODS else "qat"
  kind = "short-" * (recipe in config.SHORT)
  if recipe in config.STATIC:
    changes["precision.calibration"] = str(calibrated(recipe, root))
  return f"{CONFIG}:{kind}{method}-{recipe}", changes


def gptq(recipe: str, root: pathlib.Path) -> pathlib.Path:
  """The folder of GPTQ's codes; written where there is none."""
  folder = root / f"gptq-{recipe}"
  if not (folder / "config.json").exists():
    c = named.load(f"{CONFIG}:qat-{recipe}", QUANTIZED)
    dispatch.call("quantize", c, base.get_config(), str(root / f"{folder.name}.work"),
                  out=str(folder))  # fmt: skip
  return folder


def calibrated(recipe: str, root: pathlib.Path) -> pathlib.Path:
  """The table of static scales; written where there is none."""
  path = root / f"calibrated-{recipe}.json"
  if not path.exists():
    c = named.load(f"{CONFIG}:short-qat-{recipe}", {"init.hf": "", "weights.hf": config.MODEL})
    dispatch.call("calibrate", c, base.get_config(), str(root), out=str(path))
  return path


def evaluate(arm: str, root: pathlib.Path, folder: str = "") -> tuple[dict, dict]:
  """({source: {"loss", "kl", "tokens"}}, origin) of a folder's weights, or of a run's last ones;
  of an arm without a run the released ones.

  A folder of another than the released weights holds codes already: it is read in BF16.
  """
  name, changes = trial(arm, root)
  # Every arm has the teacher here, and the KL plain.
  own = {"distill.weight": 1.0, "distill.temperature": 1.0, "distill.teacher": config.MODEL}
  if folder:
    own["eval.precisions"] = ("bf16",)
  spec = resolve.resolve(named.load(name, changes | own), 1, choose.current_device())
  teacher = start.teacher(spec, console_lib.console())
  if folder:
    params, _ = hf_weights.load_params(folder, spec.model, spec.run.layout)
    states = {}
  else:
    is_there = (root / arm / "checkpoints").is_dir()
    if is_there == (split(arm)[0] == "ptq"):
      raise SystemExit(f"{arm}: {root / arm} has {'a' if is_there else 'no'} checkpoint: remove it")
    loaded = restore.load_trained(spec, str(root / arm))
    params, states = loaded.params, loaded.states
  found = evaluator.Evaluator(spec, teacher).run(params, states)
  heldout = {source: next(iter(by.values())) for source, by in found.items()}
  print_ = loader.fingerprint(spec.data)
  return heldout, provenance.provenance(dict(spec.flat), print_, spec.seed, 1)


def measure(arm: str, root: pathlib.Path, steps: int) -> dict | None:
  """The result of an arm; None where it cannot be had yet, or of a measurement of time."""
  method = split(arm)[0]
  if method == "ptq":
    heldout, origin = evaluate(arm, root)
    return {"heldout": heldout, "origin": {k: origin.get(k) for k in KEPT}}
  if method == "gptq":
    heldout, origin = evaluate(arm, root, folder=str(gptq(split(arm)[1], root)))
    return {"heldout": heldout, "origin": {k: origin.get(k) for k in KEPT}}
  name, changes = trial(arm, root)
  if steps:
    changes |= {"steps": steps, "optim.warmup_steps": 1, "eval.tokens": 0}
  # Evaluated below, as all arms are.
  done = sweep.one(name, str(root / (arm + f"-{steps}steps" * bool(steps))),
                   changes | {"eval.tokens": 0}, str(ROOT))  # fmt: skip
  seconds = [round(float(s), 2) for s in done.curves["step_seconds"].values]
  if steps:
    print(f"{arm}: seconds of the steps after the first {seconds}")
    return None
  heldout, _ = evaluate(arm, root)
  curves = {k: done.curves[k] for k in ("loss", "distill/kl") if k in done.curves}
  return {
    "heldout": heldout, "step_seconds": statistics.median(seconds),
    "train": {k: [float(f"{x:.6g}") for x in c.values] for k, c in curves.items()},
    "origin": {k: done.provenance.get(k) for k in KEPT},
  }  # fmt: skip


def _results() -> dict[str, dict]:
  return {arm: json.loads(path.read_text()) for arm in ARMS
          if (path := RESULTS / f"{arm}.json").exists()}  # fmt: skip


def table(results: dict[str, dict]) -> str:
  """Held-out loss and KL by recipe and method, and paired differences over the seeds."""
  heads = ("recipe", "text", "quantity", "ptq", "gptq", *METHODS, "qad - qat", "qad - start",
           "qad - released_qad")  # fmt: skip
  lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
  count = 3 * 2 * len(config.LONG) * 2  # differences, quantities, texts of the long arms
  for recipe in (*config.LONG, *config.SHORT):
    seeds = SEEDS if recipe in config.LONG else SEEDS[:1]
    for source in ("python_docs", "brown"):
      for quantity in ("loss", "kl"):

        def of(arm, source=source, quantity=quantity):
          return results[arm]["heldout"][source][quantity] if arm in results else None

        once = [of(f"{method}-{recipe}") for method in ("ptq", "gptq")]
        by = {m: [of(f"{m}-{recipe}-seed{s}") for s in seeds] for m in METHODS}
        cells = [*("" if v is None else f"{v:.4f}" for v in once)]
        cells += ["" if None in v else f"{statistics.mean(v):.4f}" for v in by.values()]
        for before in (by["qat"], [once[recipe in config.LONG]] * len(seeds), by[RELEASED]):
          is_there = None not in (*by["qad"], *before)
          cells.append(_difference(by["qad"], before, count) if is_there else "")
        if any(cells):
          lines.append(f"| `{recipe}` | {source} | {quantity} | {' | '.join(cells)} |")
  return "\n".join(lines)


def _difference(values, before, count: int) -> str:
  found = intervals.estimate([a - b for a, b in zip(values, before, strict=True)], count)
  if len(values) == 1:
    return f"{found.mean:+.4f}, one seed"
  return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("arms", nargs="*", metavar="ARM")
  parser.add_argument("--workdir", type=pathlib.Path, default=ROOT / "runs" / "2026_qad")
  parser.add_argument("--steps", type=int, default=0)
  parser.add_argument("--table", action="store_true")
  asked = parser.parse_args()
  if unknown := sorted({*asked.arms} - {*ARMS}):
    parser.error(f"unknown arm {unknown[0]!r}; expected some of {', '.join(ARMS)}")
  root = asked.workdir.resolve()
  os.chdir(ROOT)  # paths of the configuration are relative
  for arm in () if asked.table else asked.arms or ARMS:
    path = RESULTS / f"{arm}.json"
    if path.exists():
      continue
    result = measure(arm, root, asked.steps)
    if result is not None:
      RESULTS.mkdir(exist_ok=True)
      records.write_atomic(str(path), records.to_json({"arm": arm, **result}, indent=1) + "\n")
      shutil.rmtree(root / arm / "checkpoints", ignore_errors=True)  # 1.4 GB, all read
  print(table(_results()))


if __name__ == "__main__":
  main()
