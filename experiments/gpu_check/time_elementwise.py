"""Bandwidth of the quantizer, its prologues and AdamW. The report divides by the copy's."""

from typing import Any

import jax

from gpu_check import measure, programs
from gpu_check.worker import Context


def run(context: Context, kind: str, **values) -> dict[str, Any]:
  """{"tb_per_s", "ms", ...}; bytes are those of operands and results, each once per pass."""
  program = programs.BUILDERS[kind](**values)
  results = jax.eval_shape(program.function, *program.arguments)
  moved = programs.num_bytes(program.arguments) + programs.num_bytes(results)
  found = measure.time_program(context, program)
  return {"tb_per_s": moved / found["ms"] / 1e9, **found, "bytes": moved}
