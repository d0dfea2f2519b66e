"""Bytes that wait for the backward pass against products computed twice, policy by policy.

Compiles the train step of three layers of Qwen2.5-7B's shape at 8192 tokens for one H200, which
need not be here, and reads both from the program: stacks over layers that the backward loop reads,
and forward products under jax.checkpoint's name for what is computed again.

  JAX_PLATFORMS=cpu python experiments/memory_pareto/pareto.py          # prints a Markdown table
  ... pareto.py --json experiments/memory_pareto/results.json           # and writes, arm by arm

needs:   pip install "jax[cuda13]", no GPU; about a minute per arm
"""

import argparse
import collections
import json
import os
import pathlib
import re
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

from configs import cpt_7b  # noqa: E402
from fp8jax.compiled import aot, hlo, memory, saved_tensors  # noqa: E402
from fp8jax.config import files as config_files  # noqa: E402
from fp8jax.run import provenance  # noqa: E402
from fp8jax.step import train_step  # noqa: E402

LAYERS, TOKENS = 3, 8192
GROUPS = {"save_norm_inputs": "e4m3_16", "save_gate_up": "e4m3_16"}
BF16 = {"save_norm_inputs": "bf16", "save_gate_up": "bf16"}
OPERANDS = {"save_gemm_inputs": "quantized"}
# recipe, remat_policy, forms of residuals: keys of the section memory.
ARMS = [
  ("block_128", "none", {}),
  ("block_128", "none", GROUPS),
  ("block_128", "linears", {}),
  ("block_128", "linears", GROUPS),
  ("block_128", "full", {}),
  ("block_128", "full", {"save_layer_inputs": "e4m3_16"}),
  ("block_128", "operands", OPERANDS),
  ("block_128", "operands", OPERANDS | GROUPS),
  ("tensor_current", "none", OPERANDS | GROUPS),
  ("tensor_current", "none", OPERANDS),
  ("bf16", "none", BF16),
  ("bf16", "none", GROUPS),
  ("block_128", "operands", OPERANDS | dict.fromkeys(GROUPS, "mxfp4")),
]


def measure(recipe: str, remat: str, copies: dict[str, str]) -> dict:
  """One arm: bytes per token and layer, and work done again, as compiled."""
  c = config_files.without_files(cpt_7b.get_config(recipe))
  changes = {
    "model.num_layers": LAYERS, "global_batch": 1, "eval.batch": 1, "grad_accum_steps": 1,
    "seq_len": TOKENS,
    "mesh.data": 1, "mesh.fsdp": 1, "memory.remat_policy": remat,
  }  # fmt: skip
  c.update_from_flattened_dict(changes | {f"memory.{k}": v for k, v in copies.items()})
  start = time.time()
  spec, devices = aot.resolve(c, "h200:1")
  program = aot.lower(spec, devices).compile()
  text = program.as_text()
  arrays = memory.saved_by_layers(text, spec, train_step.abstract_state(spec, 1).params)
  work: collections.Counter[str] = collections.Counter()
  for product in hlo.gemms(text, "gpu"):
    if product.key.product == "fwd" and product.key.site.startswith("layers/"):
      work["again" if product.key.is_recompute else "once"] += product.times * product.work
  kinds: dict[str, float] = {}
  for item in saved_tensors.of_layers(spec):
    kind = f"{item.block}, {item.dtype}"
    kinds[kind] = kinds.get(kind, 0) + item.nbytes / LAYERS / TOKENS
  made = provenance.provenance({}, "none", 0)
  return {
    "origin": {"commit": made["commit"], "dirty": made["dirty"], "jax": made["versions"]["jax"]},
    "recipe": recipe,
    "remat": remat,
    "copies": copies,
    "bytes_compiled": sum(arrays.values()) / LAYERS / TOKENS,
    "bytes_declared": sum(kinds.values()),
    "declared": kinds,
    "arrays": arrays,
    "gemm_flops_forward": 2 * work["once"] / LAYERS / TOKENS,
    "gemm_flops_again": 2 * work["again"] / LAYERS / TOKENS,
    # One forward call per layer; a second computes attention again.
    "attention_again": len(re.findall(r"__cudnn\$fmhaSoftmax(?![$\w])", text)) > 1,
    "temporaries": program.memory_analysis().temp_size_in_bytes,
    "seconds": round(time.time() - start),
  }


def row(found: dict) -> str:
  copies = ", ".join(f"{k} {v}" for k, v in found["copies"].items()) or "none"
  # Gradients are two products for each of the forward pass.
  share = found["gemm_flops_again"] / (3 * found["gemm_flops_forward"])
  return (
    f"| `{found['recipe']}` | {found['remat']} | {copies} | {found['bytes_compiled']:,.0f} | "
    f"{found['bytes_declared']:,.0f} | {found['gemm_flops_again'] / 1e6:.1f} ({share:.1%}) | "
    f"{'yes' if found['attention_again'] else 'no'} | {found['temporaries'] / 2**30:.2f} |"
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", type=pathlib.Path, help="write results with their origin here")
  parser.add_argument(
    "--only", type=int, nargs="*", help="numbers of arms; others stay as they are"
  )
  args = parser.parse_args()
  results = [None] * len(ARMS)
  if args.json and args.json.exists():
    before = json.loads(args.json.read_text())["results"]
    results = [*before, *results[len(before) :]]
  for n in range(len(ARMS)) if args.only is None else args.only:
    results[n] = measure(*ARMS[n])
    print(row(results[n]), flush=True)
    if args.json:
      shape = {"layers": LAYERS, "tokens": TOKENS, "target": "h200:1"}
      found = {**shape, "results": results}
      args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
  main()
