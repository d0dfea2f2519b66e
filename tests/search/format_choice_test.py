"""A format per site: the knapsack against all assignments, options against whole recipes."""

import itertools

import harness
import numpy as np
import pytest
from scipy import stats

from fp8jax.errors import UserError
from fp8jax.recipe import rules as rules_lib
from fp8jax.search import cost, formats
from fp8jax.sensitivity import halves
from fp8jax.sensitivity.records import Records
from fp8jax.sensitivity.study import CHOOSE, ON, Study

FORMATS = ("e2m1_dynamic", "fp8_dynamic", "bf16")


@pytest.mark.parametrize("seed", range(4))
def test_knapsack_is_the_best_of_all_assignments(seed):
  rng = np.random.default_rng(seed)
  recipes = [rules_lib.recipe_by_name(name) for name in FORMATS]
  costs = cost.table(rng.integers(1, 9, 7).tolist(), recipes)
  losses = 1e-3 * np.exp(2 * rng.standard_normal((7, 3))) * [1, 0.1, 0]
  rows = np.arange(7)
  for budget in (0.0625, 0.1, 0.25, 0.6):
    every = [c for c in itertools.product(range(3), repeat=7)
             if costs[rows, list(c)].sum() <= budget * (1 + 1e-9)]  # fmt: skip
    best = min(every, key=lambda c: losses[rows, list(c)].sum())
    assert formats.knapsack(losses, costs, budget).tolist() == [*best]
  with pytest.raises(UserError, match="below 0.0625"):
    formats.knapsack(losses, costs, 0.06)


def test_rank_correlation_is_spearmans_and_covers_it():
  rng, hits = np.random.default_rng(0), 0
  for _ in range(20):  # of normal pairs with correlation 0.8, whose Spearman's rho is 0.786
    a, b = rng.multivariate_normal([0, 0], [[1, 0.8], [0.8, 1]], 60).T
    rho, low, high = formats.rank_correlation(a, np.exp(b))
    assert rho == pytest.approx(stats.spearmanr(a, b).statistic)
    hits += low < 0.786 < high
  assert hits >= 16


@pytest.mark.slow  # four programs of a small model
def test_an_option_of_a_site_is_the_site_in_its_recipe(tmp_path):
  changes = {
    "eval.batch": 2, "seq_len": 64, "model.init_std": 0.1, "sensitivity.tokens": 256,
    "data.heldout_fraction": 0.5, "model.num_layers": 2,
  }  # fmt: skip
  spec = harness.text_spec("e2m1_dynamic", job="sensitivity", **changes)
  params, batches = harness.init_params(spec.model), halves.read(spec)
  of = (params, spec.sites(), batches)
  other = Study(spec, *of, Records(tmp_path / "one.jsonl", {}))
  recipes = [rules_lib.recipe_by_name(name) for name in FORMATS]
  study = formats.FormatStudy(recipes, spec, *of, Records(tmp_path / "two.jsonl", {}))
  assert len(study.places) == 14
  for d, name in ((0, "layers/0/attn/q"), (13, "layers/1/mlp/down")):
    assert study.space.decisions[d] == name
    wanted = other.measure(name, {name: ON}, CHOOSE).kl.estimate
    assert study.alone(d, 0) == pytest.approx(wanted, rel=1e-3) and wanted > 1e-5
    assert study.alone(d, 1) < 0.2 * wanted
  scores, estimates = study.scores(), other.estimate()
  for d, name in enumerate(study.space.decisions):
    wanted = estimates[name]["both"]["kl"].sum() / study.tokens(CHOOSE).sum()
    assert scores[d, 0] == pytest.approx(wanted, rel=1e-5) and 0 < scores[d, 1] < 0.2 * wanted
  assert study.programs.measure._cache_size() == 1
  result = formats.choose(study, 0.125, spec.precision.phases[0].rules)
  arms = {arm["arm"]: arm for arm in result["budgets"][0]["arms"]}
  assert arms.keys() == {"gradient scores", "measured alone", *(f"all {name}" for name in FORMATS)}
  assert arms["all bf16"]["kl"][0] == pytest.approx(0, abs=1e-6)
  assert arms["gradient scores"]["bops"] <= 0.125 * (1 + 1e-9)
  assert arms["gradient scores"]["kl"][0] < arms["all e2m1_dynamic"]["kl"][0]
  assert study.programs.measure._cache_size() == 1
  assert result["spearman"]["e2m1_dynamic"][0] > 0.5 and len(formats.table(result)) == 10
