"""A run is told where FP8 loses, by what was measured."""

import jax
import pytest

from fp8jax.kernels import timings
from fp8jax.recipe import library

KIND = jax.devices()[0].device_kind.lower().replace(" ", "_")
OURS = ("block_128", "mosaic_sm90")
BIG = timings.LayerTiming(*OURS, 8192, 4096, 4096, bf16_ms=3.0, fp8_ms=2.0)
SMALL = timings.LayerTiming(*OURS, 512, 512, 512, bf16_ms=0.1, fp8_ms=0.125)


def _row(m, n, k, recipe="block_128", backend="mosaic_sm90"):
  definition = library.RECIPES[recipe].to_dict()
  return {"site": f"s{m}", "m_n_k": [m, n, k], "recipe": recipe, "definition": definition,
          "backends": dict.fromkeys(("fwd", "dgrad", "wgrad"), backend)}  # fmt: skip


def test_what_is_stored_is_loaded(tmp_path):
  timings.store([BIG, SMALL], {"commit": "c"}, tmp_path)
  assert timings.load(tmp_path) == (BIG, SMALL)
  assert (tmp_path / f"{KIND}.json").exists()
  assert timings.load(tmp_path / "elsewhere") == ()


@pytest.mark.parametrize(
  "row, is_told",
  [
    (_row(512, 512, 512), "slower"),
    (_row(512, 1024, 256), "slower"),  # an octave either way: 1.41 doublings
    (_row(512, 1024, 128), "size like this"),  # too far from anything measured
    (_row(8192, 4096, 4096), ""),  # wins
    (_row(512, 512, 512, "bf16"), ""),  # does as advised
    # The same work: scales rounded otherwise, other eight bits, FP8 kept for the backward pass.
    (_row(512, 512, 512, "block_128_pow2"), "slower"),
    (_row(512, 512, 512, "block_128_hybrid"), "slower"),
    # Other work than what was measured.
    (_row(512, 512, 512, "tensor_current", "xla_sm90"), "by xla_sm90"),
    (_row(512, 512, 512, "rowwise", "xla"), "by xla"),
    (_row(512, 512, 512, backend="reference"), "by reference"),
  ],
)
def test_sites_that_lose_are_named_with_the_fix(row, is_told):
  found = timings.lines([row], (BIG, SMALL))
  assert len(found) == bool(is_told)
  if is_told == "slower":
    assert found[0].startswith(f"s512: {row['recipe']} is slower than BF16")
    assert "0.80 x in block_128" in found[0] and "('s512', 'bf16')" in found[0]
  elif is_told:
    assert found[0].startswith(f"s512: whether {row['recipe']} is faster than BF16 is unknown")
    assert "not measured" in found[0] and is_told in found[0] and "slower" not in found[0]


def test_a_recipe_is_told_what_was_measured_in_its_own():
  tensor = timings.LayerTiming("tensor_current", "xla_sm90", 512, 512, 512, bf16_ms=0.1, fp8_ms=0.2)
  (line,) = timings.lines([_row(512, 512, 512, "tensor_current", "xla_sm90")], (SMALL, tensor))
  assert "0.50 x in tensor_current" in line


def test_an_unknown_device_is_said_to_be_one():
  (line,) = timings.lines([_row(512, 512, 512)], ())
  assert "not measured" in line and "bench_kernels" in line
  assert timings.lines([_row(512, 512, 512, "bf16")], ()) == []
