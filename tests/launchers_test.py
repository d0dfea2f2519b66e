"""The launch scripts, executed with stand-ins for the scheduler's commands."""

import contextlib
import os
import pathlib
import runpy
import subprocess
import sys
import types

import pytest


@pytest.mark.parametrize(
  "code, nodes, requeued", [(75, "1", True), (143, "2", True), (0, "1", False), (130, "1", False)]
)
def test_slurm_script_requeues_what_was_preempted(tmp_path, repository, code, nodes, requeued):
  log = tmp_path / "log"
  for name, status in (("srun", code), ("scontrol", 0)):
    path = tmp_path / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\nexit {status}\n')
    path.chmod(0o755)
  env = {
    "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "PYTHON": "python",
    "SLURM_JOB_NUM_NODES": nodes,
  }  # fmt: skip
  script = repository / "experiments/launch/slurm.sh"
  done = subprocess.run(["bash", script, "--config=x.py", "--workdir=a b"], env=env)
  lines = log.read_text().splitlines()
  distributed = "--distributed " if nodes == "2" else ""
  assert lines[0] == f"srun python launch.py {distributed}--config=x.py --workdir=a b"
  assert lines[1:] == (["scontrol requeue 7"] if requeued else [])
  assert done.returncode == (0 if requeued else code)
  options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
  assert "#SBATCH --requeue" in options and "#SBATCH --signal=TERM@300" in options


@pytest.mark.parametrize("code, logged", [(0, [{"objective": 2.5}]), (3, [])])
def test_agent_of_weights_and_biases_gives_each_run_a_workdir(
  tmp_path, repository, monkeypatch, code, logged
):
  """The package is a stand-in, and so is the run: its summary.json lies where launch.py is told."""
  said, commands = [], []
  run = types.SimpleNamespace(config={"optim.peak_lr": 0.01, "seed": 1}, log=said.append)
  wandb = types.SimpleNamespace(init=lambda: contextlib.nullcontext(run))
  monkeypatch.setitem(sys.modules, "wandb", wandb)
  agent = runpy.run_path(str(repository / "experiments/sweeps/wandb_agent.py"))
  agent["trial"].__globals__["ROOT"] = tmp_path

  def start(command, cwd):
    commands.append(command)
    workdir = pathlib.Path(command[-1].removeprefix("--workdir="))
    workdir.mkdir(parents=True)
    (workdir / "summary.json").write_text('{"objective": 2.5}')
    return types.SimpleNamespace(returncode=code)

  monkeypatch.setattr(subprocess, "run", start)
  agent["trial"]()
  assert said == logged and commands[0][3:5] == ["--config.optim.peak_lr=0.01", "--config.seed=1"]
  assert commands[0][-1] == f"--workdir={tmp_path}/runs/wandb/optim.peak_lr=0.01-seed=1"
