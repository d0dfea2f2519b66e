"""Memory of a step on a device, declared and compiled, and its FP8 GEMMs."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax

from fp8jax import console as console_lib
from fp8jax import params as params_lib
from fp8jax.compiled import aot, memory
from fp8jax.compiled.memory import MemoryRow
from fp8jax.generation import capacity
from fp8jax.generation.settings import Generate
from fp8jax.models import lora
from fp8jax.rl.settings import RL
from fp8jax.run import provenance
from fp8jax.step import distillation, train_spec


def run(
  spec: train_spec.TrainSpec, devices: Sequence[Any], topology: str, workdir: str
) -> dict[str, Any]:
  """Bytes per device by kind and FP8 GEMMs, declared and found in the compiled step.

  Args:
    spec: the run.
    devices: those to compile for, real or of a topology.
    topology: --topology, for the message; "" where the devices are here.
    workdir: gets memory.json for the run's report, where it exists.
  """
  out = console_lib.console(stderr=True)
  rows = memory.declared(spec)
  out.print(f"compiling the step for {topology or devices[0].device_kind}")
  compiled, summary = memory.compiled(spec, aot.lower(spec, devices))
  rows += compiled
  if (own := spec.sections.get(RL)) and own.tasks:
    rollout = _of_rollout(spec, aot.parse(topology)[0] if topology else "")
    rows += rollout
    parts = {row.kind: row.declared or 0 for row in rollout}
    summary["rollout"] = {**parts, "peak": summary["state_declared"] + sum(parts.values())}
  out.print(memory.table(rows, summary))
  proof = summary["fp8_gemms"]
  out.print(
    f"FP8 GEMMs per step and device: {proof['found']} of {proof['planned']} planned"
    + (f", by {', '.join(proof['by'])}" if proof["by"] else "")
    + (f"; {proof['problem']}" if proof["problem"] else "")
  )
  result = {"rows": [dataclasses.asdict(row) for row in rows], **summary}
  if os.path.isdir(workdir):
    provenance.write_json(workdir, "memory.json", result)
  return result


def _of_rollout(spec: train_spec.TrainSpec, gpu: str) -> list[MemoryRow]:
  """Bytes per device that --job=rl holds beside the state of training: always the reference's, and
  while it draws the weights as products read them, and keys and values.

  Args:
    gpu: one of aot.CAPABILITY; "" for the devices at hand.
  """
  own, g, layout, rows = spec.of(RL), spec.of(Generate), spec.run.layout, []
  if own.objective.has_reference and not distillation.is_base(spec, own.reference):
    model = lora.without(spec.model)
    held = params_lib.abstract(distillation.declaration(spec), model.dims, layout)
    count = sum(x.size for x in jax.tree.leaves(held)) * spec.run.dtype.itemsize
    split = layout.size(tuple(dict.fromkeys(a for c in "DFGHV" for a in layout.weight_axes(c))))
    rows.append(MemoryRow("rollout: reference", count // split, None, "in the compute dtype"))
  drawn = spec.with_recipe(own.rollout) if own.rollout else spec
  serving = capacity.Serving(
    spec.model, capacity.Gpu.named(gpu or "h200"), g.max_length, 0.0, g.cache_format,
    spec.run.dtype.itemsize,
  )  # fmt: skip
  served = layout.served()
  num = served.size(served.act_axes("F"))
  row = serving.row("", drawn.precision.phases[0].rules, num)
  slots = -(-g.slots // served.size(served.act_axes("B")))
  cache = slots * row.cache_per_sequence
  note = f"{slots} sequences of {g.max_length} tokens"
  rows.append(MemoryRow("rollout: weights", row.weights, None, f"shared by {num}"))
  return [*rows, MemoryRow("rollout: keys and values", cache, None, note)]
