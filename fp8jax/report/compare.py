"""Runs beside each other: paired differences of loss, loss by learning rate, cost of equal loss.

Runs are paired with those of the baseline that have the same seed, the same data and the same
other settings: the two then read the same batches, and their difference is the recipe's. Losses
are paired by batch, since roll-backs leave some out. R is a seed, S is a step.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fp8jax.errors import UserError
from fp8jax.report import arms, files
from fp8jax.report.arms import Member, has_diverged, smoothed
from fp8jax.report.files import UNQUANTIZED, RunFiles
from fp8jax.statistics import Estimate, estimate


@dataclasses.dataclass(frozen=True)
class Row:
  """A quantity of an arm relative to the baseline, in percent.

  Attributes:
    together: the estimate whose interval holds with 95 % together with those of all other rows.
  """

  arm: str
  setting: str
  quantity: str
  estimate: Estimate
  together: Estimate


@dataclasses.dataclass(frozen=True)
class EqualLoss:
  """The cost of the baseline's final training loss, as multiples of the baseline's own cost.

  Attributes:
    target: the baseline's smoothed loss at the last step that both have, nats per token (per pair
      of rl.pairs), the mean over seeds.
    tokens, seconds: mean multiples over the seeds that reach it; None where none does, or no time
      was logged.
    reached, seeds: how many seeds reach it, of how many.
  """

  arm: str
  setting: str
  target: float
  tokens: float | None
  seconds: float | None
  reached: int
  seeds: int


@dataclasses.dataclass(frozen=True)
class Difference:
  """The paired difference of the smoothed training loss along a run, in percent.

  Attributes:
    tokens: float64 [S], seen so far.
    mean, low, high: float64 [S], over seeds: the mean, the smallest and the largest.
    window: steps of the running mean.
  """

  arm: str
  setting: str
  tokens: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray
  window: int
  seeds: int


@dataclasses.dataclass(frozen=True)
class Comparison:
  """All that the pictures and tables of a comparison show.

  Attributes:
    config: {key: {run: value}} of keys in which the runs differ.
    notes: what was left out, and why.
  """

  baseline: str
  members: tuple[Member, ...]
  rows: tuple[Row, ...]
  differences: tuple[Difference, ...]
  equal_loss: tuple[EqualLoss, ...]
  config: Mapping[str, Mapping[str, Any]]
  notes: tuple[str, ...]


def compare(folders: Sequence[str], baseline: str = UNQUANTIZED) -> Comparison:
  """Compares the runs in these folders, finished or not.

  Args:
    folders: of at least two runs.
    baseline: an arm: the recipe of most sites, see RunFiles.recipe, or the text that the table of
      runs gives for it. "" is `bf16`, and without a run of it the arm of the first run.

  Raises:
    UserError: fewer than two runs, a folder that is no run's, or no run of the baseline.
  """
  if len(folders) < 2:
    raise UserError("a comparison needs at least two runs: --job=compare runs/A runs/B")
  runs = [files.read(folder) for folder in folders]
  notes: list[str] = []
  runs = _with_losses(runs, notes)
  config = arms.differing(runs)
  for r in runs:
    lost = int((~np.isfinite(r.curves["loss"].values)).sum())
    if lost and not has_diverged(r):
      notes.append(f"{r.name}: {lost} steps without a finite loss, left out")
  members = arms.once(arms.members(runs, config, baseline), notes)
  known = sorted({m.arm for m in members})
  if not baseline and members:
    baseline = UNQUANTIZED if UNQUANTIZED in known else members[0].arm
  if baseline not in known:
    one_of = ", ".join(known)
    raise UserError(f"no run is of the baseline {baseline!r}; --baseline= one of {one_of}")
  pairs: dict[tuple[str, str], list[tuple[Member, Member]]] = {}
  base = [m for m in members if m.arm == baseline]
  for m in members:
    if m.arm == baseline:
      continue
    other, why = arms.partner(m, base, baseline)
    if other is None:
      notes.append(f"{m.run.name}: {why}, not compared")
    elif has_diverged(other.run):
      notes.append(f"{m.run.name}: {other.run.name} diverged, not compared")
    elif m.seed in [mine.seed for mine, _ in pairs.get((m.arm, m.setting), [])]:
      notes.append(f"{m.run.name}: another run of its arm, settings and seed is compared")
    else:
      pairs.setdefault((m.arm, m.setting), []).append((m, other))
  values, differences, equal = [], [], []
  for (arm, setting), arm_pairs in sorted(pairs.items()):
    arm_pairs.sort(key=lambda pair: pair[0].seed)
    values += [(arm, setting, quantity, v) for quantity, v in _quantities(arm_pairs).items()]
    differences += [d for d in [_difference(arm, setting, arm_pairs)] if d is not None]
    equal.append(_equal_loss(arm, setting, arm_pairs))
  rows = [Row(a, s, q, estimate(v), estimate(v, len(values))) for a, s, q, v in values]
  return Comparison(
    baseline, tuple(members), tuple(rows), tuple(differences), tuple(equal), config, tuple(notes)
  )


def _with_losses(runs: Sequence[RunFiles], notes: list[str]) -> list[RunFiles]:
  """The runs whose losses are of data that others may have, too; of the rest a note says why not.

  Raises:
    UserError: every run learned from its own completions.
  """
  notes += [
    f"{r.name}: {'diverged at its first step' if r.nonfinite else 'no training step yet'}, left out"
    for r in runs if "loss" not in r.curves
  ]  # fmt: skip
  trained = [r for r in runs if "loss" in r.curves]
  drawn = [r for r in trained if "rl/reward" in r.curves]
  why = "learned from completions of its own, whose losses are no other run's"
  remedy = "--job=report WORKDIR shows rewards and accuracies"
  if drawn and len(drawn) == len(trained):
    raise UserError(f"{drawn[0].name} {why}, as every other run here; {remedy}")
  notes += [f"{r.name}: {why}, left out; {remedy}" for r in drawn]
  return [r for r in trained if "rl/reward" not in r.curves]


# --- quantities ----------------------------------------------------------------------------------


def _quantities(pairs: Sequence[tuple[Member, Member]]) -> dict[str, list[float]]:
  """{quantity: its values by seed}: training, and held out what rounding and training did."""
  values: dict[str, list[float]] = {}
  for mine, base in pairs:
    late = 3 * _common(mine.run, base.run)[0][-1:].sum() // 4  # the last step of three quarters
    values.setdefault("training", []).append(training(mine.run, base.run))
    values.setdefault("training, last quarter", []).append(training(mine.run, base.run, late))
    ours, theirs = _last_heldout(mine.run, base.run)
    for source in dict.fromkeys(source for source, _ in ours):
      own = next((v for (s, p), v in ours.items() if s == source and p != UNQUANTIZED), None)
      plain, other = (losses.get((source, UNQUANTIZED)) for losses in (ours, theirs))
      of = {"served": (own, other), "rounding": (own, plain), "weights": (plain, other)}
      for quantity, (value, reference) in of.items():
        if value is not None and reference is not None:
          # An evaluation from before a divergence says nothing of the run.
          percent = math.inf if has_diverged(mine.run) else _percent(value, reference)
          values.setdefault(f"{quantity}, {source}", []).append(percent)
  return values


def _percent(value: float, base: float) -> float:
  return 100 * (value / base - 1) if base and math.isfinite(value) else math.inf


def training(run: RunFiles, base: RunFiles, after: int = 0) -> float:
  """Mean percentage by which the training loss exceeds the baseline's after the warm-up.

  Infinite where the run diverged.

  Args:
    after: a later step, up to which losses do not count either.
  """
  if has_diverged(run):
    return math.inf
  of_run, of_base = _paired(run, base, after)
  return float(np.mean(100 * (of_run / of_base - 1))) if of_run.size else math.nan


def _paired(run: RunFiles, base: RunFiles, after: int) -> tuple[np.ndarray, np.ndarray]:
  """Losses of the steps that both have, after the warm-up where they reach that far."""
  steps, i, j = _common(run, base)
  late = steps > max(run.resolved.get("optim.warmup_steps", 0), after)
  late = late if late.any() else steps > after
  return run.curves["loss"].values[i][late], base.curves["loss"].values[j][late]


def _common(run: RunFiles, base: RunFiles):
  """(batches of which both have a finite loss, their places in the one, in the other).

  A batch has the number of the step that takes it where none is left out.
  """
  both = run.curves["loss"].values, base.curves["loss"].values
  batches, i, j = np.intersect1d(_batches(run), _batches(base), return_indices=True)
  kept = np.isfinite(both[0][i]) & np.isfinite(both[1][j])
  return batches[kept], i[kept], j[kept]


def _batches(run: RunFiles) -> np.ndarray:
  """The batch of every step with a loss: roll-backs leave some out."""
  steps, skipped = run.curves["loss"].steps, run.curves.get("batches_skipped")
  if skipped is None:
    return steps
  at = np.searchsorted(skipped.steps, steps, "right")
  return steps + np.append(0, skipped.values)[at].astype(steps.dtype)


def _last_heldout(*runs: RunFiles) -> list[dict[tuple[str, str], float]]:
  """{(source, precision): loss} of each run at the last step at which all were evaluated."""
  steps = set.intersection(*({h.step for h in run.heldout if h.step} for run in runs))
  last = max(steps, default=0)
  return [
    {(h.source, h.precision): h.loss for h in run.heldout if h.step == last and last}
    for run in runs
  ]


def _difference(arm, setting, pairs: Sequence[tuple[Member, Member]]) -> Difference | None:
  """Differences of the steps that every seed has."""
  common = [_common(mine.run, base.run) for mine, base in pairs]
  steps = np.array(sorted(set.intersection(*(set(c[0].tolist()) for c in common))), np.int64)
  window = max(1, min(arms.WINDOW, len(steps) // arms.WINDOW_SHARE))
  if not len(steps):
    return None
  by_seed = []
  for (mine, base), (both, i, j) in zip(pairs, common):
    at = np.isin(both, steps)
    kernel = np.ones(window) / window
    ours, theirs = (
      np.convolve(m.run.curves["loss"].values[k][at], kernel, "valid")
      for m, k in ((mine, i), (base, j))
    )
    by_seed.append(100 * (ours / theirs - 1))
  values_RS = np.array(by_seed)
  tokens = steps[window - 1 :] * float(pairs[0][0].run.tokens_per_step)
  return Difference(
    arm, setting, tokens, values_RS.mean(0), values_RS.min(0), values_RS.max(0), window, len(pairs)
  )


def _equal_loss(arm, setting, pairs: Sequence[tuple[Member, Member]]) -> EqualLoss:
  tokens, seconds, targets, reached = [], [], [], 0
  for mine, base in pairs:
    steps, means = smoothed(base.run)
    # A run may be shorter than its baseline: the loss that this has at the shorter one's end.
    target = float(means[max(0, np.searchsorted(steps, mine.run.step, "right") - 1)])
    targets.append(target)
    ours, theirs = cost(mine.run, target), cost(base.run, target)
    if ours is None or theirs is None or has_diverged(mine.run):
      continue
    reached += 1
    if theirs[0]:  # 0 where config.json does not say how many a step has
      tokens.append(ours[0] / theirs[0])
    if ours[1] is not None and theirs[1]:
      seconds.append(ours[1] / theirs[1])
  mean = lambda values: float(np.mean(values)) if values else None  # noqa: E731
  return EqualLoss(
    arm, setting, float(np.mean(targets)), mean(tokens), mean(seconds), reached, len(pairs)
  )


def cost(run: RunFiles, target: float) -> tuple[float, float | None] | None:
  """(tokens, seconds of training) until the smoothed loss is at most `target`; None if never.

  Seconds are the steps' own, without compilation, evaluation and checkpoints; None where no time
  was logged.
  """
  steps, means = smoothed(run)
  below = np.flatnonzero(means <= target)
  if not below.size:
    return None
  step = int(steps[below[0]])
  times = run.curves.get("step_seconds")
  seconds = None
  if times is not None and np.isfinite(times.values).any():
    # Steps without a time (the first ones) take the mean.
    seconds = step * float(np.nanmean(times.values[times.steps <= step])) if (
      times.steps <= step).any() else None  # fmt: skip
  return step * float(run.tokens_per_step), seconds
