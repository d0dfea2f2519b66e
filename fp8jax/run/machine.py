"""The NVIDIA driver of a machine, and the JAX wheels that it allows.

`python -m fp8jax.run.machine` prints the extra of jax to install, "cuda13" or "cuda12", or nothing
on a machine without a driver.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable

from fp8jax.errors import UserError

# The first driver of each CUDA, NVIDIA's "CUDA Compatibility" guide: minor version compatibility.
_WHEELS = ((580, "cuda13"), (525, "cuda12"))
_TIMEOUT_S = 30


def driver_version() -> str | None:
  """Version of the NVIDIA driver by nvidia-smi, "580.65.06"; None where no driver answers."""
  version = next(iter(_nvidia_smi("driver_version")), "")
  return version if version.replace(".", "").isdigit() else None


def compute_capability() -> int:
  """Of the first visible NVIDIA GPU, 90 for 9.0; 0 where nobody says it. JAX stays away."""
  gpus = visible_gpus()
  words = _nvidia_smi("compute_cap", "-i", gpus[0]) if gpus else []
  number = re.fullmatch(r"(\d+)\.(\d)", words[0]) if words else None
  return int(number[1] + number[2]) if number else 0


def visible_gpus() -> list[str]:
  """Indices of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves to this process; JAX stays away."""
  if "CUDA_VISIBLE_DEVICES" in os.environ:
    return [x for x in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if x not in ("", "-1")]
  return _nvidia_smi("index")


def _nvidia_smi(query: str, *options: str) -> list[str]:
  """Words of the answer, one per GPU; [] without one."""
  program = shutil.which("nvidia-smi")
  if program is None:
    return []
  words = [program, f"--query-gpu={query}", "--format=csv,noheader", *options]
  try:
    answer = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S)
  except (OSError, subprocess.TimeoutExpired):
    return []
  return answer.stdout.split() if answer.returncode == 0 else []


def wheels(driver: str) -> str:
  """The extra of jax whose CUDA a driver runs.

  Raises:
    UserError: the driver is older than every CUDA that JAX ships.
  """
  major = int(driver.split(".")[0])
  for least, extra in _WHEELS:
    if major >= least:
      return extra
  raise UserError(
    f"the NVIDIA driver {driver} is older than {_WHEELS[-1][0]}, the first that CUDA 12 runs on; "
    "update it, or set JAX_PLATFORMS=cpu to compute on the CPU"
  )


def check_platform(
  platform: str,
  wanted: str | None,
  jax_version: str,
  find_driver: Callable[[], str | None] = driver_version,
):
  """Refuses the CPU on a machine with an NVIDIA driver, unless it was asked for.

  Args:
    platform: JAX's default backend.
    wanted: the value of JAX_PLATFORMS, None or "" where nothing was asked for.
    jax_version: what to install with CUDA.

  Raises:
    UserError: with the command that installs the CUDA wheels.
  """
  if platform != "cpu" or wanted:
    return
  driver = find_driver()
  if driver is None:
    return
  package = f"jax[{wheels(driver)}]=={jax_version}"
  raise UserError(
    f"JAX computes on the CPU, and this machine has the NVIDIA driver {driver}. Install the CUDA "
    f"wheels with\n  {shlex.quote(sys.executable)} -m pip install {shlex.quote(package)}\n"
    "or set JAX_PLATFORMS=cpu to compute on the CPU"
  )


def main() -> int:
  driver = driver_version()
  try:
    print(wheels(driver) if driver else "")
  except UserError as e:
    print(f"error: {e}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
