"""What a 7B-shaped step keeps between forward and backward on an H200. See aot_test.py."""

import math
import re

import aot_test
import pytest

LAYERS, TOKENS = 3, 2048
BYTES = {"f32": 4, "bf16": 2, "f8e4m3fn": 1}
# Elements per token of the inputs of a layer's linears, each counted once: of q, k and v; of o; of
# gate and up; of down (Qwen2.5-7B).
INPUTS = {"q, k, v": 3584, "o": 28 * 128, "gate, up": 3584, "down": 18944}


def kept(recipe: str) -> dict:
  """{"dtype[shape]": how many}, of arrays stacked over layers that the backward loop reads."""
  changes = {
    "model.num_layers": LAYERS, "batch": 1, "eval.batch": 1, "accumulation": 1, "length": TOKENS,
    "memory.remat": "none", "precision.rules": (("head", "bf16"), ("layers/.*", recipe)),
    "mesh.fsdp": 1, "mesh.data": 1, "mesh.tensor": 1,
  }  # fmt: skip
  _, lowered = aot_test.lower(aot_test.load("configs/cpt_7b.py", changes), "h200", 1)
  compiled = lowered.compile()
  loops = re.findall(r"= \((.*?)\) while\(", compiled.as_text())
  found = [re.findall(rf"(\w+)\[({LAYERS},[\d,]+)\]", loop) for loop in loops]
  arrays = max(found, key=len)
  return {
    "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    "arrays": {f"{d}[{s}]": arrays.count((d, s)) for d, s in arrays},
  }


def _bytes(arrays: dict[str, int], pattern: str) -> int:
  """Of the stacked arrays whose name matches."""
  total = 0
  for name, count in arrays.items():
    dtype, shape = name.rstrip("]").split("[")
    if re.fullmatch(pattern, name):
      total += count * BYTES[dtype] * math.prod(map(int, shape.split(",")))
  return total


@pytest.mark.aot
def test_saved_recipes_keep_half_the_bytes_of_bf16_inputs_once_per_input(capsys):
  wide, narrow = (
    aot_test.elsewhere(f"kept({recipe!r})", "residuals_aot_test")
    for recipe in ("block_128", "block_128_saved")
  )
  tiles = TOKENS // 128
  fp8 = _bytes(narrow["arrays"], rf"f8e4m3fn\[{LAYERS},\d+,{TOKENS}\]")
  scales = _bytes(narrow["arrays"], rf"f32\[{LAYERS},\d+,{tiles}\]")
  as_bf16 = 2 * LAYERS * TOKENS * sum(INPUTS.values())
  with capsys.disabled():
    print(f"\nkept of linears' inputs: {(fp8 + scales) / as_bf16:.4f} of BF16")
    for name, found in (("block_128", wide), ("block_128_saved", narrow)):
      print(f"{name}: temporaries {found['temporaries'] / 2**30:.3f} GiB, {found['arrays']}")
  # q, k and v share one, gate and up another.
  assert fp8 == LAYERS * TOKENS * sum(INPUTS.values())
  assert (fp8 + scales) / as_bf16 <= 0.55
  # The input of `down` in BF16 is kept by the one and not by the other.
  act = rf"bf16\[{LAYERS},1,{TOKENS},18944\]"
  assert _bytes(wide["arrays"], act) and not _bytes(narrow["arrays"], act)
  assert not _bytes(wide["arrays"], r"f8e4m3fn.*")
