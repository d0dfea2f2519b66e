"""The launch scripts, executed with stand-ins for the scheduler's commands."""

import os
import subprocess

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
