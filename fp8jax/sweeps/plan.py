"""The trials of a sweep in the order in which they are started: all known, or suggested."""

import collections
import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from fp8jax import keys
from fp8jax.errors import UserError, one_line
from fp8jax.sweeps import spec
from fp8jax.sweeps.outcome import Outcome
from fp8jax.sweeps.spec import Sweep, Trial


class Listed:
  """Trials that are known beforehand: hands them out, and takes their outcomes."""

  def __init__(self, trials: list[Trial]):
    self._waiting = collections.deque(trials)

  def take(self) -> Trial | None:
    """The next trial, None where there is none now."""
    return self._waiting.popleft() if self._waiting else None

  def give(self, trial: Trial, outcome: Outcome):
    """Nothing depends on it."""


class Suggested:
  """Points that Optuna suggests; the objective of one is the mean over its seeds.

  The study is a journal in the sweep's folder: a sweep that goes on asks for the points that it
  has not told of, and suggests new ones with what all others gave.
  """

  def __init__(self, sweep: Sweep, search: spec.Optuna, folder: str):
    import optuna  # pyright: ignore  (extra `sweep`)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Also when it reads its journal; `_expand` makes tuples again.
    warnings.filterwarnings("ignore", "Choices for a categorical distribution")
    self._states = optuna.trial.TrialState
    self._sweep, self._search, self._folder = sweep, search, folder
    import optuna.storages.journal as journal  # pyright: ignore

    self._distributions: dict[str, Any] = {
      k: _distribution(d) for k, d in search.distributions.items()
    }
    self._points = sweep.points()
    self._path = f"{folder}/optuna.journal"
    with self._reading():
      if os.path.exists(self._path) and open(self._path, "rb").read()[-1:] not in (b"", b"\n"):
        raise ValueError("its last line is cut")  # Optuna would write behind it
      storage = optuna.storages.JournalStorage(journal.JournalFileBackend(self._path))
      self._studies = {
        (arm, i): optuna.create_study(
          study_name=f"{arm or 'all'}-{i}", storage=storage, load_if_exists=True
        )
        for arm in sweep.arms
        for i in range(len(self._points))
      }
    for study in self._studies.values():
      # The sampler's generator is not saved: with the same seed it would repeat its first points.
      seed = search.seed + len(study.get_trials())
      study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    self._waiting: collections.deque = collections.deque()
    # By workdir, of every suggestion of the point: study, number, and a list that seeds share.
    self._left: dict[str, list[tuple[Any, int, list]]] = collections.defaultdict(list)
    self._ended: dict[str, Outcome] = {}
    for which, study in self._studies.items():
      for old in study.get_trials(states=(self._states.RUNNING,)):
        self._expand(which, old.number, old.params)

  @contextlib.contextmanager
  def _reading(self) -> Iterator[None]:
    try:
      yield
    except Exception as e:  # whatever Optuna meets in a damaged file, or one of other distributions
      raise UserError(
        f"{self._path} is no study of this search: {type(e).__name__}: {one_line(e)}; drop its "
        "last line if that is cut, or move it away: trials that finished are not run again"
      ) from e

  def take(self) -> Trial | None:
    while not self._waiting:  # a point may be one that runs or has run
      short = [w for w, s in self._studies.items() if len(s.get_trials()) < self._search.count]
      if not short:
        break
      which = min(short, key=lambda w: len(self._studies[w].get_trials()))
      with self._reading():
        asked = self._studies[which].ask(self._distributions)
      self._expand(which, asked.number, asked.params)
    return self._waiting.popleft() if self._waiting else None

  def _expand(self, which, number: int, params: dict[str, Any]):
    arm, i = which
    # In the journal JSON has made lists of tuples.
    point = self._points[i] | {key: keys.as_tuple(value) for key, value in params.items()}
    outcomes: list[Outcome] = []
    for seed in self._sweep.seeds:
      trial = self._sweep.trial(self._folder, arm, point, seed)
      suggestion = (self._studies[which], number, outcomes)
      if ended := self._ended.get(trial.workdir):
        self._tell(*suggestion, ended)
        continue
      if trial.workdir not in self._left:
        self._waiting.append(trial)
      self._left[trial.workdir].append(suggestion)

  def give(self, trial: Trial, outcome: Outcome):
    if outcome.status not in ("finished", "diverged"):
      return  # asked for again by the next call
    self._ended[trial.workdir] = outcome
    for suggestion in self._left[trial.workdir]:
      self._tell(*suggestion, outcome)

  def _tell(self, study, number: int, outcomes: list[Outcome], outcome: Outcome):
    """The objective of a suggestion, with the outcome of its last seed."""
    outcomes.append(outcome)
    if len(outcomes) < len(self._sweep.seeds):
      return
    if (objective := of_point(outcomes)) is None:  # TPE takes it for one of the bad points
      study.tell(number, state=self._states.PRUNED)
    else:
      study.tell(number, objective)


def of_point(outcomes: list[Outcome]) -> float | None:
  """The objective of a point, the mean over its seeds; None where a seed has none."""
  objectives = [o.objective for o in outcomes if o.objective is not None]
  return sum(objectives) / len(objectives) if len(objectives) == len(outcomes) else None


def _distribution(one: spec.Distribution):
  from optuna import distributions  # pyright: ignore  (extra `sweep`)

  if isinstance(one, spec.Choice):
    return distributions.CategoricalDistribution(one.values)
  if isinstance(one, spec.Integer):
    return distributions.IntDistribution(one.low, one.high)
  if isinstance(one, (spec.Uniform, spec.LogUniform)):
    return distributions.FloatDistribution(one.low, one.high, log=isinstance(one, spec.LogUniform))
  raise UserError(f"Optuna has no distribution like {one!r}; use those of fp8jax/sweeps/spec.py")


def of(sweep: Sweep, folder: str) -> Listed | Suggested:
  """The trials of a sweep, or the search for them."""
  if sweep.search is None:
    return Listed(sweep.trials(folder))
  return Suggested(sweep, sweep.search, folder)
