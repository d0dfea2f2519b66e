"""Bytes and bounds of a served model against numbers worked out by hand, and the job's table."""

import dataclasses
import json
import pathlib

import aot_harness
import harness
import pytest
import run_files

from configs import base
from fp8jax.compiled import aot
from fp8jax.config import resolve
from fp8jax.errors import ConfigError, UserError
from fp8jax.generation import capacity
from fp8jax.jobs import dispatch, plan_inference, table
from fp8jax.models import presets
from fp8jax.recipe import rules as rules_lib

PAGE = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "2024_nemotron"
# Nemotron-4 340B (arXiv:2406.11704, table 1), its two matrices of 73,728 as three of 49,152.
NEMOTRON = dataclasses.replace(
  presets.DEBUG, vocab_size=256_000, hidden_size=18_432, intermediate_size=49_152, num_layers=96,
  num_heads=96, num_kv_heads=8, head_dim=192, max_positions=4096, tie_embeddings=False,
)  # fmt: skip
# Of a layer: queries and outputs, keys and values, the feed-forward layer's two matrices.
LINEAR = 96 * (2 * 18_432 * 18_432 + 2 * 18_432 * 8 * 192 + 2 * 18_432 * 73_728)
NORMS, TABLE = (2 * 96 + 1) * 18_432, 256_000 * 18_432


def _rules(name):
  return (("head", "bf16"), ("layers/.*", name))


def _serving(gpu="h100", model=NEMOTRON, **changes):
  return capacity.Serving(
    model,
    capacity.Gpu.named(gpu),
    **dict(length=4096, reserve=0.1, cache_format="compute") | changes,
  )


def test_peaks_are_those_of_the_units_that_a_gpu_has():
  """Dense operations of the data sheets, of floating point with float32 sums."""
  names = ("bf16", "int8", "fp8", "nvfp4_ste")
  products = [rules_lib.recipe_by_name(name).fwd for name in names]
  for gpu, peaks in {
    "a100": (312, 624, 312, 312), "l4": (121, 242, 242, 242), "h100": (989, 1978, 1978, 1978),
    "rtx4090": (165.2, 660.8, 330.4, 330.4), "b200": (2250, 4500, 4500, 9000),
    "rtx5090": (209.5, 838, 419, 1676),
  }.items():  # fmt: skip
    flops = capacity.Gpu.named(gpu).flops
    assert [flops(product) / 1e12 for product in products] == pytest.approx(peaks)


def test_340b_in_fp8_fits_on_eight_h100_and_in_bf16_does_not():
  """One DGX H100, for which it was sized. All bytes are of one of the eight."""
  assert (LINEAR, 2 * TABLE) == (331_584_897_024, 9_437_184_000)
  row = _serving().row("fp8", _rules("fp8"), 8)
  # A byte per parameter and a float32 for each of seven matrices; 16 bits of embedding and head.
  assert row.weights == LINEAR // 8 + 96 * 7 * 4 + 2 * 2 * TABLE // 8 + 4 * NORMS
  assert (row.scales, row.fewest, row.problem) == (96 * 7 * 4, 8, "")
  # Keys and values of 96 layers, of one of eight heads of 192, in 16 bits.
  assert row.cache_per_token == 2 * 96 * 192 * 2 and row.cache_per_sequence == 4096 * 73_728
  memory = 84_929_347_584  # bytes of an H100, with XLA's name of them
  assert row.batch == int((0.9 * memory - row.weights) / row.cache_per_sequence) == 107
  # Bytes bound the step: weights but for the embedding, and the cache, at 3.352 TB/s.
  read = row.weights - 2 * TABLE // 8
  for rows, bound in ((1, row.alone), (107, row.together)):
    assert bound == pytest.approx(rows / ((read + rows * 4096 * 73_728) / 3352.32e9), rel=1e-12)
  assert row.limit == "bytes"
  wide = _serving().row("bf16", _rules("bf16"), 8)
  assert wide.weights == (LINEAR + 2 * TABLE) // 4 + 4 * NORMS > memory  # 85.3 GB
  assert (wide.batch, wide.alone, wide.together) == (0, 0.0, 0.0)
  # On sixteen every key head lies twice, 18,432 x 192 more of keys and of values per layer.
  twice = _serving().row("bf16", _rules("bf16"), 16)
  assert twice.weights == (
    (LINEAR + 96 * 2 * 18_432 * 8 * 192 + 2 * TABLE) // 8 + 4 * NORMS
  )  # fmt: skip
  assert twice.cache_per_token == row.cache_per_token and wide.fewest == 16
  # Its card (huggingface.co/nvidia/Nemotron-4-340B-Base) wants 16 H100 or 8 H200 for BF16.
  assert _serving("h200").row("bf16", _rules("bf16"), 8).fewest == 8
  # Blocks of 128 rows are not whole in the 192 rows of keys that each of eight has.
  row = _serving().row("fp8_block", _rules("fp8_block"), 8)
  assert row.batch == 0 and "layers/attn/k, output GK: 1536 over 8 devices is 192" in row.problem


def test_the_tables_of_its_page_are_those_of_the_arithmetic():
  script = run_files.script(PAGE / "plan.py")
  kept = json.loads((PAGE / "results.json").read_text())["results"]
  assert script.tables(kept) in (PAGE / "README.md").read_text()
  for gpu in script.GPUS:
    for name in base.get_config().plan_inference.formats:
      row = _serving(gpu).row(name, _rules(name), 8)
      assert dataclasses.asdict(row) == kept["rows"][gpu][name], (gpu, name)


# 18,432 x 2,304, a matrix of queries on one of eight; bytes of its scales.
SCALES = {
  "fp8": 4,  # per tensor
  "fp8_dynamic": 2_304 * 4,  # per channel
  "fp8_block": 18 * 144 * 4,
  "w4a16": 2_304 * 144 * 4,  # groups of 128
  "mxfp8_ste": 2_304 * 576,  # a byte per 32
  "mxfp4_ste": 2_304 * 576,
  "nvfp4_ste": 2_304 * 1_152 + 4,  # a byte per 16, and one for the tensor
}


@pytest.mark.parametrize("name", SCALES)
def test_bytes_of_a_matrix_are_those_of_its_codes_and_scales(name):
  quant = rules_lib.recipe_by_name(name).fwd.rhs
  bits = 4 if "4" in name.removesuffix("_ste").replace("a16", "") else 8
  assert capacity.matrix_bytes(2_304, 18_432, quant, 2) == (
    2_304 * 18_432 * bits // 8, SCALES[name]
  )  # fmt: skip


def test_a_last_tile_counts_whole_and_16_bits_have_no_scales():
  quant = rules_lib.recipe_by_name("fp8_block").fwd.rhs
  assert capacity.matrix_bytes(576, 192, quant, 2) == (576 * 192, 5 * 2 * 4)
  assert capacity.matrix_bytes(576, 192, None, 2) == (2 * 576 * 192, 0)


def test_flops_bound_short_contexts_at_the_peak_of_the_operands():
  """A context of 16 tokens: many sequences share the reading of the weights."""
  hopper, blackwell = (_serving(gpu, length=16) for gpu in ("h200", "b200"))
  # Per sequence and GPU: two FLOPs a weight, and attention over 16 tokens in 12 heads of 192.
  attention = 96 * 4 * 12 * 192 * 16
  of = {"fp8_dynamic": 2, "w4a16": 1, "w4afp8": 2, "nvfp4_ste": 2}
  for serving, peak, times in (
    (hopper, 989e12, of), (blackwell, 2250e12, of | {"nvfp4_ste": 4}),
  ):  # fmt: skip
    for name, factor in times.items():
      row = serving.row(name, _rules(name), 8)
      seconds = 2 * LINEAR / 8 / (factor * peak) + (2 * TABLE / 8 + attention) / peak
      assert row.limit == "FLOPs" and row.together == pytest.approx(1 / seconds, rel=1e-12), name


def test_a_tied_head_is_the_embedding_unless_it_is_quantized():
  """SmolLM2-135M on one GPU, in an E4M3 cache."""
  model = presets.SMOLLM2_135M
  serving = _serving(model=model, length=2048, cache_format="e4m3")
  linear = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
  plain = serving.row("bf16", _rules("bf16"), 1)
  assert plain.weights == 2 * (linear + 49_152 * 576) + 4 * 61 * 576
  assert plain.bytes_per_parameter == 2
  quantized = serving.row("all", ((".*", "fp8"),), 1)
  assert quantized.weights == linear + 3 * 49_152 * 576 + 4 * (30 * 7 + 1) + 4 * 61 * 576
  assert plain.cache_per_token == 2 * 30 * 3 * (64 + 4)
  # Nine heads and three of keys: two GPUs cannot have whole ones.
  row = serving.row("fp8", _rules("fp8"), 2)
  assert "num_kv_heads = 3 does not divide over 2 devices" in row.problem and not row.batch


def test_the_job_prints_a_row_per_format_and_that_nothing_was_compiled(capsys, monkeypatch):
  c = harness.tiny_config("fp8_dynamic", **{"generate.max_length": 64, "mesh.data": 3})
  c.plan_inference.formats = ("w4a16", "mxfp4_ste")

  def missing(name, count):
    raise UserError(f"--topology={name}:{count} needs XLA for CUDA")

  monkeypatch.setattr(aot, "devices_of", missing)
  found = dispatch.call("plan_inference", c, base.get_config(), "", topology="h100:2")
  said = capsys.readouterr().err
  assert [row["format"] for row in found["rows"]] == ["configured", "w4a16", "mxfp4_ste"]
  assert (found["count"], found["length"], found["gpu"]["name"]) == (2, 64, "h100")
  # Each of two GPUs has seven matrices of 32,768 bytes in a layer, and a scale per channel: 256 of
  # queries, keys, values, gate and up, 128 of outputs and down.
  scales = 4 * (5 * 256 + 2 * 128)
  assert found["rows"][0]["bytes_per_parameter"] == 1 + scales / (7 * 32_768)
  assert "no measurements" in said and "w4a16" in said
  assert "arithmetic alone, no decoding step was compiled: --topology=h100:2 needs XLA" in said
  assert found["compiled"] == {"problem": "--topology=h100:2 needs XLA for CUDA"}
  assert len(plan_inference.COLUMNS) == len(plan_inference.cells(capacity.Row(**found["rows"][0])))


def test_what_cannot_be_planned_is_refused():
  c = harness.tiny_config(**{"plan_inference.reserve": 1.0})
  c.plan_inference.formats = ("fp8_dynamc",)
  with pytest.raises(ConfigError) as error:
    resolve.resolve(c, 1, harness.CPU, needs=table.JOBS["plan_inference"].needs)
  assert "plan_inference.reserve=1.0 must be a share" in str(error.value)
  assert "plan_inference.formats: unknown recipe 'fp8_dynamc'; did you mean 'fp8_dynamic'" in str(
    error.value
  )
  with pytest.raises(UserError, match="--topology='': expected one of a100:N"):
    dispatch.call("plan_inference", c, base.get_config(), "")


def compiled():
  """The decoding step of eight layers for two H100s, in codes, for each format of the cache."""
  steps = {}
  for format_ in ("compute", "e4m3"):
    changes = {"generate.cache_format": format_, "model.num_layers": 8}
    c = harness.tiny_config("fp8_dynamic", **changes)
    c.plan_inference.formats, c.plan_inference.reserve = (), 0.98
    of_job = dispatch.call("plan_inference", c, base.get_config(), "", topology="h100:2")
    steps[format_] = of_job["compiled"]
  return steps


@pytest.mark.aot
def test_a_compiled_decoding_step_has_the_bytes_of_the_arithmetic():
  """Beside them it takes a token, a position and a seed per sequence, and what sites carry; and no
  copy of the cache, of which it reads a layer at a time."""
  for step in aot_harness.elsewhere("compiled()", __file__).values():
    extra = step["arguments"] - step["declared"]
    assert 12 * step["sequences"] <= extra < 12 * step["sequences"] + 4096
    assert step["temporaries"] < 0.7 * step["declared"]
