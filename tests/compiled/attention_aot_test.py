"""Attention of isolated documents in programs for H200s that are not there, and its numbers.

Needs the CUDA wheels and tokamax: make test-aot.
"""

import importlib.util
import json
import math
import re

import aot_harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.ops.attention import attention, first_keys

LENGTH = 32768
ONE_LAYER = {
  "global_batch": 1, "eval.batch": 1, "seq_len": LENGTH, "model.max_positions": LENGTH,
  "model.num_layers": 1, "model.hidden_size": 512, "model.intermediate_size": 1024,
  "model.num_heads": 4, "model.num_kv_heads": 2, "model.head_dim": 128, "model.vocab_size": 1024,
  "memory.remat_policy": "full",
}  # fmt: skip
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "s32": 32, "u32": 32, "s64": 64, "f64": 64}


def largest_array(changes: dict, num: int = 1) -> dict:
  """The largest array that any instruction of a compiled train step gives."""
  c = aot_harness.load("configs/base.py", ONE_LAYER | changes)
  spec, lowered = aot_harness.lower(c, "h200", num)
  program = lowered.compile()
  sizes = {}
  for dtype, dims in set(re.findall(r"\b([a-z]+\d*\w*)\[([\d,]+)\]", program.as_text())):
    nbytes = math.prod(map(int, dims.split(","))) * _BITS.get(dtype, 8) // 8
    sizes[f"{dtype}[{dims}]"] = nbytes
  name = max(sizes, key=sizes.__getitem__)
  kernels = re.findall(r'custom_call_target="([^"]*)"', program.as_text())
  return {
    "attention": spec.run.attention, "largest": name, "bytes": sizes[name],
    "temporaries": program.memory_analysis().temp_size_in_bytes, "kernels": sorted(set(kernels)),
  }  # fmt: skip


@pytest.mark.aot
@pytest.mark.slow  # the masks that it is given: below; the choice: ops/attention_test.py
@pytest.mark.parametrize("num", [1, 4])
def test_isolation_at_32k_has_no_array_of_length_by_length_on_h200(num, capsys):
  changes = {"global_batch": num, "eval.batch": num, "mesh.fsdp": -1}
  found = aot_harness.elsewhere(f"largest_array({changes!r}, {num})", __file__)
  with capsys.disabled():
    print("\n" + json.dumps(found))
  assert found["attention"] == "tokamax" and "mosaic_gpu_v2" in found["kernels"]
  assert found["bytes"] < LENGTH**2 and found["temporaries"] < LENGTH**2


@pytest.mark.aot
@pytest.mark.slow
def test_the_largest_array_is_the_bias_that_cudnn_takes(capsys):
  found = aot_harness.elsewhere("largest_array({'kernels.attention': 'cudnn'})", __file__)
  with capsys.disabled():
    print("\n" + json.dumps(found))
  assert found["bytes"] >= 2 * LENGTH**2 and f"{LENGTH},{LENGTH}]" in found["largest"]


def cudnn_in_fp8(gpus: list[str], shape: dict) -> dict:
  """What experiments/2026_cudnn_fp8_attention counts, by GPU and dtype."""
  path = aot_harness.ROOT / "experiments/2026_cudnn_fp8_attention/compiled.py"
  spec = importlib.util.spec_from_file_location("cudnn_fp8_attention", path)
  spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
  dtypes = ("float8_e4m3fn", "bfloat16")
  found = {f"{gpu} {dtype}": module.measure(gpu, dtype, shape) for gpu in gpus for dtype in dtypes}
  return found | {"refused": {name: module.refusal(x) for name, x in module.REFUSED.items()}}


@pytest.mark.aot
@pytest.mark.slow
def test_cudnns_fp8_attention_takes_scales_returns_amaxes_and_saves_bytes():
  """A program of it is no proof: an A100, which has no FP8 units, gets the same calls."""
  shape = {"tokens": 256, "heads": 4, "kv_heads": 2}
  found = aot_harness.elsewhere(f"cudnn_in_fp8(['h200', 'b200', 'a100'], {shape!r})", __file__)
  assert all(error for error in found.pop("refused").values())
  q, kv, statistic = 256 * 4 * 128, 256 * 2 * 128, 4 * 256 * 4
  for name, row in found.items():
    size, scales, amaxes, fp8 = (1, 13, 6, "F8") if "float8" in name else (2, 0, 0, "")
    both = row["forward and backward"]
    assert both["calls"] == [f"__cudnn$fmhaSoftmax{fp8}", f"__cudnn$fmhaSoftmaxBackward{fp8}"]
    assert len(both["scales"]) == scales and len(row["returned_amaxes"]) == amaxes
    # q, k, v, dO; then O, dQ, dK, dV and the address of each result.
    wide = size * (2 * q + 2 * kv)
    assert both["argument_bytes"] == wide + 4 * scales
    assert both["output_bytes"] == wide + 4 * amaxes + 8 * (4 + amaxes)
    # q, k, v, O, the statistic of the softmax, and 12 scales that the backward pass reads.
    assert row["saved_bytes"] == wide + statistic + 4 * (12 if fp8 else 0)
    # Of cuDNN's own scratch memory the compiler knows nothing.
    assert set(both["workspaces"]) == {"u8[0]{0}"}


@pytest.mark.aot
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (4, 1)], ids=str)
def test_tokamax_reads_first_keys_as_the_mask_of_documents(rng, heads):
  """Its own reference in float32, output and gradients, against the masked attention of "xla"."""
  base = pytest.importorskip("tokamax._src.ops.attention.base")
  num, length, size = 2, 96, 32
  segments = np.array([[1] * 30 + [2] + [3] * 50 + [0] * 15, [1] * 96], np.int32)
  q, k, v, g = (
    jnp.asarray(rng.standard_normal((num, length, h, size)), jnp.float32)
    for h in (heads[0], heads[1], heads[1], heads[0])
  )
  first_BL = first_keys(jnp.asarray(segments))

  def theirs(q, k, v):
    mask = base.Mask(is_causal=True, k_start=first_BL[:, None])
    precision = jax.lax.Precision.HIGHEST
    op = base.DotProductAttention()
    return op(q, k, v, logits_scale=size**-0.5, mask=mask, precision=precision)

  def both(f):
    out, pull = jax.vjp(f, q, k, v)
    return out, *pull(g)

  ours = both(lambda q, k, v: attention(q, k, v, jnp.asarray(segments), "xla"))
  for name, got, want in zip(("out", "dq", "dk", "dv"), jax.jit(lambda: both(theirs))(), ours):
    error = np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(np.asarray(want)).max()
    assert error < 2e-6, (name, error)
