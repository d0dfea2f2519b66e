"""The wheel: the files that it brings, and a job that runs from it, far from a clone."""

import os
import shutil
import subprocess
import sys
import tomllib

import pytest

# Trains, exports and shows a configuration with what lies in the folders of PYTHONPATH.
JOBS = """
import json
import fp8jax
from configs import base, debug
from fp8jax.compiled import aot
from fp8jax.jobs import dispatch

def config():
  c = debug.get_config("tensor_current")
  c.update_from_flattened_dict({
    "steps": 2, "global_batch": 2, "seq_len": 64, "eval.tokens": 64, "eval.batch": 1,
    "optim.warmup_steps": 1, "optim.decay_steps": 1, "checkpoint.every": 0,
    "log.tensorboard": False,
  })
  return c

trained = dispatch.call("train", config(), base.get_config(), "run")
c = config()
exported = dispatch.call("export", c, base.get_config(), "run", out="exported")
targets = sorted(path.name for path in aot.FOLDER.iterdir())
print(json.dumps([fp8jax.__file__, trained["step"], exported["step"], targets]))
"""


def test_package_data_names_every_file_that_is_not_python(repository):
  package = repository / "fp8jax"
  setuptools = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]
  named = {path for glob in setuptools["package-data"]["fp8jax"] for path in package.glob(glob)}
  files = {path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
  assert {path for path in files if path.suffix != ".py"} == named
  folders = {path.parent for path in files if path.suffix == ".py"}
  assert all((folder / "__init__.py").exists() for folder in folders)


@pytest.mark.slow
def test_wheel_trains_and_exports_from_another_folder(repository, tmp_path):
  """pip needs the network, or its cache, for the setuptools that builds it."""
  source, site, elsewhere = (tmp_path / name for name in ("source", "site", "elsewhere"))
  elsewhere.mkdir()
  for name in ("fp8jax", "configs"):
    shutil.copytree(repository / name, source / name)
  for name in ("launch.py", "pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(repository / name, source)
  pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
  subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)], check=True)
  (wheel,) = tmp_path.glob("fp8jax-*.whl")
  subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
  share = site / "share" / "fp8jax"
  kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  env = {**kept, "PYTHONPATH": os.pathsep.join(map(str, (site, share)))}

  def run(*command):
    done = subprocess.run(
      [sys.executable, *command], cwd=elsewhere, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

  last = run("-c", JOBS).splitlines()[-1]
  targets = '["b200.txtpb", "h100.txtpb", "h200.txtpb"]'
  assert last == f'["{site}/fp8jax/__init__.py", 2, 2, {targets}]'
  assert (elsewhere / "exported" / "model.safetensors").exists()
  launch = str(share / "launch.py")
  assert "optim.schedule = 'wsd'\n    " in run(launch, "--explain", "optim.schedule")
