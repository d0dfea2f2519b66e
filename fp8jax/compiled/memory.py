"""Where a training step's memory goes, per device: declared by the configuration, found by XLA.

The state is known before anything is compiled: every array's shape, dtype and place. The other
arrays of a step are declared for its peak (workspace.py; residuals of layers, by block, in
saved_tensors.py) and read from the compiled program at its own peak (xla_buffers.py), by shape.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from fp8jax import params as params_lib
from fp8jax.compiled import collectives as collectives_lib
from fp8jax.compiled import fp8_gemms, saved_tensors, workspace, xla_buffers
from fp8jax.models import transformer
from fp8jax.ops import stored_params
from fp8jax.quantization import bf16_remainder, quantized_tensor
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.step import distillation, quantized_once, train_spec, train_step


@dataclasses.dataclass(frozen=True)
class MemoryRow:
  """One kind of memory.

  Attributes:
    declared, compiled: bytes on one device; None where only the other side knows.
    note: the largest arrays found, or how the two differ.
  """

  kind: str
  declared: int | None
  compiled: int | None
  note: str = ""


def declared(spec: train_spec.TrainSpec) -> list[MemoryRow]:
  """State that lives between steps."""
  state = train_step.abstract_state(spec, 1)
  of_params = jax.tree.structure(spec.declaration).flatten_up_to(state.params)
  both = list(zip(jax.tree.leaves(spec.declaration), of_params, strict=True))
  rest = dataclasses.replace(state, params=(), opt=())
  kinds = {
    **_by_kind("masters", [value for p, value in both if p.trainable]),
    **_by_kind("frozen", [value for p, value in both if not p.trainable]),
    **_by_kind("moments", state.opt),
    "scaling states, counters": sum(map(nbytes, jax.tree.leaves(rest))),
  }
  if teacher := distillation.abstract(spec):
    kinds |= _by_kind("teacher", teacher)
  return [MemoryRow(kind, n, None) for kind, n in kinds.items()]


def _by_kind(name: str, tree) -> dict[str, int]:
  """{"moments: codes": bytes, ...}, without what there is none of."""
  kinds = {"float32": 0, "16 bits": 0, "remainders": 0, "codes": 0, "scales": 0}
  for x in jax.tree.leaves(tree, is_leaf=stored_params.is_stored):
    if isinstance(x, bf16_remainder.SplitFloat32):
      kinds["16 bits"] += nbytes(x.high)
      kinds["remainders"] += nbytes(x.low)
    elif isinstance(x, quantized_tensor.QuantizedTensor):
      data = nbytes(x.data)
      kinds["codes" if x.quant.format.is_low_bit else "16 bits"] += data
      kinds["scales"] += sum(map(nbytes, jax.tree.leaves(x))) - data
    elif isinstance(x, StoredMatrix):
      kinds["codes"] += nbytes(x.data)
      kinds["scales"] += nbytes(x.scale)
    else:
      kinds["16 bits" if x.dtype.itemsize == 2 else "float32"] += nbytes(x)
  return {f"{name}: {kind}": n for kind, n in kinds.items() if n}


def nbytes(x) -> int:
  """Of the part on one device."""
  return math.prod(workspace.local_shape(x)) * x.dtype.itemsize


def compiled(spec: train_spec.TrainSpec, lowered) -> tuple[list[MemoryRow], dict[str, Any]]:
  """(rows of the step beside state, a summary): needs a compiler for the spec's devices.

  Rows that begin with a space say what another one is made of.
  """
  program, held = xla_buffers.compile_and_read(lowered)
  memory = program.memory_analysis()
  arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
  state = sum(row.declared or 0 for row in declared(spec))
  params = params_lib.abstract(spec.declaration, spec.model.dims, spec.run.layout)
  saved = saved_tensors.of_layers(spec)
  said = sum(item.nbytes for item in saved)
  moment, wanted = workspace.peak(spec, said)
  there = _by_shape(held, spec, params)
  text = program.as_text()
  arrays = saved_by_layers(text, spec, params)
  compiled_saved = sum(arrays.values())
  used = sum(value.nbytes for value in held)
  rows = [
    MemoryRow("batch, sites, alignment", None, arguments - state),
    *(_row(kind, wanted, there) for kind in workspace.KINDS if kind in wanted or kind in there),
    MemoryRow("free at the peak" if held else "not told apart", None, temporaries - used),
    *_saved_rows(saved),
    MemoryRow("  saved for backward, in all", said, compiled_saved, _differences(arrays, saved)),
  ]
  peak_, all_declared = arguments + temporaries, state + sum(wanted.values())
  summary = {
    "declared": all_declared,
    "declared_moment": moment,
    "declared_of_peak": all_declared / peak_,
    "state_declared": state,
    "arguments_compiled": arguments,
    "temporaries_compiled": temporaries,
    "outputs_not_aliased": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "peak": peak_,
    "saved_declared": said,
    "saved_compiled": compiled_saved,
    "saved_arrays": arrays,
    "fp8_gemms": fp8_gemms.summary(spec, fp8_gemms.text_of(spec, lowered, program)),
  }
  if (mesh := spec.run.layout.mesh) is not None:
    moved = collectives_lib.account(text, dict(mesh.shape))
    summary["collectives"] = [dataclasses.asdict(row) for row in moved]
  return rows, summary


def table(rows: Sequence[MemoryRow], summary: dict[str, Any]):
  """Memory per device by kind, as declared and as compiled, each at its own peak."""
  import rich.table  # extra `train`

  table = rich.table.Table(title="memory per device")
  for name in ("kind", "declared GiB", "compiled GiB"):
    table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
  table.add_column("largest arrays, differences")

  def gib(n: int | None) -> str:
    return "" if n is None else f"{n / 2**30:.3f}"

  for row in rows:
    table.add_row(row.kind, gib(row.declared), gib(row.compiled), row.note)
  table.add_section()
  table.add_row(
    "arguments of the step", gib(summary["state_declared"]), gib(summary["arguments_compiled"])
  )
  table.add_row(
    "temporaries", gib(summary["declared"] - summary["state_declared"]),
    gib(summary["temporaries_compiled"]), f"declared: at the {summary['declared_moment']}",
  )  # fmt: skip
  table.add_row(
    "peak", gib(summary["declared"]), gib(summary["peak"]),
    f"declared / compiled: {summary['declared_of_peak']:.3f}",
  )  # fmt: skip
  return table


def _saved_rows(saved: list[saved_tensors.SavedTensor]) -> list[MemoryRow]:
  """One row per block and dtype; its note has the largest arrays."""
  of_kind: dict[str, list[saved_tensors.SavedTensor]] = {}
  for item in saved:
    of_kind.setdefault(item.kind, []).append(item)
  rows = []
  for kind, items in of_kind.items():  # large before small
    note = ", ".join(f"{i.count} x [{','.join(map(str, i.shape))}]" for i in items[:3])
    declared = sum(item.nbytes for item in items)
    rows.append(MemoryRow(f"  saved for backward: {kind}", declared, None, note))
  return rows


def _row(
  kind: str, wanted: dict[str, int], there: dict[str, list[xla_buffers.Buffer]]
) -> MemoryRow:
  buffers = there.get(kind, [])
  counts = collections.Counter(value.shape for value in buffers[:4])
  largest = ", ".join(f"{n} x {shape}" if n > 1 else shape for shape, n in counts.items())
  return MemoryRow(kind, wanted.get(kind, 0), sum(value.nbytes for value in buffers), largest)


def _by_shape(held: list[xla_buffers.Buffer], spec, params) -> dict[str, list[xla_buffers.Buffer]]:
  """Kind of workspace.py -> what is of that kind, largest first."""
  stacks, matrices, operands = _bulks(params), set(), _operands(spec)
  for leaf in params_lib.flatten(params["layers"]).values():
    for shape in (leaf.shape, workspace.local_shape(leaf)):
      matrices.add(_bulk(shape[1:]))
      matrices.update(_bulk([math.prod(shape[1:i]), math.prod(shape[i:])]) for i in (2, 3))
  vocabulary = spec.model.vocab_size
  sizes = {vocabulary, vocabulary // spec.run.layout.size(spec.run.layout.act_axes("V"))}
  layers = {run.stop - run.start for run, _ in transformer.runs(spec.sites())}
  by_kind: dict[str, list[xla_buffers.Buffer]] = {}
  for value in held:
    dtype, _, dims = value.shape.rstrip("]").partition("[")
    shape = tuple(int(n) for n in dims.split(",")) if dims else ()
    if sizes & set(shape) and len(_bulk(shape)) > 1:
      kind = workspace.VOCABULARY
    elif _bulk(shape) in operands and dtype.startswith(("f8", "u8", "f4", "s8")):
      kind = workspace.ONCE
    elif _bulk(shape) in stacks:
      kind = workspace.GRADIENTS
    elif shape and shape[0] in layers and len(shape) > 2:
      kind = workspace.SAVED
    elif _bulk(shape) in matrices:
      kind = workspace.WEIGHTS
    elif dtype.startswith(("f8", "u8")):
      kind = workspace.OPERANDS
    else:
      kind = workspace.ACTIVATIONS
    by_kind.setdefault(kind, []).append(value)
  return by_kind


def _operands(spec) -> set[tuple[int, ...]]:
  """`_bulk` of the stacks of operands that a step makes once."""
  if not quantized_once.is_on(spec):
    return set()
  return {_bulk(x.shape) for x in quantized_once.account(spec).arrays}


def _bulks(tree) -> set[tuple[int, ...]]:
  """Of every array's part on one device, see `_bulk`."""
  return {_bulk(workspace.local_shape(leaf)) for leaf in jax.tree.leaves(tree)}


def _bulk(shape) -> tuple[int, ...]:
  """Sizes above 1, sorted: a matrix and its transpose are alike."""
  return tuple(sorted(n for n in shape if n > 1))


def saved_by_layers(text: str, spec: train_spec.TrainSpec, params) -> dict[str, int]:
  """{"bf16[28,1,8192,3584] x 2": bytes}: stacks over layers that the backward loop reads.

  Stacks in the shape of a parameter are parameters, gradients or moments, and counted as such; so
  are scales of the state, which that loop carries where it moves layers (layerwise.py).
  """
  state = train_step.abstract_state(spec, 1)
  known = _bulks((params, state.params, state.opt)) | _operands(spec)
  total: dict[str, int] = {}
  # A loop for each run of layers in the same recipes, and of what it carries the largest.
  for layers in {run.stop - run.start for run, _ in transformer.runs(spec.sites())}:
    best: dict[str, int] = {}
    for result in re.findall(r"= \((.*?)\) while\(", text):
      counts = collections.Counter(re.findall(rf"(\w+)\[({layers},[\d,]+)\]", result))
      sizes = {}
      for (dtype, dims), count in counts.items():
        shape = tuple(int(n) for n in dims.split(","))
        if _bulk(shape) not in known:
          own_bytes = saved_tensors.nbytes(dtype, count * math.prod(shape))
          sizes[f"{dtype}[{dims}] x {count}"] = own_bytes
      if sum(sizes.values()) > sum(best.values()):
        best = sizes
    total |= best
  return dict(sorted(total.items(), key=lambda item: -item[1]))


def _differences(arrays: dict[str, int], wanted: list[saved_tensors.SavedTensor]) -> str:
  """By dtype, compiled less declared, with the arrays that there are."""
  texts = []
  for dtype in sorted({name.partition("[")[0] for name in arrays} | {i.dtype for i in wanted}):
    there = {name: n for name, n in arrays.items() if name.startswith(f"{dtype}[")}
    more = sum(there.values()) - sum(item.nbytes for item in wanted if item.dtype == dtype)
    if more:
      texts.append(f"{dtype} {more / 2**20:+.1f} MiB of {', '.join(there) or 'none'}")
  return f"compiled - declared: {'; '.join(texts)}" if texts else ""
