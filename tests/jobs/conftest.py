"""Jobs as tests run them: the launcher in a process of its own, and a job in this one."""

import os
import pathlib
import subprocess
import sys

import debug_runs
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ONE_DEVICE = "--xla_force_host_platform_device_count=1"


@pytest.fixture(scope="module")
def launch():
  """Runs launch.py to its end on one device."""
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ONE_DEVICE}

  def run(workdir, *flags):
    done = subprocess.run(
      [sys.executable, "launch.py", f"--workdir={workdir}", *flags],
      cwd=ROOT, env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done

  return run


@pytest.fixture
def run_job():
  return debug_runs.run_job
