"""A step of the 7B, compiled for H200s that are not there: launches, bytes, collectives.

command: python experiments/bench/compiled/run.py [--target h200:8] [ARM ...]    results/*.json

Needs the CUDA wheels and no GPU (make test-aot installs them). An arm is configs/cpt_7b.py with
some keys changed; each is compiled with two and with four layers, and a layer is half of what the
second program has more: its forward and backward pass in every microbatch, and its update. Counted
are the instructions of the compiled program as often as loops run them, not what a GPU does:

  launches   instructions that start a kernel: fusions, products, kernels of ours, copies
  bytes      read and written in memory by them: of a fusion that reads a slice of an array, or
             writes one in place, the slice. Caches may save some
  moved      received from other devices (fp8jax/compiled/collectives.py)
"""

import argparse
import collections
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX looks for others

import jax  # noqa: E402

from configs import cpt_7b  # noqa: E402
from fp8jax import records  # noqa: E402
from fp8jax.compiled import aot, collectives, hlo, saved_tensors  # noqa: E402
from fp8jax.config import files  # noqa: E402
from fp8jax.jobs import table  # noqa: E402
from fp8jax.run import provenance  # noqa: E402

LAYERS = (2, 4)
_SHORT = {"seq_len": 8192, "grad_accum_steps": 4, "global_batch": 4, "mesh.fsdp": 1}
_ONCE = {"memory.weight_operands": "per_step"}
# Of h200:1 8,192 tokens in each of four microbatches; of h200:8 the configuration as it is.
ARMS = {
  "bf16": ("bf16", {}),
  "block_128_pow2": ("", {}),
  "block_128_pow2, once": ("", _ONCE),
  "block_128_pow2, once, 16-bit masters": ("", _ONCE | {"optim.master_format": "bf16_remainder"}),
  "block_128_pow2, once, 8 in flight": ("", _ONCE | {"mesh.collectives_in_flight": 8}),
}
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "while",
         "call", "conditional", "iota", "partition-id", "replica-id", "opt-barrier",
         "optimization-barrier"}  # fmt: skip
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_READS = ("dynamic-slice", "slice", "gather")


def nbytes(shape: str) -> int:
  """Of an array, or of all arrays of a tuple."""
  return sum(
    saved_tensors.nbytes(dtype, math.prod(int(n) for n in dims.split(",") if n))
    for dtype, dims in _ARRAY.findall(shape)
  )


def executed(
  program: hlo.Program, name: str = "", times: int = 1
) -> Iterator[tuple[hlo.Instruction, dict[str, hlo.Instruction], int]]:
  """(instruction that starts a kernel, its computation, executions)."""
  here = program.computations[name or program.entry]
  for i in here.values():
    if i.opcode in ("while", "call", "conditional"):
      own = times * (program.trips(i) if i.opcode == "while" else 1)
      for callee in i.called:
        yield from executed(program, callee, own)
    elif i.opcode not in _FREE and not i.opcode.endswith("-done"):
      yield i, here, times


def traffic(program: hlo.Program, i: hlo.Instruction, here) -> int:
  """Bytes of memory that an instruction reads and writes; 0 of a collective."""
  kind = i.opcode.removesuffix("-start")
  if kind in collectives.RECEIVED:
    return 0
  operands = [here[o].shape for o in i.operands if o in here]
  if kind in _READS:
    return 2 * nbytes(i.shape)
  if kind == "dynamic-update-slice":
    return 2 * nbytes(operands[1])
  if kind == "copy" and kind != i.opcode:  # the shape is of the source, the copy and a word
    return 2 * sum(map(nbytes, operands))
  if kind != "fusion":
    return sum(map(nbytes, operands)) + nbytes(i.shape)
  return _of_fusion(program.computations[i.called[0]])


def _of_fusion(inside: dict[str, hlo.Instruction]) -> int:
  *_, root = inside.values()
  roots = [inside[o] for o in root.operands] if root.opcode == "tuple" else [root]
  total, in_place = 0, set()
  for one in roots:
    while one.opcode in ("bitcast", "copy") and one.operands[0] in inside:
      one = inside[one.operands[0]]
    if one.opcode == "dynamic-update-slice":
      in_place.add(_source(inside, one.operands[0]))
      total += nbytes(inside[one.operands[1]].shape)
    else:
      total += nbytes(one.shape)
  for i in inside.values():
    if i.opcode == "parameter" and i.name not in in_place:
      users = [u for u in inside.values() if i.name in u.operands]
      sliced = users and all(u.opcode in _READS and u.operands[0] == i.name for u in users)
      total += sum(nbytes(u.shape) for u in users) if sliced else nbytes(i.shape)
  return total


def _source(inside, name: str) -> str:
  """The parameter that a chain of bitcasts begins at."""
  while inside[name].opcode in ("bitcast", "copy", "convert"):
    name = inside[name].operands[0]
  return name


def kind_of(program: hlo.Program, i: hlo.Instruction) -> str:
  """What an instruction is for, by the scope that it was traced in."""
  if i.opcode.removesuffix("-start") in collectives.RECEIVED:
    return "collective"
  if program.computes_products(i):
    return "product"
  for scope in ("quantize", "optimizer"):
    if re.search(rf"(^|[/(]){scope}([/)]|$)", i.op_name):
      return scope
  return "other"


def count(text: str) -> dict[str, dict[str, int]]:
  """{kind: {"launches", "bytes"}} of a compiled program."""
  program, total = hlo.Program(text), collections.defaultdict(lambda: {"launches": 0, "bytes": 0})
  for i, here, times in executed(program):
    row = total[kind_of(program, i)]
    row["launches"] += times
    row["bytes"] += times * traffic(program, i, here)
  return dict(total)


def compiled(arm: str, target: str, layers: int):
  """(HLO text of the step, spec)."""
  recipe, changes = ARMS[arm]
  c = cpt_7b.get_config(recipe)
  c.update_from_flattened_dict((_SHORT if target.endswith(":1") else {}) | changes)
  c.model.num_layers = layers
  spec, devices = aot.resolve(files.without_files(c), target, table.JOBS["memory"].needs)
  return aot.lower(spec, devices).compile().as_text(), spec


def measure(arm: str, target: str) -> dict:
  """A layer's launches and bytes per microbatch, and what the whole model would have."""
  counts, moved = [], []
  for layers in LAYERS:
    text, spec = compiled(arm, target, layers)
    counts.append(count(text))
    mesh = spec.run.layout.mesh
    rows = collectives.account(text, dict(mesh.shape)) if mesh is not None else []
    moved.append({
      kind: [sum(getattr(r, name) for r in rows if r.kind == kind) for name in ("nbytes", "beside")]
      for kind in {r.kind for r in rows}
    })  # fmt: skip
  few, many = counts
  more, micro = LAYERS[1] - LAYERS[0], spec.grad_accum_steps
  kinds = sorted({*few, *many})
  nothing = {"launches": 0, "bytes": 0}
  layer = {
    kind: {
      name: (many.get(kind, nothing)[name] - few.get(kind, nothing)[name]) / more / micro
      for name in nothing
    }
    for kind in kinds
  }
  return {
    "layer_per_microbatch": layer,
    "moved_by_a_layer_per_step": {
      kind: [(b - a) / more for a, b in zip(moved[0].get(kind, (0, 0)), both, strict=True)]
      for kind, both in moved[1].items()
    },
    "microbatches": micro, "tokens": spec.tokens_per_device,
    "commit": provenance.provenance(dict(spec.flat), "", spec.seed, spec.num_devices)["commit"],
  }  # fmt: skip


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("arms", nargs="*", metavar="ARM", help=f"of {', '.join(ARMS)}")
  parser.add_argument("--target", default="h200:1")
  asked = parser.parse_args()
  if unknown := sorted({*asked.arms} - {*ARMS}):
    parser.error(f"unknown arm {unknown[0]!r}; expected some of {', '.join(ARMS)}")
  path = HERE / "results" / f"{asked.target.replace(':', 'x')}-jax-{jax.__version__}.json"
  found = json.loads(path.read_text()) if path.exists() else {"arms": {}}
  for arm in asked.arms or ARMS:
    if asked.target.endswith(":1") and "in flight" in arm:
      continue  # one device moves nothing
    found["arms"][arm] = measure(arm, asked.target)
    path.parent.mkdir(exist_ok=True)
    records.write_atomic(str(path), records.to_json(found, indent=1) + "\n")
    print(arm, json.dumps(found["arms"][arm]["layer_per_microbatch"]), flush=True)


if __name__ == "__main__":
  main()
