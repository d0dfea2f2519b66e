"""Compiled programs stay on disk, so that a run that resumes or is repeated compiles nothing.

JAX's persistent compilation cache, on by default. JAX_COMPILATION_CACHE_DIR moves it and
JAX_ENABLE_COMPILATION_CACHE=false switches it off; both are JAX's own variables.
"""

import contextlib
import hashlib
import os
import platform

import jax

ROOT = os.path.join("~", ".cache", "fp8jax", "xla")


def enable(root: str = ROOT) -> str | None:
  """Switches the cache on unless the user has chosen; returns why it stays off, or None.

  XLA:CPU compiles for the instructions of this processor, and JAX's key does not name them. Each
  kind of processor therefore has a folder of its own: a home directory may be shared.
  """
  if (
    jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache
  ):
    return None
  folder = os.path.join(os.path.expanduser(root), _processor())
  with contextlib.suppress(OSError):
    os.makedirs(folder, exist_ok=True)
  if not os.access(folder, os.W_OK):
    return (
      f"compiled programs are not cached: {folder} cannot be written; "
      "JAX_COMPILATION_CACHE_DIR names another folder"
    )
  jax.config.update("jax_compilation_cache_dir", folder)
  return None


def _processor() -> str:
  """Name that differs where instructions differ, e.g. "x86_64-1f2e3d4c"."""
  features = ""
  if os.path.exists("/proc/cpuinfo"):
    with open("/proc/cpuinfo") as f:
      features = "".join(sorted({line for line in f if line.startswith(("flags", "Features"))}))
  return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
