"""Numerics that people watch: what every site saw, drift since the snapshot before, and alarms."""

import math
import os
from collections.abc import Mapping
from typing import Any

from fp8jax import patterns
from fp8jax.config.alarms import ADVICE
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.quantization import tensor_stats
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import WHOLE
from fp8jax.run import metrics_writer
from fp8jax.step.settings import Alarm

# Statistics with alarms only where one scale covers a whole axis: finer tiles contain outliers.
_OF_OUTLIERS = ("kurtosis", "alignment")
Numerics = Mapping[str, Mapping[str, Mapping[str, Any]]]
# Lines per snapshot; what is beyond is counted.
_MOST = 8


def summarise(
  sites, stats: Mapping[str, Any], alignment: Mapping[str, Any]
) -> dict[str, dict[str, dict[str, float]]]:
  """{layer's site: {tensor: tensor_stats.summary}} of what loud sites saw, on the host.

  Activations that no GEMM reads have a site too, with "x" and "g", without quantization's numbers.

  Args:
    alignment: transformer.alignment, reported with the input of each layer's site.
  """
  numerics = _of_tensors(sites, stats, tensor_stats.summary, tensor_stats.unquantized_summary)
  for path, values_N in alignment.items():
    for i, value in enumerate(values_N):
      numerics[rules.layer_name(path, i)]["x"]["alignment"] = float(value)
  return numerics


def exponents(sites, stats: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
  """{layer's site: {tensor: tensor_stats.exponents}} of what loud sites saw, on the host."""
  return _of_tensors(sites, stats, tensor_stats.exponents, tensor_stats.exponents)


def _of_tensors(sites, stats, of_gemm, of_activation):
  """{layer's site: {tensor: summary}}; an activation has fewer tensors than a GEMM."""
  return {
    name: {
      t: (of_gemm if len(tensors) == 3 else of_activation)(values)
      for t, values in zip(site_lib.TENSORS[len(tensors)], tensors, strict=True)
    }
    for name, tensors in site_tree.per_layer(sites, stats).items()
  }


def with_drift(now: Numerics, before: Numerics) -> dict[str, dict[str, dict[str, Any]]]:
  """A snapshot of the numerics with what changed since the snapshot before.

  Args:
    now, before: {layer's site: {tensor: tensor_stats.summary}}; before may be of a file, where
      numbers that are not finite are strings.

  Returns:
    `now` with amax_drift, log2 of the ratio of amaxes, and snr_drift, the difference in dB, of
    every tensor for which both snapshots have such numbers.
  """
  return {
    site: {
      tensor: {**summary, **_drift(summary, before.get(site, {}).get(tensor, {}))}
      for tensor, summary in tensors.items()
    }
    for site, tensors in now.items()
  }


def _drift(now: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, float]:
  (a, b), (c, d) = ([float(x.get(k, math.nan)) for x in (now, old)] for k in ("amax", "snr_db"))
  drift = {}
  if 0 < a < math.inf and 0 < b < math.inf:
    drift["amax_drift"] = math.log2(a) - math.log2(b)
  if math.isfinite(c) and math.isfinite(d):
    drift["snr_drift"] = c - d
  return drift


def last_snapshot(workdir: str) -> tuple[int, Numerics]:
  """(its step, the newest snapshot) in WORKDIR/metrics.jsonl; (0, {}) without one."""
  path, last = os.path.join(workdir, "metrics.jsonl"), (0, {})
  for _, row in metrics_writer.rows(path):
    if "numerics" in row:
      last = row["step"], row["numerics"]
  return last


class AlarmMonitor:
  """Checks each snapshot of the numerics against the alarms; says what is new."""

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

  @property
  def firing(self) -> set[tuple[str, str]]:
    """(layer's site, statistic) of every alarm that rang at the last snapshot."""
    return {(name.rpartition("/")[0], alarm.statistic) for name, alarm in self._ringing}

  def new(self, numerics: Mapping[str, Any]) -> list[dict[str, str]]:
    """{"place", "text"} of every alarm that was silent at the last snapshot.

    Args:
      numerics: as `with_drift`'s; the numbers may be of a file.
    """
    ringing, new = set(), []
    for site, tensors in numerics.items():
      for tensor, summary in tensors.items():
        name = f"{site}/{tensor}"
        for alarm in self._alarms if name in self._narrow else ():
          if alarm.statistic in _OF_OUTLIERS and not self._narrow[name]:
            continue
          value = float(summary.get(alarm.statistic, math.nan))
          if alarm.is_met_by(value) and patterns.matches(alarm.sites, [name]):
            ringing.add((name, alarm))
            if (name, alarm) not in self._ringing:
              new.append({"place": name, "text": _text(alarm, value)})
    self._ringing = ringing
    return new


def as_lines(step: int, alarms: list[dict[str, str]]) -> list[str]:
  """Alarms of a snapshot as people read them; the first few, and how many more there are."""
  lines = [f"step {step}: {alarm['place']}: {alarm['text']}" for alarm in alarms]
  if len(lines) > _MOST:
    lines[_MOST:] = [f"step {step}: {len(lines) - _MOST} more such alarms, see metrics.jsonl"]
  return lines


def _text(alarm: Alarm, value: float) -> str:
  is_share = alarm.statistic in ("saturation", "underflow")
  show = (lambda v: f"{v:.2%}") if is_share else (lambda v: f"{v:.4g}")
  bound = f"{'above' if alarm.relation == '>' else 'below'} {show(alarm.bound)}"
  advice = ADVICE[alarm.statistic]
  return f"{alarm.statistic} {show(value)}, {bound}. Try: {advice}"
