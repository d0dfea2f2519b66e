"""The trend of a metric over evaluations: which of them are worse, or no improvement."""

import dataclasses
import math
from fractions import Fraction

from fp8jax.phases.policy import LowerRate, Policy, is_accuracy


@dataclasses.dataclass(frozen=True)
class Trend:
  """The evaluations of a policy's metric, as far as it remembers them.

  Attributes:
    best: the least cost so far, a loss or minus an accuracy; None before the first.
    failed: successive evaluations, up to the last one, that were worse or no improvement.
    good: step of the last evaluation that was not; -1 before.
    cooldown: evaluations to come that do not count.
  """

  best: float | None = None
  failed: int = 0
  good: int = -1
  cooldown: int = 0

  def after(self, policy: Policy, step: int, cost: float) -> tuple["Trend", bool]:
    """(the trend with another evaluation, whether the policy acts after it).

    Accuracies are compared as the fractions that they are: at a bound, rounding would decide.
    """
    exact = _as_fraction if is_accuracy(policy.metric) else float
    best, value = math.inf if self.best is None else exact(self.best), exact(cost)
    if isinstance(policy, LowerRate):  # optax.contrib.reduce_on_plateau's rule
      share = exact(policy.rtol) * abs(best) if self.best is not None else 0.0
      better = value < best - share - exact(policy.atol)
      is_good, rest, known = better, policy.cooldown, cost if better else self.best
    else:
      is_good, rest = value <= best + exact(policy.worse_by), 0
      known = cost if self.best is None else min(self.best, cost)
      known = known if known < math.inf else None  # min ignores a NaN
    failed = 0 if is_good or self.cooldown else self.failed + 1
    acts = failed >= policy.patience
    good = step if is_good else self.good
    rest = rest if acts else max(self.cooldown - 1, 0)
    return Trend(known, 0 if acts else failed, good, rest), acts


def _as_fraction(share: float) -> Fraction | float:
  """The fraction that was rounded to this number, of a denominator up to ten million."""
  return Fraction(share).limit_denominator(10**7) if math.isfinite(share) else share
