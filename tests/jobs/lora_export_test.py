"""Adapters merged by --job=export: the weights in the folder, and the gate."""

import dataclasses

import harness
import ml_dtypes
import numpy as np
import pytest
from harness import tiny_config, tiny_plan

from fp8jax.jobs import export, train
from fp8jax.jobs.restore import restore_params
from fp8jax.models import presets
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import stored_params

SMALL = {
  "global_batch": 1, "seq_len": 128, "eval.batch": 1, "eval.tokens": 128, "model.num_layers": 2,
  "model.num_heads": 2, "model.num_kv_heads": 1, "model.intermediate_size": 256, "steps": 2,
  "optim.decay_steps": 1, "optim.warmup_steps": 0, "optim.peak_lr": 1e-1, "optim.min_lr": 1e-2,
  "model.lora.rank": 4, "model.lora.targets": ("attn/.*", "mlp/up"), "eval.precisions": ("bf16",),
  "log.tensorboard": False, "export.gate_tokens": 128,
}  # fmt: skip


@pytest.mark.slow
def test_adapters_are_merged_in_float32_and_the_gate_compares_with_both(tmp_path, monkeypatch):
  monkeypatch.setitem(presets.PRESETS, "tiny", harness.TINY)
  plan = tiny_plan(tiny_config(**SMALL))
  train.run(plan, str(tmp_path))
  params, _, _ = restore_params(plan, str(tmp_path))
  attn = params["layers"]["attn"]
  a, b = (np.asarray(attn[n], np.float64) for n in ("q_lora_a", "q_lora_b"))
  q = np.asarray(stored_params.compute_copy(attn["q"]), np.float64)
  assert np.any(b)
  want = (q + 4.0 * np.einsum("ndr,nrhk->ndhk", a, b)).astype(np.float32)
  for form in ("hf-bf16", "hf-fp8-block"):
    target = str(tmp_path / form)
    wanted = dataclasses.replace(plan.export, format=form, path=target, dtype="bfloat16")
    result = export.run(dataclasses.replace(plan, export=wanted), str(tmp_path))
    read, _ = hf_weights.load_params(target, dataclasses.replace(plan.model, lora=None))
    got = np.asarray(read["layers"]["attn"]["q"])
    if form == "hf-bf16":
      assert np.abs(got - want.astype(ml_dtypes.bfloat16).astype(np.float32)).max() < 1e-4
    assert np.abs(got - want).max() <= 2.0**-4 * np.abs(want).max()
    if form == "hf-fp8-block":  # training had no codes of what adapters were merged into
      assert (result["fp8_matrices"], result["codes_of_training"]) == (2 * 7, 2 * 2)
    assert result["gate"]["fp8jax"]["kl"] < 0.01 and result["gate"]["fp8jax"]["top1"] > 0.8
