"""Where a training step's memory goes, per device: declared by the configuration, found by XLA.

State is known before anything is compiled: every array's shape, dtype and place. What the step
needs besides is the compiler's: gradients, what waits for the backward pass (read from the loop
over layers in the compiled program), and the rest, which is gathered or worked on at a time.
"""

import dataclasses
import math
import re
from typing import Any

import jax

from fp8jax import config
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
  kept = _kept_by_layers(text, plan, params)
  temporaries = memory.temp_size_in_bytes
  rows = [
    Row("batch, sites, alignment", arguments - state, "compiled - declared"),
    *(Row(kind, n, "declared") for kind, n in gradients.items()),
    *(Row(f"kept for backward: {name}", n, "compiled") for name, n in kept.items()),
    Row(
      "at work: gathered weights, logits, scratch",
      temporaries - sum(gradients.values()) - sum(kept.values()),
      "compiled - the above",
    ),
  ]
  summary = {
    "state_declared": state,
    "arguments_compiled": arguments,
    "temporaries_compiled": temporaries,
    "outputs_not_aliased": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "peak": arguments + temporaries,
  }
  return rows, summary


def _kept_by_layers(text: str, plan: config.Plan, params) -> dict[str, int]:
  """{"bf16[28,1,8192,3584] x 2": bytes}: stacks over layers that the backward loop reads.

  Stacks in the shape of a parameter are parameters, gradients or moments, and counted as such.
  """
  known = set()
  for leaf in params_lib.flatten(params).values():
    shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
    known.add(tuple(sorted(n for n in shape if n > 1)))
  layers, best = plan.model.num_layers, {}
  for result in re.findall(r"= \((.*?)\) while\(", text):
    found: dict[str, int] = {}
    for dtype, dims in re.findall(rf"(\w+)\[({layers},[\d,]+)\]", result):
      shape = tuple(int(n) for n in dims.split(","))
      if tuple(sorted(n for n in shape if n > 1)) not in known:
        found[f"{dtype}[{dims}]"] = found.get(f"{dtype}[{dims}]", 0) + math.prod(shape) * (
          1 if dtype.startswith("f8") else _BYTES.get(dtype, 4)
        )
    if sum(found.values()) > sum(best.values()):
      best = found
  return dict(sorted(best.items(), key=lambda item: -item[1]))
