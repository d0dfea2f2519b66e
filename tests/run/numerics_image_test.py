"""Images of numerics in TensorBoard, and the adapter of trackers with a stand-in."""

import shutil
import struct
import sys
import types

import debug_runs
import numpy as np
from tensorboardX.proto import event_pb2

from fp8jax.run import metrics_writer, numerics_image, palette, tracker


def test_a_snapshot_is_one_image_in_tensorboard_and_no_curve(tmp_path):
  log = metrics_writer.Metrics(str(tmp_path), 0, (), tensorboard=True)
  numerics = {f"layers/{i}/mlp/up": {t: {"snr_db": 20.0} for t in "xwg"} for i in range(2)}
  for step in (1, 2):
    log.write(step, {"loss": 1.5})
    log.write_nested(step, "numerics", numerics, lambda: numerics_image.draw(numerics))
  log.close()
  rows = debug_runs.rows(tmp_path)
  assert [row["numerics"] for row in rows if "numerics" in row] == [numerics, numerics]
  (path,) = (tmp_path / "tensorboard").iterdir()
  data, tags, start = path.read_bytes(), [], 0
  while start < len(data):  # u64 length, u32 checksum, event, u32 checksum
    (size,) = struct.unpack_from("<Q", data, start)
    event = event_pb2.Event.FromString(data[start + 12 : start + 12 + size])
    tags += [(event.step, v.tag, bool(v.image.encoded_image_string)) for v in event.summary.value]
    start += 16 + size
  of_numerics = [tag for tag in tags if tag[1].startswith("numerics")]
  assert of_numerics == [(1, "numerics", True), (2, "numerics", True)]
  assert (2, "loss", False) in tags


def test_colours_of_an_image_are_places_on_the_ramp():
  hexadecimal = [
    "#" + bytes(numerics_image.color(v, 1e-8, 1.0)).hex()
    for v in (0.0, 1e-8, 1e-4, 1.0, 7.0, float("inf"))
  ]
  low, middle, high = palette.RAMP[0], palette.RAMP[4], palette.RAMP[-1]
  assert hexadecimal == [low, low, middle, high, high, palette.MISSING]
  # Decibels: fewer are brighter.
  assert (numerics_image.color(0.0, 40.0, 0.0) == numerics_image.color(1.0, 1e-8, 1.0)).all()
  numerics = {f"layers/{i}/mlp/up": {"x": {"snr_db": 20.0}, "w": {}} for i in range(3)}
  image = numerics_image.draw({**numerics, "head": {"g": {"amax": 1e3}}})
  assert image.dtype == np.uint8 and image.shape[2] == 3
  cell = image[numerics_image._ROW_H + 2, numerics_image._LABEL_W + 2]
  assert (cell == numerics_image.color(20.0, 40.0, 0.0)).all()


def test_tracker_gives_weights_and_biases_an_id_to_resume_by(monkeypatch, tmp_path):
  """Its resume="allow" without an id begins a new run; a folder that was deleted is a new run."""
  given = []
  wandb = types.SimpleNamespace(init=lambda **how: given.append(how))
  monkeypatch.setitem(sys.modules, "wandb", wandb)
  for name in ("a", "a/", "b", "a"):
    if len(given) == 3:
      shutil.rmtree(tmp_path / "a")
    tracker.Tracker("wandb", f"{tmp_path}/{name}", {})
  ids = [how["id"] for how in given]
  assert ids[0] == ids[1] and len(set(ids)) == 3
  assert all(how["resume"] == "allow" for how in given)


def test_tracker_sends_the_numbers_of_each_row(monkeypatch, tmp_path):
  """Of the rows that TensorBoard draws; a row of the file alone is not sent."""
  calls = []
  package = types.ModuleType("trackio")
  for name in ("init", "log", "finish"):
    setattr(package, name, lambda *a, _name=name, **k: calls.append((_name, a, k)))
  monkeypatch.setitem(sys.modules, "trackio", package)
  workdir = f"{tmp_path}/mine/"
  (tmp_path / "mine").mkdir()
  track = lambda: tracker.Tracker("trackio", workdir, {"steps": 3})  # noqa: E731
  log = metrics_writer.Metrics(workdir, 0, (), tensorboard=False, track=track)
  log.write(2, {"loss": 1.5, "heldout": "no number"})
  log.write_row(3, {"loss": 2.5})
  log.close()
  assert [row["step"] for row in debug_runs.rows(tmp_path / "mine")] == [2, 3]
  config = {"project": "fp8jax", "name": "mine", "config": {"steps": 3}, "resume": "allow"}
  assert calls == [("init", (), config), ("log", ({"loss": 1.5},), {"step": 2}), ("finish", (), {})]
