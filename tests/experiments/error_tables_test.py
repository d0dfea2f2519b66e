"""Committed error tables are those of the code, and say of the paper what the numbers say."""

import dataclasses
import importlib.util
import json
import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

from fp8jax.optim import storage
from fp8jax.optim.storage import Moments

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from experiments.moments import dynamics  # noqa: E402

# Columns that are no shares (experiments/lab/tensors.py).
AS_IT_IS = ("times", "bytes", "GiB", "dB", "k ")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def _script(path: str):
  spec = importlib.util.spec_from_file_location(path.replace("/", "_"), ROOT / path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_quartets_table_is_what_its_rules_give():
  """Arithmetic of two of the rules, by fewer samples."""
  script = _script("experiments/2025_quartet/error_table.py")
  kept = json.loads((ROOT / "experiments/2025_quartet/results.json").read_text())["results"]
  readme = (ROOT / "experiments/2025_quartet/README.md").read_text()
  for names in (("stochastic, amax", "floor times 4/3"), ("QuEST", "even")):
    quant = script.RULES[names]
    found = script.measure(quant, samples=2**18, seeds=2)
    for key, value in kept[", ".join(names)].items():
      # Standard deviation of a draw: 0.1 % of the error, 4e-4 of the misalignment.
      assert found[key] == pytest.approx(value, rel=0.01, abs=1.5e-3 * (key == "misalignment"))
    error = kept[", ".join(names)]["mse"]
    assert f"| {names[0]} | {names[1]} | {error:.3e} |" in readme
    paper = script.PAPER[names[0]][0]
    is_said = script.verdict(names[0], kept[", ".join(names)])[0] == "reproduced"
    assert is_said == (abs(error / paper - 1) <= 0.03)


@pytest.mark.parametrize(
  "folder", ["2025_fp4", "2025_halo", "2023_fp8_lm", "2024_trillion_token", "2024_coat"]
)
def test_a_table_of_real_tensors_is_that_of_its_results(folder):
  """Measured from weights that the suite has not: the page repeats results.json."""
  kept = json.loads((ROOT / f"experiments/{folder}/results.json").read_text())
  readme = (ROOT / f"experiments/{folder}/README.md").read_text()
  assert kept["provenance"]["commit"]
  for name, row in kept["results"].items():
    (line,) = [
      one for one in readme.splitlines() if one.startswith((f"| {name} |", f"| `{name}` |"))
    ]
    cells = [float(c) for c in line.split("|")[2 : 2 + len(row)]]
    scale = {"cosine": 100, "error": 1, "snr": 1}
    as_it_is = dict.fromkeys((k for k in row if k.startswith(AS_IT_IS)), 1)
    want = [v * (scale | as_it_is).get(k, 100) for k, v in row.items()]
    rounded = 0.06 if folder.startswith("2025") else 0  # to tenths; others to three digits
    assert cells == pytest.approx(want, rel=0.02, abs=rounded)


def test_adams_step_along_gradients_is_numpys(rng):
  """Of experiments/moments: moments between steps through ml_dtypes, a scale per layer."""
  kept = storage.moments("tensor_e5m2_e4m3")
  kept = Moments(kept.mu, dataclasses.replace(kept.nu, keeps_nonzero=False))
  draws = rng.standard_normal((3, 2, 8, 64)) * np.exp2(-rng.integers(0, 14, (3, 2, 8, 64)))
  draws = np.float32(draws)
  found = dynamics.on_gradients({"pair": kept}, ({"w": g} for g in draws), 0.95)["pair"]

  def stored(x, dtype):
    scale = np.abs(x).max((1, 2), keepdims=True) / float(ml_dtypes.finfo(dtype).max)
    return (x / scale).astype(dtype).astype(np.float64) * scale

  state, exact = [[np.zeros((2, 8, 64)) for _ in range(2)] for _ in range(2)]
  for t, g in enumerate(np.float64(draws), 1):
    steps = []
    for pair in (state, exact):
      pair[0], pair[1] = 0.9 * pair[0] + 0.1 * g, 0.95 * pair[1] + 0.05 * g * g
      steps.append(pair[0] / (1 - 0.9**t) / (np.sqrt(pair[1] / (1 - 0.95**t)) + 1e-8))
    state = [stored(state[0], ml_dtypes.float8_e5m2), stored(state[1], ml_dtypes.float8_e4m3fn)]
  off = np.linalg.norm(steps[0] - steps[1]) / np.linalg.norm(steps[1])
  assert found["error"] == pytest.approx(off, rel=1e-3) and off > 0.02
  assert found["zero"] == pytest.approx(np.mean(state[1] == 0), abs=1e-9) and found["zero"] > 0.02
  largest = np.abs(steps[0]).max() / np.abs(steps[1]).max()
  assert found["largest"] == pytest.approx(largest, rel=1e-3)
