"""A run that dies continues exactly; one that is asked to stop saves and leaves."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import debug_runs
import numpy as np
import pytest

from fp8jax.optim import storage
from fp8jax.run import checkpoint

CHANGES = {
  "steps": 12, "checkpoint.every": 3, "optim.decay_steps": 3, "optim.warmup_steps": 3,
  "eval.tokens": 256, "eval.precisions": ("recipe",), "log.every": 10, "log.tensorboard": False,
}  # fmt: skip


# What recipes keep, and nothing; random bits of the step are the optimizer's.
MIXTURE = ((".*/mlp/gate", "tensor_delayed"), (".*", "block_128"))
# Of each kind one site, which compile in half the time.
TWO_SITES = ((".*/mlp/gate", "tensor_delayed"), (".*/mlp/down", "block_128"), (".*", "bf16"))


def _launch(root: pathlib.Path, workdir, **changes) -> subprocess.Popen:
  """The launcher in a process of its own, with the devices of this one, whose programs it reads."""
  changes = debug_runs.CHANGES | debug_runs.QUICK | changes
  flags = [f"--config.{k}={v}" for k, v in changes.items()]
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
  return subprocess.Popen(
    [sys.executable, "launch.py", "--config=configs/debug.py", f"--workdir={workdir}", *flags],
    cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
  )  # fmt: skip


def _metrics(workdir) -> dict[int, dict]:
  found = {}
  with open(workdir / "metrics.jsonl") as f:
    for line in f:
      row = json.loads(line)
      assert row["step"] not in found or "loss" not in row or "loss" not in found[row["step"]]
      found.setdefault(row["step"], {}).update(row)
  return found


def _wait_for_step(process, workdir, step: int):
  path = workdir / "metrics.jsonl"
  deadline = time.time() + 120
  while time.time() < deadline and process.poll() is None:
    if path.exists() and any(json.loads(x)["step"] >= step for x in path.read_text().splitlines()):
      return
    time.sleep(0.05)
  process.kill()  # what it printed ends when it does
  pytest.fail(f"never reached step {step}:\n{process.stdout.read()}")


def _params(workdir, step):
  saved = checkpoint.Checkpoints(str(workdir), 2)
  import jax

  tree = saved._manager.restore(  # noqa: SLF001 (raw: as stored, no abstract tree)
    step, args=checkpoint.ocp.args.Composite(params=checkpoint.ocp.args.StandardRestore())
  ).params
  saved.close()
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


OPTIMIZERS = {
  "float32, two FP8 sites": ("float32", "float32", "float32", 1),
  "coat, bf16_remainder, bf16_sr": ("coat", "bf16_remainder", "bf16_sr", 1),
  "fp8lm, f16, e4m3, two microbatches": ("fp8lm", "f16", "e4m3", 2),
  "masters bf16_sr": ("float32", "bf16_sr", "float32", 1),
} | {f"moments {name}": (name, "float32", "float32", 1) for name in storage.MOMENTS}


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=pytest.mark.slow if i else ()) for i, n in enumerate(OPTIMIZERS)]
)
def test_kill_minus_nine_and_resume_is_bitwise_the_same_run(tmp_path, repository, run_job, name):
  """However the optimizer keeps what it needs; the first two with FP8 layers."""
  keys = ("optim.moment_format", "optim.master_format", "optim.grad_format", "grad_accum_steps")
  changes = CHANGES | dict(zip(keys, OPTIMIZERS[name]))
  if name == "coat, bf16_remainder, bf16_sr":
    changes["precision.rules"] = MIXTURE
  else:
    is_fp8 = name == "float32, two FP8 sites"
    changes["precision.rules"] = TWO_SITES if is_fp8 else ((".*", "bf16"),)
  code, _, stderr = run_job("train", debug_runs.config(**changes), tmp_path / "whole")
  assert code == 0, stderr
  broken = _launch(repository, tmp_path / "broken", **changes)
  _wait_for_step(broken, tmp_path / "broken", 8)  # past the checkpoint of step 6
  broken.send_signal(signal.SIGKILL)
  broken.wait()
  code, stdout, stderr = run_job("train", debug_runs.config(**changes), tmp_path / "broken")
  assert code == 0, stderr
  assert "resuming from step" in stdout
  a, b = _metrics(tmp_path / "whole"), _metrics(tmp_path / "broken")
  assert sorted(a) == sorted(b) == list(range(13))
  for step in range(1, 13):
    for key in ("loss", "grad_norm", "update_norm", "param_norm", "learning_rate"):
      assert a[step][key] == b[step][key], (step, key)
  for x, y in zip(_params(tmp_path / "whole", 12), _params(tmp_path / "broken", 12), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.slow  # run/multiprocess_test.py
@pytest.mark.parametrize(
  "number, code",
  [(signal.SIGTERM, 75), (signal.SIGINT, 130)],
  ids=["SIGTERM", "Ctrl-C"],
)
def test_asked_to_stop_saves_and_says_so_in_the_exit_code(tmp_path, repository, number, code):
  changes = {"steps": 100000, "checkpoint.every": 0, "eval.tokens": 0}
  process = _launch(repository, tmp_path, **CHANGES | changes)
  _wait_for_step(process, tmp_path, 3)
  process.send_signal(number)
  output = process.communicate(timeout=120)[0]
  assert process.returncode == code, output
  assert "interrupted: saved step" in output and f"(exit code {code})" in output
  saved = checkpoint.Checkpoints(str(tmp_path), 2)
  steps = saved.steps()
  saved.close()
  assert len(steps) == 1 and steps[0] >= 3
