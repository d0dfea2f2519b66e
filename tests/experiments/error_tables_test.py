"""Committed error tables are those of the code, and say of the paper what the numbers say."""

import importlib.util
import json
import pathlib

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


_SPAN = (0.5, 5.0)


def test_the_table_of_deviations_is_that_of_its_results():
  kept = json.loads((ROOT / "experiments/2025_munit/results.json").read_text())["results"]
  readme = (ROOT / "experiments/2025_munit/README.md").read_text()
  for name, row in kept.items():
    spans = [f"{row[f'{k}_min']:.2g} to {row[f'{k}_max']:.2g}" for k in ("x", "w", "g", "dw")]
    shares = [f"{100 * row[f'flushed_{a}']:.1f}, {100 * row[f'error_{b}']:.1f}"
              for a, b in (("float16", "float16"), ("e5m2", "fp8"))]  # fmt: skip
    assert f"| {' | '.join([name, *spans, *shares])} |" in readme


@pytest.mark.slow  # two models forward and backward
def test_unit_scaling_gives_every_tensor_deviation_near_1_and_a_plain_model_does_not():
  script = _script("experiments/2025_munit/error_table.py")
  kept = json.loads((ROOT / "experiments/2025_munit/results.json").read_text())["results"]
  for arm, is_unit in (("unit scaling", True), ("plain", False)):
    found, shares, _ = script.deviations(arm)
    every = [value for of in found.values() for value in of.values()]
    assert (_SPAN[0] < min(every) and max(every) < _SPAN[1]) == is_unit
    assert max(every) / min(every) < 10 or not is_unit
    assert (shares["e5m2"] < 1e-3) == is_unit
    for kind, of in found.items():
      ends = [kept[arm][f"{kind}_min"], kept[arm][f"{kind}_max"]]
      assert [min(of.values()), max(of.values())] == pytest.approx(ends, rel=0.05)
