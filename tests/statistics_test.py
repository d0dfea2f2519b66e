"""Oracles: closed forms, enumeration of every resample in float64, coverage in simulations."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fp8jax import statistics


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
  for n in range(1, 7):
    for correct in range(n + 1):
      verdicts = [True] * correct + [False] * (n - correct)
      for k in range(1, n + 1):
        subsets = list(itertools.combinations(verdicts, k))
        share = sum(map(any, subsets)) / len(subsets)
        assert statistics.pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-15)
  scores = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
  expected = [1 - math.comb(2, 2) / math.comb(4, 2), 0, 1]
  assert statistics.pass_at_k_of_items(scores, 2).tolist() == expected
  for n, correct, k in ((4, 1, 5), (4, 5, 1), (4, 1, 0)):
    with pytest.raises(ValueError, match="pass@"):
      statistics.pass_at_k(n, correct, k)
  with pytest.raises(ValueError, match="verdicts of 0 or 1"):
    statistics.pass_at_k_of_items(np.array([[0.5, 1]]), 1)


def test_wilson_ends_are_where_the_score_test_rejects():
  """Both ends solve (share - p)^2 = z^2 p (1 - p) / n."""
  for successes, n in ((0, 10), (3, 10), (10, 10), (181, 198)):
    found = statistics.wilson(successes, n)
    for p in (found.low, found.high):
      gap = (successes / n - p) ** 2 - 1.959963984540054**2 * p * (1 - p) / n
      assert abs(gap) < 1e-12
    assert found.low <= found.estimate == successes / n <= found.high
  assert statistics.wilson(8, 10).low == pytest.approx(0.4901625, abs=1e-6)  # a published value


def _all_means(values_RI: np.ndarray) -> np.ndarray:
  """The mean of every resample of rows and columns, each as often as it is drawn."""
  runs, items = values_RI.shape
  return np.array([
    values_RI[np.ix_(rows, columns)].mean()
    for rows in itertools.product(range(runs), repeat=runs)
    for columns in itertools.product(range(items), repeat=items)
  ])  # fmt: skip


def test_bootstraps_agree_with_the_enumeration_of_every_resample():
  rng = np.random.default_rng(0)
  scores_I = rng.uniform(size=6)
  found = statistics.bootstrap(scores_I, resamples=40_000)
  exact = np.quantile(_all_means(scores_I[None]), (0.025, 0.975))
  assert np.abs([found.low, found.high] - exact).max() < 0.005
  candidate, baseline = rng.uniform(size=(2, 3, 5))
  compared = statistics.compare(candidate, baseline, resamples=40_000)
  means = _all_means(100 * (candidate - baseline))
  assert compared.difference == pytest.approx(means.mean())
  exact = np.quantile(means, (0.025, 0.975))
  assert np.abs([compared.low, compared.high] - exact).max() < 1.5  # of 77 points, in steps of 1
  few = [statistics.compare(candidate, baseline, resamples=50, seed=seed) for seed in (0, 0, 1)]
  assert few[0] == few[1] != few[2]


def test_a_ratio_resamples_losses_with_their_tokens():
  rng = np.random.default_rng(7)
  tokens_I = np.array([1, 2, 9, 30, 4, 100.0])
  losses_I = tokens_I * rng.uniform(1, 3, 6)
  chosen = np.array(list(itertools.product(range(6), repeat=6)))
  exact = np.quantile(losses_I[chosen].sum(1) / tokens_I[chosen].sum(1), (0.025, 0.975))
  found = statistics.bootstrap(losses_I, tokens_I, resamples=40_000)
  assert found.estimate == pytest.approx(losses_I.sum() / tokens_I.sum())
  assert np.abs([found.low, found.high] - exact).max() < 0.02 * (exact[1] - exact[0])
  # One loss per token everywhere: the lengths alone vary, and the ratio does not.
  found = statistics.bootstrap(2.5 * tokens_I, tokens_I)
  assert (found.low, found.high) == pytest.approx((2.5, 2.5), abs=1e-12)
  # An item without tokens: the resamples that hold it alone have no ratio.
  found = statistics.bootstrap(np.array([0.0, 3.0]), np.array([0.0, 2.0]))
  assert (found.low, found.high) == (1.5, 1.5)
  for losses, tokens in (([], []), ([1.0], [0.0]), ([[1.0]], [[1.0]])):
    with pytest.raises(ValueError, match="of which the sum is positive"):
      statistics.bootstrap(np.array(losses), np.array(tokens))


@pytest.mark.parametrize(
  "low, high, verdict",
  ((-2.5, -0.5, "no verdict"), (-2.5, -2.0, "no verdict"), (-2.5, -2.01, "worse"),
   (-2.0, 1.0, "no verdict"), (-1.99, -0.5, "parity"), (-9.0, 9.0, "no verdict")),
)  # fmt: skip
def test_a_verdict_needs_the_interval_on_one_side_of_the_margin(low, high, verdict):
  found = statistics.Comparison(0.0, low, high, 2.0, 1, 10, None, (0.0,))
  assert found.verdict == verdict


@pytest.mark.parametrize("mean, half, expected", [
  (0.1, 0.1, "met"), (-0.1, 0.1, "met"), (0.6, 0.2, "missed"), (0.5, 0.25, "no verdict: too short"),
  (0.25, 0.5, "no verdict: too short"), (0.0, 0.25, "no verdict: too short"),
  (-0.3, 0.04, "no verdict: too short"), (0.1, math.inf, "no verdict: too short"),
])  # fmt: skip
def test_a_loss_meets_the_bar_with_its_whole_interval(mean, half, expected):
  assert statistics.Estimate(mean, mean - half, mean + half, (mean,)).verdict == expected


def test_an_interval_counts_items_and_not_their_samples():
  """Samples of an item that all agree add nothing: the interval is that of one sample."""
  rng = np.random.default_rng(1)
  verdicts = rng.random((40, 1)) < 0.4
  one = statistics.interval(verdicts)
  assert one.method == "wilson"
  many = statistics.interval(np.repeat(verdicts, 32, axis=1))
  assert many.method == "bootstrap" and many.estimate == one.estimate
  assert many.high - many.low == pytest.approx(one.high - one.low, rel=0.1)
  independent = statistics.interval(rng.random((40, 32)) < 0.4)
  assert independent.high - independent.low < 0.3 * (one.high - one.low)
  for share in (0, 1):  # where a bootstrap has no width
    found = statistics.interval(np.full((20, 4), share))
    assert found == statistics.wilson(20 * share, 20) and found.high - found.low > 0.1


def test_parity_needs_the_whole_interval_above_the_margin():
  rng = np.random.default_rng(2)
  baseline = (rng.random((3, 400)) < 0.7).astype(float)
  same = statistics.compare(baseline, baseline)
  assert (same.difference, same.verdict) == (0, "parity") and -1 < same.low == -same.high < 0
  flipped = baseline.copy()
  flipped[:, :40] = 0  # about 7 points lower on a tenth of the items
  worse = statistics.compare(flipped, baseline)
  assert worse.verdict == "worse" and -11 < worse.low < worse.high < -2
  noisy = (rng.random((3, 400)) < 0.7).astype(float)
  unclear = statistics.compare(noisy, baseline)
  assert unclear.low < -2 < unclear.high and unclear.verdict == "no verdict"
  assert unclear.items_needed > 400
  assert f"about {unclear.items_needed:,} items would be needed" in unclear.sentence
  assert statistics.compare(noisy, baseline, margin=20).verdict == "parity"
  with pytest.raises(ValueError, match="same \\(seeds, items\\)"):
    statistics.compare(baseline, baseline[:2])
  with pytest.raises(ValueError, match="margin"):
    statistics.compare(baseline, baseline, margin=0)


@pytest.mark.parametrize("items, sees", [(1, 97.5), (30, 11.57), (182, 2.0065), (183, 1.9956)])
def test_equal_answers_exclude_what_a_rare_loss_would_have_shown(items, sees):
  """scipy.stats.binomtest(0, items).proportion_ci(0.95).high, in points."""
  ones = np.ones((1, items))
  same = statistics.compare(ones, ones)
  assert (-same.low, same.high) == pytest.approx((sees, sees), rel=2e-4)
  assert same.verdict == ("parity" if items >= 183 else "no verdict")
  assert same.items_needed == 183
  # One item more or less, or a part of one, says no more.
  for change in (-1.0, -1 / 8, 1 / 64):
    one = ones.copy()
    one[0, 0] += change
    found = statistics.compare(one, ones, resamples=200)
    assert found.low <= found.difference - sees * 0.999 or found.low == -100
    low, high = found.difference - sees, found.difference + sees
    assert found.verdict == ("parity" if low > -2 else "worse" if high < -2 else "no verdict")
  # Questions that gain 3 points and lose 7 pass for equal no oftener than the interval says.
  rng, said = np.random.default_rng(0), 0
  for _ in range(200):
    drawn = rng.random((1, items))
    one, other = (drawn >= 0.07).astype(float), (drawn < 0.97).astype(float)
    said += statistics.compare(one, other, resamples=200).verdict == "parity"
  assert said <= 10


def test_no_number_of_items_makes_up_for_seeds_that_differ():
  rng = np.random.default_rng(3)
  baseline = np.full((3, 200), 0.5)
  candidate = baseline + np.array([[0.2], [0.0], [-0.2]]) + rng.normal(0, 0.01, (3, 200))
  found = statistics.compare(candidate, baseline)
  assert found.verdict == "no verdict" and found.items_needed is None
  assert "run more seeds" in found.sentence
  assert found.by_seed == pytest.approx([20, 0, -20], abs=0.5)


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say():
  """Shares drawn per item from a beta distribution around a known mean."""
  rng = np.random.default_rng(4)
  for items, samples, lowest in ((30, 1, 0.94), (30, 8, 0.91), (200, 8, 0.93)):
    hits = 0
    for trial in range(1000):
      share_I = rng.beta(2, 3, items)  # mean 0.4
      scores = rng.random((items, samples)) < share_I[:, None]
      found = statistics.interval(scores, resamples=1000, seed=trial)
      hits += found.low <= 0.4 <= found.high
    assert lowest <= hits / 1000 <= 0.98, (items, samples, hits / 1000)


@pytest.mark.slow
def test_parity_is_found_wrongly_in_at_most_one_of_forty():
  """An arm that is worse by exactly the margin: the lower end may exceed it in 2.5 %."""
  rng = np.random.default_rng(5)
  for seeds, of_seed in ((1, 0.0), (3, 0.0), (3, 0.02), (5, 0.02)):
    wrong = 0
    for trial in range(400):
      share_I = rng.beta(4, 2, 250)
      shift = rng.normal(-0.05, of_seed, (seeds, 1))
      arms = [rng.random((seeds, 250)) < np.clip(share_I + s, 0, 1) for s in (shift, 0)]
      true = 100 * float((np.clip(share_I - 0.05, 0, 1) - share_I).mean())
      found = statistics.compare(*arms, margin=-true, resamples=600, seed=trial)
      wrong += found.verdict == "parity"
    assert wrong / 400 <= 0.041, (seeds, of_seed, wrong / 400)  # 0.025 and two standard errors


@pytest.mark.slow
def test_items_needed_show_the_parity_of_equal_arms():
  rng = np.random.default_rng(6)
  pilot = [rng.random((3, 1000)) < 0.6 for _ in range(2)]
  needed = statistics.compare(*pilot, margin=5).items_needed
  verdicts = []
  for trial in range(200):
    arms = [rng.random((3, needed)) < 0.6 for _ in range(2)]
    verdicts.append(statistics.compare(*arms, margin=5, resamples=600, seed=trial).verdict)
  assert 0.72 <= verdicts.count("parity") / 200, verdicts.count("parity") / 200


def test_so_many_seeds_give_a_verdict_with_the_chance_that_is_said():
  """Against draws: the first n at which 80 % of intervals lie inside, and n - 1 at which not.

  Of one bound the chance is besides the noncentral t distribution's.
  """
  rng = np.random.default_rng(0)
  asked = ((0.05, 0.3, -0.25, 0.25), (0.8, 0.3, 0.25, math.inf), (-0.5, 0.3, -math.inf, 0.0),
           (2.0, 0.47, 0.0, math.inf), (0.0, 0.07, -0.25, 0.25))  # fmt: skip
  for mean, deviation, low, high in asked:
    n, share = statistics.seeds_needed(mean, deviation, low, high, count=3), []
    for seeds in (n - 1, n, n + 2):
      draws = rng.normal(mean, deviation, (20_000, seeds))
      half = stats.t.ppf(1 - 0.025 / 3, seeds - 1) * draws.std(1, ddof=1) / math.sqrt(seeds)
      inside = (draws.mean(1) - half > low) & (draws.mean(1) + half < high)
      share.append(float(inside.mean()))
    assert share[0] < 0.81 and share[1] > 0.79 and share[2] > share[1], (mean, n, share)
    distance = min(abs(mean - end) for end in (low, high)) / deviation
    chance = [stats.nct.sf(stats.t.ppf(1 - 0.025 / 3, k - 1), k - 1, distance * math.sqrt(k))
              for k in (n - 1, n)]  # fmt: skip
    assert chance[0] < 0.8 <= chance[1] or math.isfinite(high - low)
  assert statistics.seeds_needed(0.25, 0.3, -0.25, 0.25) is None  # it lies on the bound
  assert statistics.seeds_needed(0.0, 0.0, -0.25, 0.25) == 3
