"""A sweep as a value: a configuration, the axes along which its keys vary, seeds and arms."""

import dataclasses
import hashlib
import itertools
import math
import os
import random
import re
import runpy
from collections.abc import Mapping
from typing import Any, Protocol

from fp8jax.config import named
from fp8jax.errors import ConfigErrors, UserError

Point = dict[str, Any]


class Distribution(Protocol):
  """Values of one key that a random axis draws and Optuna suggests."""

  def draw(self, rng: random.Random) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Uniform:
  """A float between two bounds."""

  low: float
  high: float

  def draw(self, rng: random.Random) -> float:
    return rng.uniform(self.low, self.high)


@dataclasses.dataclass(frozen=True)
class LogUniform:
  """A float whose logarithm is uniform: learning rates, weight decay."""

  low: float
  high: float

  def draw(self, rng: random.Random) -> float:
    return math.exp(rng.uniform(math.log(self.low), math.log(self.high)))


@dataclasses.dataclass(frozen=True)
class Integer:
  """A whole number, both bounds included."""

  low: int
  high: int

  def draw(self, rng: random.Random) -> int:
    return rng.randint(self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Choice:
  """One of some values."""

  values: tuple

  def draw(self, rng: random.Random) -> Any:
    return rng.choice(self.values)


class Axis(Protocol):
  """Points that a sweep visits, {config key: value} each."""

  def points(self) -> list[Point]: ...


@dataclasses.dataclass(frozen=True)
class Grid:
  """Every combination of the values of some keys."""

  values: Mapping[str, tuple]

  def points(self) -> list[Point]:
    return [dict(zip(self.values, row)) for row in itertools.product(*self.values.values())]


@dataclasses.dataclass(frozen=True)
class Points:
  """Points one by one, for keys that change together."""

  listed: tuple[Point, ...]

  def points(self) -> list[Point]:
    return list(self.listed)


@dataclasses.dataclass(frozen=True)
class Random:
  """So many points drawn independently; the same seed draws the same ones (Bergstra & Bengio)."""

  distributions: Mapping[str, Distribution]
  count: int
  seed: int = 0

  def points(self) -> list[Point]:
    rng = random.Random(self.seed)
    return [
      {key: one.draw(rng) for key, one in self.distributions.items()} for _ in range(self.count)
    ]


@dataclasses.dataclass(frozen=True)
class Optuna:
  """Points that Optuna's TPE suggests for each arm from the objectives so far (extra `sweep`)."""

  distributions: Mapping[str, Distribution]
  count: int
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Trial:
  """One run of a sweep.

  Attributes:
    config: "FILE" or "FILE:ARM".
    changes: {config key: value} beside it.
    workdir: where it lives.
    arm, point, seed: its place in the sweep.
  """

  config: str
  changes: Point
  workdir: str
  arm: str = ""
  point: Point = dataclasses.field(default_factory=dict)
  seed: int = 0

  def arguments(self) -> list[str]:
    """Those of launch.py."""
    changes = [f"--config.{key}={value}" for key, value in self.changes.items()]
    return [f"--config={self.config}", *changes, f"--workdir={self.workdir}"]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """Runs of one configuration that differ along axes.

  Attributes:
    config: file.
    axes: the sweep visits the product of their points.
    arms: arms of the file, e.g. recipes; "" is the file without one.
    seeds: each point runs with each.
    fixed: changes that all runs share.
    search: points beyond the axes, chosen by Optuna from the objectives so far; None: none.
    stop_above: a trial whose loss (mean of 8 steps) is so many nats above its first has diverged
      and is stopped.
    slurm: parameters of submitit's executor for --submit=slurm, e.g. {"slurm_partition": "gpu"}.
  """

  config: str
  axes: tuple[Axis, ...] = ()
  arms: tuple[str, ...] = ("",)
  seeds: tuple[int, ...] = (0,)
  fixed: Point = dataclasses.field(default_factory=dict)
  search: Optuna | None = None
  stop_above: float = 1.0
  slurm: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def keys(self) -> list[str]:
    """Keys that vary, those of the search last."""
    found = [key for axis in self.axes for point in axis.points() for key in point]
    found += self.search.distributions if self.search else ()
    return list(dict.fromkeys(found))

  def points(self) -> list[Point]:
    """The product of the axes."""
    rows = itertools.product(*(axis.points() for axis in self.axes))
    return [{k: v for part in row for k, v in part.items()} for row in rows]

  def trial(self, folder: str, arm: str, point: Point, seed: int) -> Trial:
    """The run at a point; its workdir under `folder` is named by what differs."""
    config = f"{self.config}:{arm}" if arm else self.config
    parts = [arm] * bool(arm) + [f"{_short(k, self.keys)}={_text(v)}" for k, v in point.items()]
    name = "-".join([*parts, f"seed={seed}"] if len(self.seeds) > 1 or not parts else parts)
    changes = {**self.fixed, **point, "seed": seed}
    return Trial(config, changes, os.path.join(folder, name), arm, point, seed)

  def trials(self, folder: str) -> list[Trial]:
    """All runs that are known beforehand, seeds innermost."""
    return [
      self.trial(folder, arm, point, seed)
      for arm, point, seed in itertools.product(self.arms, self.points(), self.seeds)
    ]


def _short(key: str, keys: list[str]) -> str:
  """The last part of a key where no other varying key shares it."""
  last = key.rpartition(".")[2]
  return last if [k.rpartition(".")[2] for k in keys].count(last) == 1 else key


def _text(value: Any) -> str:
  """A value as part of a file's name; a digest keeps apart those that would look alike."""
  whole = str(value)
  text = re.sub(r"[^\w.+,]+", "_", whole)[:40]
  if text == whole or re.fullmatch(r"-?[\d.e+-]+", whole):
    return whole
  return f"{text}_{hashlib.sha256(whole.encode()).hexdigest()[:6]}"


def load(path: str) -> Sweep:
  """The SWEEP of a file.

  Raises:
    UserError: with everything that is wrong with it.
  """
  if not os.path.isfile(path):
    raise UserError(f"--sweep={path!r}: there is no such file; see experiments/sweeps")
  sweep = runpy.run_path(path).get("SWEEP")
  if not isinstance(sweep, Sweep):
    raise UserError(f"{path} defines no SWEEP; write `SWEEP = fp8jax.sweeps.spec.Sweep(...)` in it")
  check(sweep, path)
  return sweep


def check(sweep: Sweep, where: str):
  """Raises ConfigError where arms, keys or values are none of the configuration's."""
  problems = ConfigErrors()
  problems.check(
    bool(sweep.arms and sweep.seeds), f"{where}: arms and seeds have one entry or more"
  )
  problems.check("seed" not in sweep.keys, f"{where}: 'seed' is no axis; name seeds=(0, 1, ...)")
  trials = sweep.trials("")
  problems.check(bool(trials), f"{where}: an axis has no point")
  seen = set()
  for trial in trials:
    problems.check(trial.workdir not in seen, f"{where}: {trial.workdir} occurs twice; drop one")
    seen.add(trial.workdir)
  distributions = sweep.search.distributions if sweep.search else {}
  drawn = {key: one.draw(random.Random(0)) for key, one in distributions.items()}
  for arm, point in itertools.product(sweep.arms, sweep.points()):
    trial = sweep.trial("", arm, {**point, **drawn}, 0)
    problems.attempt(lambda trial=trial: named.flat(trial.config, trial.changes))
  problems.found = list(dict.fromkeys(problems.found))
  problems.refuse()
