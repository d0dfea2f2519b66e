"""A sweep as a value: a configuration, the axes along which its keys vary, seeds and arms."""

import dataclasses
import functools
import hashlib
import itertools
import math
import os
import random
import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from fp8jax.config import named
from fp8jax.errors import UserError

Point = dict[str, Any]

# Bytes of a workdir's name that file systems take.
_LONGEST = 255


class Distribution(Protocol):
  """Values of one key that a random axis draws and Optuna suggests."""

  def draw(self, rng: random.Random) -> Any: ...


def _require(value: Any, **expected: tuple[bool, str]):
  """Refuses fields of a value, {name: (whether it is right, what is expected)}."""
  for field, (is_right, words) in expected.items():
    if not is_right:
      name, given = type(value).__name__, getattr(value, field)
      raise UserError(f"{name}({field}={given!r}): expected {words}")


def _is_number(x: Any) -> bool:
  return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _is_tuple(values: Any, kind: Any = object) -> bool:
  """Whether it is a tuple or the like, read as often as wanted; not one text, not empty."""
  is_many = isinstance(values, Collection) and not isinstance(values, (str, bytes, Mapping))
  is_many = is_many or hasattr(values, "tolist")  # an array of NumPy
  return is_many and len(values) > 0 and all(isinstance(v, kind) for v in values)


def _is_table(values: Any, kind: Any = object) -> bool:
  """Whether it is {key: one of a kind}."""
  return isinstance(values, Mapping) and all(
    isinstance(k, str) and isinstance(v, kind) for k, v in values.items()
  )


@dataclasses.dataclass(frozen=True)
class Uniform:
  """A float between two bounds."""

  low: float
  high: float

  def __post_init__(self):
    _require(self, low=(_is_number(self.low), "a number"), high=(_is_number(self.high), "a number"))
    _require(self, high=(self.low <= self.high, f"a number of at least low={self.low}"))

  def draw(self, rng: random.Random) -> float:
    return rng.uniform(self.low, self.high)


@dataclasses.dataclass(frozen=True)
class LogUniform(Uniform):
  """A float whose logarithm is uniform: learning rates, weight decay."""

  def __post_init__(self):
    super().__post_init__()
    _require(self, low=(self.low > 0, "a number above 0, which has a logarithm"))

  def draw(self, rng: random.Random) -> float:
    return math.exp(rng.uniform(math.log(self.low), math.log(self.high)))


@dataclasses.dataclass(frozen=True)
class Integer(Uniform):
  """A whole number, both bounds included."""

  low: int
  high: int

  def __post_init__(self):
    super().__post_init__()
    for bound in ("low", "high"):
      _require(self, **{bound: (isinstance(getattr(self, bound), int), "a whole number")})

  def draw(self, rng: random.Random) -> int:
    return rng.randint(self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Choice:
  """One of some values."""

  values: tuple

  def __post_init__(self):
    _require(self, values=(_is_tuple(self.values), "a tuple of one value or more"))

  def draw(self, rng: random.Random) -> Any:
    return rng.choice(self.values)


class Axis(Protocol):
  """Points that a sweep visits, {config key: value} each; len(axis) of them, known beforehand."""

  def points(self) -> list[Point]: ...

  def __len__(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Grid:
  """Every combination of the values of some keys."""

  values: Mapping[str, tuple]

  def __post_init__(self):
    is_right = _is_table(self.values) and all(map(_is_tuple, self.values.values()))
    _require(self, values=(is_right, "{key: tuple of values}, each of one value or more"))

  def __len__(self) -> int:
    return math.prod(map(len, self.values.values()))

  def points(self) -> list[Point]:
    return [dict(zip(self.values, row)) for row in itertools.product(*self.values.values())]


@dataclasses.dataclass(frozen=True)
class Points:
  """Points one by one, for keys that change together."""

  listed: tuple[Point, ...]

  def __post_init__(self):
    is_right = _is_tuple(self.listed, Mapping) and all(map(_is_table, self.listed))
    _require(self, listed=(is_right, "a tuple of points, {key: value} each"))

  def __len__(self) -> int:
    return len(self.listed)

  def points(self) -> list[Point]:
    return list(self.listed)


@dataclasses.dataclass(frozen=True)
class _Drawn:
  """So many points, each key from its distribution."""

  distributions: Mapping[str, Distribution]
  count: int
  seed: int = 0

  def __post_init__(self):
    of_keys = _is_table(self.distributions) and bool(self.distributions)
    of_keys = of_keys and all(hasattr(d, "draw") for d in self.distributions.values())
    is_count = _is_number(self.count) and isinstance(self.count, int) and self.count >= 1
    _require(
      self,
      distributions=(of_keys, "{key: Uniform, LogUniform, Integer or Choice}, one key or more"),
      count=(is_count, "a whole number of points, at least 1"),
      seed=(
        isinstance(self.seed, int) and 0 <= self.seed < 2**31,
        "a whole number from 0 to 2^31 - 1",
      ),
    )


@dataclasses.dataclass(frozen=True)
class Optuna(_Drawn):
  """Points that Optuna's TPE suggests for each arm from the objectives so far (extra `sweep`)."""


@dataclasses.dataclass(frozen=True)
class Random(_Drawn):
  """So many points drawn independently; the same seed draws the same ones (Bergstra & Bengio)."""

  def __len__(self) -> int:
    return self.count

  def points(self) -> list[Point]:
    rng = random.Random(self.seed)
    return [
      {key: one.draw(rng) for key, one in self.distributions.items()} for _ in range(self.count)
    ]


@dataclasses.dataclass(frozen=True)
class Trial:
  """One run of a sweep.

  Attributes:
    config: "FILE" or "FILE:ARM".
    changes: {config key: value} beside it.
    arm, point, seed: its place in the sweep.
  """

  config: str
  changes: Point
  workdir: str
  arm: str = ""
  point: Point = dataclasses.field(default_factory=dict)
  seed: int = 0

  @property
  def job(self) -> str:
    """That of its file."""
    return named.job(self.config.partition(":")[0])

  def bound(self, stop_above: float) -> float:
    """Nats above its first loss at which it has diverged: the loss of RL is none of text."""
    return stop_above if self.job == "train" else math.inf

  def arguments(self) -> list[str]:
    """Those of launch.py."""
    changes = [f"--config.{key}={value}" for key, value in self.changes.items()]
    return [f"--config={self.config}", *changes, f"--workdir={self.workdir}"]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """Runs of one configuration that differ along axes.

  Attributes:
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

  def __post_init__(self):
    axes, are_axes = self.axes, isinstance(self.axes, (tuple, list))
    are_axes = are_axes and all(hasattr(a, "points") and hasattr(a, "__len__") for a in axes)
    _require(
      self,
      config=(isinstance(self.config, str), "the path of a config file"),
      axes=(are_axes, "a tuple of axes, e.g. (Grid({...}),)"),
      arms=(_is_tuple(self.arms, str), "a tuple of one name or more, e.g. ('bf16',)"),
      seeds=(_is_tuple(self.seeds, int), "a tuple of one whole number or more, e.g. (0, 1)"),
      fixed=(_is_table(self.fixed), "{key: value}"),
      search=(isinstance(self.search, (Optuna, type(None))), "Optuna(...), or None"),
      stop_above=(
        _is_number(self.stop_above) and self.stop_above > 0, "a finite number of nats above 0"
      ),
      slurm=(_is_table(self.slurm), "{parameter of submitit's executor: value}"),
    )  # fmt: skip

  def __len__(self) -> int:
    """Trials, those of the search too."""
    beside = self.search.count if self.search else 1
    return math.prod([len(self.arms), len(self.seeds), beside, *map(len, self.axes)])

  @functools.cached_property
  def varying(self) -> list[tuple[str, ...]]:
    """The keys of each axis, and those of the search last."""
    keys = [tuple(dict.fromkeys(k for p in axis.points() for k in p)) for axis in self.axes]
    return keys + ([tuple(self.search.distributions)] if self.search else [])

  @functools.cached_property
  def keys(self) -> list[str]:
    """Keys that vary, those of the search last."""
    return list(dict.fromkeys(itertools.chain(*self.varying)))

  def points(self) -> list[Point]:
    """The product of the axes."""
    rows = itertools.product(*(axis.points() for axis in self.axes))
    return [{k: v for part in row for k, v in part.items()} for row in rows]

  def trial(self, folder: str, arm: str, point: Point, seed: int) -> Trial:
    """The run at a point; its workdir under `folder` is named by what differs."""
    config = f"{self.config}:{arm}" if arm else self.config
    parts = [arm] * bool(arm) + [f"{_short(k, self.keys)}={_text(v)}" for k, v in point.items()]
    name = "-".join([*parts, f"seed={seed}"] if len(self.seeds) > 1 or not parts else parts)
    name = _short_name(name)
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


def _short_name(name: str) -> str:
  """A name that file systems take; a digest stands for the end of a longer one."""
  if len(name.encode()) <= _LONGEST:
    return name
  digest = f"_{_digest(name)}"
  return name.encode()[: _LONGEST - len(digest)].decode(errors="ignore") + digest


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:6]


def _text(value: Any) -> str:
  """A value as part of a file's name; a digest keeps apart those that would look alike."""
  whole = str(value)
  text = re.sub(r"[^\w.+,]+", "_", whole)[:40]
  if text == whole or re.fullmatch(r"-?[\d.e+-]+", whole):
    return whole
  return f"{text}_{_digest(whole)}"
