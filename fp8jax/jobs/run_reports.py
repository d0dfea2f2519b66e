"""The reports of a run: rows of metrics.jsonl, messages, progress bar, trace, report.html."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import jax
import rich.console

from fp8jax.jobs import report, run_state
from fp8jax.optim import param_stats
from fp8jax.phases import decide
from fp8jax.report import page
from fp8jax.run import (
  alarms,
  calibration,
  end,
  goodput,
  metrics,
  metrics_writer,
  numerics_image,
  profiler,
  progress,
  provenance,
  start,
  tracker,
)
from fp8jax.step import train_spec
from fp8jax.step.state import State


@dataclasses.dataclass
class Taken:
  """A step that the device takes while the host goes on.

  Attributes:
    step: steps taken, with it.
    values: its metrics, on the device; floats on the host after `wait`.
    host, position: its batch, and the data's position after that.
    read, waited: metrics of the batch, and seconds for it.
    is_finite, nested: after `wait`; metrics that are no single number.
  """

  step: int
  values: dict[str, Any]
  host: dict[str, Any]
  position: Any
  read: dict[str, float]
  waited: float
  is_finite: bool = True
  nested: dict[str, Any] = dataclasses.field(default_factory=dict)

  def wait(self):
    """Reads the metrics from the device."""
    values = jax.device_get(self.values)
    keys = ("tensor_stats", "alignment", "param_stats", "by_source")
    self.nested = {key: values.pop(key, None) for key in keys}
    self.is_finite = values.pop("is_finite")
    self.values = {k: float(v) for k, v in values.items()}


class RunReports:
  """Writes down what a run does, and says it.

  Attributes:
    clock: its seconds by their use.
    log: its rows, from `open` on.
    speed: of the steps, inside `steps`.
  """

  log: metrics_writer.Metrics
  speed: progress.Throughput

  def __init__(
    self, spec: train_spec.TrainSpec, workdir: str, fingerprint: str, out: rich.console.Console
  ):
    self._spec, self.workdir, self._fingerprint, self.out = spec, workdir, fingerprint, out
    self.clock, self._looks = goodput.Clock(), alarms.Looks(workdir)
    self.profiler = profiler.Profiler(workdir, spec.log, out)

  def open(self, step: int, evaluated: Collection[str]):
    """Rows follow those of `step` steps. Args: steps with an evaluation that the run remembers."""
    spec, workdir, name = self._spec, self.workdir, self._spec.log.tracker
    track = (lambda: tracker.Tracker(name, workdir, spec.flat)) if name else None
    self.log = metrics_writer.Metrics(workdir, step, evaluated, spec.log.tensorboard, track)

  def forget(self, step: int, evaluated: Collection[str]):
    """Takes back the rows after `step` steps."""
    self.log.forget(step, evaluated)
    self._looks.forget()

  @contextlib.contextmanager
  def steps(self, first: int) -> Iterator[None]:
    """Inside, steps are taken, after `first` of them."""
    spec, tokens = self._spec, self._spec.tokens_per_step
    flops = metrics.flops_per_token(spec.model, spec.data.seq_len)
    peak = metrics.peak_flops(jax.devices()[0].device_kind, spec.num_devices)
    self.speed = progress.Throughput(tokens, tokens * flops, peak)
    self._progress = progress.Progress(spec.steps, first, spec.log.every, self.out)
    try:
      yield
    finally:
      self._progress.close()
      self.profiler.close()

  def step(self, now: run_state.RunState, taken: Taken):
    """Writes down a step that was waited for."""
    step, nested = taken.step, taken.nested
    if not taken.is_finite:
      self.out.print(f"step {step}: loss, gradient or a GEMM's operand not finite; update skipped")
    times = metrics_writer.times(self._spec, step, self.clock, taken.waited, now.shares)
    times |= self.speed.values() | taken.read | now.batches.losses(nested["by_source"])
    self.log.write_step(step, taken.values, taken.is_finite, now.batches.counts, times)
    if nested["tensor_stats"] is not None:
      self._statistics(now, step, nested)
    self._progress.update(step, taken.values["loss"], self.speed)

  def _statistics(self, now: run_state.RunState, step: int, nested: dict[str, Any]):
    """Writes what every site saw in a loud step, and says what is alarming."""
    sites, stats, spec = now.sites[True], nested["tensor_stats"], now.spec
    numerics = self._looks.add(alarms.summarise(sites, stats, nested["alignment"]))
    self.log.write_nested(step, "numerics", numerics, lambda: numerics_image.draw(numerics))
    self.log.write_row(step, {"exponents": alarms.exponents(sites, stats)})
    if (by_param := nested["param_stats"]) is not None:
      of = param_stats.summary(by_param, spec.log.param_stats, spec.optim, spec.declaration)
      self.log.write_row(step, {"param_stats": of})
    self._events(step, "alarms", now.watch.new(numerics))

  def actions(self, step: int, events: list[decide.Event]):
    """Writes down what policies did."""
    self._events(step, "actions", [event.row for event in events])

  def _events(self, step: int, kind: str, events: list[dict[str, str]]):
    if events:
      self.log.write_row(step, {kind: events})
    for line in alarms.as_lines(step, events):
      self.out.print(line)

  def refresh(self, step: int, sites, before, after):
    """Writes all scales before and after a refresh, for precision.calibration."""
    if jax.process_index() == 0:
      how = dict(step=step, fingerprint=self._fingerprint)
      tables = (calibration.of_states(sites, states, **how) for states in (before, after))
      names = calibration.keep_refresh(self.workdir, step, *tables)
      self.log.write_row(step + 1, {"refresh": names})

  @contextlib.contextmanager
  def steering(self, now: run_state.RunState) -> Iterator[None]:
    """Inside, policies decide; sites.json then has the recipes that they gave."""
    before = now.spec
    yield
    if now.spec is not before:
      provenance.write_json(self.workdir, "sites.json", start.all_site_rows(now.spec))

  def end(
    self, now: run_state.RunState, step: int, last: dict[str, float], state: State,
    evaluations: dict[str, Any],
  ) -> dict[str, Any]:  # fmt: skip
    """Writes, says and returns the summary. Args: metrics of the last step, {} without one."""
    # A finished run that is started again takes no step.
    loss = last["loss"] if last else metrics_writer.last_logged(self.workdir, "loss")
    how = (now.batches.counts, evaluations, self.clock.seconds())
    summary = end.summarise(now.spec, self.workdir, step, loss, state, *how)
    end.print_end(self.out, summary, self.workdir)
    self.draw()
    return summary

  def draw(self):
    """Writes WORKDIR/report.html; says why not, and the run goes on."""
    if self._spec.log.report and jax.process_index() == 0:
      self.out.print(page.attempt(self.workdir, report.others))
