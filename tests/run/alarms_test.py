"""Alarms of tensor statistics: printed once, and again after the statistic was in range."""

import json
import types

import debug_runs
import harness
import pytest

from fp8jax import console
from fp8jax.config import alarms as config_alarms
from fp8jax.jobs import run_reports
from fp8jax.ops import site_tree
from fp8jax.recipe.library import RECIPES
from fp8jax.run import alarms as run_alarms


@pytest.mark.slow  # numbers: step/activation_stats_test.py; alarms: below
def test_loud_step_reports_and_alarms_once(tmp_path, capsys):
  rules = (("snr_db", "<", 60.0, "layers/0/mlp/up/x"), ("saturation", ">", 2.0))
  harness.train_on_text(
    tmp_path,
    **{
      "precision.rules": (("layers/.*/mlp/(up|down)", "block_128"), (".*", "bf16")),
      "log.tensor_stats_every": 2, "log.alarms": rules, "eval.tokens": 0,
    },
  )  # fmt: skip
  rows = debug_runs.rows(tmp_path)
  snapshots = {r["step"]: r["numerics"] for r in rows if "numerics" in r}
  # The step after 2 and after 4 steps; the first one too. 22 sites; per layer the residual stream
  # and two norms; the embedding, the last norm and the logits.
  assert list(snapshots) == [1, 3, 5] and len(snapshots[1]) == 34
  up = snapshots[3]["layers/0/mlp/up"]["x"]
  assert 25 < up["snr_db"] < 40 and up["saturation"] == 0 and up["amax"] > 0
  assert "alignment" not in up and 2 < up["kurtosis"] < 10
  assert 0 < snapshots[3]["layers/2/mlp/down"]["x"]["alignment"] < 1
  said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1: ")]
  assert len(said) == 1 and "layers/0/mlp/up/x: snr_db" in said[0] and "Try: " in said[0]


def test_alarm_rings_again_after_silence():
  alarms = config_alarms.read_alarms((("underflow", ">", 0.3),))
  monitor = run_alarms.AlarmMonitor(alarms, {"a": RECIPES["block_128"]})
  numerics = {"a": {t: {"underflow": 0.5} for t in "xwg"}}
  quiet = {"a": {t: {"underflow": 0.1} for t in "xwg"}}
  first = run_alarms.as_lines(1, monitor.new(numerics))
  assert len(first) == 3 and "a/x: underflow 50.00%, above 30.00%. Try: " in first[0]
  assert not monitor.new(numerics) and not monitor.new(quiet)
  assert len(run_alarms.as_lines(4, monitor.new(numerics))) == 3


@pytest.mark.parametrize("start, has_same_alarms, is_new", [
  (0, True, False), (3, True, True), (0, False, True),
])  # fmt: skip
def test_what_rang_before_a_run_was_interrupted_is_new_in_another_phase_alone(
  tmp_path, monkeypatch, start, has_same_alarms, is_new
):
  """The last snapshot is of step 3, and of a phase that begins after `start` steps. Alarms that are
  new themselves ring, too."""
  rows = [{"step": s, "numerics": {"a": {"x": {"snr_db": v}}}} for s, v in ((1, 3.0), (3, "-inf"))]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  numerics = {"a": {"x": {"snr_db": 4.0}, "w": {"snr_db": 5.0}}}
  monkeypatch.setattr(run_reports.alarms, "summarise", lambda *_: numerics)
  monkeypatch.setattr(run_reports.alarms, "exponents", lambda *_: {})
  spec = harness.text_spec("block_128", **{"log.tensorboard": False})
  reports = run_reports.RunReports(spec, str(tmp_path), "", console.console())
  reports.open(3, ())
  monitor = run_alarms.AlarmMonitor(
    config_alarms.read_alarms((("snr_db", "<", 15.0),)), {"a": RECIPES["block_128"]}
  )
  phases = types.SimpleNamespace(phases=[types.SimpleNamespace(start=start)])
  now = types.SimpleNamespace(
    sites={True: None},
    watch=monitor,
    phase=0,
    has_same_alarms=has_same_alarms,
    spec=types.SimpleNamespace(precision=phases),
  )
  nested = {"tensor_stats": {}, "alignment": None, "param_stats": None}
  for step in (5, 7):
    reports._statistics(now, step, nested)
  reports.log.close()
  rang = {
    r["step"]: [a["place"] for a in r["alarms"]] for r in debug_runs.rows(tmp_path) if "alarms" in r
  }
  assert rang == {5: ["a/x", "a/w"] if is_new else ["a/w"]}


def test_outliers_raise_an_alarm_where_one_scale_covers_them():
  alarms = config_alarms.read_alarms((("kurtosis", ">", 1e4),))
  numerics = {"layers/0/mlp/down": {"x": {"kurtosis": 2e4}}}
  for recipe, expected in (("tensor_current", 1), ("block_128", 0)):
    recipes = site_tree.recipes_of(harness.one_layer_spec(recipe).sites())
    assert len(run_alarms.AlarmMonitor(alarms, recipes).new(numerics)) == expected
