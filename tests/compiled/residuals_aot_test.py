"""What a 7B-shaped step on an H200 writes, and keeps for its backward pass. See aot_test.py.

`PYTHONPATH=.:tests python tests/compiled/residuals_aot_test.py RECIPE REMAT` prints the account
of one.
"""

import collections
import json
import math
import re
import sys

import aot_harness
import pytest
import variants

LAYERS, TOKENS = 3, 2048
BYTES = {"f32": 4, "bf16": 2, "f8e4m3fn": 1}
HIDDEN, WIDE = 3584, 18944
# Elements per token of the inputs of a layer's linears, each counted once: of q, k and v; of o; of
# gate and up; of down (Qwen2.5-7B).
INPUTS = {"q, k, v": HIDDEN, "o": 28 * 128, "gate, up": HIDDEN, "down": WIDE}


def account(recipe: str, remat: str = "none") -> dict:
  """Of a compiled step.

  Returns:
    arrays: {"dtype[shape]": how many}, stacked over layers, that the backward loop reads.
    wide: {what writes [tokens, F] in 16 or 32 bits: how often}, in a layer.
    quantizer: {operands with tokens: calls}, in a layer.
    proof: FP8 products found and planned.
  """
  recipe, save = variants.split(recipe)
  changes = {
    "model.num_layers": LAYERS, "global_batch": 1, "eval.batch": 1, "grad_accum_steps": 1,
    "seq_len": TOKENS,
    "memory.remat_policy": remat, "memory.save_gemm_inputs": save.value,
    "precision.rules": (("head", "bf16"), ("layers/.*", recipe)),
    "mesh.fsdp": 1, "mesh.data": 1, "mesh.tensor": 1,
  }  # fmt: skip
  spec, lowered = aot_harness.lower(aot_harness.load("configs/cpt_7b.py", changes), "h200", 1)
  compiled = lowered.compile()
  text = compiled.as_text()
  proof = aot_harness.prove(spec, text)
  loops = re.findall(r"= \((.*?)\) while\(", text)
  found = [re.findall(rf"(\w+)\[({LAYERS},[\d,]+)\]", loop) for loop in loops]
  arrays = max(found, key=len)
  return {
    "arrays": {f"{d}[{s}]": arrays.count((d, s)) for d, s in arrays},
    "wide": dict(_writers(text)),
    "quantizer": dict(_operands(text)),
    "proof": [proof["fp8"], proof["planned"]],
  }


def _writers(text: str) -> collections.Counter:
  """Instructions of loops whose results have TOKENS x WIDE elements of 16 or 32 bits."""
  found, computation = collections.Counter(), ""
  for line in text.splitlines():
    line = line[:4000]
    if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", line):
      computation = header[1]
    made = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(", line)
    # Inside a fusion nothing is written; slices of stacked arrays are copied by a fusion-start.
    if not made or computation.startswith(("fused", "wrapped", "dynamic-slice-fusion")):
      continue
    if made[2] not in ("fusion", "custom-call", "convert", "copy", "transpose"):
      continue
    shapes = re.findall(r"(?:bf16|f32)\[(?:1,)*([\d,]+)\]", made[1])
    if f"{TOKENS},{WIDE}" in shapes:
      name = re.search(r'op_name="([^"]*)"', line)
      scope = re.search(r"(\w+:(?:fwd|dgrad|wgrad))", name[1]) if name else None
      found[scope[1] if scope else name[1] if name else made[2]] += 1
  return found


def _operands(text: str) -> collections.Counter:
  """Operands of the calls of the quantizer that read activations or gradients."""
  found = collections.Counter()
  for line in text.splitlines():
    if 'custom_call_target="mosaic_gpu' in line and "/quantize_fp8/" in line:
      (shapes,) = re.findall(r"operand_layout_constraints=\{(.*?\})\}", line)
      shapes = re.sub(r"\{[\d,]*\}", "", shapes)
      if f"[{TOKENS}," in shapes:
        found[shapes] += 1
  return found


def _bytes(arrays: dict[str, int], pattern: str) -> int:
  """Of the stacked arrays whose name matches."""
  total = 0
  for name, count in arrays.items():
    dtype, shape = name.rstrip("]").split("[")
    if re.fullmatch(pattern, name):
      total += count * BYTES[dtype] * math.prod(map(int, shape.split(",")))
  return total


@pytest.mark.aot
@pytest.mark.slow
def test_saved_recipes_keep_half_the_bytes_of_bf16_inputs_once_per_input(capsys):
  wide, narrow = (
    aot_harness.elsewhere(f"account({recipe!r})", __file__)
    for recipe in ("block_128", "block_128 saved")
  )
  tiles = TOKENS // 128
  fp8 = _bytes(narrow["arrays"], rf"f8e4m3fn\[{LAYERS},\d+,{TOKENS}\]")
  scales = _bytes(narrow["arrays"], rf"f32\[{LAYERS},\d+,{tiles}\]")
  as_bf16 = 2 * LAYERS * TOKENS * sum(INPUTS.values())
  with capsys.disabled():
    print(f"\nkept of linears' inputs: {(fp8 + scales) / as_bf16:.4f} of BF16")
    for name, found in (("block_128", wide), ("block_128 saved", narrow)):
      print(f"{name}: {found}")
  # q, k and v share one, gate and up another.
  assert fp8 == LAYERS * TOKENS * sum(INPUTS.values())
  assert (fp8 + scales) / as_bf16 <= 0.55
  assert not _bytes(wide["arrays"], r"f8e4m3fn.*")
  # Of what has the width of `down`'s input, gate and up are kept, in BF16, and nothing else.
  for found in (wide, narrow):
    stacked = rf"\[{LAYERS},1,{TOKENS},{WIDE}\]"
    assert _bytes(found["arrays"], "bf16" + stacked) == 2 * 2 * LAYERS * TOKENS * WIDE
    assert not _bytes(found["arrays"], "f32" + stacked)
    _check_nothing_wide_is_written(found, again=1 if found is wide else 0)


@pytest.mark.aot
@pytest.mark.slow
def test_where_nothing_else_needs_the_input_stacks_shrink_by_what_is_saved():
  """Not so under block_128, which has the inputs from the sources of norms and SwiGLU: see
  memory_pareto."""
  wide, narrow = (
    aot_harness.elsewhere(f"account({recipe!r})", __file__)
    for recipe in ("tensor_current", "tensor_current saved")
  )
  # q, k and v share their input in BF16; scales per tensor are of one site each, codes too.
  inputs = rf"\[{LAYERS},\d*,?{TOKENS},(?:{HIDDEN}|{WIDE})\]"
  as_bf16 = 2 * LAYERS * TOKENS * (2 * HIDDEN + WIDE)
  fp8 = _bytes(narrow["arrays"], rf"f8e4m3fn\[{LAYERS},\d+,{TOKENS}\]")
  # Norms and SwiGLU keep what they are computed from, in BF16: two inputs, gate and up.
  sources = 2 * LAYERS * TOKENS * 2 * (HIDDEN + WIDE)
  assert _bytes(wide["arrays"], "bf16" + inputs) == as_bf16 + sources
  assert _bytes(narrow["arrays"], "bf16" + inputs) == sources and 0 < fp8 < 0.6 * as_bf16
  assert not any(_bytes(found["arrays"], "f32" + inputs) for found in (wide, narrow))
  total = [_bytes(found["arrays"], r"(?:f32|bf16|f8e4m3fn)\[.*") for found in (wide, narrow)]
  assert total[0] - total[1] == pytest.approx(as_bf16 - fp8, rel=1e-4)  # a scale per site


def _check_nothing_wide_is_written(found: dict, again: int):
  """Norms and SwiGLU are computed in the quantizer: forward, `again` for weight gradients, back.

  What is left in BF16 is what GEMMs give.
  """
  assert found["proof"][0] == found["proof"][1] > 0
  assert found["wide"] == {"gate:fwd": 1, "up:fwd": 1, "down:dgrad": 1}
  hidden, wide = f"bf16[{TOKENS},{HIDDEN}]", f"bf16[{TOKENS},{WIDE}]"
  assert found["quantizer"] == {
    # Of attention and of the feed-forward layer.
    f"{hidden}, f32[{TOKENS}], f32[{HIDDEN}]": 2 + 2 * again,
    f"{wide}, {wide}": 1 + again,
    f"{wide}, {wide}, {wide}": 1,
    # Attention's output, gradients of q, of o and of down; of k and v.
    hidden: 4 + again,
    f"bf16[{TOKENS},512]": 2,
  }


if __name__ == "__main__":
  aot_harness.configure_jax()
  print(json.dumps(account(*sys.argv[1:]), indent=1))
