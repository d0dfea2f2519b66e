"""What tables of quantization after training say: searches, clusters and fronts by hand."""

import importlib.util
import pathlib
import sys

import numpy as np
import oracle
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _script(path: str):
  of = ROOT / "experiments" / path
  spec = importlib.util.spec_from_file_location(of.stem + "_of_paper", of)
  module = importlib.util.module_from_spec(spec)
  before = list(sys.path)
  try:
    spec.loader.exec_module(module)
  finally:
    sys.path[:] = before
  return module


@pytest.mark.slow
def test_search_of_gaudis_scales_is_over_all_four(rng):
  """float64 tries the hardware's four. An error counts as less from 2^-12 of itself on."""
  methods = _script("2025_gaudi/methods.py")
  quant, bests = methods.methods()["maxabs_hw_opt_weight"][0], set()
  for size in 2.0 ** np.arange(-14, 13, 2):
    x = (size * rng.standard_t(2, (8, 32))).astype(np.float32)
    errors = {
      s: np.square(oracle.cast(np.clip(x / np.float32(s), -240, 240), "e4m3").astype(float) * s
                   - x).sum()
      for s in (2.0**-8, 2.0**-4, 1.0, 16.0)
    }  # fmt: skip
    got = float(methods.served.quantize.scales(x, quant)[0, 0])
    assert errors[got] == pytest.approx(min(errors.values()), rel=2.5e-4)
    bests.add(got)
  assert bests == {2.0**-8, 2.0**-4, 1.0, 16.0}


def test_coverage_resamples_networks_not_cells():
  coverage = _script("2023_efficient_ptq/coverage.py")
  values = [("a", 100.0)] * 30 + [("b", 0.0)] * 10
  i = coverage.clustered(values, 1)
  # Both draws may be of one network; forty cells on their own would give 60 to 88.
  assert (i.estimate, i.low, i.high) == (75.0, 0.0, 100.0)
  text, image = {"E4M3 | static": 2.0, "E3M4 | static": 0.5}, {"E4M3 | static": 3.0,
                                                               "E3M4 | static": 0.7}  # fmt: skip
  cells = coverage.cells({"0.8M, seed 1": {"manual": text}, "cnn": {"seed 0": image}})
  advised = f"{coverage.ADVISED} | static"
  assert [(name, c[advised]) for name, _, c in cells] == [("0.8M", 2.0), ("cnn", 0.7)]


def test_front_has_what_nothing_cheaper_beats():
  grid = _script("2023_minifloats/grid.py")
  window = lambda kl: {"manual": {"windows": [[kl, 1, 1, 1, 1, 1]] * 4}}  # noqa: E731
  of = [("INT4", 0.06, 0.5), ("E2M1", 0.06, 0.3), ("INT6", 0.14, 0.4), ("INT8", 0.25, 0.1)]
  rows = [(name, "nearest", bops, bops, window(kl)) for name, bops, kl in of]
  assert grid.front(rows) == {("E2M1", "nearest"), ("INT8", "nearest")}
  assert grid.best(rows, ["INT4", "INT6"])[0] == "INT6"
