"""Which implementation runs a GEMM, and why not another one.

`choose` asks every backend and keeps the reasons. "auto" takes the first that says yes and reports
what it passed over; a named backend that cannot run the problem is an error before step 0.
"""

import dataclasses

import jax

from fp8jax.kernels import scaled_matmul
from fp8jax.recipe import Gemm


@dataclasses.dataclass(frozen=True)
class Device:
  """What a backend needs to know about the hardware.

  Attributes:
    platform: "cpu" or "gpu".
    capability: CUDA compute capability x 10 (90 for Hopper), 0 elsewhere.
  """

  platform: str = "cpu"
  capability: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
  """One GEMM as a backend sees it: sizes per device, precision, hardware."""

  m: int
  n: int
  k: int
  gemm: Gemm
  device: Device

  @property
  def platform(self) -> str:
    return self.device.platform


@dataclasses.dataclass(frozen=True)
class Choice:
  """The backend that runs a problem and what `auto` passed over on the way to it."""

  backend: str
  notes: tuple[str, ...] = ()


def current_device() -> Device:
  """The device JAX computes on."""
  device = jax.devices()[0]
  capability = getattr(device, "compute_capability", None)
  if device.platform in ("gpu", "cuda", "rocm"):
    return Device("gpu", int(float(capability) * 10) if capability else 0)
  return Device(device.platform, 0)


def choose(problem: Problem, wanted: str = "auto") -> Choice:
  """The backend for `problem`.

  Args:
    problem: sizes, precision, hardware.
    wanted: "auto" or a backend's name.

  Raises:
    ValueError: no backend can run it, or the named one cannot; says why and what to do.
  """
  if not problem.gemm.is_narrow:
    return Choice("xla")
  device = problem.device
  if device.platform == "gpu" and device.capability < 89 and wanted != "reference":
    raise ValueError(
      f"FP8 needs compute capability 8.9 or newer and this device has {device.capability / 10}: "
      "XLA would silently multiply in 16 bits. Use recipe 'bf16', or kernels.matmul='reference' to "
      "emulate."
    )
  backends = scaled_matmul.BACKENDS
  if wanted != "auto":
    if wanted not in backends:
      raise ValueError(f"kernels.matmul={wanted!r}; expected 'auto' or one of {sorted(backends)}")
    reason = backends[wanted].supports(problem)
    if reason is not None:
      raise ValueError(f"kernels.matmul={wanted!r} cannot run {describe(problem)}: {reason}")
    return Choice(wanted)
  notes = []
  for name, module in backends.items():
    reason = module.supports(problem)
    if reason is None:
      return Choice(name, tuple(notes))
    notes.append(f"{name}: {reason}")
  raise ValueError(f"no backend runs {describe(problem)}: " + "; ".join(notes))


def compiler_options(device: Device) -> dict[str, bool] | None:
  """For jax.jit of a program with FP8 GEMMs.

  On GPU XLA's Triton may take an FP8 GEMM with tiles too small for the FP8 instruction: it then
  converts both operands and multiplies in 16 bits. cuBLASLt never does.
  """
  return {"xla_gpu_enable_triton_gemm": False} if device.platform == "gpu" else None


def describe(problem: Problem) -> str:
  gemm = problem.gemm
  return f"{problem.m}x{problem.n}x{problem.k} ({gemm.lhs} by {gemm.rhs})"
