"""Stacks of layers in a step compiled for an H200: read and written where they lie, never copied.

Needs the CUDA wheels: make test-aot.
"""

import re

import aot_harness
import pytest
from aot_harness import SMALL, load, lower

MICROBATCHES = 3


def copied() -> dict[str, list[str]]:
  """What the loop over microbatches gives, but for our kernels, in the shape of a layer's codes or
  of all layers' sums; and the kernels that read or write a layer of a stack."""
  from fp8jax import params as params_lib
  from fp8jax.compiled import hlo

  rules = (("layers/.*", "block_128"), (".*", "bf16"))
  changes = {
    "precision.rules": rules, "memory.remat_policy": "full", "kernels.attention": "cudnn",
    "memory.weight_operands": "per_step", "grad_accum_steps": MICROBATCHES,
    "global_batch": SMALL["global_batch"] * MICROBATCHES,
  }  # fmt: skip
  spec, lowered = lower(load("configs/base.py", SMALL | changes), "h200", 1)
  program = hlo.Program(lowered.compile().as_text())
  shapes = [
    x.shape for path, x in params_lib.flatten(
      params_lib.abstract(spec.declaration, spec.model.dims, spec.run.layout)).items()
    if path.startswith("layers/") and len(x.shape) > 2
  ]  # fmt: skip
  sums = {f"f32[{','.join(map(str, shape))}]" for shape in shapes}
  found = {"sums": [], "codes": [], "kernels": []}

  def look(name: str, is_micro: bool):
    for i in program.computations[name].values():
      if i.opcode in ("while", "call", "conditional"):
        trips = program.trips(i) if i.opcode == "while" else 1
        for callee in i.called:
          look(callee, is_micro or trips == MICROBATCHES)
        continue
      # jax 0.12 calls kernels that read a slice of a stack in fusions, too.
      inside = program.computations[i.called[0]].values() if i.opcode == "fusion" else [i]
      kernels = [one.op_name for one in inside if one.opcode == "custom-call"]
      if is_micro and kernels:
        found["kernels"] += [i.name] * any("scaled_matmul" in name for name in kernels)
      elif is_micro and i.opcode in ("copy", "fusion", "dynamic-slice", "copy-start"):
        result = re.sub(r"\{[\d,]*\}", "", i.shape)
        found["codes"] += [i.name] * ("f8e" in result)
        found["sums"] += [i.name] * any(stack in result for stack in sums)

  look(program.entry, False)
  return found


@pytest.mark.aot
def test_codes_and_sums_of_layers_stay_where_they_are():
  found = aot_harness.elsewhere("copied()", __file__)
  assert found["codes"] == found["sums"] == []
  # Seven sites forward, all but down again, and two gradients of each.
  assert len(found["kernels"]) == 7 + 6 + 2 * 7
