"""Fewer points than a run has, said with the picture: means of steps in a row, chosen snapshots."""

import dataclasses
import math

import numpy as np

from fp8jax.report.files import Curve, Snapshots

# Points of a curve, and snapshots of a heat map; cells of a heat map and counts by exponent, of all
# its snapshots together. A report of 100 snapshots at 30 layers stays below 5 MB.
MAX_POINTS, MAX_SNAPSHOTS = 400, 100
MAX_CELLS, MAX_COUNTS = 40_000, 240_000
# Significant digits of numbers in a report; metrics.jsonl has all of them.
DIGITS = 3


@dataclasses.dataclass(frozen=True)
class Thinned:
  """Means of consecutive steps, with the smallest and the largest of each.

  Attributes:
    steps: the last step of each group.
    mean, low, high: of its finite values; NaN where there is none.
    per_point: how many steps a point stands for.
  """

  steps: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray
  per_point: int


def curve(c: Curve, most: int = MAX_POINTS) -> Thinned:
  """At most `most` points of a curve; the last group may be smaller."""
  n = len(c.steps)
  size = max(1, math.ceil(n / most))
  starts = range(0, n, size)
  parts = [c.values[i : i + size] for i in starts]
  parts = [part[np.isfinite(part)] for part in parts]
  steps = np.array([c.steps[min(i + size, n) - 1] for i in starts], np.int64)

  def of(fn):
    return np.array([fn(part) if part.size else math.nan for part in parts])

  return Thinned(steps, of(np.mean), of(np.min), of(np.max), size)


def lasts(n: int, most: int = MAX_POINTS) -> range:
  """Of n points at most `most`: the last of each group of as many."""
  size = max(1, math.ceil(n / most))
  return range(size - 1, n, size)


def chosen(snapshots: Snapshots) -> np.ndarray:
  """Indices of snapshots with at most MAX_CELLS cells, see `spread`."""
  return spread(len(snapshots.steps), MAX_CELLS // max(len(snapshots.cells), 1))


def spread(n: int, most: int) -> np.ndarray:
  """Indices of at most `most` of n snapshots, and MAX_SNAPSHOTS: evenly, with both ends."""
  most = min(max(most, 2), MAX_SNAPSHOTS)
  if n <= most:
    return np.arange(n)
  return np.unique(np.linspace(0, n - 1, most).round().astype(int))


def number(value: float, digits: int = DIGITS) -> float | int | None:
  """A number with few digits for JSON, None where it is not finite."""
  if not math.isfinite(value):
    return None
  rounded = float(f"{value:.{digits}g}")
  return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e6 else rounded
