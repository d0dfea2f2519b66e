"""The first minute: which wheels a driver allows, which device computes, and what is said of it.

Drivers are nvidia-smi programs of our own on PATH, devices are values: no GPU is here.
"""

import dataclasses
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
import rich.console

from configs import base, cpt_7b_1gpu, debug, smollm2_cpt
from fp8jax.config import files as config_files
from fp8jax.config import resolve
from fp8jax.errors import UserError
from fp8jax.jobs import dispatch, table
from fp8jax.kernels import choose
from fp8jax.run import machine, metrics
from fp8jax.run import start as run_start

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _program(folder: pathlib.Path, name: str, script: str) -> pathlib.Path:
  path = folder / name
  path.write_text(f"#!/bin/sh\n{script}\n")
  path.chmod(0o755)
  return path


# --- drivers -------------------------------------------------------------------------------------

# (what nvidia-smi prints, its exit code) and the driver that is there.
ANSWERS = {
  "two GPUs": ("580.65.06\n580.65.06", 0, "580.65.06"),
  "no driver": ("NVIDIA-SMI has failed because it couldn't communicate with the driver", 9, None),
  "no GPU": ("No devices were found", 0, None),
  "silent": ("", 0, None),
  "no nvidia-smi": (None, 0, None),
}


@pytest.mark.parametrize("said, code, version", ANSWERS.values(), ids=list(ANSWERS))
def test_the_driver_is_what_nvidia_smi_says(said, code, version, tmp_path, monkeypatch):
  if said is not None:
    _program(tmp_path, "nvidia-smi", f"echo {shlex.quote(said)}; exit {code}")
  monkeypatch.setenv("PATH", str(tmp_path))
  assert machine.driver_version() == version


@pytest.mark.parametrize(
  "driver, extra",
  [("580.65.06", "cuda13"), ("595.1", "cuda13"), ("579.99", "cuda12"), ("525.60.13", "cuda12")],
)
def test_wheels_are_those_that_the_driver_runs(driver, extra):
  assert machine.wheels(driver) == extra


def test_a_driver_older_than_every_wheel_is_refused():
  with pytest.raises(UserError, match="470.82.01 is older than 525.*update it, or.*=cpu"):
    machine.wheels("470.82.01")


def test_the_cpu_beside_a_driver_is_refused_with_the_install_line():
  with pytest.raises(UserError) as e:
    machine.check_platform("cpu", None, "0.12.0.1", lambda: "535.104.05")
  (line,) = (x for x in str(e.value).splitlines() if x.startswith("  "))
  assert shlex.split(line) == [
    sys.executable, "-m", "pip", "install", "jax[cuda12]==0.12.0.1"]  # fmt: skip
  assert "535.104.05" in str(e.value) and "JAX_PLATFORMS=cpu" in str(e.value)


@pytest.mark.parametrize(
  "platform, wanted, driver",
  [("gpu", None, "580.0"), ("cpu", "cpu", "580.0"), ("cpu", None, None)],
  ids=["a GPU", "asked for", "no driver"],
)
def test_other_platforms_are_accepted(platform, wanted, driver):
  machine.check_platform(platform, wanted, "0.12.0.1", lambda: driver)


def test_a_run_on_the_cpu_beside_a_driver_stops_before_it_begins(tmp_path):
  """launch.py, with the CPU wheels of this environment or without the GPU that its others want."""
  _program(tmp_path, "nvidia-smi", "echo 580.65.06")
  env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
  env.pop("JAX_PLATFORMS")
  done = subprocess.run(
    [sys.executable, "launch.py", "--config=configs/debug.py", f"--workdir={tmp_path / 'run'}"],
    cwd=ROOT, env=env, capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 1 and not done.stdout and not (tmp_path / "run").exists()
  assert f"jax[cuda13]=={jax.__version__}" in done.stderr.rpartition("error: ")[2]


# --- make ----------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path):
  """(target, {program: script}, variables) -> a run of make, which sees these programs alone."""
  programs = tmp_path / "bin"
  programs.mkdir()
  for name in ("sh", "sed", "rm", "touch", "cat"):
    (programs / name).symlink_to(shutil.which(name))

  def run(goal, scripts, **variables):
    for name, script in scripts.items():
      _program(programs, name, script)
    env = {"PATH": str(programs), "PYENV_ROOT": str(tmp_path), "HOME": str(tmp_path)}
    env |= {k: variables.pop(k) for k in ("JAX_PLATFORMS",) if k in variables}
    command = [shutil.which("make"), "-C", str(ROOT), goal, f"VENV={tmp_path / 'venv'}"]
    command += [f"{k}={v}" for k, v in variables.items()]
    return subprocess.run(command, env=env, capture_output=True, text=True)

  return run


NEW_ENOUGH = 'case "$*" in *ensurepip*) exit 1;; *--version*) echo Python 3.12.3;; esac'


@pytest.mark.parametrize("python, said, unsaid", [
  (NEW_ENOUGH, r"error: Python 3.12.3 \(python3\) has no ensurepip(.|\n)*apt install "
   "python3-venv", "no Python 3.12"),
  ("exit 1", "error: no Python 3.12 or 3.13 found", "ensurepip"),
], ids=["no ensurepip", "too old"])  # fmt: skip
def test_a_python_that_setup_cannot_use_is_named(make, python, said, unsaid):
  done = make("setup", {"python3": python})
  assert done.returncode and re.search(said, done.stdout) and unsaid not in done.stdout


@pytest.mark.parametrize(
  "driver, platforms, wheels",
  [
    ("580.65.06", "", ["jax[cuda13]==0.12.0.1"]),
    # Every driver's wheels: below.
    pytest.param("535.1", "", ["jax[cuda12]==0.12.0.1"], marks=pytest.mark.slow),
    ("535.1", "cpu", []),
    pytest.param(None, "", [], marks=pytest.mark.slow),
    ("470.1", "", None),
  ],
)
def test_make_installs_the_wheels_that_the_driver_allows(make, tmp_path, driver, platforms, wheels):
  """Once; the interpreter is this one, pip a list of what it was asked for."""
  asked, venv = tmp_path / "asked", tmp_path / "venv"
  (venv / "bin").mkdir(parents=True)
  (venv / ".ready").touch()
  pip = f'if [ "$2" = pip ]; then echo "$*" >> {asked}; else exec {sys.executable} "$@"; fi'
  _program(venv / "bin", "python", pip)
  scripts = {"nvidia-smi": f"echo {driver}"} if driver else {}
  for _ in range(2 if wheels else 1):
    done = make("wheels", scripts, JAX_PLATFORMS=platforms)
    assert (done.returncode == 0) == (wheels is not None), done.stderr
  installed = re.findall(r"jax\[.*", asked.read_text()) if asked.exists() else []
  assert installed == (wheels or [])


# --- the first line ------------------------------------------------------------------------------

TILED = {"model.hidden_size": 256, "model.num_heads": 4, "model.num_kv_heads": 4, "seq_len": 128}


def _spec(num=1, device="cpu", capability=0, arm="", **changes):
  c = base.get_config(arm)
  c.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
  return resolve.resolve(c, num, choose.Device(device, capability))


def _devices(num, kind):
  return [types.SimpleNamespace(device_kind=kind)] * num


@pytest.mark.parametrize(
  "spec, devices, line",
  [
    (lambda: _spec(), _devices(1, "cpu"), "CPU: FP8 is emulated, exact and slow"),
    (lambda: _spec(arm="bf16"), _devices(1, "cpu"), "CPU"),
    (lambda: _spec(1, "gpu", 90, **TILED), _devices(1, "NVIDIA H200"),
     "1 × NVIDIA H200 (sm_90): FP8 products by mosaic_sm90"),
    (lambda: _spec(8, "gpu", 90, "tensor_current", **TILED), _devices(8, "NVIDIA H200"),
     "8 × NVIDIA H200 (sm_90): FP8 products by xla_sm90"),
    (lambda: _spec(1, "gpu", 80, kernels__matmul="reference"), _devices(1, "NVIDIA A100"),
     "1 × NVIDIA A100 (sm_80): FP8 products by reference (emulated, slow)"),
    (lambda: _spec(1, "gpu", 75, "bf16"), _devices(1, "Tesla T4"), "1 × Tesla T4 (sm_75): no FP8"),
    (lambda: _spec(8, "gpu", 89, "tensor_current", mesh__fsdp=1), _devices(8, "NVIDIA L4"),
     "1 of 8 × NVIDIA L4 (sm_89): FP8 products by xla; mesh.data, mesh.fsdp and mesh.tensor are 1, "
     "the other 7 are idle"),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_the_first_line_names_devices_and_kernels(spec, devices, line):
  assert run_start.device_line(spec(), devices) == line


@pytest.mark.parametrize("module", [debug, smollm2_cpt])
def test_the_demo_takes_one_device_of_eight(module):
  """Its batch of two suits no eight; sizes that are tiles stand in for the model's."""
  c = config_files.without_files(module.get_config("tensor_current"))
  spec = resolve.resolve(c, 8, choose.Device("gpu", 90))
  assert spec.num_devices == 1 and spec.run.layout.mesh is None


def test_turing_computes_in_float32_without_cudnn():
  for capability, dtype, implementation in ((75, "float32", "xla"), (80, "bfloat16", "cudnn")):
    run = _spec(1, "gpu", capability, "bf16").run
    assert (run.dtype.name, run.attention) == (dtype, implementation)


def test_only_a_gpu_whose_fp8_products_are_not_recommended_comes_with_a_caution():
  cautioned = [n for n in (0, 75, 89, 90, 100, 103, 120, 121)
               if choose.caution(choose.Device("gpu", n))]  # fmt: skip
  assert cautioned == [89, 120, 121]


@pytest.mark.parametrize(
  "arm, changes, is_cautioned",
  [("bf16", {}, False), ("tensor_current", {}, True),
   ("tensor_current(accumulate=precise)", {"kernels__matmul": "reference"}, False),
   ("bf16", {"precision__schedule": ((3, ((".*", "tensor_current"),)),)}, True)],
)  # fmt: skip
def test_a_start_has_the_caution_where_a_phase_multiplies_on_fp8_hardware(
  monkeypatch, arm, changes, is_cautioned
):
  monkeypatch.setattr(jax, "devices", lambda: _devices(1, "NVIDIA L4"))
  spec, out = _spec(1, "gpu", 89, arm, **changes), io.StringIO()
  console = rich.console.Console(file=out, width=2000)
  run_start.print_start(console, spec, {}, "data", run_start.all_site_rows(spec))
  assert ("not recommended" in out.getvalue()) == is_cautioned


@pytest.mark.parametrize("arm, version, is_said", [
  ("block_128", (0, 12, 0), True), ("block_128", (0, 11, 2), False), ("bf16", (0, 12, 0), False),
])  # fmt: skip
def test_a_start_on_hopper_says_which_jax_compiles_larger_tiles(monkeypatch, arm, version, is_said):
  monkeypatch.setattr(jax, "devices", lambda: _devices(1, "NVIDIA H200"))
  monkeypatch.setattr(jax, "__version_info__", version)
  spec, out = _spec(1, "gpu", 90, arm, **TILED), io.StringIO()
  console = rich.console.Console(file=out, width=2000)
  run_start.print_start(console, spec, {}, "data", run_start.all_site_rows(spec))
  assert ("tiles of 128x128. jax 0.11.2 fits 128x192" in out.getvalue()) == is_said


# --- memory --------------------------------------------------------------------------------------


def test_a_config_sets_the_share_of_memory_before_jax_meets_its_devices():
  """launch.py as it is, the job replaced by one that looks."""
  code = (
    "import os, runpy, sys; from fp8jax.jobs import dispatch; "
    "import jax._src.xla_bridge as bridge; "
    "dispatch.run = lambda *a, **k: print(os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'], "
    "bridge.backends_are_initialized()); "
    "sys.argv = ['launch.py', '--config=configs/cpt_7b_1gpu_32k.py']; "
    "runpy.run_path('launch.py', run_name='__main__')"
  )
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
  assert done.stdout.split() == ["0.95", "False"], done.stderr


def test_only_configs_that_need_it_take_more_memory():
  assert dispatch.environment(base.get_config()) == {}
  wanted = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
  assert dispatch.environment(cpt_7b_1gpu.get_config()) == wanted


@pytest.fixture
def too_much(monkeypatch):
  """--job=train takes 64 TiB."""
  row = dataclasses.replace(
    table.JOBS["train"], run=lambda *_, **__: jnp.zeros(2**46, jnp.int8).block_until_ready()
  )
  monkeypatch.setitem(table.JOBS, "train", row)


def test_out_of_memory_ends_in_one_line_with_the_command_that_explains_it(
  tmp_path, capsys, monkeypatch, too_much
):
  big = jnp.zeros((3, 2**21), jnp.float32)  # of no other test
  argv = ["launch.py", "--config=configs/debug.py:bf16", "--config.global_batch=8", "--job=train"]
  monkeypatch.setattr(sys, "argv", argv)
  c = debug.get_config("bf16")
  assert dispatch.run("train", c, base.get_config(), "configs/debug.py", str(tmp_path)) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: out of memory: RESOURCE_EXHAUSTED")
  assert f"1 x float32[3,{big.shape[1]}] 24.0 MiB" in line

  command = "python launch.py --config=configs/debug.py:bf16 --config.global_batch=8 --job=memory"
  assert f"{command};" in line


def test_out_of_memory_in_a_notebook_is_one_error(tmp_path, too_much):
  with pytest.raises(UserError, match="out of memory: .*the same call with the job 'memory'"):
    dispatch.call("train", debug.get_config("bf16"), base.get_config(), str(tmp_path))


# --- MFU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "kind, tera",
  [
    ("NVIDIA H20", 148), ("NVIDIA H200", 989), ("NVIDIA H800", 989), ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 NVL", 835), ("NVIDIA L40S", 362),
    ("NVIDIA L4", 121), ("NVIDIA A10G", 70), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", 65),
    ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 5090", 209.5),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
    ("NVIDIA B200", 2250), ("NVIDIA B300", 2250), ("NVIDIA GB200", 2500), ("NVIDIA GB300", 2500),
    ("NVIDIA L40", None), ("cpu", None),
  ],
)  # fmt: skip
def test_peaks_are_found_by_the_names_that_drivers_give(kind, tera):
  peak = metrics.peak_flops(kind)
  assert peak == (None if tera is None else pytest.approx(tera * 1e12))
