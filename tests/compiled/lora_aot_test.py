"""A step with adapters compiled for H200s that are not there: codes multiplied, no weight gradient.

Needs the CUDA wheels: make test-aot-all.
"""

import aot_harness
import pytest
from aot_harness import SMALL, load, lower, prove

ADAPTED = {
  "precision.rules": (("head", "bf16"), ("layers/.*", "block_128")), "model.lora.rank": 16,
  "memory.remat_policy": "full", "global_batch": 2, "eval.batch": 2, "mesh.fsdp": 2,
  "model.hidden_size": 1024, "model.intermediate_size": 2048, "model.num_heads": 4,
  "kernels.attention": "cudnn",
}  # fmt: skip


def adapted() -> dict:
  spec, lowered = lower(load("configs/base.py", SMALL | ADAPTED), "h200", 2)
  return prove(spec, lowered.compile().as_text())


@pytest.mark.aot
@pytest.mark.slow
def test_a_frozen_base_is_multiplied_in_fp8_forward_and_back_on_h200(capsys):
  found = aot_harness.elsewhere("adapted()", __file__)
  with capsys.disabled():
    print(f"\n{found['table']}{found['refused']}")
  assert not found["refused"] and found["by"] == ["mosaic_gpu_v2"]
  # Two layers of seven sites, forward and for the data gradient, six of them recomputed.
  assert found["fp8"] == found["planned"] == 2 * (7 + 7 + 6)
