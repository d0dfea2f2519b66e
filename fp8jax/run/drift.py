"""Drift: how the statistics of a tensor changed since the look before."""

import math
import os
from collections.abc import Mapping
from typing import Any

from fp8jax.run import metrics_writer

Numerics = Mapping[str, Mapping[str, Mapping[str, Any]]]


def with_drift(now: Numerics, before: Numerics) -> dict[str, dict[str, dict[str, Any]]]:
  """A look at the numerics with what changed since the look before.

  Args:
    now, before: {layer's site: {tensor: tensor_stats.summary}}; before may be of a file, where
      numbers that are not finite are strings.

  Returns:
    `now` with amax_drift, log2 of the ratio of amaxes, and snr_drift, the difference in dB, of
    every tensor for which both looks have such numbers.
  """
  return {
    site: {
      tensor: {**summary, **_drift(summary, before.get(site, {}).get(tensor, {}))}
      for tensor, summary in tensors.items()
    }
    for site, tensors in now.items()
  }


def _drift(now: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, float]:
  drift = {}
  a, b = float(now["amax"]), float(old.get("amax", math.nan))
  if 0 < a < math.inf and 0 < b < math.inf:
    drift["amax_drift"] = math.log2(a) - math.log2(b)
  a, b = float(now.get("snr_db", math.nan)), float(old.get("snr_db", math.nan))
  if math.isfinite(a) and math.isfinite(b):
    drift["snr_drift"] = a - b
  return drift


def last_look(workdir: str) -> Numerics:
  """The newest look in WORKDIR/metrics.jsonl; empty without one."""
  path = os.path.join(workdir, "metrics.jsonl")
  looks = [row["numerics"] for _, row in metrics_writer.rows(path) if "numerics" in row]
  return looks[-1] if looks else {}


class Looks:
  """The looks of a run, each compared with the one before, which a resumed run reads."""

  def __init__(self, workdir: str):
    self._workdir = workdir
    self._last: Numerics | None = None  # None: that of metrics.jsonl

  def forget(self):
    """Rows of metrics.jsonl were taken back."""
    self._last = None

  def add(self, numerics: Numerics) -> dict[str, dict[str, dict[str, Any]]]:
    """`with_drift` of a look that comes after the others."""
    before = last_look(self._workdir) if self._last is None else self._last
    self._last = with_drift(numerics, before)
    return self._last
