"""The origin of a number: command, commit, versions, devices, data."""

import contextlib
import datetime
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from typing import Any

import jax

from fp8jax import records
from fp8jax.records import to_json
from fp8jax.run import schemas


def write_json(workdir: str, name: str, value):
  """Writes WORKDIR/name atomically, from process 0."""
  if jax.process_index() == 0:
    records.write_atomic(os.path.join(workdir, name), to_json(value) + "\n")


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
    **sources(),
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
  legs = _legs(workdir) if start else []
  if legs and legs[-1].get("config") == config:
    del legs[-1]["config"]
  return {"from_step": start, "earlier": legs}


def _legs(workdir: str) -> list[dict[str, Any]]:
  """The provenances of a run's processes so far, oldest first; [] where none is known."""
  path = os.path.join(workdir, "provenance.json")
  if not os.path.exists(path):
    return []
  remedy = "rename it, and the same command goes on without the earlier legs"
  last = records.read(path, schemas.Provenance, remedy)
  return [*last.pop("earlier", []), last]


def origin(workdir: str) -> int | None:
  """The step that a run began from, which init.workdir may set; None where that is not known."""
  return next((leg.get("from_step") for leg in _legs(workdir)), None)


def _versions() -> dict[str, str]:
  versions = {}
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return versions


def _driver(path: str = "/proc/driver/nvidia/version") -> str | None:
  """Version of NVIDIA's driver, None where there is none."""
  try:
    with open(path) as f:
      version = re.search(r"NVRM version: .*?(\d+\.\d[\d.]*)", f.read())
  except OSError:
    return None
  return version[1] if version else None


# Texts, pictures and the JSON of experiments, which programs write; and what they are asked.
_RESULTS, _ASKED = ("*.md", "*.png", "*.svg", "experiments/*.json"), "experiments/*/tasks/*"


def sources() -> dict[str, Any]:
  """{"commit", "dirty"}: of the checkout, and whether its files differ from the commit.

  Results do not count: commands that rewrite tracked tables one after the other are all clean.
  Both are None outside a checkout.
  """

  def run(*args):
    here = os.path.dirname(os.path.abspath(__file__))
    return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True)

  try:
    top = run("rev-parse", "--show-toplevel").stdout.strip()
    if not os.path.exists(os.path.join(top, "fp8jax", "run", "provenance.py")):
      return {"commit": None, "dirty": None}  # installed inside another project
    commit = run("rev-parse", "HEAD").stdout.strip()
    others = [f":(top,exclude){pattern}" for pattern in _RESULTS]
    status = functools.partial(run, "status", "--porcelain", "--")
    edited = status(":/", *others).stdout + status(f":(top){_ASKED}").stdout
    return {"commit": commit, "dirty": bool(edited.strip())}
  except (OSError, subprocess.CalledProcessError):
    return {"commit": None, "dirty": None}
