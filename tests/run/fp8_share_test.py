"""Shares of FP8 against sums written out for a small model, by layer and by product."""

import json

import debug_runs
import harness
import pytest

from fp8jax.run import fp8_share

# harness.TINY: two layers, hidden 128, feed-forward 512, 4 heads of 128; vocabulary 512.
D, F, H, V, LENGTH, BATCH = 128, 512, 512, 512, 128, 8
TOKENS = LENGTH * BATCH
LINEAR = [(D, H)] * 3 + [(H, D)] + [(D, F)] * 2 + [(F, D)]


def _operands(tokens, contracted, produced):
  """Elements that (fwd, dgrad, wgrad) read."""
  x, w, g = tokens * contracted, contracted * produced, tokens * produced
  return x + w, g + w, x + g


def _spec(rules, **changes):
  return harness.tiny_spec(harness.tiny_config(**{"precision.rules": rules, **changes}))


def test_shares_equal_sums_over_layers_and_products():
  rules = (("head", "bf16"), ("layers/1/mlp/down", "bf16"), ("layers/.*", "rowwise_gw_hp"))
  spec = _spec(rules, **{"memory.loss_chunk": 48})
  narrow_flops = all_flops = narrow = wide = 0
  for layer in range(2):
    for i, (contracted, produced) in enumerate(LINEAR):
      is_wide = layer == 1 and i == 6
      for product, elements in enumerate(_operands(TOKENS, contracted, produced)):
        flops = 2 * TOKENS * contracted * produced
        all_flops += flops
        if is_wide or product == 2:  # this recipe leaves the weight gradient
          wide += elements
        else:
          narrow, narrow_flops = narrow + elements, narrow_flops + flops
  # Three passes, two layers, two products of attention over an average of half the length.
  all_flops += 3 * 2 * 2 * TOKENS * LENGTH * H
  for length in (48, 48, 32):  # the head reads its weight for every chunk
    wide += sum(_operands(BATCH * length, D, V))
  all_flops += 6 * TOKENS * D * V
  found = fp8_share.of_phase(spec)
  assert found["fp8_flops_share"] == pytest.approx(narrow_flops / all_flops, rel=1e-12)
  assert spec.run.dtype.itemsize == 4  # on the CPU
  assert found["fp8_gemm_bytes_share"] == pytest.approx(narrow / (narrow + 4 * wide), rel=1e-12)


def test_shares_of_a_run_are_means_over_its_steps():
  all_wide = ((".*", "bf16"),)
  spec = _spec(((".*", "block_128"),), **{"precision.schedule": ((15, all_wide),)})
  first = fp8_share.of_phase(spec)
  assert first["fp8_gemm_bytes_share"] == 1 and 0.8 < first["fp8_flops_share"] < 1
  assert fp8_share.of_phase(spec, 1) == {"fp8_flops_share": 0, "fp8_gemm_bytes_share": 0}
  for steps, taken in ((0, 1), (10, 1), (20, 0.75)):
    for name, share in fp8_share.of_run(spec, steps).items():
      assert share == pytest.approx(taken * first[name], rel=1e-12)


@pytest.mark.slow  # compiles a step
def test_shares_are_in_every_row_and_in_the_summary(tmp_path):
  c = {"steps": 2, "eval.tokens": 0, "precision.verify_fp8_gemms": False}
  harness.train_on_text(tmp_path, "block_128", **c)
  rows = debug_runs.rows(tmp_path)
  summary = json.loads((tmp_path / "summary.json").read_text())
  for name, share in fp8_share.of_phase(harness.text_spec("block_128", **c)).items():
    assert [row[name] for row in rows if "loss" in row] == [share, share]
    assert summary[name] == pytest.approx(share) and 0 < share < 1
