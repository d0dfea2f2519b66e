"""Memory of a step on a device, declared and compiled, and its FP8 GEMMs."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from fp8jax import console as console_lib
from fp8jax.compiled import aot, memory
from fp8jax.run import provenance
from fp8jax.step import train_spec


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
