"""Runs of launch.py that a table has one row of each of."""

import json
import pathlib
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Run(NamedTuple):
  """What a finished run left: summary.json, provenance.json, the lines of metrics.jsonl."""

  summary: dict
  provenance: dict
  steps: list

  def heldout(self, which: int) -> dict:
    """{source: {precision: nats per token}} of the first evaluation (0) or the last (-1)."""
    evaluation = list(self.summary["evaluations"].values())[which]
    return {
      source: {precision: values["loss"] for precision, values in by_precision.items()}
      for source, by_precision in evaluation.items()
    }

  def logged(self, name: str) -> list:
    """A metric at every step that has it."""
    return [step[name] for step in self.steps if name in step]


def run(config: str, folder: str, changes=()) -> Run:
  """The run of `--config=config` with `changes` ({key: value}) in ROOT/folder.

  It is started, goes on where it was interrupted, or was finished before.
  """
  path = ROOT / folder
  if not (path / "summary.json").exists():
    overrides = [f"--config.{key}={value}" for key, value in dict(changes).items()]
    command = [sys.executable, "launch.py", f"--config={config}", f"--workdir={path}", *overrides]
    # An interrupted run ends the table with its own code: 75 after SIGTERM, 130 after Ctrl-C.
    if code := subprocess.run(command, cwd=ROOT).returncode:
      sys.exit(code)
  summary, provenance = (
    json.loads((path / f"{name}.json").read_text()) for name in ("summary", "provenance")
  )
  steps = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
  return Run(summary, provenance, steps)
