"""Sweeps of a stand-in for launch.py."""

import json

from fp8jax.sweeps import file, run, spec

# A launch.py whose objective is rate + seed / 100. Rates above 1 end as a diverged run does, above
# 10 the loss grows without end, above 100 nothing is said, and all but the first wait for SIGTERM.
LAUNCH = """
import json, pathlib, signal, sys, time
values = dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:])
workdir = pathlib.Path(values["workdir"])
workdir.mkdir(parents=True, exist_ok=True)
rate, seed = float(values["config.optim.peak_lr"]), int(values["config.seed"])
name = values["config"].partition(":")[2]
flat = {"seed": seed, "steps": 4, "optim.peak_lr": rate, "name": name}
with open(workdir.parent / "started.txt", "a") as f: f.write(workdir.name + "\\n")
(workdir / "config.json").write_text(json.dumps({"resolved": flat}))
if rate > 10:
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
  with open(workdir / "metrics.jsonl", "a") as f:
    for step in range(10**6):
      loss = 5.0 + step if rate < 100 else 5.0
      f.write(json.dumps({"step": step, "loss": loss}) + "\\n"); f.flush(); time.sleep(0.01)
if rate > 1: sys.exit(3)
summary = {"step": 4, "objective": rate + seed / 100}
(workdir / "summary.json").write_text(json.dumps(summary))
"""
CONFIG = """
from ml_collections import ConfigDict
def get_config(arm=""):
  return ConfigDict({"seed": 0, "steps": 4, "optim": {"peak_lr": 1.0}, "name": arm}).lock()
"""


def sweep(folder, monkeypatch, asked, **options):
  """(exit code, trials of sweep.json, names of the trials started)."""
  monkeypatch.setattr(file, "load", lambda *_, **needs: asked)
  given = {"parallel": 1, "submit": "", "is_printed": False, "is_mapped": False, **options}
  code = run.run("s.py", str(folder), str(folder / "out"), **given)
  started = folder / "out" / "started.txt"
  names = started.read_text().split() if started.exists() else []
  started.unlink(missing_ok=True)
  return code, json.loads((folder / "out" / "sweep.json").read_text())["trials"], names


def rates(*rates, **more):
  return spec.Sweep("c.py", axes=(spec.Grid({"optim.peak_lr": rates}),), **more)
