"""The part of a run in a comparison: its arm, its setting, and its partner in the baseline."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fp8jax.config import policy as policy_config
from fp8jax.config import registry
from fp8jax.errors import UserError
from fp8jax.keys import Affects
from fp8jax.phases import policy as policy_lib
from fp8jax.report.files import UNQUANTIZED, RunFiles

# A smoothed loss is the mean of so many steps, and of no more than this share of a run.
WINDOW, WINDOW_SHARE = 32, 8
# A run of which none of so many last steps has a finite loss has diverged.
LAST_STEPS = 8
# Sections of keys that say how a program runs.
_PLACE = ("memory.", "kernels.", "mesh.", "sharding.")


@dataclasses.dataclass(frozen=True)
class Member:
  """A run and its part in the comparison.

  Attributes:
    setting: in words, with how it ran where that tells runs of its arm apart.
    shared: the setting that a partner has, too.
    place: how it ran, where that tells runs of an arm apart.
  """

  run: RunFiles
  arm: str
  setting: str
  seed: int
  shared: str
  place: str

  @property
  def data(self) -> tuple[Any, int]:
    """Runs of which it is equal read the same batches: the data, and the shares they are read in.

    Several processes of a run from before it said so evaluated other held-out windows, too: of it
    minus their number.
    """
    of = self.run.provenance
    processes = of.get("processes", 1)
    return of.get("data_fingerprint"), of.get("shares", -processes if processes > 1 else 1)

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


def members(
  runs: Sequence[RunFiles], config: Mapping[str, Any], baseline: str = ""
) -> list[Member]:
  """Arms by recipe, told apart further where another key that alters results differs within one.

  How a program runs may differ between arms: kernels of a recipe are its own. Where it differs for
  one seed of an arm, it is a setting. So is a key that alters results within the baseline.

  Args:
    config: see `differing`.
    baseline: its recipe; any other text is `bf16`, or without a run of it the first run's.
  """
  recipes = [r.recipe for r in runs]
  if baseline not in recipes:
    baseline = UNQUANTIZED if UNQUANTIZED in recipes else "".join(recipes[:1])
  read = set().union(*map(_keys_read, runs))
  varied = [
    k for k in config
    if k != "seed" and (registry.affects(k) is not Affects.NOTHING or k in read)
  ]  # fmt: skip
  of_place = [k for k in varied if k.startswith(_PLACE)]
  of_base = [k for k in of_place if _alters(k, [r for r in runs if r.recipe == baseline])]
  apart = [k for k in varied if k.startswith("precision.")]
  shared = [k for k in varied if k not in (*of_place, *apart)] + of_base
  apart += [k for k in of_place if k not in of_base and _alters(k, runs)]
  alike: dict[tuple[str, str, int], list[RunFiles]] = {}
  for m in (_member(run, runs, apart, shared, ()) for run in runs):
    alike.setdefault((m.arm, m.shared, m.seed), []).append(m.run)
  within = [k for k in of_place if k not in of_base
            and any(k in differing(of) for of in alike.values())]  # fmt: skip
  return [_member(run, runs, apart, shared, within) for run in runs]


def _member(run: RunFiles, runs: Sequence[RunFiles], apart, shared, within) -> Member:
  same = [r for r in runs if r.recipe == run.recipe]
  details = [k for k in apart if any(_counts(r, k) != _counts(run, k) for r in same)]
  arm = " ".join([run.recipe, *_said(run, [k for k in details if _counts(run, k) is not None])])
  common = ", ".join(_said(run, [k for k in shared if _counts(run, k) is not None]))
  place = ", ".join(_said(run, within))
  setting = ", ".join(filter(None, (common, place)))
  return Member(run, arm, setting, int(run.resolved.get("seed", 0)), common, place)


def partner(m: Member, base: Sequence[Member], baseline: str) -> tuple[Member | None, str]:
  """(the run of the baseline that read the same batches, "") or (None, why there is none).

  Of several the one that ran as it did.
  """
  same = [b for b in base if (b.shared, b.seed) == (m.shared, m.seed)]
  if not same:
    return None, f"no run of {baseline} with its seed and settings"
  read = [b for b in same if b.data == m.data]
  if not read:
    return None, _other_data(m, same)
  placed = [b for b in read if b.place == m.place] or read
  if len(placed) > 1:
    ways = "; ".join(b.place for b in placed)
    return None, f"runs of {baseline} with its seed and settings ran in other ways ({ways})"
  return placed[0], ""


def _other_data(m: Member, same: Sequence[Member]) -> str:
  """Why its batches are not those of runs with its seed and settings."""
  data, shares = m.data
  if alike := [b for b in same if b.data[0] == data]:
    own, theirs = (
      f"{n} share{'s' * (n > 1)}" if n > 0 else f"shares that {-n} processes did not state"
      for n in (shares, alike[0].data[1])
    )
    return (
      f"its data were read in {own} and those of {alike[0].run.name} in {theirs}, which gives "
      "other batches"
    )
  return f"other data than {same[0].run.name}"


def once(all_: Sequence[Member], notes: list[str]) -> list[Member]:
  """The members without a second run of an arm, setting, seed and data, which is no second sample.

  The one that finished stays, or that of more steps.
  """
  alike: dict[tuple[Any, ...], list[Member]] = {}
  for m in all_:
    alike.setdefault((m.arm, m.setting, m.seed, m.data), []).append(m)
  kept = [max(of, key=lambda m: (m.run.summary is not None, m.run.step)) for of in alike.values()]
  for one, of in zip(kept, alike.values(), strict=True):
    same = f"as {one.run.workdir} in arm, settings and seed, left out"
    notes += [f"{m.run.workdir}: {same}" for m in of if m is not one]
  return kept


def differing(runs: Sequence[RunFiles]) -> dict[str, dict[str, Any]]:
  """{key: {run's name: value}} where the resolved configurations differ."""
  keys = sorted(set().union(*(r.resolved for r in runs)))
  values = {k: {r.workdir: _value(r, k) for r in runs} for k in keys}
  return {
    k: v
    for k, v in values.items()
    if any(x != y for x, y in zip(list(v.values()), list(v.values())[1:]))
  }


def _value(run: RunFiles, key: str) -> Any:
  """Of a run from before the key, its default."""
  return run.resolved[key] if key in run.resolved else _defaults().get(key)


@functools.cache
def _defaults() -> dict[str, Any]:
  """As JSON has them."""
  plain = {name: one.default for name, one in registry.KEYS.items()}
  return json.loads(json.dumps(plain, default=str))


def _counts(run: RunFiles, key: str) -> Any:
  """A value, where it alters results; None of kernels and places that do not."""
  value = _value(run, key)
  alters = not key.startswith(_PLACE) or registry.affects(key, [value]) is Affects.RESULT
  return repr(value) if alters else None


def _alters(key: str, runs: Sequence[RunFiles]) -> bool:
  return len({_counts(r, key) for r in runs}) > 1


def _keys_read(run: RunFiles) -> set[str]:
  """Keys that alter a result because the run's policies decide by them."""
  try:
    return policy_lib.keys_read(policy_config.read(run.resolved.get("precision.policy", ())))
  except ValueError as e:
    raise UserError(f"{run.name}: {e}; leave the run out") from e


def _said(run: RunFiles, keys: Sequence[str]) -> list[str]:
  """["peak_lr=0.001", ...]"""
  return [f"{k.rpartition('.')[2]}={_value(run, k)}" for k in keys]


def has_diverged(run: RunFiles) -> bool:
  """Whether a run stopped at a loss or gradient that is not finite, or ran on without any.

  A step whose update was skipped or undone is not divergence: the run went on.
  """
  loss = run.curves["loss"].values
  if not np.isfinite(loss[-LAST_STEPS:]).any():
    return True
  return run.nonfinite is not None and run.summary is None and run.nonfinite["step"] > run.step


def smoothed(run: RunFiles) -> tuple[np.ndarray, np.ndarray]:
  """(steps, running mean of the training loss over WINDOW steps, or fewer, that end there)."""
  c = run.curves["loss"]
  kept = np.isfinite(c.values) if np.isfinite(c.values).any() else np.full(len(c.steps), True)
  steps, values = c.steps[kept], c.values[kept]
  window = max(1, min(WINDOW, len(steps) // WINDOW_SHARE))
  return steps[window - 1 :], np.convolve(values, np.ones(window) / window, "valid")
