"""SmolLM2-135M in every served format, read by a client: does it compute what fp8jax says?

what:      of every served format KL of transformers' logits of the folder against ours of the same
           folder, weights alone and as served, beside the noise floor and against the source
           and errors of its products of quantized activations, by what their rounding costs;
           with "vllm" of vLLM's, as it serves the folder, and by what it multiplies the matrices
command:   python experiments/2026_ptq/clients.py DIR PYTHON        (resumes; the table of README)
           python experiments/2026_ptq/clients.py DIR PYTHON vllm   (the same of vLLM)
           python experiments/2026_ptq/clients.py DIR               (the tables of what is there)
           PYTHON has torch, transformers, accelerate and compressed-tensors, or vllm
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
from fp8jax.errors import UserError
from fp8jax.jobs import dispatch
from fp8jax.recipe.served import SERVED
from fp8jax.run import provenance

HERE = pathlib.Path(__file__).resolve().parent
# The recipe of the other matrices, of formats that 576 inputs do not hold.
REST = {"w4a16": "w4a16_g64", "w4afp8": "w4afp8_g64"}
# Blocks cut the 576 outputs of down, too: no matrix of this model is whole in them.
ARMS = tuple(name for name in SERVED if name != "fp8_block")


def one(target: pathlib.Path, recipe: str, python: str, client: str) -> dict:
  c = smollm2.config(recipe, "")
  if recipe in REST:
    c.precision.rules = (("layers/.*/mlp/down", recipe), ("layers/.*", REST[recipe]),
                         ("head", "bf16"))  # fmt: skip
  c.export.client_python, c.export.client = python, client
  out = target / "folders" / recipe
  shutil.rmtree(out, ignore_errors=True)
  found: dict = {"recipe": recipe}
  try:
    made = dispatch.call("quantize", c, base.get_config(), str(target / "work"), out=str(out))
    found |= {"gate": made["gate"], "quantized": made["fp8_matrices"]}
    shutil.rmtree(out)
  except UserError as e:  # the server has no kernel here, and says so
    if client != "vllm" or "cannot read the folder" not in str(e):
      raise
    found["error"] = str(e).partition(": ")[2]
  return found | {"provenance": provenance.provenance({}, "assets named in the script", 0)}


HEADS = {
  "transformers": ["format", "matrices", "KL of the weights", "at most", "products",
                   "KL as served", "at most", "KL from the source, fp8jax", "transformers"],
  "vllm": ["format", "multiplied by", "KL", "at most", "unrounded of least",
           "KL from the source, fp8jax", "vLLM"],
}  # fmt: skip


def main(target: pathlib.Path, python: str = "", asked: str = "transformers"):
  if asked not in HEADS:
    raise SystemExit(f"unknown client {asked!r}; expected one of {', '.join(HEADS)}")
  for client, file, cells in (
    ("transformers", "clients", transformers_cells), ("vllm", "vllm", vllm_cells)
  ):  # fmt: skip
    paths = [target / f"{'vllm-' * (client == 'vllm')}{recipe}.json" for recipe in ARMS]
    for recipe, path in zip(ARMS, paths, strict=True):
      if python and client == asked and not path.exists():
        target.mkdir(parents=True, exist_ok=True)
        records.write_atomic(str(path), records.to_json(one(target, recipe, python, client)))
    if rows := [json.loads(path.read_text()) for path in paths if path.exists()]:
      (HERE / f"{file}.json").write_text(records.to_json(rows) + "\n")
      table = tensors.markdown(HEADS[client], [cells(row) for row in rows])
      tensors.write_table(HERE, table, file)


def vllm_cells(row: dict) -> list[str]:
  if "error" in row:
    return [row["recipe"], f"refused: {row['error'].partition('folder: ')[2][:160]}", *[""] * 5]
  gate, fidelity = row["gate"], row["gate"]["fidelity"]
  of = "served_" if "served_kl" in fidelity else ""
  by = "; ".join(f"`{k}`: {v}" for k, v in gate["vllm"]["layers"].items())
  bounded = [f"{fidelity[of + k]:.1e}" for k in ("kl", "bound")]
  unrounded = " of ".join(f"{fidelity[f'unrounded_{k}']:.1e}" for k in ("kl", "least") if of)
  return [row["recipe"], by, *bounded, unrounded,
          f"{gate.get('served', gate['fp8jax'])['kl']:.3f}",
          f"{gate['vllm']['kl']:.3f}"]  # fmt: skip


def transformers_cells(row: dict) -> list[str]:
  gate, fidelity = row["gate"], row["gate"]["fidelity"]
  ours = gate.get("served", gate["fp8jax"])
  shown = [f"{fidelity[k]:.1e}" if k in fidelity else "" for k in
           ("kl", "bound", "product", "served_kl", "served_bound")]  # fmt: skip
  return [row["recipe"], str(row["quantized"]), *shown,
          f"{ours['kl']:.3f}", f"{gate['transformers']['kl']:.3f}"]  # fmt: skip


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
