"""A step of the 7B, compiled for H200s that are not there: launches, bytes, collectives.

command: python experiments/bench/compiled/run.py [--target h200:8] [ARM ...]    results/*.json

Needs the CUDA wheels and no GPU (make test-aot installs them). An arm is configs/cpt_7b.py with
some keys changed; each is compiled with two and with four layers, and a layer is half of what the
second program has more: per microbatch what the loop over microbatches runs, the rest once per
step: its update, and its weights where they are quantized once. Counted are the instructions of the
compiled program as often as loops run them, not what a GPU does:

  launches   instructions that start a kernel: fusions, products, kernels of ours, copies;
             quantizations are those of our quantizer's kernels
  bytes      read and written in memory by them: of a fusion that reads a slice of an array, or
             writes one in place, the slice; of a kernel in it what it has alone. Caches may save
             some
  moved      received from other devices (fp8jax/compiled/collectives.py)
"""

import argparse
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
# No other loop runs five times.
_SHORT = {"seq_len": 8192, "grad_accum_steps": 5, "global_batch": 5, "mesh.fsdp": 1}
_ONCE = {"memory.weight_operands": "per_step"}
_SAVED = {"memory.remat_policy": "none"}
_CODES = {"model.lora.rank": 16, "model.lora.base": "block_fp8"}
# Of h200:1 8,192 tokens in each of five microbatches; of h200:8 the configuration as it is.
ARMS = {
  "bf16": ("bf16", {}),
  "block_128_pow2": ("", {}),
  "block_128_pow2, once": ("", _ONCE),
  "block_128_pow2, once, 16-bit masters": ("", _ONCE | {"optim.master_format": "bf16_remainder"}),
  "bf16, saved": ("bf16", _SAVED),
  "block_128_pow2, saved": ("", _SAVED),
  "block_128_pow2, once, saved": ("", _ONCE | _SAVED),
  "block_128_pow2, base in codes": ("", _CODES),
  "block_128_pow2, base in codes, once": ("", _ONCE | _CODES),
  "block_128_pow2, once, 8 in flight": ("", _ONCE | {"mesh.collectives_in_flight": 8}),
  "block_128_pow2, once, bf16 wire": ("", _ONCE | {"optim.grad_wire": "bf16"}),
  "block_128_pow2, once, e4m3 wire": ("", _ONCE | {"optim.grad_wire": "e4m3"}),
}
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "while",
         "call", "conditional", "iota", "partition-id", "replica-id", "opt-barrier",
         "optimization-barrier"}  # fmt: skip
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_LAYERS = re.compile(r"\[\d+,(?=\d+,\d+\])")  # of a stack, of which our kernels read or write one
_READS_LAYERS = re.compile("scaled_matmul|quantize_fp8")
_NUMBERS = re.compile(r"s32\[[12]\]")
_READS = ("dynamic-slice", "slice", "gather")


def nbytes(shape: str) -> int:
  """Of an array, or of all arrays of a tuple."""
  return sum(
    saved_tensors.nbytes(dtype, math.prod(int(n) for n in dims.split(",") if n))
    for dtype, dims in _ARRAY.findall(shape)
  )


def executed(
  program: hlo.Program, microbatches: int, name: str = "", times: int = 1, is_micro: bool = False
) -> Iterator[tuple[hlo.Instruction, dict[str, hlo.Instruction], int, bool]]:
  """(instruction that starts a kernel, its computation, executions, if of a microbatch)"""
  here = program.computations[name or program.entry]
  for i in here.values():
    if i.opcode in ("while", "call", "conditional"):
      trips = program.trips(i) if i.opcode == "while" else 1
      inside = is_micro or trips == microbatches
      for callee in i.called:
        yield from executed(program, microbatches, callee, times * trips, inside)
    elif i.opcode not in _FREE and not i.opcode.endswith("-done") and not _is_memory(i):
      yield i, here, times, is_micro


def _is_memory(i: hlo.Instruction) -> bool:
  """Whether an instruction gives memory that nothing was written to."""
  return i.opcode == "custom-call" and 'custom_call_target="AllocateBuffer"' in i.rest


def is_collective(program: hlo.Program, i: hlo.Instruction) -> bool:
  """Whether an instruction moves arrays between devices, itself or in what it starts."""
  inside = program.computations[i.called[0]].values() if i.opcode == "async-start" else [i]
  return any(one.opcode.removesuffix("-start") in collectives.RECEIVED for one in inside)


def traffic(program: hlo.Program, i: hlo.Instruction, here) -> int:
  """Bytes of memory that an instruction reads and writes; 0 of a collective."""
  kind = i.opcode.removesuffix("-start")
  if is_collective(program, i):
    return 0
  operands = [here[o].shape for o in i.operands if o in here]
  if kind in _READS:
    return 2 * nbytes(i.shape)
  if kind == "dynamic-update-slice":
    return 2 * nbytes(operands[1])
  if kind == "copy" and kind != i.opcode:  # the shape is of the source, the copy and a word
    return 2 * sum(map(nbytes, operands))
  if kind != "fusion":
    target, result = i.attribute(r'custom_call_target="([^"]*)"'), i.shape
    if target.startswith("__cublas"):  # the second result is its workspace
      result = result.removeprefix("(").partition(", s8[")[0]
    if _reads_layers(i, here):
      operands, result = [_LAYERS.sub("[", o) for o in operands], _LAYERS.sub("[", result)
    return sum(map(nbytes, operands)) + nbytes(result)
  return _of_fusion(program.computations[i.called[0]])


def _reads_layers(i: hlo.Instruction, here) -> bool:
  """Whether a kernel of ours takes stacks, and the numbers of their layers."""
  numbers = (_NUMBERS.match(here[o].shape) for o in i.operands if o in here)
  return _READS_LAYERS.search(i.op_name) is not None and any(numbers)


def _of_fusion(inside: dict[str, hlo.Instruction]) -> int:
  *_, root = inside.values()
  roots = [inside[o] for o in root.operands] if root.opcode == "tuple" else [root]
  total, in_place, updates = 0, set(), set()
  for one in roots:
    while one.opcode in ("bitcast", "copy") and one.operands[0] in inside:
      one = inside[one.operands[0]]
    if one.opcode == "dynamic-update-slice":
      in_place.add(_source(inside, one.operands[0]))
      updates.add(one.name)
      total += nbytes(inside[one.operands[1]].shape)
    else:
      total += nbytes(one.shape)
  for i in inside.values():
    if i.opcode == "parameter":
      users = [(u, where) for u, where in _users(inside, i.name)
               if not (i.name in in_place and u.name in updates)]  # fmt: skip
      # Where a slice begins is no array that it is taken of.
      sliced = all(u.opcode in _READS and where == 0 for u, where in users)
      of_layer = any(_reads_layers(u, inside) for u, _ in users)
      whole = nbytes(_LAYERS.sub("[", i.shape) if of_layer else i.shape)
      total += sum(nbytes(u.shape) for u, _ in users) if sliced else whole
  return total


def _users(inside, name: str) -> list[tuple[hlo.Instruction, int]]:
  """The instructions that read an array, also behind bitcasts of it, and as which operand."""
  found = []
  for user in inside.values():
    if name in user.operands:
      places = [(user, n) for n, operand in enumerate(user.operands) if operand == name]
      found += _users(inside, user.name) if user.opcode == "bitcast" else places
  return found


def _source(inside, name: str) -> str:
  """The parameter that a chain of bitcasts begins at."""
  while inside[name].opcode in ("bitcast", "copy", "convert"):
    name = inside[name].operands[0]
  return name


def kernel(program: hlo.Program, i: hlo.Instruction) -> hlo.Instruction:
  """The call of a kernel that a fusion makes, of slices that it reads or writes; or i itself."""
  inside = program.computations[i.called[0]].values() if i.opcode == "fusion" else ()
  return next((one for one in inside if one.opcode == "custom-call"), i)


def kind_of(program: hlo.Program, i: hlo.Instruction) -> str:
  """What an instruction is for, by the scope that it was traced in."""
  if is_collective(program, i):
    return "collective"
  i = kernel(program, i)
  if program.computes_products(i):
    return "product"
  for scope in ("quantize", "optimizer"):
    if re.search(rf"(^|[/(]){scope}([/)]|$)", i.op_name):
      return scope
  return "other"


NOTHING = {"launches": 0, "bytes": 0, "quantizations": 0}


def count(text: str, microbatches: int) -> dict[str, dict[str, dict[str, float]]]:
  """{"microbatch" or "step": {kind: {"launches", "bytes", "quantizations"}}} of a program."""
  program, total = hlo.Program(text), {"microbatch": {}, "step": {}}
  for i, here, times, is_micro in executed(program, microbatches):
    of_kind, kind = total["microbatch" if is_micro else "step"], kind_of(program, i)
    row = of_kind.setdefault(kind, dict(NOTHING))
    times /= microbatches if is_micro else 1
    row["launches"] += times
    row["bytes"] += times * traffic(program, i, here)
    is_kernel = kernel(program, i).opcode == "custom-call"
    row["quantizations"] += times * (kind == "quantize" and is_kernel)
  return total


def compiled(arm: str, target: str, layers: int):
  """(HLO text of the step, spec)."""
  recipe, changes = ARMS[arm]
  c = cpt_7b.get_config(recipe)
  c.update_from_flattened_dict((_SHORT if target.endswith(":1") else {}) | changes)
  c.model.num_layers = layers
  spec, devices = aot.resolve(files.without_files(c), target, table.JOBS["memory"].needs)
  return aot.lower(spec, devices).compile().as_text(), spec


def measure(arm: str, target: str) -> dict:
  """What a layer takes, {"microbatch", "step"}, and what it moves between devices."""
  counts, moved = [], []
  for layers in LAYERS:
    text, spec = compiled(arm, target, layers)
    counts.append(count(text, spec.grad_accum_steps))
    mesh = spec.run.layout.mesh
    rows = collectives.account(text, dict(mesh.shape)) if mesh is not None else []
    moved.append({
      kind: [sum(getattr(r, name) for r in rows if r.kind == kind) for name in ("nbytes", "beside")]
      for kind in {r.kind for r in rows}
    })  # fmt: skip
  more = LAYERS[1] - LAYERS[0]

  def of_layer(when: str, kind: str):
    few, many = (one[when].get(kind, NOTHING) for one in counts)
    return {name: (many[name] - few[name]) / more for name in NOTHING}

  layer = {when: {kind: of_layer(when, kind) for kind in sorted(counts[1][when])}
           for when in counts[1]}  # fmt: skip
  sums = {when: {n: sum(of[n] for of in kinds.values()) for n in NOTHING}
          for when, kinds in layer.items()}  # fmt: skip
  return {
    "of_layer": sums, "of_layer_by_kind": layer,
    "moved_by_layer": {
      kind: [(b - a) / more for a, b in zip(moved[0].get(kind, (0, 0)), both, strict=True)]
      for kind, both in moved[1].items()
    },
    "microbatches": spec.grad_accum_steps, "tokens": spec.tokens_per_device,
    "commit": provenance.provenance(dict(spec.flat), "", spec.seed, spec.num_devices)["commit"],
  }  # fmt: skip


def record(stem: str, arms, measure):
  """Measures arms, name -> arguments, writes results/STEM-jax-VERSION.json and prints sums."""
  path = HERE / "results" / f"{stem}-jax-{jax.__version__}.json"
  commit = provenance.provenance({}, "", 0, 1)["commit"]
  found = {name: measure(*arm) | {"commit": commit} for name, arm in arms.items()}
  records.write_atomic(str(path), records.to_json({"arms": found}, indent=1) + "\n")
  for name, row in found.items():
    print(name, json.dumps({n: row[n] for n in NOTHING if n in row}), flush=True)


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
    if asked.target.endswith(":1") and arm.endswith(("in flight", "wire")):
      continue  # one device moves nothing
    found["arms"][arm] = measure(arm, asked.target)
    path.parent.mkdir(exist_ok=True)
    records.write_atomic(str(path), records.to_json(found, indent=1) + "\n")
    print(arm, json.dumps(found["arms"][arm]["of_layer"]), flush=True)


if __name__ == "__main__":
  main()
