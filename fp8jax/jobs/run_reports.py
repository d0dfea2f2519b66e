"""The reports of a run: rows of metrics.jsonl, messages, progress bar, trace, report.html."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import rich.console

from fp8jax.jobs import report, run_state
from fp8jax.optim import param_stats
from fp8jax.phases import decide
from fp8jax.report import page
from fp8jax.run import alarms, calibration, end, goodput, metrics, metrics_writer, numerics_image
from fp8jax.run import profiler as profiler_lib
from fp8jax.run import progress as progress_lib
from fp8jax.run import provenance as provenance_lib
from fp8jax.run import start as start_lib
from fp8jax.run import tracker as tracker_lib
from fp8jax.step import train_spec
from fp8jax.step.state import State


class Taken(NamedTuple):
  """A step that the device takes while the host goes on."""

  step: int  # steps taken, with it
  values: dict[str, Any]  # its metrics, on the device
  host: Any  # its batch
  position: Any  # of the data, after the batch
  read: dict[str, float]  # metrics of the batch
  waited: float  # seconds for it


class RunReports:
  """Writes down what a run does, and says it."""

  log: metrics_writer.Metrics  # from `open` on
  speed: progress_lib.Throughput  # inside `steps`
  _before: alarms.Numerics | None = None  # those of the last loud step; None: of metrics.jsonl

  def __init__(
    self, spec: train_spec.TrainSpec, workdir: str, fingerprint: str, out: rich.console.Console
  ):
    self._spec, self.workdir, self._fingerprint, self.out = spec, workdir, fingerprint, out
    self.clock, self.profiler = goodput.Clock(), profiler_lib.Profiler(workdir, spec.log, out)

  def open(self, step: int, evaluated: Collection[str]):
    """Rows follow those of `step` steps. Args: steps with an evaluation that the run remembers."""
    spec, workdir, name = self._spec, self.workdir, self._spec.log.tracker
    track = (lambda: tracker_lib.Tracker(name, workdir, spec.flat)) if name else None
    self.log = metrics_writer.Metrics(workdir, step, evaluated, spec.log.tensorboard, track)

  def forget(self, step: int, evaluated: Collection[str]):
    """Takes back the rows after `step` steps."""
    self.log.forget(step, evaluated)
    self._before = None

  @contextlib.contextmanager
  def steps(self, first: int) -> Iterator[None]:
    """Inside, steps are taken, after `first` of them."""
    spec, tokens = self._spec, self._spec.tokens_per_step
    flops = metrics.flops_per_token(spec.model, spec.data.seq_len)
    peak = metrics.peak_flops(jax.devices()[0].device_kind, spec.num_devices)
    self.speed = progress_lib.Throughput(tokens, tokens * flops, peak)
    self._progress = progress_lib.Progress(spec.steps, first, spec.log.every, self.out)
    try:
      yield
    finally:
      self._progress.close()
      self.profiler.close()

  def step(self, now: run_state.RunState, taken: Taken, values, nested, is_finite: bool):
    """Writes down a step. Args: its metrics on the host, and those that are no single numbers."""
    step = taken.step
    if not is_finite:
      self.out.print(f"step {step}: loss, gradient or a GEMM's operand not finite; update skipped")
    times = metrics_writer.times(self._spec, step, self.clock, taken.waited, now.shares)
    times |= self.speed.values() | taken.read | now.batches.losses(nested["by_source"])
    self.log.write_step(step, values, is_finite, now.batches.counts, times)
    if nested["tensor_stats"] is not None:
      self._statistics(now, step, nested)
    self._progress.update(step, values["loss"], self.speed)

  def _statistics(self, now: run_state.RunState, step: int, nested: dict[str, Any]):
    """Writes what every site saw in a loud step, and says what is alarming."""
    sites, stats, spec = now.sites[True], nested["tensor_stats"], now.spec
    before = self._before
    if before is None:  # the run goes on: what rang then, in this phase, is not new now
      at, before = alarms.last_snapshot(self.workdir)
      if now.has_same_alarms and at > now.spec.precision.phases[now.phase].start:
        now.watch.new(before)
    numerics = alarms.with_drift(alarms.summarise(sites, stats, nested["alignment"]), before)
    self._before = numerics
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

  def refresh(self, loss: str, step: int, sites, before, after):
    """Writes all scales before and after a refresh, for precision.calibration of this loss."""
    if jax.process_index() == 0:
      of_run = {"step": step, "fingerprint": self._fingerprint, "loss": loss}
      tables = (
        calibration.of_states(self._spec, sites, states, **of_run) for states in (before, after)
      )
      names = calibration.keep_refresh(self.workdir, step, *tables)
      self.log.write_row(step + 1, {"refresh": names})

  @contextlib.contextmanager
  def steering(self, now: run_state.RunState) -> Iterator[None]:
    """Inside, policies decide; sites.json then has the recipes that they gave."""
    before = now.spec
    yield
    if now.spec is not before:
      provenance_lib.write_json(self.workdir, "sites.json", start_lib.all_site_rows(now.spec))

  def end(self, now: run_state.RunState, step: int, last, state: State, evaluations) -> dict:
    """Writes, says and returns the summary. Args: metrics of the last step, {} without one."""
    # A finished run that is started again takes no step.
    loss = last["loss"] if last else metrics_writer.last_logged(self.workdir, "loss")
    of = (now.batches.counts, evaluations, self.clock.seconds())
    summary = end.summarise(now.spec, self.workdir, step, loss, state, *of)
    end.print_end(self.out, summary, self.workdir)
    self.draw()
    return summary

  def draw(self):
    """Writes WORKDIR/report.html; says why not, and the run goes on."""
    if self._spec.log.report and jax.process_index() == 0:
      self.out.print(page.attempt(self.workdir, report.others))
