"""Trains, goes on in a served format, writes the folder and reads it back -> results.json, a table.

command: python experiments/2025_torchao/run.py [--workdir DIR] [--client PYTHON] [ARM ...]

PYTHON has torch, transformers and compressed-tensors: the gate of every folder asks these, too.
Held-out losses are of one text, in nats per byte: of the trained model, of the same rounded to the
format (ptq, in the 2:4 mask where there is one), after QAT, and of as many steps without (more). A
format costs ptq - trained before QAT, and qat - more after it.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import config  # noqa: E402
import numpy as np  # noqa: E402

from fp8jax import records  # noqa: E402
from fp8jax.models.hf import tensors as hf_tensors  # noqa: E402
from fp8jax.sweeps import run as sweep  # noqa: E402

CONFIG, RESULTS = "experiments/2025_torchao/config.py", HERE / "results.json"
KEPT = ("commit", "dirty", "versions", "devices", "data_fingerprint")


def losses(workdir: pathlib.Path, step: int) -> dict[str, float]:
  """{"recipe" or "bf16": held-out loss} of a step; the first precision is the recipe's."""
  made = json.loads((workdir / "summary.json").read_text())["evaluations"][str(step)]["main"]
  by = [of["loss"] for of in made.values()]
  return {"recipe": by[0], "bf16": by[-1]}


def export(arm: str, workdir: pathlib.Path, client: str) -> dict:
  """What --job=export prints of the folder that it writes beside the run."""
  made = subprocess.run(
    [sys.executable, "launch.py", f"--config={CONFIG}:{arm}", "--job=export",
     f"--workdir={workdir}", f"--out={workdir}-folder",
     "--config.export.format=compressed-tensors", "--config.export.gate_tokens=1024",
     *([f"--config.export.client_python={client}"] if client else [])],
    cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
  )  # fmt: skip
  return json.loads(made.stdout[made.stdout.index("{") :])


def zeros(folder: str) -> float:
  """The share of quantized weights that are 0 as fp8jax reads the folder."""
  read = hf_tensors.Folder(folder)
  names = json.loads((pathlib.Path(folder) / "fp8_matrices.json").read_text())["rows"]
  values = [read.read_float(name) for name in names if name.endswith(".weight")]
  return float(np.mean(np.concatenate([v.ravel() for v in values]) == 0))


def measure(arm: str, root: pathlib.Path, client: str) -> dict | None:
  """The result of an arm that starts from "train"; None of "train" itself and of the control."""
  own = {"init.workdir": str(root / "train"), "init.weights_only": True} if arm != "train" else {}
  done, last = sweep.one(f"{CONFIG}:{arm}", str(root / arm), own, str(ROOT)), config.STEPS["qat"]
  if not arm.startswith("qat-"):
    return None
  before, after = (losses(root / "more", step)["bf16"] for step in (0, last))
  ptq, qat = (losses(root / arm, step)["recipe"] for step in (0, last))
  made = export(arm, root / arm, client)
  return {
    "trained": before, "ptq": ptq, "qat": qat, "more": after, "gate": made["gate"],
    "codes_of_training": made["codes_of_training"], "zeros": zeros(f"{root / arm}-folder"),
    "origin": {k: done.provenance.get(k) for k in KEPT},
  }  # fmt: skip


def table(arms: dict) -> str:
  lines = ["| stage | trained | ptq | more | qat | cost before | cost after | codes kept | zeros |"
           " KL read by fp8jax | KL in transformers |", "|---" * 11 + "|"]  # fmt: skip
  for arm, of in arms.items():
    cells = [f"{of[k]:.4f}" for k in ("trained", "ptq", "more", "qat")]
    cells += [f"{of['ptq'] - of['trained']:+.4f}", f"{of['qat'] - of['more']:+.4f}"]
    cells += [str(of["codes_of_training"]), f"{of['zeros']:.1%}"]
    kls = [of["gate"].get(who, {}).get("kl") for who in ("fp8jax", "transformers")]
    cells += ["not run" if kl is None else f"{kl:.1e}" for kl in kls]
    lines.append(f"| `{arm}` | {' | '.join(cells)} |")
  return "\n".join(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("arms", nargs="*", metavar="ARM")
  parser.add_argument("--workdir", type=pathlib.Path, default=ROOT / "runs" / "2025_torchao")
  parser.add_argument("--client", default="")
  asked = parser.parse_args()
  os.chdir(ROOT)  # paths of the configuration are relative
  found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  for arm in asked.arms or config.ARMS:
    if (result := measure(arm, asked.workdir.resolve(), asked.client)) is not None:
      found[arm] = result
      records.write_atomic(str(RESULTS), records.to_json(found, indent=1) + "\n")
  print(table(found))


if __name__ == "__main__":
  main()
