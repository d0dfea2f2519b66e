"""SmolLM2-135M in every served format, read by transformers: does it compute what fp8jax says?

what:      of every served format KL of transformers' logits of the folder against ours of the same
           folder, weights alone and as served, beside the noise floor and against the source
           and errors of its products of quantized activations, by what their rounding costs
command:   python experiments/2026_ptq/clients.py DIR PYTHON   (resumes; the table of README)
           python experiments/2026_ptq/clients.py DIR          (the table of what is there)
           PYTHON has torch, transformers, accelerate and compressed-tensors
needs:     assets/smollm2-135m (make run)
hardware:  two CPU cores, 6 GB; about a minute an arm

An arm is a --job=quantize to the nearest whose gate lets the client read the folder, on two windows
of 256 tokens of the manual. 128 does not divide 576, and readers have no partial groups: a format
with groups of 128 is that of the projections down, and the rest has groups of 64.
"""

import json
import pathlib
import shutil
import sys

import smollm2
import tensors

from configs import base
from fp8jax import records
from fp8jax.jobs import dispatch
from fp8jax.recipe.served import SERVED
from fp8jax.run import provenance

HERE = pathlib.Path(__file__).resolve().parent
# The recipe of the other matrices, of formats that 576 inputs do not hold.
REST = {"w4a16": "w4a16_g64", "w4afp8": "w4afp8_g64"}
# Blocks cut the 576 outputs of down, too: no matrix of this model is whole in them.
ARMS = tuple(name for name in SERVED if name != "fp8_block")


def one(target: pathlib.Path, recipe: str, python: str) -> dict:
  c = smollm2.config(recipe, "")
  if recipe in REST:
    c.precision.rules = (("layers/.*/mlp/down", recipe), ("layers/.*", REST[recipe]),
                         ("head", "bf16"))  # fmt: skip
  c.export.client_python = python
  out = target / "folders" / recipe
  shutil.rmtree(out, ignore_errors=True)
  made = dispatch.call("quantize", c, base.get_config(), str(target / "work"), out=str(out))
  shutil.rmtree(out)
  return {"recipe": recipe, "gate": made["gate"], "quantized": made["fp8_matrices"],
          "provenance": provenance.provenance({}, "assets named in the script", 0)}  # fmt: skip


def main(target: pathlib.Path, python: str = ""):
  paths = [target / f"{recipe}.json" for recipe in ARMS]
  for recipe, path in zip(ARMS, paths, strict=True):
    if python and not path.exists():
      target.mkdir(parents=True, exist_ok=True)
      records.write_atomic(str(path), records.to_json(one(target, recipe, python)))
  rows = [json.loads(path.read_text()) for path in paths if path.exists()]
  (HERE / "clients.json").write_text(records.to_json(rows) + "\n")
  head = ["format", "matrices", "KL of the weights", "at most", "products", "KL as served",
          "at most",
          "KL from the source, fp8jax", "transformers"]  # fmt: skip
  tensors.write_table(HERE, tensors.markdown(head, [cells(row) for row in rows]), "clients")


def cells(row: dict) -> list[str]:
  gate, fidelity = row["gate"], row["gate"]["fidelity"]
  ours = gate.get("served", gate["fp8jax"])
  shown = [f"{fidelity[k]:.1e}" if k in fidelity else "" for k in
           ("kl", "bound", "product", "served_kl", "served_bound")]  # fmt: skip
  return [row["recipe"], str(row["quantized"]), *shown,
          f"{ours['kl']:.3f}", f"{gate['transformers']['kl']:.3f}"]  # fmt: skip


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
