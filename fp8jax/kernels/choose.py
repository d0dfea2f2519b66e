"""Which implementation runs a GEMM, and why not another one.

`choose` asks every backend and keeps the reasons. "auto" takes the first that says yes and reports
what it passed over; a named backend that cannot run the problem is an error before step 0. On a GPU
"auto" never takes `reference`: emulation there is asked for by name.
"""

import dataclasses
import re
from typing import Literal

import jax

from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.recipe.gemm import PASSES, Gemm, Recipe
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.quant import WHOLE

# Compute capabilities x 10: the first with BF16 tensor cores and cuDNN's attention, the first with
# FP8 tensor cores, and the first of the consumer Blackwells.
_AMPERE, _ADA, _SM120 = 80, 89, 120


@dataclasses.dataclass(frozen=True)
class Device:
  """The facts about the hardware that a backend needs.

  Attributes:
    platform: "cpu" or "gpu".
    capability: CUDA compute capability x 10 (90 for Hopper), 0 elsewhere (also AMD's GPUs).
  """

  platform: str = "cpu"
  capability: int = 0


@dataclasses.dataclass(frozen=True)
class GemmProblem:
  """One GEMM as a backend sees it: sizes per device, precision, hardware."""

  m: int
  n: int
  k: int
  gemm: Gemm
  device: Device

  @property
  def platform(self) -> str:
    return self.device.platform

  @property
  def has_one_scale_each(self) -> bool:
    """Each operand has one scale: what every generation of cuBLASLt since Ada multiplies."""
    return all(q is not None and q.tile == (WHOLE, WHOLE) for q in (self.gemm.lhs, self.gemm.rhs))


@dataclasses.dataclass(frozen=True)
class Choice:
  """The backend that runs a problem and what `auto` passed over on the way to it."""

  backend: str
  notes: tuple[str, ...] = ()


def current_device() -> Device:
  """The device JAX computes on."""
  device = jax.devices()[0]
  if device.platform in ("gpu", "cuda", "rocm"):
    # "9.0" of NVIDIA, "gfx942" of AMD.
    number = re.fullmatch(r"(\d+)\.(\d)", str(getattr(device, "compute_capability", "")))
    return Device("gpu", int(number[1] + number[2]) if number else 0)
  return Device(device.platform, 0)


def compute_dtype(device: Device) -> str:
  """The dtype that "auto" stands for: bfloat16 where the hardware multiplies it, else float32."""
  return "bfloat16" if device.platform == "gpu" and not _is_before(device, _AMPERE) else "float32"


def attention(device: Device, dtype: str) -> Literal["xla", "cudnn"]:
  """The attention that "auto" stands for: cuDNN's fused one needs Ampere and 16-bit inputs."""
  is_fused = lacks_cudnn(device) is None and dtype in ("bfloat16", "float16")
  return "cudnn" if is_fused else "xla"


def lacks_cudnn(device: Device) -> str | None:
  """Why cuDNN's attention does not run on a device, or None."""
  if device.platform != "gpu" or device.capability == 0:
    return "needs an NVIDIA GPU"
  if device.capability < _AMPERE:
    return f"needs compute capability 8.0 or newer and this GPU is {name_of(device)}"
  return None


def lacks_dtype(device: Device, dtype: str) -> str | None:
  """Why activations of a dtype are refused on a device, or None."""
  if dtype == "bfloat16" and _is_before(device, _AMPERE):
    return (
      f"{name_of(device)} has no BF16 tensor cores (compute capability 8.0 is the first with them)"
    )
  return None


def name_of(device: Device) -> str:
  """ "sm_90", or the platform where there is no compute capability."""
  return f"sm_{device.capability}" if device.capability else device.platform


def caution(device: Device) -> str | None:
  """A line for the start of a run on a GPU that no program of ours was ever compiled for."""
  if device.platform != "gpu" or device.capability < _SM120:
    return None
  return (
    f"{name_of(device)}: nothing of this project has been compiled for it or run on it. Recipes "
    "with one scale per tensor are given to cuBLASLt; precision.verify_fp8_gemms reads the "
    "compiled program. "
    "Compare a short run with recipe 'bf16' first: Transformer Engine found wrong FP8 gradients on "
    "this generation (TransformerEngine#3215)"
  )


def _is_before(device: Device, capability: int) -> bool:
  """Whether an NVIDIA GPU is older than a compute capability."""
  return device.platform == "gpu" and 0 < device.capability < capability


def choose(problem: GemmProblem, wanted: str = "auto") -> Choice:
  """The backend for `problem`.

  Args:
    problem: sizes, precision, hardware.
    wanted: "auto" or a backend's name.

  Raises:
    ValueError: no backend can run it, or the named one cannot; says why and what to do.
  """
  if not problem.gemm.is_narrow:
    return Choice("xla")
  device, backends = problem.device, gemm_api.BACKENDS
  if wanted not in ("auto", *backends):
    raise ValueError(f"kernels.matmul={wanted!r}; expected 'auto' or one of {sorted(backends)}")
  if wanted != "reference" and (reason := _excluded(problem)):
    raise ValueError(f"{reason}. {_instead(problem)}")
  if wanted != "auto":
    reason = backends[wanted].supports(problem)
    if reason is not None:
      raise ValueError(f"kernels.matmul={wanted!r} cannot run {describe(problem)}: {reason}")
    return Choice(wanted)
  notes = []
  for name, module in backends.items():
    if name == "reference" and device.platform != "cpu":
      continue
    reason = module.supports(problem)
    if reason is None:
      return Choice(name, tuple(notes))
    notes.append(f"{name}: {reason}")
  raise ValueError(
    f"no FP8 kernel for {name_of(device)} runs {describe(problem)}: {'; '.join(notes)}. "
    f"{_instead(problem)}"
  )


def native_recipes(problem: GemmProblem) -> list[str]:
  """Recipes with three products on FP8 hardware, at the sizes of `problem`."""

  def is_native(recipe: Recipe) -> bool:
    gemms = [gemm for which in PASSES if (gemm := getattr(recipe, which)).is_narrow]
    problems = [dataclasses.replace(problem, gemm=gemm) for gemm in gemms]
    return bool(gemms) and all(_runs(p) for p in problems)

  return [name for name, recipe in RECIPES.items() if is_native(recipe)]


def _runs(problem: GemmProblem) -> bool:
  if _excluded(problem):
    return False
  modules = (m for name, m in gemm_api.BACKENDS.items() if name != "reference")
  return any(module.supports(problem) is None for module in modules)


def _excluded(problem: GemmProblem) -> str | None:
  """Why a GPU is not given an FP8 product, whatever the kernels support; None where it is."""
  device = problem.device
  if device.platform != "gpu":
    return None
  if device.capability == 0:
    return "FP8 has not been tried on GPUs other than NVIDIA's. Use recipe 'bf16'"
  if device.capability < _ADA:
    return (
      f"FP8 needs compute capability 8.9 or newer and this device has {device.capability / 10}: "
      "XLA would silently multiply in 16 bits. Use recipe 'bf16'; these save memory beside it and "
      "need no FP8 units: optim.moment_format='coat', optim.master_format='bf16_remainder', "
      "memory.save_norm_inputs and "
      "memory.save_gate_up='e4m3_16'"
    )
  if device.capability >= _SM120 and not problem.has_one_scale_each:
    return (
      f"{name_of(device)} is given FP8 products with one scale per tensor only: nothing of this "
      "project has been compiled for it or run on it, and cuBLASLt rejects a scale per row there "
      f"(pytorch#192707). {describe(problem)} is none"
    )
  return None


def _instead(problem: GemmProblem) -> str:
  """Recipes that run on this device at this size, the first as an option, and how to emulate."""
  native = native_recipes(problem)
  emulate = (
    "kernels.matmul='reference' emulates every recipe, slowly, and so does JAX_PLATFORMS=cpu"
  )
  if not native:  # nor will the compiled program have any FP8 product to prove
    return emulate.replace("'reference'", "'reference' with precision.verify_fp8_gemms=False")
  return (
    f"Recipes that run on {name_of(problem.device)} at this size: {', '.join(native)} "
    f"(--config=FILE:{native[0]}). {emulate}"
  )


def compiler_options(device: Device) -> dict[str, bool] | None:
  """For jax.jit of a program with FP8 GEMMs.

  On GPU XLA's Triton may take an FP8 GEMM with tiles too small for the FP8 instruction: it then
  converts both operands and multiplies in 16 bits. cuBLASLt never does.
  """
  return {"xla_gpu_enable_triton_gemm": False} if device.platform == "gpu" else None


def describe(problem: GemmProblem) -> str:
  gemm = problem.gemm
  return f"{problem.m}x{problem.n}x{problem.k} ({gemm.lhs} by {gemm.rhs})"
