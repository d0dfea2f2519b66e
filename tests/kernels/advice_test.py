"""A run is told where FP8 loses, by what was measured."""

import jax
import pytest

from fp8jax.kernels import advice

KIND = jax.devices()[0].device_kind.lower().replace(" ", "_")
BIG = advice.Layer("block_128", 8192, 4096, 4096, bf16_ms=3.0, fp8_ms=2.0)
SMALL = advice.Layer("block_128", 512, 512, 512, bf16_ms=0.1, fp8_ms=0.125)


def _row(m, n, k, recipe="block_128"):
  narrow = None if recipe == "bf16" else {"format": "e4m3fn"}
  return {"site": f"s{m}", "m_n_k": [m, n, k], "recipe": recipe,
          "definition": {"fwd": {"lhs": narrow}}}  # fmt: skip


def test_what_is_stored_is_loaded(tmp_path):
  advice.store([BIG, SMALL], {"commit": "c"}, tmp_path)
  assert advice.load(tmp_path) == (BIG, SMALL)
  assert (tmp_path / f"{KIND}.json").exists()
  assert advice.load(tmp_path / "elsewhere") == ()


@pytest.mark.parametrize(
  "row, is_told",
  [
    (_row(512, 512, 512), True),
    (_row(512, 1024, 256), True),  # an octave either way: 1.41 doublings
    (_row(512, 1024, 128), False),  # too far from anything measured
    (_row(8192, 4096, 4096), False),  # wins
    (_row(512, 512, 512, "bf16"), False),  # does as advised
  ],
)
def test_sites_that_lose_are_named_with_the_fix(row, is_told):
  found = advice.lines([row], (BIG, SMALL))
  assert len(found) == is_told
  if is_told:
    assert found[0].startswith("s512: block_128 is slower than BF16")
    assert "0.80 x" in found[0] and "('s512', 'bf16')" in found[0]


def test_an_unknown_device_is_said_to_be_one():
  (line,) = advice.lines([_row(512, 512, 512)], ())
  assert "not measured" in line and "bench_kernels" in line
  assert advice.lines([_row(512, 512, 512, "bf16")], ()) == []
