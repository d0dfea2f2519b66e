"""A model served on so many GPUs, format by format: its bytes, and a bound of its speed.

The table is arithmetic (generation/capacity.py). With XLA for CUDA, a decoding step of the
configuration's own rules is compiled for these GPUs besides, with as many sequences as fit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import rich.console

from fp8jax import console as console_lib
from fp8jax.errors import UserError
from fp8jax.generation import aot, capacity
from fp8jax.generation.settings import Generate, PlanInference
from fp8jax.kernels import choose
from fp8jax.step import train_spec

# Of the row in precision.rules.
CONFIGURED = "configured"
COLUMNS = [
  "format", "B/param", "weights GiB", "KiB/token", "MiB/seq.", "sequences", "tokens/s: 1",
  "tokens/s: all", "bound by", "fits from",
]  # fmt: skip


def run(
  spec: train_spec.TrainSpec, gpu: str, count: int,
  compiled_for: Callable[[], tuple[train_spec.TrainSpec, list]], workdir: str,
) -> dict[str, Any]:  # fmt: skip
  """Prints the table; returns its rows, what they assume, and the compiled step.

  Args:
    spec: model, rules and settings, resolved for no device in particular.
    gpu: a GPU of compiled/aot.py.
    count: how many share the model.
    compiled_for: resolves the configuration for them, and gives devices to compile for.
  """
  del workdir
  out = console_lib.console(stderr=True)
  serving, rows = table_of(spec, gpu, count)
  out.print(conditions(serving, count))
  out.print(console_lib.table("served, by format", COLUMNS, [cells(row) for row in rows]))
  for row in rows:
    if row.problem:
      out.print(f"{row.format} on {count}: {row.problem}")
  compiled = _compiled(out, serving, rows[0], compiled_for)
  return {
    "gpu": dataclasses.asdict(serving.gpu), "count": count, "length": serving.length,
    "reserve": serving.reserve, "cache_format": serving.cache_format,
    "rows": [dataclasses.asdict(row) for row in rows], "compiled": compiled,
  }  # fmt: skip


def table_of(
  spec: train_spec.TrainSpec, gpu: str, count: int
) -> tuple[capacity.Serving, list[capacity.Row]]:
  """(what is served, the configuration's row and those of plan_inference.formats)."""
  generate, own = spec.of(Generate), spec.of(PlanInference)
  length = generate.max_length or spec.model.max_positions
  facts = capacity.Gpu.named(gpu)
  stated = spec.flat["precision.compute_dtype"]
  dtype = choose.compute_dtype(choose.Device("gpu", facts.capability))
  itemsize = 4 if (dtype if stated == "auto" else stated) == "float32" else 2
  serving = capacity.Serving(
    spec.model, facts, length, own.reserve, generate.cache_format, itemsize
  )
  named = {name: (("head", "bf16"), ("layers/.*", name)) for name in own.formats}
  rules = {CONFIGURED: spec.precision.phases[-1].rules, **named}
  return serving, [serving.row(name, of_row, count) for name, of_row in rules.items()]


def conditions(serving: capacity.Serving, count: int) -> str:
  """A sentence about the rows."""
  gpu = serving.gpu
  return (
    f"{count} x {gpu.name} ({gpu.memory / 1e9:.1f} GB, {gpu.bandwidth / 1e12:.2f} TB/s, BF16 "
    f"{gpu.peak / 1e12:.0f} TFLOP/s each), sequences of {serving.length} tokens, cache "
    f"{serving.cache_format!r}, {serving.reserve:.0%} of the memory in reserve. Bytes are those of "
    "one GPU, scales included; tokens/s are bounds from bytes and FLOPs, no measurements"
  )


def cells(row: capacity.Row) -> list[str]:
  """A row as text."""
  numbers = [
    f"{row.bytes_per_parameter:.4f}", f"{row.weights / 2**30:.2f}",
    f"{row.cache_per_token / 2**10:.1f}", f"{row.cache_per_sequence / 2**20:.1f}",
  ]  # fmt: skip
  fewest = "-" if row.fewest is None else str(row.fewest)
  if not row.batch:
    return [row.format, *numbers, "none", "-", "-", "-", fewest]
  bounds = [str(row.batch), f"{row.alone:,.0f}", f"{row.together:,.0f}", row.limit]
  return [row.format, *numbers, *bounds, fewest]


def _compiled(
  out: rich.console.Console, serving: capacity.Serving, row: capacity.Row, compiled_for
) -> dict[str, Any]:
  """Bytes of the compiled decoding step beside the row's; {"problem": why there is none}."""
  if not row.batch:
    return {"problem": f"{row.format}: no sequence fits, nothing is compiled"}
  try:
    spec, devices = compiled_for()
    programs = aot.lower(spec, devices, row.batch, serving.length, serving.cache_format)
  except UserError as e:
    out.print(f"arithmetic alone, no decoding step was compiled: {e}")
    return {"problem": str(e)}
  memory: Any = programs.decode.compile().memory_analysis()
  step = {
    "sequences": row.batch,
    "arguments": memory.argument_size_in_bytes,
    "declared": row.weights + row.batch * row.cache_per_sequence,
    "temporaries": memory.temp_size_in_bytes,
    "peak_of_memory": (memory.argument_size_in_bytes + memory.temp_size_in_bytes)
    / serving.gpu.memory,
  }
  out.print(
    f"decoding step of {row.format} with {row.batch} sequences, compiled: weights and cache "
    f"{step['arguments'] / 2**30:.2f} GiB (the table's {step['declared'] / 2**30:.2f}), "
    f"temporaries {step['temporaries'] / 2**30:.2f} GiB, {step['peak_of_memory']:.1%} of the "
    "memory of a GPU"
  )
  return step
