"""Numerics that people watch: what every site saw, and rules that raise an alarm about it."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from fp8jax.ops import site as site_lib
from fp8jax.quant import history, observe
from fp8jax.recipe import WHOLE, Recipe

# What a rule may test, with what to try when it fires.
ADVICE = {
  "saturation": "its scale is too small for what came: a shorter history or a margin "
  "(tensor_delayed(steps=16, margin=1)), or current scales (tensor_current, block_128)",
  "underflow": "its range is too wide for one scale: finer tiles (block_128, mxfp8), E5M2 for "
  "gradients (block_128_hybrid), or bf16 for this site",
  "snr_db": "narrowing loses too much of it: finer tiles (block_128, mxfp8) or bf16 for this site",
  "amax": "it grows: lower optim.peak_lr, or give this site bf16",
  "nonfinite": "something upstream overflowed: lower optim.peak_lr, or give this site bf16",
  "kurtosis": "few elements hold most of it and set its scale: finer tiles (block_128, mxfp8), "
  "bf16 for this site, or precision.smooth_swiglu if it is the input of mlp/down",
  "alignment": "gate and up weights of a channel are parallel, which makes it grow with the square "
  "of its input: precision.smooth_swiglu, finer tiles (block_128), or bf16 for this site",
}
# What alarms only where one scale covers a whole axis: finer tiles keep outliers to themselves.
_OF_OUTLIERS = ("kurtosis", "alignment")
# Lines per look; what is beyond is counted.
_MOST = 8


@dataclasses.dataclass(frozen=True)
class Alarm:
  """Fires where a statistic of a narrow tensor lies beyond a bound.

  Attributes:
    statistic: a key of ADVICE.
    relation: ">" or "<".
    bound: in the statistic's unit (shares from 0 to 1, decibels, the tensor's own).
    sites: regular expression on "layers/3/mlp/up/g", site and tensor.
  """

  statistic: str
  relation: str
  bound: float
  sites: str = ".*"

  def is_met_by(self, value: float) -> bool:
    return value > self.bound if self.relation == ">" else value < self.bound


def read_alarms(stated) -> tuple[Alarm, ...]:
  """log.alarms of a config.

  Raises:
    ValueError: not (statistic, "<" or ">", number[, regular expression]).
  """
  alarms = []
  for i, entry in enumerate(stated):
    good = isinstance(entry, (tuple, list)) and len(entry) in (3, 4)
    good = good and entry[0] in ADVICE and entry[1] in ("<", ">")
    good = (
      good and isinstance(entry[2], (int, float)) and all(isinstance(e, str) for e in entry[3:])
    )
    if not good:
      raise ValueError(
        f"log.alarms[{i}]={entry!r} is no rule such as ('underflow', '>', 0.3) or ('snr_db', '<', "
        f"10.0, 'layers/.*/g'); statistics are {', '.join(ADVICE)}"
      )
    try:
      re.compile(entry[3] if len(entry) == 4 else "")
    except re.error as e:
      raise ValueError(f"log.alarms[{i}]: {entry[3]!r} is no regular expression: {e}") from e
    alarms.append(Alarm(entry[0], entry[1], float(entry[2]), *entry[3:]))
  return tuple(alarms)


def summarise(
  sites, seen: Mapping[str, Any], alignment_N
) -> dict[str, dict[str, dict[str, float]]]:
  """{layer's site: {tensor: observe.summary}} of what loud sites saw, on the host.

  Args:
    alignment_N: of gate and up weights (ops/smooth.py); it goes with what they make, the input of
      mlp/down.
  """
  numerics = {
    name: {t: observe.summary(values) for t, values in zip(history.TENSORS, tensors, strict=True)}
    for name, tensors in site_lib.per_layer(sites, seen).items()
  }
  for i, value in enumerate(alignment_N):
    numerics[f"layers/{i}/mlp/down"]["x"]["alignment"] = float(value)
  return numerics


def flat(numerics: Mapping[str, Any]) -> dict[str, float]:
  """{"numerics/layers/3/mlp/up/g/underflow": ...}: one TensorBoard curve each."""
  return {
    f"numerics/{site}/{tensor}/{statistic}": value
    for site, tensors in numerics.items()
    for tensor, summary in tensors.items()
    for statistic, value in summary.items()
  }


class Watch:
  """Checks each look at the numerics against the alarms; says what is new."""

  def __init__(self, alarms: tuple[Alarm, ...], recipes: Mapping[str, Recipe]):
    """Args: the rules, and {layer's site: its recipe}."""
    self._alarms = alarms
    # Narrow tensors, and whether a tile of theirs covers a whole axis.
    self._narrow = {
      f"{name}/{tensor}": any(WHOLE in quant.tile for quant in uses)
      for name, recipe in recipes.items()
      for tensor, uses in recipe.uses().items()
      if uses
    }
    self._ringing: set[tuple[str, Alarm]] = set()

  def lines(self, step: int, numerics: Mapping[str, Any]) -> list[str]:
    """One line for every alarm that was silent at the last look."""
    ringing, new = set(), []
    for site, tensors in numerics.items():
      for tensor, summary in tensors.items():
        name = f"{site}/{tensor}"
        for alarm in self._alarms if name in self._narrow else ():
          if alarm.statistic in _OF_OUTLIERS and not self._narrow[name]:
            continue
          value = summary.get(alarm.statistic, math.nan)
          if alarm.is_met_by(value) and re.fullmatch(alarm.sites, name):
            ringing.add((name, alarm))
            if (name, alarm) not in self._ringing:
              new.append(_line(step, name, alarm, value))
    self._ringing = ringing
    if len(new) > _MOST:
      new[_MOST:] = [f"step {step}: {len(new) - _MOST} more such alarms, see metrics.jsonl"]
    return new


def _line(step: int, name: str, alarm: Alarm, value: float) -> str:
  is_share = alarm.statistic in ("saturation", "underflow")
  show = (lambda v: f"{v:.2%}") if is_share else (lambda v: f"{v:.4g}")
  bound = f"{'above' if alarm.relation == '>' else 'below'} {show(alarm.bound)}"
  advice = ADVICE[alarm.statistic]
  return f"step {step}: {name}: {alarm.statistic} {show(value)}, {bound}. Try: {advice}"
