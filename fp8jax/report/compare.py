"""Runs beside each other: paired differences of loss, loss by learning rate, cost of equal loss.

Runs are paired with those of the baseline that have the same seed, the same data and the same
other settings: the two then read the same batches, and their difference is the recipe's. R is a
seed, S is a step.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fp8jax.config import policy as policy_config
from fp8jax.config import registry
from fp8jax.errors import UserError
from fp8jax.keys import Affects
from fp8jax.phases import policy as policy_lib
from fp8jax.report import files
from fp8jax.report.files import UNQUANTIZED, RunFiles
from fp8jax.statistics import Estimate, estimate

# A smoothed loss is the mean of so many steps, and of no more than this share of a run.
WINDOW, _WINDOW_SHARE = 32, 8
# A run of which none of so many last steps has a finite loss has diverged.
_LAST_STEPS = 8


# Sections of keys that say how a program runs.
_PLACE = ("memory.", "kernels.", "mesh.", "sharding.")


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
    target: the baseline's smoothed loss at the last step that both have, nats per token, the mean
      over seeds.
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
class Member:
  """A run and its part in the comparison."""

  run: RunFiles
  arm: str
  setting: str
  seed: int

  @property
  def final_loss(self) -> float:
    """Last held-out loss in the run's own precision, mean over sources; else smoothed training.

    Infinite where the run diverged. The evaluation before the first step is none of training.
    """
    if has_diverged(self.run):
      return math.inf
    trained = [h for h in self.run.heldout if h.step]
    held = [h for h in trained if h.precision != UNQUANTIZED] or trained
    if held:
      last = max(h.step for h in held)
      return float(np.mean([h.loss for h in held if h.step == last]))
    return float(smoothed(self.run)[1][-1])


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
  notes = [
    f"{r.name}: {'diverged at its first step' if r.nonfinite else 'no training step yet'}, left out"
    for r in runs if "loss" not in r.curves
  ]  # fmt: skip
  runs = [r for r in runs if "loss" in r.curves]
  config = _differing(runs)
  for r in runs:
    lost = int((~np.isfinite(r.curves["loss"].values)).sum())
    if lost and not has_diverged(r):
      notes.append(f"{r.name}: {lost} steps without a finite loss, left out")
  members = _once(_members(runs, config), notes)
  arms = sorted({m.arm for m in members})
  if not baseline and members:
    baseline = UNQUANTIZED if UNQUANTIZED in arms else members[0].arm
  if baseline not in arms:
    raise UserError(f"no run is of the baseline {baseline!r}; --baseline= one of {', '.join(arms)}")
  pairs: dict[tuple[str, str], list[tuple[Member, Member]]] = {}
  base = {(m.setting, m.seed): m for m in members if m.arm == baseline}
  for m in members:
    other = base.get((m.setting, m.seed))
    if m.arm == baseline:
      continue
    if other is None:
      notes.append(f"{m.run.name}: no run of {baseline} with its seed and settings, not compared")
    elif has_diverged(other.run):
      notes.append(f"{m.run.name}: {other.run.name} diverged, not compared")
    elif len({r.provenance.get("data_fingerprint") for r in (m.run, other.run)}) > 1:
      notes.append(f"{m.run.name}: other data than {other.run.name}, not compared")
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


def _differing(runs: Sequence[RunFiles]) -> dict[str, dict[str, Any]]:
  """{key: {run's name: value}} where the resolved configurations differ."""
  keys = sorted(set().union(*(r.resolved for r in runs)))
  values = {k: {r.workdir: r.resolved.get(k) for r in runs} for k in keys}
  return {
    k: v
    for k, v in values.items()
    if any(x != y for x, y in zip(list(v.values()), list(v.values())[1:]))
  }


def _members(runs: Sequence[RunFiles], config: Mapping[str, Mapping[str, Any]]) -> list[Member]:
  """Arms by recipe, told apart further where another key that alters results differs within one.

  How a program runs may differ between arms: kernels of a recipe are its own. Where it differs for
  one seed of an arm, it is a setting.
  """
  read = set().union(*map(_keys_read, runs))
  varied = [
    k for k in config
    if k != "seed" and (registry.affects(k) is not Affects.NOTHING or k in read)
  ]  # fmt: skip
  of_place = [k for k in varied if k.startswith(_PLACE)]
  alters = [k for k in of_place if registry.affects(k, [*config[k].values()]) is Affects.RESULT]
  apart = [k for k in varied if k.startswith("precision.") or k in alters]
  settings = [k for k in varied if k not in (*of_place, *apart)]
  alike: dict[tuple[str, str, int], list[RunFiles]] = {}
  for m in (_member(run, runs, apart, settings) for run in runs):
    alike.setdefault((m.arm, m.setting, m.seed), []).append(m.run)
  within = [k for k in of_place if any(k in _differing(of) for of in alike.values())]
  return [_member(run, runs, apart, [*settings, *within]) for run in runs]


def _member(run: RunFiles, runs: Sequence[RunFiles], apart, settings: Sequence[str]) -> Member:
  same = [r for r in runs if r.recipe == run.recipe]
  details = [k for k in apart if any(r.resolved.get(k) != run.resolved.get(k) for r in same)]
  arm = " ".join([run.recipe, *_said(run, details)])
  return Member(run, arm, ", ".join(_said(run, settings)), int(run.resolved.get("seed", 0)))


def _once(members: Sequence[Member], notes: list[str]) -> list[Member]:
  """The members without a second run of an arm, setting and seed, which is no second sample."""
  first: dict[tuple[str, str, int], Member] = {}
  for m in members:
    one = first.setdefault((m.arm, m.setting, m.seed), m)
    if one is not m:
      notes.append(f"{m.run.workdir}: as {one.run.workdir} in arm, settings and seed, left out")
  return [*first.values()]


def _keys_read(run: RunFiles) -> set[str]:
  """Keys that alter a result because the run's policies decide by them."""
  try:
    return policy_lib.keys_read(policy_config.read(run.resolved.get("precision.policy", ())))
  except ValueError as e:
    raise UserError(f"{run.name}: {e}; leave the run out") from e


def _said(run: RunFiles, keys: Sequence[str]) -> list[str]:
  """["peak_lr=0.001", ...]"""
  return [f"{k.rpartition('.')[2]}={run.resolved.get(k)}" for k in keys]


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


def has_diverged(run: RunFiles) -> bool:
  """Whether a run stopped at a loss or gradient that is not finite, or ran on without any.

  A step whose update was skipped or undone is not divergence: the run went on.
  """
  loss = run.curves["loss"].values
  if not np.isfinite(loss[-_LAST_STEPS:]).any():
    return True
  return run.nonfinite is not None and run.summary is None and run.nonfinite["step"] > run.step


def _paired(run: RunFiles, base: RunFiles, after: int) -> tuple[np.ndarray, np.ndarray]:
  """Losses of the steps that both have, after the warm-up where they reach that far."""
  steps, i, j = _common(run, base)
  late = steps > max(run.resolved.get("optim.warmup_steps", 0), after)
  late = late if late.any() else steps > after
  return run.curves["loss"].values[i][late], base.curves["loss"].values[j][late]


def _common(run: RunFiles, base: RunFiles):
  """(steps at which both have a finite loss, their places in the one, in the other)."""
  both = run.curves["loss"], base.curves["loss"]
  steps, i, j = np.intersect1d(both[0].steps, both[1].steps, return_indices=True)
  kept = np.isfinite(both[0].values[i]) & np.isfinite(both[1].values[j])
  return steps[kept], i[kept], j[kept]


def _last_heldout(*runs: RunFiles) -> list[dict[tuple[str, str], float]]:
  """{(source, precision): loss} of each run at the last step at which all were evaluated."""
  steps = set.intersection(*({h.step for h in run.heldout if h.step} for run in runs))
  last = max(steps, default=0)
  return [
    {(h.source, h.precision): h.loss for h in run.heldout if h.step == last and last}
    for run in runs
  ]


def smoothed(run: RunFiles) -> tuple[np.ndarray, np.ndarray]:
  """(steps, running mean of the training loss over WINDOW steps, or fewer, that end there)."""
  c = run.curves["loss"]
  kept = np.isfinite(c.values) if np.isfinite(c.values).any() else np.full(len(c.steps), True)
  steps, values = c.steps[kept], c.values[kept]
  window = max(1, min(WINDOW, len(steps) // _WINDOW_SHARE))
  return steps[window - 1 :], np.convolve(values, np.ones(window) / window, "valid")


def _difference(arm, setting, pairs: Sequence[tuple[Member, Member]]) -> Difference | None:
  """Differences of the steps that every seed has."""
  common = [_common(mine.run, base.run) for mine, base in pairs]
  steps = np.array(sorted(set.intersection(*(set(c[0].tolist()) for c in common))), np.int64)
  window = max(1, min(WINDOW, len(steps) // _WINDOW_SHARE))
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
