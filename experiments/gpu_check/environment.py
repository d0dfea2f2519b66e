"""The machine: versions, driver, the compiler's handling of setmaxnreg, whether CUPTI works."""

import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile
from typing import Any

from gpu_check.worker import Context

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "ml-dtypes", "flax",
            "optax", "orbax-checkpoint", "safetensors", "tokenizers", "rich", "torch", "triton",
            "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nvjitlink",
            "nvidia-cuda-nvcc")  # fmt: skip
SMI = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"


def run(context: Context, part: str, shape=()) -> dict[str, Any]:
  return {"versions": _versions, "setmaxnreg": _setmaxnreg, "cupti": _cupti}[part](context, shape)


def _versions(context: Context, shape) -> dict[str, Any]:
  del context, shape
  import jax

  found = {}
  for name in PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  device = jax.devices()[0]
  return {
    "packages": found, "device": device.device_kind, "devices": jax.device_count(),
    "python": platform.python_version(),
    "nvidia_smi": _said("nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"),
    "ptxas": _said("ptxas", "--version"),
  }  # fmt: skip


def _said(command: str, *arguments: str) -> str:
  """The last line that a command prints, or that it is not there."""
  if not shutil.which(command):
    return "not on PATH"
  done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=30)
  return ((done.stdout or done.stderr).strip().splitlines() or [""])[-1]


def memory_gib() -> float:
  """The GPU's memory; 0 if nobody says."""
  said = _said("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
  return int(said) / 1024 if said.isdecimal() else 0.0


def _setmaxnreg(context: Context, shape) -> dict[str, Any]:
  """Compiles one GEMM whose producer is a warpgroup of its own and reads the compiler's report."""
  if context.is_dry:
    return {"setmaxnreg": "not compiled: dry"}
  with tempfile.TemporaryDirectory() as folder:
    # Mosaic reads these when it compiles.
    os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1",
                   "MOSAIC_GPU_DUMP_PTXAS": "1"}  # fmt: skip
    import jax

    from gpu_check import programs

    config = {"stages": 4, "cluster_m": 2, "producer": "warpgroup"}
    program = programs.gemm("fwd", tuple(shape), config)
    jax.jit(program.function).lower(*program.arguments).compile()
    files = [p for p in pathlib.Path(folder).iterdir() if p.suffix in (".ptx", ".ptxas", ".txt")]
    text = "\n".join(p.read_text(errors="ignore") for p in files)
  return read_resources(text)


def read_resources(text: str) -> dict[str, Any]:
  """Registers, spilled bytes, shared memory and the fate of setmaxnreg, from the dumped files."""
  registers = re.findall(r"Used (\d+) registers", text)
  if not registers:
    raise ValueError("the compiler's report is missing: MOSAIC_GPU_DUMP_PTXAS wrote none")
  has_it = "setmaxnreg.inc" in text
  ignored = "'setmaxnreg' ignored" in text or "C7504" in text or "C7508" in text
  memory = re.findall(r"smem_scratch_bytes=(\d+)", text)
  return {
    "setmaxnreg": "ignored" if ignored else "honoured" if has_it else "not in the program",
    "registers": int(registers[0]),
    "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", text))),
    "shared_memory_bytes": int(memory[0]) if memory else 0,
  }


def _cupti(context: Context, shape) -> dict[str, Any]:
  """Whether CUPTI times a kernel; a crash here costs this line alone."""
  del shape
  if context.is_dry:
    return {"works": False, "why": "dry"}
  import jax
  import jax.numpy as jnp
  from jax.experimental.mosaic.gpu import profiler

  x = jnp.ones((8192, 8192), jnp.float32)
  _, traces = profiler.measure(jax.jit(lambda x: -x), aggregate=False, iterations=2)(x)
  times = [ms for trace in traces or () for _, ms in trace]
  # 512 MiB at an HBM3e's 4.8 TB/s takes 0.11 ms at least.
  return {"works": bool(times) and 0.05 < min(times) < 10, "ms": times}
