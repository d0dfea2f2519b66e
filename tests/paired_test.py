"""The statistics of experiments/2025_infir2/paired.py: intervals, verdicts, and the pairing."""

import importlib.util
import math
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def paired():
  path = ROOT / "experiments/2025_infir2/paired.py"
  spec = importlib.util.spec_from_file_location("paired", path)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(path.parent))
    spec.loader.exec_module(module)
  return module


def _run(recipe, seed, train, own, bf16, fingerprint="same"):
  return {
    "recipe": recipe,
    "seed": seed,
    "train": train,
    "heldout_after": {"docs": {recipe: own, "bf16": bf16}},
    "data_fingerprint": fingerprint,
  }


def test_interval_is_students(paired):
  # Student's 97.5 % quantile with two degrees of freedom is 4.30265.
  mean, half = paired.interval([1.0, 2.0, 3.0])
  assert mean == 2.0 and half == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
  assert paired.interval([1.0])[1] == math.inf
  # Of five intervals each has 99 %: the 99.5 % quantile is 9.92484.
  assert paired.interval([1.0, 2.0, 3.0], 5)[1] == pytest.approx(9.92484 / math.sqrt(3), rel=1e-5)


@pytest.mark.parametrize(
  "mean, half, expected",
  [
    (0.1, 0.1, "met"),
    (-0.1, 0.1, "met"),
    (0.6, 0.2, "missed"),
    (0.2, 0.1, "no verdict: too short"),
    (0.3, 0.1, "no verdict: too short"),
    (-0.3, 0.2, "no verdict: too short"),
    (0.1, math.inf, "no verdict: too short"),
  ],
)
def test_verdict_needs_the_whole_interval(paired, mean, half, expected):
  assert paired.verdict(mean, half) == expected


def test_differences_pair_seeds_and_keep_forward_passes_apart(paired):
  design = paired.Design("any", (0, 1, 2), 3)
  warm_up = [9.0] * design.warmup  # must not count
  runs = {}
  for seed, factor in ((0, 1.01), (1, 1.03)):
    base = [2.0, 4.0 + seed]
    runs["bf16", seed] = _run("bf16", seed, [1.0] * design.warmup + base, 2.0, 2.0)
    train = warm_up + [factor * loss for loss in base]
    runs["block_128", seed] = _run("block_128", seed, train, 2.04 * 1.05, 2.04)
  runs["block_128", 2] = _run("block_128", 2, warm_up, 1.0, 1.0)  # has no baseline yet
  found = paired.differences(design, runs, "block_128")
  assert found["training"] == pytest.approx([1.0, 3.0])
  # Four steps of training and a warm-up of three: the last quarter is the last step.
  assert found["training, last quarter"] == pytest.approx([1.0, 3.0])
  assert found["served, docs"] == pytest.approx([7.1, 7.1])
  assert found["rounding, docs"] == pytest.approx([5.0, 5.0])
  assert found["weights, docs"] == pytest.approx([2.0, 2.0])


def test_other_data_are_refused(paired):
  runs = {
    ("bf16", 0): _run("bf16", 0, [1.0] * 9, 1.0, 1.0),
    ("block_128", 0): _run("block_128", 0, [1.0] * 9, 1.0, 1.0, "other"),
  }
  with pytest.raises(ValueError, match="read different data with seed 0"):
    paired.differences(paired.Design("any", (0,), 3), runs, "block_128")
