"""The origin of a number: command, commit, versions, devices, data."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
from typing import Any

import jax

from fp8jax.errors import read_json, writing


def write_json(workdir: str, name: str, value):
  """Writes WORKDIR/name atomically, from process 0."""
  if jax.process_index() != 0:
    return
  path = os.path.join(workdir, name)
  with writing(path):
    with open(path + ".part", "w") as f:
      f.write(to_json(value) + "\n")
    os.replace(path + ".part", path)


def to_json(value, indent: int | None = 2) -> str:
  """Strict JSON: numbers that are not finite become the strings "nan", "inf" and "-inf"."""

  def plain(x):
    if isinstance(x, dict):
      return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
      return [plain(v) for v in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x

  return json.dumps(plain(value), indent=indent, allow_nan=False)


PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml-dtypes",
            "ml-collections", "tokenizers", "safetensors", "fp8jax")  # fmt: skip


def provenance(
  config: dict[str, Any], data: str, seed: int, num_devices: int | None = None
) -> dict[str, Any]:
  """Everything needed to know the origin of a number; num_devices of those that there are."""
  devices = jax.devices()[:num_devices]
  return {
    "command": sys.argv,
    "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    **_git(),
    "config": config,
    "seed": seed,
    "data_fingerprint": data,
    "versions": {"python": platform.python_version(), **_versions()},
    "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
    "driver": _driver(),
    "processes": jax.process_count(),
    "host": {"machine": platform.machine(), "cpus": os.cpu_count(), "system": platform.system()},
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def history(workdir: str, start: int, config: dict[str, Any]) -> dict[str, Any]:
  """Where a leg of a run starts, and the provenances of those before it, oldest first.

  Each is without "config" where the leg after it has the same.
  """
  path = os.path.join(workdir, "provenance.json")
  if not start or not os.path.exists(path):
    return {"from_step": start, "earlier": []}
  before = read_json(path, "rename it, and the same command goes on without the earlier legs")
  legs = before.pop("earlier", [])
  if before.get("config") == config:
    del before["config"]
  return {"from_step": start, "earlier": [*legs, before]}


def _versions() -> dict[str, str]:
  found = {}
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def _driver(path: str = "/proc/driver/nvidia/version") -> str | None:
  """Version of NVIDIA's driver, None where there is none."""
  try:
    with open(path) as f:
      found = re.search(r"NVRM version: .*?(\d+\.\d[\d.]*)", f.read())
  except OSError:
    return None
  return found[1] if found else None


def _git() -> dict[str, Any]:
  def run(*args):
    here = os.path.dirname(os.path.abspath(__file__))
    return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True)

  try:
    top = run("rev-parse", "--show-toplevel").stdout.strip()
    if not os.path.exists(os.path.join(top, "fp8jax", "run", "provenance.py")):
      return {"commit": None, "dirty": None}  # installed inside another project
    commit = run("rev-parse", "HEAD").stdout.strip()
    return {"commit": commit, "dirty": bool(run("status", "--porcelain").stdout.strip())}
  except (OSError, subprocess.CalledProcessError):
    return {"commit": None, "dirty": None}
