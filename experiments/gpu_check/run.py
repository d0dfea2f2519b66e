"""launch.py itself: the debugging model in one recipe, from start to checkpoint.

Its shapes are small and uneven, 192 wide and with 64 columns of keys, of which the kernels have
other programs than of a 7B. The oracle is the loss of the same run on a CPU.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from gpu_check import records
from gpu_check.worker import Absent, Context, Wrong

NEEDED = ("grain", "ml_collections", "msgspec", "orbax.checkpoint", "tensorboardX", "absl")
STEPS = 12
# Held-out nats per token after STEPS steps of configs/debug.py on a CPU: 3.055 in bf16, 3.090 in
# tensor_current (jax 0.12.0.1), 3.019 in block_128 (0.11.2). A thirteenth step changes it by 0.1.
HELD_OUT, BUDGET = 3.055, 0.15


def missing() -> list[str]:
  """Packages of the trainer that are not here."""

  def is_here(name: str) -> bool:
    try:
      return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
      return False

  return [name for name in NEEDED if not is_here(name)]


def run(context: Context, recipe: str) -> dict[str, Any]:
  """{"held_out", "held_out_bf16", "seconds"} of the last evaluation.

  Raises:
    Absent: a package of the trainer.
    Wrong: the run ends with an error, or a loss is not the CPU's.
  """
  if absent := missing():
    raise Absent(f"not installed: {', '.join(absent)}; --wheels FOLDER adds them")
  with tempfile.TemporaryDirectory() as folder:
    command = [
      sys.executable, "launch.py", f"--config=configs/debug.py:{recipe}", f"--workdir={folder}",
      f"--config.steps={STEPS}", "--config.optim.warmup_steps=2", "--config.optim.decay_steps=2",
    ]  # fmt: skip
    done = subprocess.run(
      command, capture_output=True, text=True, cwd=records.ROOT,
      env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )  # fmt: skip
    print(done.stdout[-6000:], done.stderr[-6000:], flush=True)
    if done.returncode:
      lines = (done.stderr + done.stdout).strip().splitlines() or ["no message"]
      errors = [line for line in lines if line.startswith("error:")]
      raise Wrong(f"launch.py ended with {done.returncode}: {(errors or lines)[-1][:400]}")
    text = (pathlib.Path(folder) / "metrics.jsonl").read_text()
  return judge([json.loads(line) for line in text.splitlines()], recipe)


def judge(metrics: list[dict[str, Any]], recipe: str) -> dict[str, Any]:
  """Values of the last evaluation. Raises Wrong if a held-out loss is not the CPU's."""
  last: dict[str, Any] = {}
  for record in metrics:
    last |= record
  found = {"seconds_compile": last.get("seconds/compile")}
  for name, key in ((recipe, "held_out"), ("bf16", "held_out_bf16")):
    loss = last.get(f"heldout/main/{name}/loss", last.get("heldout/main/loss"))
    if loss is None or not abs(loss - HELD_OUT) <= BUDGET:
      raise Wrong(f"held-out loss of the {name} forward pass is {loss}, on a CPU {HELD_OUT}")
    found[key] = loss
  return found
