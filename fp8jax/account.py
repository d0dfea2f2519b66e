"""Where a training step's memory goes, per device: declared by the configuration, found by XLA.

State is known before anything is compiled: every array's shape, dtype and place. What the step
needs besides is the compiler's: gradients, what waits for the backward pass (declared in waiting.py
and read from the loop over layers in the compiled program), and the rest, which is gathered or
worked on at a time.
"""

import collections
import dataclasses
import math
import re
from typing import Any

import jax

from fp8jax import config, waiting
from fp8jax import params as params_lib
from fp8jax import step as step_lib
from fp8jax.ops import weights
from fp8jax.quant import packed, split
from fp8jax.state import State

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}


@dataclasses.dataclass(frozen=True)
class Row:
  """One kind of memory.

  Attributes:
    kind: what it is.
    nbytes: on one device.
    source: "declared", "compiled", or how the two differ.
  """

  kind: str
  nbytes: int
  source: str


def declared(plan: config.Plan) -> list[Row]:
  """State that lives between steps."""
  return [Row(kind, n, "declared") for kind, n in _kinds(step_lib.abstract_state(plan, 1)).items()]


def _kinds(state: State) -> dict[str, int]:
  rest = (state.step, state.memories, state.loss_scale, state.room, state.skipped, state.halted)
  return {
    **_by_kind("masters", state.params),
    **_by_kind("moments", state.opt),
    "scale memories, counters": sum(map(_nbytes, jax.tree.leaves(rest))),
  }


def _by_kind(name: str, tree) -> dict[str, int]:
  """{"moments: codes": bytes, ...}, without what there is none of."""
  kinds = {"float32": 0, "16 bits": 0, "remainders": 0, "codes": 0, "scales": 0}
  for x in jax.tree.leaves(tree, is_leaf=weights.is_kept):
    if isinstance(x, split.Split):
      kinds["16 bits"] += _nbytes(x.high)
      kinds["remainders"] += _nbytes(x.low)
    elif isinstance(x, packed.Packed):
      data = _nbytes(x.data)
      kinds["codes" if x.quant.format.is_narrow else "16 bits"] += data
      kinds["scales"] += sum(map(_nbytes, jax.tree.leaves(x))) - data
    else:
      kinds["float32"] += _nbytes(x)
  return {f"{name}: {kind}": n for kind, n in kinds.items() if n}


def _nbytes(x) -> int:
  """Of the part on one device."""
  shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
  return math.prod(shape) * x.dtype.itemsize


def compiled(plan: config.Plan, lowered) -> tuple[list[Row], dict[str, Any]]:
  """(rows of the compiled step, a summary): needs a compiler for the plan's devices."""
  program = lowered.compile()
  memory, text = program.memory_analysis(), program.as_text()
  state = sum(row.nbytes for row in declared(plan))
  arguments = memory.argument_size_in_bytes
  params = params_lib.abstract(plan.declaration, plan.model.dims, plan.run.layout)
  gradients = _by_kind("gradients", step_lib.abstract_gradients(plan))
  arrays, wanted = kept_by_layers(text, plan, params), waiting.of_layers(plan)
  kept, said = sum(arrays.values()), sum(item.nbytes for item in wanted)
  of_kind: dict[str, int] = {}
  for item in wanted:
    of_kind[item.kind] = of_kind.get(item.kind, 0) + item.nbytes
  temporaries = memory.temp_size_in_bytes
  rows = [
    Row("batch, sites, alignment", arguments - state, "compiled - declared"),
    *(Row(kind, n, "declared") for kind, n in gradients.items()),
    *(Row(f"kept for backward: {kind}", n, "declared") for kind, n in of_kind.items()),
    Row("kept for backward: more than that", kept - said, _differences(arrays, wanted)),
    Row(
      "at work: gathered weights, logits, scratch",
      temporaries - sum(gradients.values()) - kept,
      f"compiled - the above; a chunk of logits {_logits(plan) / 2**30:.3f}",
    ),
  ]
  summary = {
    "state_declared": state,
    "arguments_compiled": arguments,
    "temporaries_compiled": temporaries,
    "outputs_not_aliased": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "peak": arguments + temporaries,
    "kept_declared": said,
    "kept_compiled": kept,
    "kept_arrays": arrays,
  }
  return rows, summary


def _logits(plan: config.Plan) -> int:
  """Bytes of one chunk's, float32."""
  layout, c = plan.run.layout, plan.config
  chunk = plan.tokens_per_device // c.length * min(plan.run.loss_chunk, c.length)
  return 4 * chunk * (plan.model.vocab_size // layout.size(layout.act_axes("V")))


def kept_by_layers(text: str, plan: config.Plan, params) -> dict[str, int]:
  """{"bf16[28,1,8192,3584] x 2": bytes}: stacks over layers that the backward loop reads.

  Stacks in the shape of a parameter are parameters, gradients or moments, and counted as such.
  """
  known = set()
  for leaf in params_lib.flatten(params).values():
    shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
    known.add(tuple(sorted(n for n in shape if n > 1)))
  total: dict[str, int] = {}
  # A loop for each run of layers in the same recipes, and of what it carries the largest.
  for layers in {stop - first for first, stop in waiting.runs(plan)}:
    best: dict[str, int] = {}
    for result in re.findall(r"= \((.*?)\) while\(", text):
      counts = collections.Counter(re.findall(rf"(\w+)\[({layers},[\d,]+)\]", result))
      found = {}
      for (dtype, dims), count in counts.items():
        shape = tuple(int(n) for n in dims.split(","))
        if tuple(sorted(n for n in shape if n > 1)) not in known:
          size = 1 if dtype.startswith("f8") else _BYTES.get(dtype, 4)
          found[f"{dtype}[{dims}] x {count}"] = count * math.prod(shape) * size
      if sum(found.values()) > sum(best.values()):
        best = found
    total |= best
  return dict(sorted(total.items(), key=lambda item: -item[1]))


def _differences(arrays: dict[str, int], wanted: list[waiting.Item]) -> str:
  """By dtype, compiled less declared, with the arrays that there are."""
  found = []
  for dtype in sorted({name.partition("[")[0] for name in arrays} | {i.dtype for i in wanted}):
    there = {name: n for name, n in arrays.items() if name.startswith(f"{dtype}[")}
    more = sum(there.values()) - sum(item.nbytes for item in wanted if item.dtype == dtype)
    if more:
      found.append(f"{dtype} {more / 2**20:+.1f} MiB of {', '.join(there) or 'none'}")
  return f"compiled - declared: {'; '.join(found) or 'nothing'}"
