"""How runs fail: the share that diverges, spikes of the loss, and the loss by domain.

Tables that the ledger prints below the comparisons of a system (design.System.shows). The rules:

- A run has diverged if a loss is not finite or if its last loss, an exponential mean of decay 0.9,
  is above 1.1 times that of the BF16 run of the same seed and rate. A run that the queue marks as
  diverged, because a mean of 8 losses lies a nat above the first, counts as not finite.
  arXiv:2405.18710 gives no rule.
- A second rule asks no other run, and so can count BF16's too: a run got worse after its warm-up if
  its last loss is above the same mean at the end of its warm-up. To diverge is to lose what was
  learned; the loss of a run that is merely slow falls.
- Both were fixed after BF16's runs and before those of any mask. The rule before them asked for 1.1
  times the best BF16 run at the rate. Seeds alone spread by more than 10 %, and so 50, 10 and 30 %
  of BF16's own runs had diverged by it at the three rates, though none ran away. Runs of one seed
  share weights and batches.
- A spike is a stretch of steps whose losses lie above the median of the 50 losses before each by
  more than 5 times their median absolute deviation.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import design
import numpy as np
import results as results_lib
from scipy import stats

from fp8jax import statistics

DECAY, FACTOR = 0.9, 1.1
WINDOW, DEVIATIONS = 50, 5.0
Result = results_lib.Result
# {(group, seed, whether a twin): results}, the ledger's.
Index = Mapping[tuple[str, int, bool], Sequence[Result]]
# {(arm, rate or None): {seed: result}}, of one origin.
Found = dict[tuple[str, float | None], dict[int, Result]]


def found(system: design.System, index: Index) -> Found:
  """The system's results of the origin that has most of them; {} without any."""
  by_origin = collections.defaultdict(lambda: collections.defaultdict(dict))
  for arm in system.arms:
    for run in system.runs((arm,)):
      rate = dict(run.changes).get("optim.peak_lr") if system.rates else None
      for result in () if run.is_twin else index.get((run.group, run.seed, False), ()):
        by_origin[result.key][arm.name, rate][run.seed] = result
  size = {key: sum(map(len, of.values())) for key, of in by_origin.items()}
  return dict(by_origin[max(size, key=lambda key: (size[key], key))]) if size else {}


# --- divergence -----------------------------------------------------------------------------------


def last(losses: Sequence[float]) -> float:
  """The exponential mean at the end; infinite if a loss is not finite."""
  if not np.isfinite(losses).all():
    return math.inf
  mean = losses[0]
  for loss in losses[1:]:
    mean = DECAY * mean + (1 - DECAY) * loss
  return mean


@dataclasses.dataclass(frozen=True)
class Share:
  """Runs of an arm at a rate that have a run of the first arm with their seed, rate and data.

  Attributes:
    rate: None where the system has one.
    diverged: share of them, with Wilson's interval.
    worse: share that got worse after the warm-up.
    median: of last losses.
  """

  arm: str
  rate: float | None
  runs: int
  diverged: statistics.Interval
  worse: statistics.Interval
  median: float


def shares(system: design.System, of: Found) -> list[Share]:
  """Of every arm and rate that has runs beside runs of the first arm, the baseline."""
  made = []
  for (arm, rate), by_seed in of.items():
    base = of.get((system.arms[0].name, rate), {})
    pairs = [(r, base[s]) for s, r in by_seed.items() if s in base and base[s].data == r.data]
    if pairs:
      counts = sum(has_diverged(*pair) for pair in pairs), sum(is_worse(r) for r, _ in pairs)
      wilson = (statistics.wilson(k, len(pairs)) for k in counts)
      median = float(np.median([_last(r) for r, _ in pairs]))
      made.append(Share(arm, rate, len(pairs), *wilson, median))
  return made


def count(system: design.System, share: Share) -> str:
  """ "20" runs, or "7 of 20" that were planned."""
  planned = system.fixed_seeds
  return str(share.runs) if share.runs == planned else f"{share.runs} of {planned}"


def has_diverged(result: Result, base: Result) -> bool:
  """Whether a run has diverged beside the baseline's run of its seed and rate."""
  return (end := _last(result)) == math.inf or end > FACTOR * _last(base)


def is_worse(result: Result) -> bool:
  """Whether a run's last loss is above that at the end of its warm-up, or not finite."""
  return (end := _last(result)) == math.inf or end > last(result.losses[: max(result.warmup, 1)])


def _last(result: Result) -> float:
  return math.inf if result.status == "diverged" else last(result.losses)


# --- spikes ---------------------------------------------------------------------------------------


def spikes(losses: Sequence[float]) -> list[int]:
  """Indices at which a spike begins; of the first WINDOW losses none does.

  A loss that is not finite lies above every threshold, and makes none.
  """
  values = np.nan_to_num(np.asarray(losses, np.float64), nan=np.inf)
  if len(values) <= WINDOW:
    return []
  before = np.lib.stride_tricks.sliding_window_view(values[:-1], WINDOW)
  with np.errstate(all="ignore"):  # infinities
    middle = np.median(before, -1)
    spread = np.median(np.abs(before - middle[:, None]), -1)
    is_above = values[WINDOW:] > middle + DEVIATIONS * spread
  is_above |= np.isinf(values[WINDOW:])
  begins = is_above & ~np.concatenate([[False], is_above[:-1]])
  return (np.flatnonzero(begins) + WINDOW).tolist()


def poisson(count: int) -> tuple[float, float]:
  """The exact interval of a mean count (Garwood 1936), at 95 %."""
  tail = (1 - statistics.CONFIDENCE) / 2
  low = stats.chi2.ppf(tail, 2 * count) / 2 if count else 0.0
  return float(low), float(stats.chi2.ppf(1 - tail, 2 * count + 2) / 2)


# --- tables ---------------------------------------------------------------------------------------


def divergence_table(system: design.System, of: Found) -> list[str]:
  head = ["arm", "rate", "runs", "diverged", "95 %", "got worse after the warm-up", "95 %",
          "last loss, median"]  # fmt: skip
  rows = []
  for s in shares(system, of):
    median = f"{s.median:.3f}" if math.isfinite(s.median) else "∞"
    both = *_share(s.diverged), *_share(s.worse)
    rows.append([s.arm, f"{s.rate:g}" if s.rate else "-", count(system, s), *both, median])
  return _table(
    "Share of runs that diverge, with Wilson's interval: a loss is not finite, or the last loss is "
    f"above {FACTOR:g} times that of {system.arms[0].name} with the same seed", head, rows
  )  # fmt: skip


def _share(of: statistics.Interval) -> tuple[str, str]:
  return f"{100 * of.estimate:.0f} %", f"[{100 * of.low:.0f}, {100 * of.high:.0f}]"


def spikes_table(system: design.System, of: Found) -> list[str]:
  base, rows = system.arms[0].name, []
  for (arm, rate), by_seed in of.items():
    steps = sum(max(len(r.losses) - WINDOW, 0) for r in by_seed.values())
    begins = {seed: spikes(r.losses) for seed, r in by_seed.items()}
    count = sum(map(len, begins.values()))
    others = {s: set(spikes(r.losses)) for s, r in of.get((base, rate), {}).items()}
    shared = (
      "-" if arm == base else sum(len(others.get(s, set()) & {*b}) for s, b in begins.items())
    )
    low, high = (1000 * x / max(steps, 1) for x in poisson(count))
    per = f"{1000 * count / max(steps, 1):.2f}"
    rows.append([arm, len(by_seed), f"{steps:,}", count, per, f"[{low:.2f}, {high:.2f}]", shared])
  head = ["arm", "seeds", "steps", "spikes", "per 1,000 steps", "95 %, Poisson",
          f"at a step where {base} has one"]  # fmt: skip
  return _table(
    f"Spikes: losses above the median of the {WINDOW} before by more than {DEVIATIONS:g} median "
    "absolute deviations", head, rows
  )  # fmt: skip


def domains_table(system: design.System, of: Found) -> list[str]:
  """Held-out losses by source, in the arm's own precision, against the first arm's."""
  base = system.arms[0].name
  rows = []
  for (arm, rate), by_seed in of.items():
    other = of.get((base, rate), {})
    pairs = [(r, other[s]) for s, r in by_seed.items() if s in other and other[s].heldout]
    if arm == base or not pairs:
      continue
    for source in pairs[0][1].heldout:
      ends = [[_own(r.heldout.get(source, {})) for r in pair] for pair in pairs]
      changes = [100 * (mine / its - 1) for mine, its in ends]
      e = statistics.estimate(changes, len(pairs[0][1].heldout))
      interval = f"[{e.low:+.2f}, {e.high:+.2f}]" if len(pairs) > 1 else "-"
      losses = [f"{np.mean(x):.4f}" for x in zip(*ends, strict=True)]
      rows.append([arm, source, len(pairs), *losses[::-1], f"{e.mean:+.2f}", interval])
  head = ["arm", "domain", "seeds", base, "arm", "effect, %", "interval, %"]
  return _table("Held-out loss by domain, nats per token", head, rows)


def _own(by_precision: Mapping[str, float]) -> float:
  return by_precision.get("own", by_precision.get("bf16", math.inf))


def _table(title: str, head: list[str], rows: list[list]) -> list[str]:
  """Lines of Markdown; [] without a row."""
  lines = [f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows]]
  return ["", f"{title}:", "", *lines] if rows else []


TABLES = {"divergence": divergence_table, "spikes": spikes_table, "domains": domains_table}


def tables(system: design.System, index) -> list[str]:
  """Lines of the tables that the system shows."""
  of = found(system, index) if system.shows else {}
  return [line for name in system.shows for line in TABLES[name](system, of)]
