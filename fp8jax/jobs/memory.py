"""Memory of a step on a device, declared and compiled, and its FP8 GEMMs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fp8jax import console as console_lib
from fp8jax.compiled import aot, memory
from fp8jax.step import run_spec


def run(plan: run_spec.RunSpec, devices: Sequence[Any], topology: str) -> dict[str, Any]:
  """Bytes per device by kind and FP8 GEMMs, declared and found in the compiled step.

  Args:
    plan: the run.
    devices: those to compile for, real or of a topology.
    topology: aot.topology, for the message; "" where the devices are here.
  """
  out = console_lib.console(stderr=True)
  rows = memory.declared(plan)
  out.print(f"compiling the step for {topology or devices[0].device_kind}")
  found, summary = memory.compiled(plan, aot.lower(plan, devices))
  rows += found
  out.print(memory.table(rows, summary))
  proof = summary["fp8_gemms"]
  out.print(
    f"FP8 GEMMs per step and device: {proof['found']} of {proof['planned']} planned"
    + (f", by {', '.join(proof['by'])}" if proof["by"] else "")
    + (f"; {proof['problem']}" if proof["problem"] else "")
  )
  return {"rows": [dataclasses.asdict(row) for row in rows], **summary}
