"""An agent of Weights & Biases that starts runs of launch.py: python wandb_agent.py SWEEP_ID

`wandb sweep experiments/sweeps/wandb.yaml` prints the id. `pip install wandb` is yours to do.
"""

import json
import pathlib
import subprocess
import sys

import wandb

ROOT = pathlib.Path(__file__).resolve().parents[2]


def trial():
  """One run: the agent's parameters are overrides, summary.json has what it minimizes."""
  with wandb.init() as run:
    changes = [f"--config.{key}={value}" for key, value in dict(run.config).items()]
    workdir = ROOT / "runs" / "wandb" / "-".join(c.removeprefix("--config.") for c in changes)
    command = [sys.executable, "launch.py", "--config=configs/debug.py", *changes]
    # 75: preempted; the same parameters go on from the checkpoint. 3: diverged, without objective.
    if subprocess.run([*command, f"--workdir={workdir}"], cwd=ROOT).returncode == 0:
      run.log({"objective": json.loads((workdir / "summary.json").read_text())["objective"]})


if __name__ == "__main__":
  wandb.agent(sys.argv[1], function=trial)
