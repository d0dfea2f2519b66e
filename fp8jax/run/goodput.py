"""Seconds of a run by their use: the share that trains is the goodput.

Source: "ML Productivity Goodput" (Google Cloud, 2024): steps that count over all time that a run
holds its devices.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# init: before the first step, models and checkpoints read. compile: programs, and the checks before
# a first step. evaluation: with the compilation of its own programs. lost: steps that were taken
# again, of an earlier process after its last checkpoint or of a roll-back.
KINDS: tuple[str, ...] = (
  "init",
  "compile",
  "data_wait",
  "rollout",
  "step",
  "checkpoint",
  "evaluation",
  "lost",
)
_PREFIX = "seconds/"


class Clock:
  """Gives every second since its creation to one kind at a time; `init` is the first."""

  def __init__(self, now: Callable[[], float] = time.perf_counter):
    self._now, self._kind = now, KINDS[0]
    self.waited = 0.0  # seconds of the last block of data_wait
    self._seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    self._since = now()

  @contextlib.contextmanager
  def on(self, kind: str) -> Iterator[None]:
    """Inside, time is of this kind; intervals nest."""
    outer, self._kind = self._turn(), kind
    begun = self._since
    try:
      yield
    finally:
      self._turn()
      self.waited = self._since - begun if kind == "data_wait" else self.waited
      self._kind = outer

  def _turn(self) -> str:
    now = self._now()
    self._seconds[self._kind] += now - self._since
    self._since = now
    return self._kind

  def go_on(self, before: Mapping[str, float], reached: float | None):
    """Adds the time of earlier processes.

    Args:
      before: their seconds by kind, at the checkpoint that this process goes on from.
      reached: all their seconds at their last step; None where that was not written.
    """
    for kind, seconds in before.items():
      if kind in self._seconds:
        self._seconds[kind] += seconds
    if before and reached is not None:
      self._seconds["lost"] += max(reached - sum(before.values()), 0.0)

  def lose_since(self, before: Mapping[str, float]):
    """Steps since a checkpoint are lost: the run goes back to it. Args: its seconds by kind."""
    self._turn()
    lost = max(self._seconds["step"] - before.get("step", self._seconds["step"]), 0.0)
    self._seconds["step"] -= lost
    self._seconds["lost"] += lost

  def metrics(self, is_whole: bool) -> dict[str, float]:
    """For a row of metrics: all seconds; where asked for, by kind, and the goodput."""
    seconds = self.seconds()
    elapsed = {"elapsed_seconds": sum(seconds.values())}
    if not is_whole:
      return elapsed
    return elapsed | {_PREFIX + k: v for k, v in seconds.items()} | {"goodput": goodput(seconds)}

  def seconds(self) -> dict[str, float]:
    """By kind, up to now."""
    self._turn()
    return dict(self._seconds)


def as_summary(seconds: Mapping[str, float]) -> dict[str, Any]:
  """For summary.json: {"seconds": by kind, "goodput": share}."""
  rounded = {kind: round(s, 2) for kind, s in seconds.items()}
  return {"seconds": rounded, "goodput": round(goodput(seconds), 4)}


def from_curves(last: Mapping[str, float]) -> dict[str, float]:
  """Seconds by kind from the last values of all metrics; {} where there are none."""
  return {k: last[_PREFIX + k] for k in KINDS if _PREFIX + k in last}


def goodput(seconds: Mapping[str, float]) -> float:
  """Share of the time that went into steps that count."""
  return seconds.get("step", 0.0) / max(sum(seconds.values()), 1e-9)


def line(seconds: Mapping[str, float]) -> str:
  """ "time 41.0 s: init 3.1, compile 12.0, ...; goodput 60.1%"; kinds without time are left out."""
  parts = [f"{k.replace('_', ' ')} {v:,.1f}" for k, v in seconds.items() if v >= 0.05]
  total = sum(seconds.values())
  return f"time {total:,.1f} s: {', '.join(parts)}; goodput {goodput(seconds):.1%}"


def table(seconds: Mapping[str, float]) -> list[tuple[Any, ...]]:
  """(kind, seconds, share) of the kinds that took time."""
  total = max(sum(seconds.values()), 1e-9)
  return [(k.replace("_", " "), f"{v:,.1f}", f"{v / total:.1%}") for k, v in seconds.items() if v]
