"""The files of a run, read into typed tables: finished runs, and runs that go on.

Nothing but the folder is read: no device is asked and no configuration resolved, so that a report
may be made beside a run that holds the GPU.
"""

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8jax import patterns, records
from fp8jax.config import identity
from fp8jax.errors import UserError
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.quantization import amax_history
from fp8jax.recipe.gemm import PASSES
from fp8jax.run import metrics_writer, schemas

# The other forward pass of eval.precisions: what a recipe's is compared with.
UNQUANTIZED = "bf16"

_HELDOUT = re.compile(r"heldout/(.+)/([^/]+)/loss")
_WEIGHT = re.compile(r"data\.sources\..+\.weight")
_WITHOUT = "delete it, and the report goes without"
_REMEDY = "name the folder of a run, which holds metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class Curve:
  """A metric over steps.

  Attributes:
    steps: int64 [N], increasing.
    values: float64 [N]; NaN and infinite where the run was.
  """

  steps: np.ndarray
  values: np.ndarray


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """A held-out loss: of a source, in a precision of the forward pass, in nats per token."""

  step: int
  source: str
  precision: str
  loss: float


@dataclasses.dataclass(frozen=True)
class Cell:
  """A tensor of a site; layer is None where the site is in no layer (the head)."""

  site: str
  layer: int | None
  tensor: str


@dataclasses.dataclass(frozen=True)
class Snapshots:
  """Tensor statistics of the loud steps.

  Attributes:
    steps: int64 [N].
    cells: C of them, by site, tensor and layer.
    values: {statistic: float64 [N, C]}; NaN where a snapshot has no such number, infinite where the
      tensor has no rounding error.
  """

  steps: np.ndarray
  cells: tuple[Cell, ...]
  values: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Event:
  """An alarm, or an action of a policy: the step, the place, and a sentence."""

  step: int
  kind: str
  place: str
  text: str


@dataclasses.dataclass(frozen=True)
class Refresh:
  """Scales that started over.

  Attributes:
    step: the first one with the scales after it.
    table: of the scales before, for precision.calibration.
    scales: (layer's site and tensor, scale before, scale after) of those that changed, the largest
      change first.
  """

  step: int
  table: str
  scales: tuple[tuple[str, float, float], ...]


@dataclasses.dataclass(frozen=True)
class RunFiles:
  """All that a run's folder says; empty where a file is not written yet.

  Attributes:
    name: last part of the folder's path.
    curves: {metric: its Curve}, without held-out losses.
    snapshots: None where tensor statistics were not recorded.
    exponents: {step: {layer's site: {tensor: tensor_stats.exponents}}} of loud steps.
    param_stats: param_stats.summary of loud steps, a cell by parameter or group; None without any.
    refreshes: of delayed and static scales by a policy.
    resolved, changed: flat configuration, and its difference from base.
    sites: rows of sites.json, see start.all_site_rows.
    nonfinite: the report of a failure, or None.
    summary: of a finished run, or None.
    noise_floor: of --job=noise, or None.
  """

  workdir: str
  name: str
  curves: Mapping[str, Curve]
  heldout: tuple[HeldOut, ...]
  snapshots: Snapshots | None
  events: tuple[Event, ...]
  resolved: Mapping[str, Any]
  changed: Mapping[str, Any]
  provenance: Mapping[str, Any]
  sites: tuple[Mapping[str, Any], ...]
  memory: Mapping[str, Any] | None
  nonfinite: Mapping[str, Any] | None
  summary: Mapping[str, Any] | None
  sensitivity: Mapping[str, Any] | None = None
  noise_floor: Mapping[str, Any] | None = None
  exponents: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
  param_stats: Snapshots | None = None
  refreshes: tuple[Refresh, ...] = ()

  @property
  def step(self) -> int:
    """The last step with a training loss; 0 before the first."""
    loss = self.curves.get("loss")
    return int(loss.steps[-1]) if loss is not None else 0

  def evaluation(self, which: int) -> dict[str, dict[str, float]]:
    """{source: {precision: held-out loss}} of the first evaluation (0) or the last (-1)."""
    step, losses = sorted({h.step for h in self.heldout})[which], {}
    for h in self.heldout:
      if h.step == step:
        losses.setdefault(h.source, {})[h.precision] = h.loss
    return losses

  @property
  def tokens_per_step(self) -> int:
    """Tokens of one optimizer step."""
    r = self.resolved
    return r.get("global_batch", 0) * r.get("seq_len", 0)

  @property
  def recipe(self) -> str:
    """The recipe of most GEMMs of the first phase, with "+" where there are several phases."""
    counts: collections.Counter[str] = collections.Counter()
    for row in self.sites:
      if row["from_step"] == 0:
        counts[row["recipe"]] += row["layers"]
    if not counts:  # results that were kept without sites.json
      rules = self.resolved.get("precision.rules") or [["", "unknown"]]
      return rules[-1][1]
    has_phases = len({row["from_step"] for row in self.sites}) > 1
    return counts.most_common(1)[0][0] + "+" * has_phases

  @property
  def device_line(self) -> str:
    """The devices and what multiplies FP8 on them."""
    used = sorted(
      {
        row["backends"][p]
        for row in self.sites
        for p in PASSES
        if row["definition"][p]["lhs"] is not None
      }
    )
    devices = self.provenance.get("devices", "unknown devices")
    if not self.sites:
      return devices
    if not used:
      return f"{devices}: no FP8 products"
    sums = "sums of 14 bits" if "emulated_sm90" in used else "exact"
    slow = f" (emulated: {sums}, slow)" * bool({*used} & {*gemm_api.EMULATED})
    return f"{devices}: FP8 products by {', '.join(used)}{slow}"


def read(workdir: str) -> RunFiles:
  """Reads the folder of a run.

  Raises:
    UserError: it is no folder of a run, or a file in it is damaged; with the remedy.
  """
  path = os.path.join(workdir, "metrics.jsonl")
  if not os.path.isfile(path):
    raise UserError(f"{workdir!r} is no folder of a run: there is no {path}; {_REMEDY}")
  rows = [row for _, row in metrics_writer.rows(path)]
  find = functools.partial(records.find, workdir, remedy=_WITHOUT)
  config = find("config.json", schemas.Config) or {}
  weights = {k: v for k, v in config.get("resolved", {}).items() if _WEIGHT.fullmatch(k)}
  where = os.path.join(workdir, "config.json")
  records.check(weights, dict[str, schemas.Positive], where, _WITHOUT)
  provenance = find("provenance.json", schemas.Provenance) or {}
  return RunFiles(
    workdir=workdir,
    name=os.path.basename(os.path.abspath(workdir)),
    curves=_curves(rows),
    heldout=_heldout(rows),
    snapshots=_snapshots({row["step"]: row["numerics"] for row in rows if "numerics" in row}),
    events=_events(rows),
    resolved=identity.without_removed(config.get("resolved") or provenance.get("config", {})),
    changed=config.get("changed", {}),
    provenance=provenance,
    sites=tuple(find("sites.json", list[schemas.Site]) or ()),
    memory=find("memory.json", schemas.Memory),
    nonfinite=find("nonfinite/report.json", schemas.Failure),
    summary=find("summary.json", schemas.Summary),
    sensitivity=find("sensitivity/sensitivity.json", schemas.Sensitivity),
    noise_floor=find("noise_floor.json", schemas.NoiseFloor),
    exponents={row["step"]: row["exponents"] for row in rows if "exponents" in row},
    param_stats=_snapshots(
      {
        row["step"]: {name: {"": of} for name, of in row["param_stats"].items()}
        for row in rows
        if "param_stats" in row
      }
    ),
    refreshes=tuple(
      _refresh(row["step"], workdir, **row["refresh"]) for row in rows if "refresh" in row
    ),
  )


def _curves(rows: list[dict[str, Any]]) -> dict[str, Curve]:
  by_step: dict[str, dict[int, float]] = {}  # a number that is not finite is a string
  for row in rows:
    for name, value in row.items():
      if name != "step" and isinstance(value, (int, float, str)) and not _HELDOUT.fullmatch(name):
        by_step.setdefault(name, {})[row["step"]] = float(value)
  ordered = {name: zip(*sorted(values.items())) for name, values in by_step.items()}
  return {
    name: Curve(np.array(steps, np.int64), np.array(values, np.float64))
    for name, (steps, values) in ordered.items()
  }


def _heldout(rows: list[dict[str, Any]]) -> tuple[HeldOut, ...]:
  losses = {
    (row["step"], match[1], match[2]): float(value)
    for row in rows for name, value in row.items() if (match := _HELDOUT.fullmatch(name))
  }  # fmt: skip
  return tuple(HeldOut(s, source, p, loss) for (s, source, p), loss in sorted(losses.items()))


def _snapshots(snapshots: Mapping[int, Mapping[str, Any]]) -> Snapshots | None:
  """Args: {step: {layer's site: {tensor: {statistic: number}}}}."""
  if not snapshots:
    return None
  steps, places, statistics = sorted(snapshots), {}, {}
  for numerics in snapshots.values():
    for name, tensors in numerics.items():
      for tensor, summary in tensors.items():
        cell = cell_of(name, tensor)
        places[cell] = (name, tensor)
        statistics.update(dict.fromkeys(summary))
  cells = tuple(sorted(places, key=cell_order))
  values = {name: np.full((len(steps), len(cells)), math.nan) for name in statistics}
  for i, step in enumerate(steps):
    for j, cell in enumerate(cells):
      site, tensor = places[cell]
      for name, value in snapshots[step].get(site, {}).get(tensor, {}).items():
        values[name][i, j] = float(value)
  return Snapshots(np.array(steps, np.int64), cells, values)


def _refresh(step: int, workdir: str, before: str, after: str) -> Refresh:
  tables = [records.find(workdir, name, schemas.Calibration, _WITHOUT) for name in (before, after)]
  if None in tables:  # deleted
    return Refresh(step, "", ())
  old, new = (
    {f"{row['site']}/{row['tensor']}": row["scale"] for row in table["rows"] if "scale" in row}
    for table in tables
  )
  changed = [(name, old[name], new[name]) for name in old if old[name] != new.get(name, old[name])]
  changed.sort(key=lambda of: -abs(math.log2(of[2] / of[1])))
  return Refresh(step, os.path.join(workdir, before), tuple(changed))


def cell_of(name: str, tensor: str) -> Cell:
  """The cell of a layer's site, "layers/3/mlp/up", or of a site in no layer."""
  layer, site = patterns.of_layer(name)
  return Cell(site, layer, tensor)


def cell_order(cell: Cell):
  """By which cells are sorted: site, tensor, layer; sites in no layer last."""
  tensor = amax_history.TENSORS.index(cell.tensor) if cell.tensor in amax_history.TENSORS else 9
  return cell.layer is None, cell.site, tensor, cell.layer or 0


def _events(rows: list[dict[str, Any]]) -> tuple[Event, ...]:
  """Rows "alarms" and "actions": lists of objects with "place" and "text"."""
  events = [
    Event(row["step"], kind, str(item.get("place", "")), str(item["text"]))
    for row in rows for kind in ("alarm", "action") for item in row.get(f"{kind}s", ())
  ]  # fmt: skip
  return tuple(sorted(events, key=lambda e: e.step))
