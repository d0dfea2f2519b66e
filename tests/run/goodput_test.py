"""Seconds by kind: sums against a clock that the test turns, and a run that is interrupted."""

import json
import shutil
import types

import jax
import pytest
import rich.console
from harness import text_config, train_on_text

from fp8jax.config import resolve
from fp8jax.kernels.choose import Device
from fp8jax.report import run_report
from fp8jax.run import goodput, metrics_writer, preemption, profiler, progress
from fp8jax.step.settings import Log


def test_every_second_has_one_kind_and_repeated_steps_are_lost():
  now = [100.0]
  clock = goodput.Clock(lambda: now[0])

  def passes(seconds):
    now[0] += seconds

  passes(3)
  with clock.on("step"):
    passes(10)
    with clock.on("data_wait"):
      passes(2)
    with pytest.raises(OSError), clock.on("checkpoint"):
      passes(1)
      raise OSError
    passes(5)
  passes(4)
  expected = dict(init=7.0, compile=0.0, data_wait=2.0, rollout=0.0, step=15.0, checkpoint=1.0)
  assert clock.seconds() == {**expected, "evaluation": 0.0, "lost": 0.0}
  assert goodput.goodput(clock.seconds()) == 15 / 25
  # The process before took 40 s to its checkpoint, and was seen for the last time 8 s later.
  clock.go_on({"step": 30.0, "init": 10.0}, 48.0)
  assert clock.seconds() == {
    **expected, "evaluation": 0.0, "init": 17.0, "step": 45.0, "lost": 8.0
  }  # fmt: skip
  assert goodput.line(clock.seconds()).endswith("lost 8.0; goodput 61.6%")
  clock.lose_since({"step": 40.0})  # a roll-back
  assert (clock.seconds()["step"], clock.seconds()["lost"]) == (40.0, 13.0)
  clock.go_on({"step": 1.0, "lost": 2.0, "of another version": 9.0}, 15.0)
  assert (clock.seconds()["step"], clock.seconds()["lost"]) == (41.0, 13.0 + 2 + 3)
  clock.go_on({"lost": 1.0}, None)
  assert clock.seconds()["lost"] == 19.0


def test_speed_is_that_of_the_last_twenty_steps(monkeypatch):
  """Steps of 1 s, then of 3 s; at 100 tokens and 60 of 80 operations per second and device."""
  now = iter([*range(8), *range(10, 70, 3)])
  monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
  speed = progress.Throughput(100, 60.0, 80.0)
  speed.tick()
  assert speed.values() == {} and speed.text(9) == ""
  speed.tick()
  assert speed.values() == {"tokens_per_second": 100.0, "step_seconds": 1.0, "mfu": 0.75}
  assert speed.text(3700) == "100 tokens/s  MFU 75.0%  1:01:40 left"
  for _ in range(6):
    speed.tick()
  assert speed.seconds_per_step == 1.0
  speed.tick()
  assert speed.seconds_per_step == 10 / 8
  for _ in range(19):
    speed.tick()
  assert speed.seconds_per_step == (67 - 7) / 20
  speed.restart()
  assert speed.seconds_per_step is None
  assert progress.Throughput(100, 60.0, None).text(1) == ""


def _traced_steps(path) -> list[int]:
  data, found = jax.profiler.ProfileData.from_file(path), []  # which owns all of its parts
  for plane in data.planes:
    for line in plane.lines:
      found += [dict(e.stats)["step_num"] for e in line.events if e.name == "train"]
  return sorted(found)


@pytest.mark.filterwarnings("ignore:builtin type")  # of the trace's reader
@pytest.mark.slow
def test_a_killed_run_counts_its_repeated_steps_and_traces_its_window(tmp_path, monkeypatch):
  """A run of 6 steps with a checkpoint at 3 dies after step 5; its trace has the steps 2 and 3.

  The run that goes on ends within its window, and writes the trace all the same.
  """
  changes = {
    "checkpoint.every": 3, "log.every": 2, "log.profile": (1, 2),
    "eval.precisions": ("bf16",),
  }  # fmt: skip
  with monkeypatch.context() as patch:

    def dies(self, step):
      if step == 5:
        raise KeyboardInterrupt
      return False

    patch.setattr(preemption.Interrupts, "requested", dies)
    with pytest.raises(KeyboardInterrupt):
      train_on_text(tmp_path, "bf16", **changes)
  (trace,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
  assert _traced_steps(str(trace)) == [2, 3]
  rows = [row for _, row in metrics_writer.rows(str(tmp_path / "metrics.jsonl"))]
  elapsed = {row["step"]: row["elapsed_seconds"] for row in rows if "elapsed_seconds" in row}
  shutil.rmtree(tmp_path / "profile")
  train_on_text(tmp_path, "bf16", **changes | {"log.profile": (4, 9)})
  (trace,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
  assert _traced_steps(str(trace)) == [5, 6]
  summary = json.loads((tmp_path / "summary.json").read_text())
  seconds = summary["seconds"]
  assert seconds.keys() == set(goodput.KINDS) and min(seconds.values()) >= 0
  # From somewhere between the steps 3 and 4, when the checkpoint was written, to the last row.
  last = max(elapsed)
  assert elapsed[last] - elapsed[4] <= seconds["lost"] <= elapsed[last] - elapsed[2]
  assert min(seconds[k] for k in ("init", "compile", "step", "checkpoint", "evaluation")) > 0
  page = run_report.write(str(tmp_path))
  with open(page) as f:
    assert f"Goodput {goodput.goodput(seconds):.1%}" in f.read()


def test_a_trace_begins_and_ends_once(monkeypatch):
  events, log = [], Log(profile=(2, 3))
  monkeypatch.setattr(jax.profiler, "start_trace", lambda _: events.append(("starts", step)))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append(("stops", step)))
  tracer = profiler.Profiler("w", log, rich.console.Console(quiet=True))
  for step in range(7):
    tracer.step(step, ())
  assert events == [("starts", 2), ("stops", 5)]


def test_a_profile_of_a_negative_window_is_refused():
  c = text_config(**{"log.profile": (10, -1)})
  with pytest.raises(resolve.ConfigError, match="log.profile=.*must be two numbers"):
    resolve.resolve(c, 1, Device("cpu"))


@pytest.mark.parametrize("stats, logged", [
  ({"peak_bytes_in_use": 3 * 2**29}, {"memory_peak_gib": 1.5}), ({"bytes_in_use": 1}, {}),
  (None, {}),
])  # fmt: skip
def test_the_most_device_memory_in_use_is_logged_where_it_is_counted(monkeypatch, stats, logged):
  device = types.SimpleNamespace(memory_stats=lambda: stats)
  monkeypatch.setattr(metrics_writer.jax, "local_devices", lambda: [device])
  spec = types.SimpleNamespace(log=types.SimpleNamespace(every=2), steps=9)
  clock = types.SimpleNamespace(metrics=lambda is_whole: {})
  for step, expected in ((2, logged), (3, {}), (9, logged)):
    row = metrics_writer.times(spec, step, clock, 0.5, {})
    assert row == {"data_wait_seconds": 0.5, **expected}
