"""Ceilings of this device: a large copy by a kernel and by the driver, large BF16 and cuBLASLt FP8
products of random numbers."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from gpu_check import measure, programs
from gpu_check.worker import Context, Wrong

# XLA's own elementwise kernel, and a copy that it leaves to the driver.
COPIES = {"copy": lambda x: -x, "memcpy": jnp.copy}


def build(kind: str, size: int) -> programs.Program:
  if kind in COPIES:
    return programs.Program(COPIES[kind], (programs.array(jnp.bfloat16, 16 * size, size),))
  is_fp8 = kind.startswith("fp8")
  matrix = programs.array(jnp.float8_e4m3fn if is_fp8 else jnp.bfloat16, size, size)
  # cuBLASLt accumulates fast unless the highest precision is asked for.
  precision = jax.lax.Precision.HIGHEST if kind == "fp8_precise" else jax.lax.Precision.DEFAULT

  def multiply(a, b):
    # Both operands contract their last axis, the only order of FP8 on Hopper.
    return jax.lax.dot_general(
      a, b, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.bfloat16
    )

  return programs.Program(multiply, (matrix, matrix))


def run(context: Context, kind: str, size: int) -> dict[str, Any]:
  """Raises Wrong if XLA does not give an FP8 product to cuBLASLt's FP8 kernel."""
  program = build(kind, size)
  found: dict[str, Any] = {}
  if kind.startswith("fp8") and not context.is_dry:
    compiled = jax.jit(program.function, compiler_options=measure.options())
    text = compiled.lower(*program.arguments).compile().as_text()
    calls = re.findall(r'custom_call_target="(__cublas[^"]*)"', text)
    precisions = re.findall(r'"operand_precision":\[([^\]]*)\]', text)
    found = {"custom_calls": calls, "operand_precision": precisions}
    if calls != ["__cublas$lt$matmul$f8"]:
      raise Wrong(f"XLA multiplies FP8 operands by {calls or 'no cuBLAS call'}, expected FP8")
  found |= measure.time_program(context, program, own=False)
  if kind in COPIES:
    moved = 2 * programs.num_bytes(program.arguments)
    return found | {"tb_per_s": moved / found["ms"] / 1e9}
  return found | {"tflops": 2 * size**3 / found["ms"] / 1e9}
