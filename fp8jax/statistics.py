"""Statistics: avg@n, pass@k, losses over seeds, their intervals, and verdicts on two arms.

R is a run of an arm (a training seed); I is an item (a question); J is a sample, one of the n
outputs of an item. Scores are shares from 0 to 1; margins and printed differences are points, 100
of which are 1. Samples of one item resemble each other, so that the item is the unit of all
resampling. Every interval is two-sided and covers 95 %.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
_QUANTILE = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
RESAMPLES = 10_000
# Percent of the baseline's loss, DeepSeek-V3 (arXiv:2412.19437, section 3.3).
BAR = 0.25
TOO_SHORT = "no verdict: too short"
# FP8 may lose so many points against BF16 and still be at parity with it.
MARGIN = 2.0
# Chance with which `items_needed` items would show the parity of two arms that are equal.
POWER = 0.8
# Numbers of a block of resamples, 32 MB in float64.
_BLOCK = 4_000_000


@dataclasses.dataclass(frozen=True)
class Interval:
  """An estimate with its confidence interval.

  Attributes:
    estimate, low, high: shares from 0 to 1, or differences of shares.
    method: "wilson", or "bootstrap" over items.
  """

  estimate: float
  low: float
  high: float
  method: str


def pass_at_k(n: int, correct: int, k: int) -> float:
  """The chance that k of n samples, drawn without replacement, hold a correct one.

  The unbiased estimator 1 - C(n - c, k) / C(n, k) of pass@k (Chen et al. 2021, arXiv:2107.03374,
  section 2.1), in exact integers.

  Args:
    n: samples of the item.
    correct: how many of them are correct (c).
    k: samples that a user would look at.

  Raises:
    ValueError: k is not within 1 and n, or correct not within 0 and n.
  """
  if not 1 <= k <= n or not 0 <= correct <= n:
    raise ValueError(f"pass@{k} of {correct} correct among {n}: expected 1 <= k <= n >= correct")
  return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def pass_at_k_of_items(scores_IJ: np.ndarray, k: int) -> np.ndarray:
  """pass@k of every item, (items,), from verdicts of 0 or 1.

  Raises:
    ValueError: a score is partial: "a correct sample" has no meaning then.
  """
  scores_IJ = _matrix(scores_IJ)
  if not np.isin(scores_IJ, (0, 1)).all():
    raise ValueError("pass@k needs verdicts of 0 or 1, and some scores lie between")
  n = scores_IJ.shape[1]
  return np.array([pass_at_k(n, round(correct), k) for correct in scores_IJ.sum(1)])


def wilson(successes: float, n: int) -> Interval:
  """Wilson's score interval of a share (Wilson 1927), which never leaves [0, 1].

  Args:
    successes: of n independent trials.
  """
  z, p = _QUANTILE, successes / n
  center = (p + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  # At 0 and n the ends are exactly 0 and 1; rounding may leave them an ulp inside.
  low = center - half if successes > 0 else 0.0
  return Interval(p, low, center + half if successes < n else 1.0, "wilson")


def bootstrap(
  scores_I: np.ndarray, weights_I: np.ndarray | None = None, resamples: int = RESAMPLES,
  seed: int = 0, count: int = 1,
) -> Interval:  # fmt: skip
  """The percentile bootstrap of sum(scores) / sum(weights) over items (Efron 1979).

  Args:
    scores_I: one number per item: the mean of its samples, its pass@k, its sum of losses.
    weights_I: of every item, its tokens, say; None: the mean over items.
    seed: of the resampling; the same seed gives the same interval.
    count: of intervals that are to hold together (Bonferroni).

  Raises:
    ValueError: no item, other shapes, or weights whose sum is not positive.
  """
  weights = np.ones_like(scores_I, np.float64) if weights_I is None else weights_I
  pairs = np.stack([np.asarray(x, np.float64) for x in (scores_I, weights)])
  if pairs.ndim != 2 or not pairs.size or not pairs[1].sum() > 0:
    raise ValueError(
      f"items of shape {pairs.shape[1:]} with denominators that sum to {pairs[1].sum()}; expected "
      "(items,) of which the sum is positive"
    )
  rng, items, ratios = np.random.default_rng(seed), pairs.shape[1], []
  for size in _blocks(resamples, items):
    chosen = rng.integers(0, items, (size, items))
    if weights_I is None:
      ratios.append(pairs[0][chosen].mean(1))
    else:
      sums = pairs[:, chosen].sum(-1)
      ratios.append(sums[0] / np.where(sums[1] > 0, sums[1], np.nan))
  ratios = np.concatenate(ratios)
  low, high = _quantiles(ratios[np.isfinite(ratios)], count)
  return Interval(float(pairs[0].sum() / pairs[1].sum()), low, high, "bootstrap")


def of_items(scores_I: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
  """The interval of a mean over items: the bootstrap, Wilson's where that would have no width."""
  if np.ptp(scores_I) == 0:
    return wilson(float(scores_I.sum()), len(scores_I))
  return bootstrap(scores_I, resamples=resamples, seed=seed)


def interval(scores_IJ: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
  """The interval of avg@n, the mean over the n samples of every item.

  Wilson's for one verdict per item; otherwise that of items, which counts the samples of an item
  once.
  """
  scores_IJ = _matrix(scores_IJ)
  if scores_IJ.shape[1] == 1 and np.isin(scores_IJ, (0, 1)).all():
    return wilson(float(scores_IJ.sum()), len(scores_IJ))
  return of_items(scores_IJ.mean(1), resamples, seed)


# --- comparisons ---------------------------------------------------------------------------------


def verdict(low: float, high: float, bar: float, words: Sequence[str], both: bool = False) -> str:
  """The word for an interval of a loss: within the bar, beyond it, or neither.

  Args:
    low, high: ends of the interval of how much worse a candidate is.
    words: for these three cases.
    both: whether a gain of more than the bar is not within it either.
  """
  if high < bar and (not both or low > -bar):
    return words[0]
  return words[1] if low > bar else words[2]


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean over seeds with Student's interval, in percent of the baseline's loss.

  Attributes:
    mean: of the seeds' values; infinite where a run diverged.
    low, high: ends of the two-sided interval; infinite with one seed.
  """

  mean: float
  low: float
  high: float
  by_seed: tuple[float, ...]

  @property
  def verdict(self) -> str:
    """Where the interval lies: "met", "missed", or that the runs are too few or too short."""
    if not all(map(math.isfinite, self.by_seed)):
      return "missed: diverged"
    return verdict(self.low, self.high, BAR, ("met", "missed", TOO_SHORT), both=True)


def estimate(values: Sequence[float], count: int = 1) -> Estimate:
  """The mean over seeds and Student's two-sided interval; a single value has an infinite one.

  Args:
    values: by seed.
    count: of intervals that hold together with 95 % (Bonferroni).
  """
  by_seed = tuple(map(float, values))
  mean = float(np.mean(by_seed))
  if len(by_seed) < 2 or not math.isfinite(mean):
    return Estimate(mean, -math.inf, math.inf, by_seed)
  from scipy import stats

  tail = (1 - CONFIDENCE) / 2 / count
  half = float(stats.t.ppf(1 - tail, len(by_seed) - 1) * stats.sem(by_seed))
  return Estimate(mean, mean - half, mean + half, by_seed)


def seeds_needed(
  mean: float, deviation: float, low: float, high: float, count: int = 1, most: int = 1000
) -> int | None:
  """Seeds with which `estimate`'s interval lies between two bounds, with a chance of POWER.

  The interval's own deviation is that of its seeds: the chance is the mean over 1,000 quantiles of
  it, the noncentral t distribution's to 1e-6 where one bound is infinite.

  Args:
    mean, deviation: of the paired differences of seeds, which are normal.
    low, high: the bounds; infinite where there is none.
    count: of intervals that hold together.
    most: None: more would be needed than so many, at least 3.
  """
  from scipy import stats

  shares = (np.arange(1000) + 0.5) / 1000
  for n in range(3, most + 1):
    error = max(deviation / math.sqrt(n), 1e-100)
    half = np.sqrt(stats.chi2.ppf(shares, n - 1) / (n - 1)) * error
    half *= stats.t.ppf(1 - (1 - CONFIDENCE) / 2 / count, n - 1)
    ends = (stats.norm.cdf((x - mean) / error) for x in (high - half, low + half))
    if np.maximum(np.subtract(*ends), 0).mean() >= POWER:
      return n
  return None


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The paired difference of two arms, candidate - baseline, in points.

  Attributes:
    difference: its mean over seeds and items.
    low, high: ends of the two-sided 95 % interval.
    margin: in points, fixed before the runs.
    seeds, items: how many of each.
    items_needed: items with which two equal arms would be shown to be at parity with a chance of
      80 %, with as many seeds and differences that vary as these do; None where the seeds differ so
      much that no number of items would do.
    by_seed: the difference of every seed.
  """

  difference: float
  low: float
  high: float
  margin: float
  seeds: int
  items: int
  items_needed: int | None
  by_seed: tuple[float, ...]

  @property
  def verdict(self) -> str:
    """ "parity", "worse" (the whole interval lies below -margin) or "no verdict"."""
    return verdict(-self.high, -self.low, self.margin, ("parity", "worse", "no verdict"))

  @property
  def sentence(self) -> str:
    """The verdict, and where there is none the items that would be needed."""
    if self.verdict != "no verdict":
      return self.verdict
    if self.items_needed is None:
      return "no verdict: the seeds differ too much for any number of items; run more seeds"
    if self.items_needed <= self.items:
      return f"no verdict: {self.items} items would show equal arms; the difference is in doubt"
    return f"no verdict: about {self.items_needed:,} items would be needed, there are {self.items}"


# Items that differ, below which a bootstrap says little.
_FEW = 5


def compare(
  candidate_RI: np.ndarray,
  baseline_RI: np.ndarray,
  margin: float = MARGIN,
  resamples: int = RESAMPLES,
  seed: int = 0,
  count: int = 1,
) -> Comparison:
  """Non-inferiority of a candidate, paired by seed and item.

  A two-level bootstrap of the mean difference: seeds and items are drawn with replacement, each on
  its own (Owen 2007, "The pigeonhole bootstrap"). It counts the noise of a single (seed, item)
  about three times, and so is cautious, unless the seeds differ by more than that noise explains:
  three seeds are few, and `by_seed` shows them. With one seed the items alone are drawn, and the
  verdict is about two runs instead of two recipes. Where fewer than five items differ, draws cannot
  tell the rest from a rare loss. The interval then holds what Clopper and Pearson (1934) leave
  unseen among so many items: 183 equal answers show parity within 2 points, 30 within 11.6.

  Args:
    candidate_RI, baseline_RI: scores from 0 to 1, the mean over an item's samples; row r of both
      is the same seed and column i the same item.
    margin: points that the candidate may lose; fixed beforehand.
    count: of comparisons whose intervals are to hold together (Bonferroni).

  Raises:
    ValueError: the shapes differ or are empty, or the margin is not positive.
  """
  candidate_RI, baseline_RI = (np.asarray(x, np.float64) for x in (candidate_RI, baseline_RI))
  if candidate_RI.shape != baseline_RI.shape or candidate_RI.ndim != 2 or not candidate_RI.size:
    raise ValueError(
      f"scores of {candidate_RI.shape} and {baseline_RI.shape}; expected the same (seeds, items)"
    )
  if margin <= 0:
    raise ValueError(f"a margin of {margin} points; expected a positive number")
  difference_RI = 100 * (candidate_RI - baseline_RI)
  items_needed, mean = _items_needed(difference_RI, margin), float(difference_RI.mean())
  low, high = _quantiles(_two_level(difference_RI, resamples, seed), count)
  if np.count_nonzero(np.any(difference_RI, 0)) < _FEW:
    tail = (1 - CONFIDENCE) / 2 / count
    rare = 100 * (1 - tail ** (1 / difference_RI.shape[1]))
    low, high = max(min(low, mean - rare), -100.0), min(max(high, mean + rare), 100.0)
    least = math.ceil(math.log(tail) / math.log1p(-min(margin, 99.9) / 100))
    items_needed = max(items_needed or 0, least)
  return Comparison(
    difference=mean,
    low=low,
    high=high,
    margin=margin,
    seeds=difference_RI.shape[0],
    items=difference_RI.shape[1],
    items_needed=items_needed,
    by_seed=tuple(map(float, difference_RI.mean(1))),
  )


def _two_level(difference_RI: np.ndarray, resamples: int, seed: int) -> np.ndarray:
  """Means of `difference_RI` with both of its axes drawn with replacement."""
  runs, items = difference_RI.shape
  rng = np.random.default_rng(seed)
  means = []
  for size in _blocks(resamples, runs * items):
    by_item = difference_RI[rng.integers(0, runs, (size, runs))].mean(1)
    chosen = rng.integers(0, items, (size, items))
    means.append(np.take_along_axis(by_item, chosen, 1).mean(1))
  return np.concatenate(means)


def _items_needed(difference_RI: np.ndarray, margin: float) -> int | None:
  """See Comparison. The variance of the mean is a part of seeds plus a part per item.

  The parts are those of a two-way table without replication (analysis of variance), with the
  interval of the bootstrap above, which counts the part per (seed, item) three times.
  """
  runs, items = difference_RI.shape
  if items < 2:
    return None
  residual = difference_RI - difference_RI.mean(1, keepdims=True)
  of_item = float(residual.mean(0).var(ddof=1))  # items, and the noise of a cell over `runs`
  cell = of_seed = 0.0
  if runs > 1:
    residual -= residual.mean(0)
    cell = float((residual**2).sum() / ((runs - 1) * (items - 1)))
    of_seed = max(float(difference_RI.mean(1).var(ddof=1)) - cell / items, 0.0)
  z = _QUANTILE + statistics.NormalDist().inv_cdf(POWER)
  room = (margin / z) ** 2 - of_seed / runs
  return math.ceil((of_item + 2 * cell / runs) / room) if room > 0 else None


def _matrix(scores_IJ: np.ndarray) -> np.ndarray:
  scores_IJ = np.asarray(scores_IJ, np.float64)
  if scores_IJ.ndim != 2 or not scores_IJ.size:
    raise ValueError(f"scores of shape {scores_IJ.shape}; expected (items, samples)")
  return scores_IJ


def _quantiles(values: np.ndarray, count: int = 1) -> tuple[float, float]:
  tail = (1 - CONFIDENCE) / 2 / count
  low, high = np.quantile(values, (tail, 1 - tail))
  return float(low), float(high)


def _blocks(total: int, width: int) -> list[int]:
  """Sizes that add up to `total`, so that a block of (size, width) stays within memory."""
  size = max(_BLOCK // width, 1)
  return [min(size, total - start) for start in range(0, total, size)]
