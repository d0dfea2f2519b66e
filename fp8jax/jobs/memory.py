"""What a step keeps on a device, declared and compiled."""

import dataclasses

from fp8jax import console as console_lib
from fp8jax.compiled import aot, memory
from fp8jax.run import (
  startup,
)
from fp8jax.step import run_spec


def run(c: run_spec.Config):
  """Bytes per device by kind, declared and found in the compiled step."""
  plan, devices = aot.resolve(aot.without_files(c), c.aot.topology)
  out = console_lib.console(stderr=True)
  rows = memory.declared(plan)
  out.print(f"compiling the step for {c.aot.topology or devices[0].device_kind}")
  found, summary = memory.compiled(plan, aot.lower(plan, devices))
  rows += found
  out.print(startup.account_table(rows, summary))
  return {"rows": [dataclasses.asdict(row) for row in rows], **summary}
