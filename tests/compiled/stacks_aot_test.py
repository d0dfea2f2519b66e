"""Stacks of layers in a step compiled for an H200: read and written where they lie, never copied.

Needs the CUDA wheels: make test-aot.
"""

import math

import aot_harness
import jax
import pytest
from aot_harness import SMALL, load, lower

MICROBATCHES = 3


def copied(form: str, policy: str) -> dict[str, list[str]]:
  """What the loop over microbatches gives, but for our kernels, in the shape of a layer's codes, of
  a layer's weights, of all layers' sums, or of gate or up of one layer or of all; and the kernels
  that read or write a layer of a stack.

  Args:
    form: memory.weight_operands.
    policy: memory.remat_policy.
  """
  from fp8jax import params as params_lib
  from fp8jax.compiled import hlo

  rules = (("layers/.*", "block_128"), (".*", "bf16"))
  changes = {
    "precision.rules": rules, "memory.remat_policy": policy, "kernels.attention": "cudnn",
    "memory.weight_operands": form, "grad_accum_steps": MICROBATCHES,
    "global_batch": SMALL["global_batch"] * MICROBATCHES,
  }  # fmt: skip
  spec, lowered = lower(load("configs/base.py", SMALL | changes), "h200", 1)
  program = hlo.Program(lowered.compile().as_text())
  shapes = [
    x.shape for path, x in params_lib.flatten(
      params_lib.abstract(spec.declaration, spec.model.dims, spec.run.layout)).items()
    if path.startswith("layers/") and len(x.shape) > 2
  ]  # fmt: skip
  weights = {own for _, *shape in shapes for own in _texts(shape)}
  sums = {own for count, *shape in shapes for own in _texts(shape, count)}
  kinds = ("sums", "codes", "weights", "gates", "products", "quantizers")
  found = {kind: [] for kind in kinds}
  gate = f"{spec.data.seq_len},{spec.model.intermediate_size}]"

  def look(name: str, is_micro: bool):
    for i in program.computations[name].values():
      if i.opcode in ("while", "call", "conditional"):
        trips = program.trips(i) if i.opcode == "while" else 1
        for callee in i.called:
          look(callee, is_micro or trips == MICROBATCHES)
        continue
      # jax 0.12 calls kernels that read a slice of a stack in fusions, too.
      inside = program.computations[i.called[0]].values() if i.opcode == "fusion" else [i]
      kernels = [one for one in inside if one.opcode == "custom-call"]
      if is_micro and kernels:
        here = program.computations[name] | {one.name: one for one in inside}
        for one in kernels:
          operands = [here[o].shape for o in one.operands if o in here]
          of_stack = any(stack in shape for shape in operands for stack in sums)
          found["products"] += [i.name] * ("scaled_matmul" in one.op_name)
          found["quantizers"] += [i.name] * ("quantize_fp8" in one.op_name and of_stack)
      elif is_micro and i.opcode.removesuffix("-start") in ("copy", "fusion", "dynamic-slice"):
        found["codes"] += [i.name] * ("f8e" in i.shape)
        found["weights"] += [i.name] * any(layer in i.shape for layer in weights)
        found["sums"] += [i.name] * any(stack in i.shape for stack in sums)
        found["gates"] += [i.name] * (gate in i.shape)

  look(program.entry, False)
  return found


def _texts(shape: list[int], *count: int) -> list[str]:
  """A float32 weight in HLO, or a stack of so many: as it is, and as a matrix."""
  matrices = [(math.prod(shape[:n]), math.prod(shape[n:])) for n in range(1, len(shape))]
  return [f"f32[{','.join(map(str, (*count, *dims)))}]" for dims in (shape, *matrices)]


@pytest.mark.aot
@pytest.mark.parametrize("form, policy", [
  ("per_product", "full"), pytest.param("per_step", "none", marks=pytest.mark.slow),
  pytest.param("per_product", "none", marks=pytest.mark.slow),
])  # fmt: skip
def test_codes_weights_and_sums_of_layers_stay_where_they_are(form, policy):
  found = aot_harness.elsewhere(f"copied({form!r}, {policy!r})", __file__)
  assert found["codes"] == found["weights"] == found["sums"] == []
  # Where they are saved. XLA's of jax 0.11 copies them in and out.
  assert not found["gates"] or jax.__version_info__ < (0, 12)
  # Seven sites forward, all but down again, and two gradients of each.
  again = 6 if policy == "full" else 0
  assert len(found["products"]) == 7 + again + 2 * 7
  # Each weight for each of its products.
  assert len(found["quantizers"]) == (0 if form == "per_step" else 7 + again + 7)
