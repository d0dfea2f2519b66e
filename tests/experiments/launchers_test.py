"""The launch scripts, executed with stand-ins for the scheduler's commands."""

import contextlib
import os
import pathlib
import runpy
import subprocess
import sys
import types

import pytest
import yaml
from kubeflow_trainer_api.models.io_k8s_apimachinery_pkg_api_resource_quantity import (
  IoK8sApimachineryPkgApiResourceQuantity as Quantity,
)
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet as JobSet


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


@pytest.mark.parametrize("code, preempted", [(75, True), (0, False), (1, False), (3, False)])
def test_ray_job_is_retried_where_it_was_preempted(repository, monkeypatch, code, preempted):
  """A diverged run and a wrong configuration end the job. Ray's decorator is a stand-in."""
  options, commands = {}, []
  ray = types.SimpleNamespace(remote=lambda **given: options.update(given) or (lambda task: task))
  monkeypatch.setitem(sys.modules, "ray", ray)
  train = runpy.run_path(str(repository / "experiments/launch/ray_job.py"))["train"]

  def start(words):
    commands.append(words)
    return types.SimpleNamespace(returncode=code)

  monkeypatch.setattr(subprocess, "run", start)
  if preempted:
    with pytest.raises(tuple(options["retry_exceptions"])):
      train(["--config=x.py"])
  else:
    assert train(["--config=x.py"]) == code
  assert commands == [[sys.executable, "launch.py", "--config=x.py"]]
  # Names of ray.remote's options for tasks.
  assert set(options) <= {"num_gpus", "num_cpus", "max_retries", "retry_exceptions", "resources"}
  assert options["max_retries"] > 0


def test_jobset_is_valid_in_its_schema_and_restarts_what_was_preempted(repository):
  """Its models are generated from the OpenAPI documents of JobSet and Kubernetes.

  They refuse a field of another name or type, as a server does.
  """
  jobset = yaml.safe_load((repository / "experiments/launch/jobset.yaml").read_text())
  assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
  (replicated,) = jobset["spec"]["replicatedJobs"]
  job = replicated["template"]["spec"]
  # The generated model of a quantity takes an object of its own alone.
  limits = job["template"]["spec"]["containers"][0]["resources"]["limits"]
  limits.update({name: Quantity(number) for name, number in limits.items()})
  JobSet.model_validate(jobset, extra="forbid")
  (rule,) = jobset["spec"]["failurePolicy"]["rules"]
  assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
  assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]  # batch/v1's reason of FailJob
  (of_pod,) = job["podFailurePolicy"]["rules"]
  assert of_pod["action"] == "FailJob" and 75 in of_pod["onExitCodes"]["values"]
  assert 0 not in of_pod["onExitCodes"]["values"] and 130 not in of_pod["onExitCodes"]["values"]
  pod = job["template"]["spec"]
  assert pod["restartPolicy"] == "Never"  # which podFailurePolicy demands
  assert pod["terminationGracePeriodSeconds"] >= 300
  words = pod["containers"][0]["command"][-1].split()
  host = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}"
  assert f"--coordinator={host}:1234" in words and f"--processes={job['completions']}" in words
  assert job["parallelism"] == job["completions"] and job["completionMode"] == "Indexed"
