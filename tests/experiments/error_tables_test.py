"""Committed error tables are those of the code, and say of the paper what the numbers say."""

import importlib.util
import itertools
import json
import pathlib

import numpy as np
import pytest

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


@pytest.mark.parametrize("folder", ["2025_fp4", "2025_halo"])
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
    want = [v * scale.get(k, 100) for k, v in row.items()]
    assert cells == pytest.approx(want, rel=0.02, abs=0.06)


def _kept(folder: str):
  """(results of a folder, its page)."""
  path = ROOT / "experiments" / folder
  kept = json.loads((path / "results.json").read_text())
  assert kept["provenance"]["commit"]
  return kept["results"], (path / "README.md").read_text()


def test_sharpness_is_the_largest_loss_of_all_corners_of_the_box():
  """The loss is convex in the logits, so that its maximum over a box lies in a corner."""
  script = _script("experiments/2024_fp8_and_back/sharpness.py")
  rng = np.random.default_rng(0)
  for eps, scale in ((1e-3, 3.0), (0.2, 1.0)):
    z, t = scale * rng.standard_normal((5, 7)), rng.integers(0, 7, 5)
    for row, target, found in zip(z, t, script.sharpness(z, t, eps), strict=True):
      losses = [
        np.log(np.exp(corner).sum()) - corner[target]
        for signs in itertools.product((-1, 1), repeat=7)
        for corner in [row + eps * (np.abs(row) + 1) * signs]
      ]
      own = np.log(np.exp(row).sum()) - row[target]
      assert found == pytest.approx(100 * (max(losses) - own) / (1 + own), rel=1e-9)
  results, readme = _kept("2024_fp8_and_back")
  assert script.table(results) in readme


def test_an_update_on_a_logarithmic_grid_errs_as_the_theorem_bounds_it():
  """Bounds hold, the multiplicative one without a weight in it; means are those of draws."""
  script = _script("experiments/2021_lns_madam/update_error.py")
  rng = np.random.default_rng(0)
  for gamma, rate in itertools.product((8, 32, 2048), (1e-4, 0.01, 0.3)):
    w, g = rng.standard_normal(500) * 2.0 ** rng.uniform(-9, 3, 500), rng.standard_normal(500)
    w = np.sign(w) * 2.0 ** (np.rint(gamma * np.log2(np.abs(w))) / gamma)
    exact = {
      "additive": np.log2(np.abs(w - rate * g)),
      "multiplicative": np.log2(np.abs(w * 2.0 ** (-rate * g * np.sign(w)))),
      "sign, multiplicative": np.log2(np.abs(w * 2.0 ** (-rate * np.sign(g) * np.sign(w)))),
    }
    bounds = {
      "additive": np.sqrt(500) / gamma * np.linalg.norm(exact["additive"]),
      "multiplicative": np.sqrt(500) * rate / gamma * np.linalg.norm(g),
      "sign, multiplicative": 500 * rate / gamma,
    }
    for kind in script.UPDATES:
      u = script.updated(kind, w, g, rate)
      assert np.abs(u - exact[kind]).max() < 1e-12
      drawn = np.floor(gamma * u + rng.random((1000, 500))) / gamma  # stochastic rounding
      squares = np.sum((drawn - u) ** 2, -1)
      mean = script.mean_error(u, gamma)
      assert abs(squares.mean() - mean) < 5 * squares.std() / np.sqrt(1000) + 1e-15
      assert script.bound(kind, w, g, rate, gamma) == pytest.approx(bounds[kind])
      # Fractions of whole numbers are those of 2^-40 in float64.
      assert mean <= bounds[kind] + 500 * 2.0**-40 / gamma**2
      # Weights 2^9 times as large: the error of a multiplicative update does not see it.
      moved = script.mean_error(script.updated(kind, 512 * w, g, rate), gamma)
      if kind != "additive":
        assert moved == pytest.approx(mean, rel=1e-6)
      elif gamma == 8 and rate < 0.3:  # of its small steps, not of fractions all over
        assert moved < 0.5 * mean


def test_the_page_of_lns_madam_is_that_of_its_results():
  script = _script("experiments/2021_lns_madam/update_error.py")
  results, readme = _kept("2021_lns_madam")
  assert script.tables(results) in readme
  for name in ("10, multiplicative, 2^-7", "16, additive, 0.08 / ln 2"):
    bits, kind, rate = name.split(", ")
    again = script.measure(int(bits), kind, script.RATES[rate])
    assert again == pytest.approx(results["updates"][name], rel=1e-9)
  for name, picojoules in results["energy"].items():
    assert script.energy(name) == pytest.approx(picojoules)
