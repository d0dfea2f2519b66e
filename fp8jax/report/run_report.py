"""WORKDIR/report.html: the sections of a run's report."""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from fp8jax import patterns
from fp8jax.evaluation import divergence
from fp8jax.phases import policy as policy_lib
from fp8jax.report import charts, exponent_charts, files, page, recommend, thin
from fp8jax.report.files import Event, RunFiles, Snapshots
from fp8jax.report.page import Section
from fp8jax.run import goodput

# Rows of the tables of alarms and of numerics that a page shows; the files have all.
MAX_EVENTS = 200
# Of a refresh: the scales that changed most.
_MAX_SCALES = 10


# Sections of another feature, of what a run's folder has of it.
Others = Sequence[Callable[[RunFiles], list[Section]]]


def write(workdir: str, others: Others = ()) -> str:
  """Writes WORKDIR/report.html from the other files of WORKDIR; returns its path.

  Raises:
    UserError: the folder is no run's, or a file in it is damaged.
    ModuleNotFoundError: the extra `report` is not installed.
  """
  run = files.read(workdir)
  path = os.path.join(workdir, "report.html")
  page.write(path, page.render(f"{run.name}: {run.recipe}", sections(run, others), page.vega()))
  return path


def pictures(workdir: str) -> list[str]:
  """Writes loss and numerics into WORKDIR, .svg and .png, where there is something; their paths."""
  specs = {s: spec for part in sections(files.read(workdir)) for s, spec in part.charts.items()}
  paths = []
  for key, name in (("loss", "loss"), ("heat_maps", "numerics")):
    if key in specs:
      paths += page.pictures(os.path.join(workdir, name), specs[key])
  return paths


def sections(run: RunFiles, others: Others = ()) -> list[Section]:
  """All parts of the report that the run's files have something for."""
  with charts.unchecked():
    return _sections(run, others)


def _sections(run: RunFiles, others: Others) -> list[Section]:
  parts = [_head(run), _training(run), _speed(run), _time(run), *_numerics(run), *_params(run)]
  parts += [_events(run), *_refreshes(run), _noise(run), _memory(run)]
  parts += [s for of in others for s in of(run)]
  return [s for s in [*parts, _config(run), _sites(run), _provenance(run)] if s is not None]


def _head(run: RunFiles) -> Section:
  steps = run.resolved.get("steps", "?")
  state = "finished" if run.summary else "not finished: drawn from what is written so far"
  rows = [
    ("devices", run.device_line),
    ("state", f"step {run.step} of {steps}, {state}"),
    ("tokens", f"{run.step * run.tokens_per_step:,}"),
    ("recipe of most sites", run.recipe),
    *_shares(run),
    ("written by", f"commit {run.provenance.get('commit')}, {run.provenance.get('time')}"),
  ]
  if run.nonfinite:
    bad, at = run.nonfinite.get("first_bad_site"), run.nonfinite.get("step")
    rows.append(("stopped", f"not finite at step {at}; first bad site: {bad}"))
  skipped = run.curves.get("skipped")
  if skipped is not None:
    n, shown = len(skipped.steps), ", ".join(map(str, skipped.steps[:12]))
    rows.append(("skipped updates", f"{n}: steps {shown}" + f" and {n - 12} more" * (n > 12)))
  return Section("Run", tables=[(("", ""), rows)])


def _shares(run: RunFiles) -> list[tuple[str, str]]:
  """How much is in FP8: of the whole run where it is finished, else of its last step."""
  of_run = run.summary or {}
  rows = []
  for name, what in (("flops", "FLOPs"), ("gemm_bytes", "bytes that GEMMs read")):
    curve = run.curves.get(f"fp8_{name}_share")
    share = of_run.get(f"fp8_{name}_share", None if curve is None else curve.values[-1])
    if share is not None:
      rows.append((f"in FP8, of {what}", f"{share:.1%}"))
  return rows


def _training(run: RunFiles) -> Section | None:
  if "loss" not in run.curves and not run.heldout:
    return None
  drawn = charts.specs(
    loss=charts.loss(run),
    gap=charts.gap(run),
    accuracy=charts.accuracies(run),
    learning_rate=charts.metric(run, "learning_rate", "learning rate", digits=".1e"),
    grad_norm=charts.metric(run, "grad_norm", "gradient norm", scale="log"),
    source_losses=charts.by_source(run, "loss"),
    sources=charts.by_source(run, "share"),
  )
  return Section("Loss", _thinning(run), drawn)


def _thinning(run: RunFiles) -> str:
  """A sentence about how many steps a point of the curves stands for."""
  if "loss" not in run.curves:
    return ""
  size = thin.curve(run.curves["loss"]).per_point
  if size == 1:
    return "Every step is a point."
  return f"A point is the mean of {size} steps; the band is their smallest and largest value."


def _speed(run: RunFiles) -> Section | None:
  share = run.curves.get("fp8_flops_share")
  # By a schedule or a policy; else the table has the one number.
  changes = share is not None and len(set(share.values)) > 1
  over_steps = charts.metric(run, "fp8_flops_share", "FLOPs in FP8", digits=".0%")
  drawn = charts.specs(
    tokens_per_second=charts.metric(run, "tokens_per_second", "tokens per second"),
    mfu=charts.metric(run, "mfu", "MFU, of the dense BF16 peak", digits=".1%"),
    data_wait=charts.metric(run, "data_wait_seconds", "wait for data, ms per step", factor=1e3),
    step_seconds=charts.metric(run, "step_seconds", "step time, s"),
    memory_peak=charts.metric(run, "memory_peak_gib", "most device memory in use so far, GiB"),
    fp8_share=over_steps if changes else None,
  )
  if not drawn:
    return None
  note = "Means over a sliding window of 20 steps, without compilation. "
  lacks = "" if "mfu" in run.curves else "No MFU: the peak of this device is not known."
  return Section("Speed", note + lacks, drawn)


def _time(run: RunFiles) -> Section | None:
  last = {name: float(curve.values[-1]) for name, curve in run.curves.items()}
  seconds = (run.summary or {}).get("seconds") or goodput.from_curves(last)
  if not seconds:
    return None
  note = (
    f"Goodput {goodput.goodput(seconds):.1%}: the share of the time of all processes of this run "
    "that went into steps that count. Lost are steps that were taken again."
  )
  return Section("Time", note, tables=[(("", "seconds", "share"), goodput.table(seconds))])


def _numerics(run: RunFiles) -> list[Section]:
  if run.snapshots is None:
    note = "None recorded: --config.log.tensor_stats_every=100 looks at every 100th step."
    return [Section("Tensor statistics", note)]
  snapshots, picked = run.snapshots, thin.chosen(run.snapshots)
  number = f"all {len(snapshots.steps)} snapshots" if len(picked) == len(snapshots.steps) else (
    f"{len(picked)} of {len(snapshots.steps)} snapshots, evenly spread")  # fmt: skip
  note = (
    f"Layer by site and tensor (x input, w weight, g gradient), {number}, numbers with "
    f"{thin.DIGITS} digits. Bright is what to look at: low signal-to-noise ratio, high everything "
    "else, means far from zero. Grey: not quantized, or no number. Colours keep their meaning over "
    "all snapshots."
  )
  specs = _maps("heat_maps", snapshots, charts.STATISTICS)
  drawn = [Section("Tensor statistics", note, specs), *_exponents(run)]
  if scales := exponent_charts.scale_ranges(snapshots):
    note = (
      "Over all layers of a site; a click in the legend picks a site. "
      "The scale of a tile of zeros is 1."
    )
    drawn.append(Section("Scales", note, charts.specs(scale_ranges=scales)))
  return [*drawn, _recommended(run, snapshots)]


def _recommended(run: RunFiles, snapshots: Snapshots) -> Section:
  rows = recommend.recommendations(snapshots, run.exponents)
  note = (
    f"For a scale per tensor, from {len(snapshots.steps)} snapshots at steps {snapshots.steps[0]} "
    f"to {snapshots.steps[-1]}; at least {recommend.LEAST_SNAPSHOTS} are needed. A delayed margin "
    "holds every amax by the largest of the snapshots before it, a static one by the first "
    f"snapshot's. Octaves are the exponents of all but {recommend.UNDERFLOW:.0%} of the nonzero "
    "elements, and the margin. Of the layers of a site the widest needs count; the rules below are "
    "layer by layer."
  )
  lines = recommend.precision_rules(rows, run.resolved.get("precision.rules") or ())
  tables = [(recommend.COLUMNS, recommend.table(rows))]
  return Section("Recommended formats and margins", note, tables=tables, text=lines)


def _maps(name: str, snapshots: Snapshots, statistics) -> dict[str, dict[str, Any]]:
  specs = charts.specs(**{name: charts.heat_maps(snapshots, statistics)})
  specs[name]["datasets"] = {"looks": charts.snapshot_values(snapshots, statistics)}
  return specs


def _params(run: RunFiles) -> list[Section]:
  if run.param_stats is None:
    return []
  note = (
    "Layer by parameter, or by group of parameters, in steps of the tensor statistics. Norms of "
    "gradients are those before clipping; an update that was not applied counts."
  )
  maps = _maps("param_maps", run.param_stats, charts.PARAM_STATISTICS)
  return [Section("Parameters", note, maps)]


def _exponents(run: RunFiles) -> list[Section]:
  rows = exponent_charts.values(run.exponents)
  if not rows:
    return []
  shown, number = len(exponent_charts.chosen(run.exponents)), len(run.exponents)
  note = (
    "The share of a tensor's nonzero elements with exponent e, 2^e <= |x| < 2^(e+1), of a sample, "
    "to the decibel. "
    f"Bright: many elements; white: none. Snapshots: {shown} of {number}. The first and the last "
    "exponent that are counted have what is beyond too."
  )
  specs = charts.specs(exponents=exponent_charts.heat_maps(run.exponents))
  specs["exponents"]["datasets"] = {"exponents": rows}
  return [Section("Exponents", note, specs)]


def _events(run: RunFiles) -> Section:
  if not run.events:
    return Section("Alarms and actions", "None recorded.")
  alarms = [e for e in run.events if e.kind == "alarm"]
  actions = [e for e in run.events if e.kind == "action"]
  note = "" if actions else "No policy acted on these alarms: nothing was changed. "
  for what, events in (("alarms", alarms), ("actions", actions)):
    if len(events) > MAX_EVENTS:
      note += f"The first {MAX_EVENTS} of {len(events)} {what}; metrics.jsonl has all. "
  rows = [(e.step, e.place, e.text, _done_about(e, alarms, actions)) for e in alarms[:MAX_EVENTS]]
  tables: list[Any] = [(("step", "tensor", "alarm", "what was done"), rows)] if rows else []
  if actions:
    done = [(e.step, e.place, e.text) for e in actions[:MAX_EVENTS]]
    tables.append((("step", "place", "action"), done))
  return Section("Alarms and actions", note, tables=tables)


def _refreshes(run: RunFiles) -> list[Section]:
  if not run.refreshes:
    return []
  rows = [
    (of.step, f"{name} ({len(of.scales)} scales changed)" * (not i) or name, f"{old:.4g}",
     f"{new:.4g}", f"{math.log2(new / old):+.2f}", of.table * (not i))
    for of in run.refreshes for i, (name, old, new) in enumerate(of.scales[:_MAX_SCALES])
  ][:MAX_EVENTS]  # fmt: skip
  note = (
    f"The {_MAX_SCALES} scales of each refresh that changed most. A run whose "
    "precision.calibration names the table starts from the scales before; a resumed one also needs "
    "'precision.calibration' in checkpoint.accept_changes."
  )
  columns = ("step", "tensor", "scale before", "after", "powers of two", "table of all before")
  return [Section("Refreshed scales", note, tables=[(columns, rows)])]


def _done_about(alarm: Event, alarms: Sequence[Event], actions: Sequence[Event]) -> str:
  """The actions at the alarm's site for its statistic, until the same alarm fires again."""
  site, statistic = alarm.place.rpartition("/")[0], alarm.text.split(" ")[0]
  again = [e.step for e in alarms if e.place == alarm.place and e.step > alarm.step]
  end = min(again, default=math.inf)
  texts = [
    f"step {a.step}: {a.text}" for a in actions
    if alarm.step <= a.step < end and _covers(a.place, site) and _answers(a.text, statistic)
  ]  # fmt: skip
  return "; ".join(texts) or "nothing"


def _answers(action: str, statistic: str) -> bool:
  """Whether the policy that an action names acts on alarms of this statistic."""
  policy = action.partition(": ")[0]
  stated = re.search(r"alarm='(\w+)'", policy)
  return (
    stated[1] in (statistic, policy_lib.ANY)
    if stated
    else not re.search("every=|metric=|^lower_rate", policy)
  )


def _covers(place: str, site: str) -> bool:
  """Whether the place of an action, a site or a pattern of sites, is of this site."""
  return (
    place == site or not patterns.problem(place, [site]) and bool(patterns.matches(place, [site]))
  )


def _noise(run: RunFiles) -> Section | None:
  if run.noise_floor is None:
    return None
  where = " ".join(f"{k} {v}" for k, v in run.noise_floor["weights"].items())
  note = (
    f"Weights: {where}. The difference of the model from itself with norm weights one ulp larger: "
    "programs of another shape, or clients, that differ by no more than this agree."
  )
  return Section("Noise floor", note, tables=[divergence.table(run.noise_floor["rows"])])


def _memory(run: RunFiles) -> Section | None:
  if run.memory is None:
    return None
  note = "Declared by the configuration beside found in the compiled step, each at its own peak."
  return Section("Memory", note, charts.specs(memory=charts.memory(run)))


def _config(run: RunFiles) -> Section:
  rows = [(k, json.dumps(v)) for k, v in sorted(run.changed.items())]
  note = "" if rows else "As configs/base.py says."
  tables = [(("key", "here"), rows)] if rows else []
  return Section("Configuration, where it differs from base", note, tables=tables)


def _sites(run: RunFiles) -> Section | None:
  if not run.sites:
    return None
  rows = [
    (r["from_step"], r["site"], r["layers"], "×".join(map(str, r["m_n_k"])), r["recipe"],
     "/".join(dict.fromkeys(r["backends"].values())), "; ".join(r["notes"]))
    for r in run.sites
  ]  # fmt: skip
  columns = ("from step", "site", "layers", "m×n×k per device", "recipe", "backends", "notes")
  return Section("Sites", tables=[(columns, rows)])


def _provenance(run: RunFiles) -> Section:
  shown = {k: v for k, v in run.provenance.items() if k not in ("config", "earlier")}
  legs = run.provenance.get("earlier", [])
  note = f"{len(legs) + 1} legs: the run was interrupted and went on." if legs else ""
  rows = [(leg.get("from_step"), leg.get("time"), leg.get("commit"), leg.get("devices"))
          for leg in [*legs, run.provenance]]  # fmt: skip
  tables = [(("from step", "time", "commit", "devices"), rows)] if legs else []
  return Section("Provenance", note, tables=tables, text=json.dumps(shown, indent=1))
