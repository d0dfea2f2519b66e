"""Committed error tables are those of the code, and say of the paper what the numbers say."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import re
import sys

import ml_dtypes
import numpy as np
import oracle
import pytest

from fp8jax.ops import site as site_lib
from fp8jax.ops.dots import dot
from fp8jax.optim import storage
from fp8jax.optim.storage import Moments

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from experiments.lab import tensors  # noqa: E402
from experiments.moments import dynamics  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]


@functools.cache
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


def test_three_parts_of_mxfp4s_error_add_up_to_it_exactly():
  """Blocks whose parts are known by hand, and normal ones: powers of two from the oracle."""
  split = _script("experiments/2025_quartet/error_table.py").split
  x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
  # Own scales 7/6, of which the power of two is 1 and saturates the largest, and 1 itself.
  x[0] = 0
  x[0, :4], x[0, 32:36] = (7, 0.26, 1.3, -0.6), (6, 0.2, 1.4, -2.6)
  data, scale = oracle.quantize(x, "e2m1", (1, 32), "floor")
  y = data.astype(np.float32) * scale
  parts = split(x, y)
  error = np.float64(y) - np.float64(x)
  np.testing.assert_array_equal(parts["scale"] + parts["dead zone"] + parts["grid"], error)
  t = np.float64(np.float32(7) * np.float32(1 / 6))
  z = np.array([6 * t, 0, t, -0.5 * t])
  np.testing.assert_array_equal(parts["scale"][0, :4], [6 - 6 * t, 0.5, 1.5 - t, 0.5 * t - 0.5])
  np.testing.assert_array_equal(parts["dead zone"][0, :4], [0, -np.float64(x[0, 1]), 0, 0])
  np.testing.assert_array_equal(parts["grid"][0, :4], np.where(z == 0, 0, z - x[0, :4]))
  np.testing.assert_array_equal(parts["scale"][0, 32:], 0)
  own = np.repeat(np.abs(x.reshape(-1, 32)).max(1) / 6, 32).reshape(x.shape)
  is_dead = parts["dead zone"] != 0
  assert (
    np.all(np.abs(x[is_dead]) <= own[is_dead] * (0.25 + 1e-6)) and not parts["grid"][is_dead].any()
  )
  assert np.all(np.abs(parts["grid"]) <= own * (1 + 1e-6))
  # Along x the parts add up, too: to what the table says of the nearest.
  kept = json.loads((ROOT / "experiments/2025_quartet/results.json").read_text())["results"]
  for rule in ("floor", "round up"):
    whole, of = kept[f"nearest, amax, {rule}"], kept[f"split, {rule}"]
    assert of["all"] == pytest.approx(whole["mse"], rel=0.01)
    along = sum(of[f"{part} along x"] for part in parts)
    assert along == pytest.approx(-whole["misalignment"], rel=0.02)


@pytest.mark.parametrize("which", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1))])
def test_a_factor_between_nvfp4s_roundings_is_what_they_give(which):
  """Four or six against nearest, and MS-EDEN against stochastic rounding, by fewer samples."""
  script = _script("experiments/2025_nvfp4/error_table.py")
  kept = json.loads((ROOT / "experiments/2025_nvfp4/results.json").read_text())["results"]
  names = script.FACTORS[which]
  found = [script.normal(script.ROUNDINGS[name], samples=2**15, draws=4) for name in names]
  for name, of in zip(names, found, strict=True):
    # Standard deviations of a draw: 1.1 % of the error, 8e-4 of the length.
    assert of[:, 0].mean() == pytest.approx(kept[name]["normal"], rel=0.02)
    assert of[:, 2].mean() == pytest.approx(kept[name]["length"], abs=2e-3)
    assert of[:, 1].mean() == pytest.approx(kept[name]["bias"], rel=0.02, abs=3e-4)
  said = kept[f"{names[0]} against {names[1]}, N(0, 1)"]
  assert script.factor(*(of[:, 0] for of in found))["factor"] == pytest.approx(
    said["factor"], rel=0.02
  )
  assert said["low"] < said["factor"] < said["high"]


TO_THREE_DIGITS = ("2023_fp8_lm", "2024_trillion_token", "2024_coat")


@pytest.mark.parametrize(
  "folder", ["2025_fp4", "2025_halo", "2025_nvfp4", "2026_fp4_copies", *TO_THREE_DIGITS]
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
    # Percent, but for what has a unit of its own.
    plain = re.compile("(error|snr|factor|low|high)$|bytes|declared|temporaries|times|GiB|dB|k ")
    want = [v * (1 if plain.match(k) else 100) for k, v in row.items()]
    rounded = 0 if folder in TO_THREE_DIGITS else 0.06  # others to tenths
    assert cells == pytest.approx(want, rel=0.02, abs=rounded)


def test_bytes_of_fp4_copies_at_7bs_shape_are_those_of_the_compiled_programs():
  table = _script("experiments/2026_fp4_copies/error_table.py").of_7b()
  assert "| 7B, mxfp4 | 63776" in table
  assert table in (ROOT / "experiments/2026_fp4_copies/README.md").read_text()


def test_logfmts_table_is_that_of_its_results():
  kept = json.loads((ROOT / "experiments/2024_deepseek_v3/results.json").read_text())["logfmt"]
  readme = (ROOT / "experiments/2024_deepseek_v3/README.md").read_text().splitlines()
  assert kept["provenance"]["commit"] and len(kept["results"]) == 12
  for name in dict.fromkeys(key.split()[0] for key in kept["results"]):
    (line,) = [one for one in readme if one.startswith(f"| `{name}` |")]
    want = [100 * v for t in "xg" for v in kept["results"][f"{name} {t}"].values()]
    assert [float(c) for c in line.split("|")[2:-1]] == pytest.approx(want, rel=0.01, abs=1e-9)


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
  assert not any(script.run_of(recipe).is_twin for recipe in ("bf16", "mask_e8m3"))


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


def _madams_loss(bits: int) -> float:
  """Mean over seeds 0 and 1 of a result file's losses after its warm-up."""
  name = f"0p8m-python_docs-bf16-optimizer=madam-peak_lr=0.08-master_format=lns{bits}-512steps"
  folder, means = ROOT / "experiments/lab/results", []
  for seed in (0, 1):
    (path,) = folder.rglob(f"{name}-seed{seed}.json")
    kept = json.loads(path.read_text())
    means.append(np.mean(kept["losses"][kept["warmup"] :]))
  return float(np.mean(means))


def test_the_page_of_lns_madam_is_that_of_its_results_and_of_the_labs():
  script = _script("experiments/2021_lns_madam/update_error.py")
  results, readme = _kept("2021_lns_madam")
  assert script.tables(results) in readme
  for name in ("10, multiplicative, 2^-7", "16, additive, 0.08 / ln 2"):
    bits, kind, rate = name.split(", ")
    again = script.measure(int(bits), kind, script.RATES[rate])
    assert again == pytest.approx(results["updates"][name], rel=1e-9)
  for name, picojoules in results["energy"].items():
    assert script.energy(name) == pytest.approx(picojoules)
  # Losses are those of the lab's committed results today, not of the day of the script.
  for name, found in script.trainings().items():
    assert results[name] == found, f"{name}: run experiments/2021_lns_madam/update_error.py again"
  (bits,) = (line for line in readme.splitlines() if line.startswith("| Madam | "))
  for n, cell in zip((16, 14, 12, 10), bits.split(" | ")[1:], strict=True):
    assert float(cell.strip(" |")) == pytest.approx(_madams_loss(n), abs=5.1e-4)
  rows = json.loads((ROOT / "experiments/ledger.json").read_text())
  for row in (row for row in rows if row["system"] == "2021_lns_madam"):
    said = f"| {row['candidate']} against {row['baseline']} | {len(row['seeds'])} | "
    assert f"{said}{row['effect']:+.2f} | [{row['low']:+.2f}, {row['high']:+.2f}] | " in readme


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
      assert [min(of.values()), max(of.values())] == pytest.approx(ends, rel=0.02)


def test_watched_operands_are_those_of_the_product(rng):
  """lab/tensors.py stands between a backward pass and its product: NumPy says what comes by."""
  x, w, g = (np.float32(rng.integers(-4, 5, shape)) for shape in ((16, 32), (32, 64), (16, 64)))
  site = dataclasses.replace(site_lib.single("bf16"), name="layers/a")
  seen, dw = tensors.watched(lambda w: (dot("BD,DF->BF", x, w, site) * g).sum(), w, 16)
  for found, expected in zip(seen["layers/a"][0], (x, w, g), strict=True):
    np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(dw, x.T @ g)


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
