"""Drift between snapshots, by hand."""

import json

import pytest

from fp8jax.run import alarms


def test_drift_is_the_change_since_the_snapshot_before():
  before = {"head": {"x": {"amax": 2.0, "snr_db": 30.0}, "w": {"amax": "nan", "snr_db": "inf"}}}
  now = {
    "head": {"x": {"amax": 16.0, "snr_db": 27.5}, "w": {"amax": 1.0, "snr_db": 31.0}},
    "layers/0/mlp/up": {"x": {"amax": 1.0, "snr_db": 30.0}},
  }
  found = alarms.with_drift(now, before)
  assert found["head"]["x"] == {"amax": 16, "snr_db": 27.5, "amax_drift": 3, "snr_drift": -2.5}
  # Nothing to compare with: no number.
  assert found["head"]["w"] == now["head"]["w"]
  assert found["layers/0/mlp/up"] == now["layers/0/mlp/up"]
  zero = {"head": {"x": {"amax": 0.0, "snr_db": float("inf")}}}
  assert alarms.with_drift(zero, now) == zero


@pytest.mark.parametrize(
  "snapshots, newest", [(0, (0, {})), (2, (1, {"head": {"x": {"amax": 1}}}))]
)
def test_last_snapshot_is_the_newest_row(tmp_path, snapshots, newest):
  assert alarms.last_snapshot(str(tmp_path)) == (0, {})
  rows = [{"step": i, "numerics": {"head": {"x": {"amax": i}}}} for i in range(snapshots)]
  rows.append({"step": 9, "loss": 1.0})
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  assert alarms.last_snapshot(str(tmp_path)) == newest
