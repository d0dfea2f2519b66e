"""Which backend runs a kernel, and why not another one: the one place that chooses.

One function per kind of kernel: `gemm`, `grouped_gemm`, `quantizer`, `adamw`, `attention`. Each
asks the `supports` of its backends in their order of preference and keeps the reasons. "auto" takes
the first that says yes and reports what it passed over. A named backend that cannot run the problem
is refused; for a GEMM that is an error before step 0. On a GPU "auto" never multiplies by
`reference`: emulation there is asked for by name.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from fp8jax.kernels.adamw import api as adamw_api
from fp8jax.kernels.attention import api as attention_api
from fp8jax.kernels.device import Device
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import grouped
from fp8jax.kernels.quantize import mosaic_sm90 as quantize_sm90
from fp8jax.recipe.gemm import PASSES, Gemm, Recipe
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.quant import Quant

# Compute capabilities x 10: the first with BF16 tensor cores, the first with FP8 tensor cores, and
# the first of the consumer Blackwells.
_AMPERE, _ADA, _SM120 = 80, 89, 120


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


@dataclasses.dataclass(frozen=True)
class Choice:
  """The backend that runs a problem.

  Attributes:
    notes: "name: reason" of each backend that "auto" passed over on the way to it.
  """

  backend: str
  notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refusal:
  """No backend that was asked for runs a problem; the reason, in words."""

  reason: str


def _first(names: Iterable[str], supports: Callable[[str], str | None]) -> Choice | tuple[str, ...]:
  """The first of the backends without a reason against it, or the reasons against all."""
  notes = []
  for name in names:
    reason = supports(name)
    if reason is None:
      return Choice(name, tuple(notes))
    notes.append(f"{name}: {reason}")
  return tuple(notes)


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


def attention(problem: attention_api.AttentionProblem, wanted: str = "auto") -> Choice | Refusal:
  """The backend of attention.

  Args:
    problem: sizes per device, isolation of documents, hardware.
    wanted: "auto" or one of attention_api.BACKENDS.

  Returns:
    Its notes name the backends that "auto" passed over, and what isolation costs. "auto" refuses
    where isolation would take an array of length x length that is larger than LARGEST_SQUARE.

  Raises:
    ValueError: `wanted` is no backend's name.
  """
  if wanted not in ("auto", *attention_api.BACKENDS):
    known = sorted(attention_api.BACKENDS)
    raise ValueError(f"kernels.attention={wanted!r}; expected 'auto' or one of {known}")
  if wanted != "auto":
    reason = attention_api.supports(wanted, problem)
    if reason is not None:
      return Refusal(f"kernels.attention={wanted!r} {reason}; use 'xla' or 'auto'")
    return Choice(wanted, _cost_of_isolation(wanted, problem))

  def reason_against(name: str) -> str | None:
    return attention_api.supports(name, problem) or attention_api.too_large(name, problem)

  choice = _first(attention_api.preference(problem), reason_against)
  if isinstance(choice, Choice):
    passed_over = choice.notes if problem.device.platform == "gpu" else ()
    return Choice(choice.backend, passed_over + _cost_of_isolation(choice.backend, problem))
  return Refusal(
    f"no attention isolates documents on {name_of(problem.device)} within memory: "
    f"{'; '.join(choice)}. Remove the reason against tokamax, or set data.cross_document=True, or "
    "name kernels.attention='cudnn' to pay for its array"
  )


def _cost_of_isolation(name: str, problem: attention_api.AttentionProblem) -> tuple[str, ...]:
  nbytes = attention_api.square_bytes(name, problem)
  return (f"{name}: isolation takes {nbytes / 2**20:,.0f} MiB per device",) if nbytes else ()


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
  """A line for the start of a run on a GPU whose FP8 products are accepted and not recommended."""
  if device.platform == "gpu" and device.capability == _ADA:
    return (
      f"{name_of(device)}: FP8 products are accepted and not recommended. The one public "
      "measurement of a scale per tensor on an L4 (Unsloth 2026.10.9, models/float8_training.py) "
      "found no gain, and NaN with checkpointing"
    )
  if device.platform != "gpu" or device.capability < _SM120:
    return None
  return (
    f"{name_of(device)}: nothing of this project has been run on it. Recipes with scales constant "
    "along K are given to cuBLASLt; precision.verify_fp8_gemms reads the compiled program. "
    "Compare a short run with recipe 'bf16' first: Transformer Engine found wrong FP8 gradients on "
    "this generation (TransformerEngine#3215)"
  )


def _is_before(device: Device, capability: int) -> bool:
  """Whether an NVIDIA GPU is older than a compute capability."""
  return device.platform == "gpu" and 0 < device.capability < capability


def gemm(problem: GemmProblem, wanted: str = "auto") -> Choice:
  """The backend of a GEMM.

  Args:
    wanted: "auto" or a key of gemm_api.BACKENDS.

  Raises:
    ValueError: no backend can run it, or the named one cannot; says why and what to do.
  """
  if not problem.gemm.multiplies_codes:
    return Choice("xla")
  backends = gemm_api.BACKENDS
  if wanted not in ("auto", *backends):
    raise ValueError(f"kernels.matmul={wanted!r}; expected 'auto' or one of {sorted(backends)}")
  if wanted not in gemm_api.EMULATED and (reason := _excluded(problem)):
    raise ValueError(f"{reason}. {_instead(problem)}")
  if wanted != "auto":
    reason = backends[wanted].supports(problem)
    if reason is not None:
      raise ValueError(f"kernels.matmul={wanted!r} cannot run {describe(problem)}: {reason}")
    return Choice(wanted)
  choice = _first(_automatic(backends, problem.device), lambda b: backends[b].supports(problem))
  if isinstance(choice, Choice):
    return choice
  raise ValueError(
    f"no FP8 kernel for {name_of(problem.device)} runs {describe(problem)}: {'; '.join(choice)}. "
    f"{_instead(problem)}"
  )


def reason_against(problem: GemmProblem) -> str | None:
  """Why "auto" refuses a GEMM, without the remedies; None where it runs."""
  if not problem.gemm.multiplies_codes:
    return None
  if reason := _excluded(problem):
    return reason
  backends = gemm_api.BACKENDS
  choice = _first(_automatic(backends, problem.device), lambda b: backends[b].supports(problem))
  return None if isinstance(choice, Choice) else "; ".join(choice)


def gemm_backends(problem: GemmProblem) -> list[str]:
  """The names of all backends that make a GEMM of FP8 dots, in order of preference."""
  backends = gemm_api.BACKENDS.items()
  return [name for name, b in backends if b.supports(problem) is None and b.num_dots(problem)]


@dataclasses.dataclass(frozen=True)
class GemmSize:
  """Global sizes of a linear layer's forward GEMM: tokens x produced x contracted."""

  tokens: int
  produced: int
  contracted: int

  def of(self, which: str) -> tuple[int, int, int]:
    """(M, N, K) of one of the three GEMMs."""
    t, p, c = self.tokens, self.produced, self.contracted
    return {"fwd": (t, p, c), "dgrad": (t, c, p), "wgrad": (c, p, t)}[which]


def backends(recipe: Recipe, size: GemmSize, device: Device, matmul: str) -> tuple[str, ...]:
  """Backends of (fwd, dgrad, wgrad); raises as `gemm`."""
  return tuple(
    gemm(GemmProblem(*size.of(p), getattr(recipe, p), device), matmul).backend for p in PASSES
  )


def grouped_gemm(problem: GemmProblem, wanted: str = "auto") -> Choice | Refusal:
  """The backend of a grouped GEMM (kernels/gemm/grouped.py).

  Args:
    problem: sizes of all groups together, precision, hardware.
    wanted: "auto" or a key of grouped.BACKENDS.

  Raises:
    ValueError: `wanted` is no backend's name.
  """
  backends = grouped.BACKENDS
  if wanted == "auto":
    names = _automatic(backends, problem.device)
  else:
    grouped.check_backend(wanted)
    names = [wanted]
  if not problem.gemm.multiplies_codes:
    return Refusal("a grouped GEMM reads FP8 operands; the recipe leaves these in 16 or 32 bits")
  choice = _first(names, lambda name: backends[name].supports(problem))
  if isinstance(choice, Choice):
    return choice
  return Refusal(f"no grouped GEMM runs {describe(problem)}: {'; '.join(choice)}")


def quantizer(x, quant: Quant, along: int, gemm_backend: str) -> Choice:
  """The backend that quantizes an operand: a kernel, or "xla" (quantization/quantize.py).

  Args:
    x: the matrix; may be abstract.
    along: the axis that the GEMM contracts, 0 or 1.
    gemm_backend: of the GEMM that reads it; those in gemm_api.WITH_QUANTIZER have a kernel.
  """
  if gemm_backend not in gemm_api.WITH_QUANTIZER:
    return Choice("xla", (f"mosaic_sm90: quantizes for {gemm_api.WITH_QUANTIZER} only",))
  reason = quantize_sm90.supports(x, quant, along)
  return Choice("mosaic_sm90") if reason is None else Choice("xla", (f"mosaic_sm90: {reason}",))


def adamw(gradient, master, mu, nu, device: Device, wanted: str = "auto") -> Choice | Refusal:
  """The backend of AdamW for arrays of these shapes, dtypes and Quants (they may be abstract).

  Args:
    gradient, master, mu, nu: see kernels/adamw/api.py.
    wanted: "auto" or a key of adamw_api.BACKENDS.

  Raises:
    ValueError: `wanted` is no backend's name.
  """
  backends: Mapping[str, Any] = adamw_api.BACKENDS
  if wanted not in ("auto", *backends):
    raise ValueError(f"backend={wanted!r} of the optimizer; expected 'auto' or {sorted(backends)}")

  def supports(name: str) -> str | None:
    return backends[name].supports(gradient, master, mu, nu, device)

  if wanted != "auto":
    reason = supports(wanted)
    if reason is None:
      return Choice(wanted)
    return Refusal(f"the optimizer's backend {wanted!r} cannot: {reason}")
  choice = _first(backends, supports)
  if isinstance(choice, Choice):
    return choice
  return Refusal("no backend of the optimizer can: " + "; ".join(choice))


def _automatic(backends: Iterable[str], device: Device) -> list[str]:
  """Those that "auto" may take: on a GPU no emulation, on a CPU `reference`."""
  able = ("reference",) if device.platform == "cpu" else ()
  return [name for name in backends if name in able or name not in gemm_api.EMULATED]


def native_recipes(problem: GemmProblem) -> list[str]:
  """Recipes with three products on FP8 hardware, at the sizes of `problem`."""

  def is_native(recipe: Recipe) -> bool:
    gemms = [gemm for which in PASSES if (gemm := getattr(recipe, which)).multiplies_codes]
    problems = [dataclasses.replace(problem, gemm=gemm) for gemm in gemms]
    return bool(gemms) and all(_runs(p) for p in problems)

  return [name for name, recipe in RECIPES.items() if is_native(recipe)]


def _runs(problem: GemmProblem) -> bool:
  return not _excluded(problem) and bool({*gemm_backends(problem)} - {*gemm_api.EMULATED})


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


def compiler_options(device: Device, in_flight: int = 1) -> dict[str, Any] | None:
  """For jax.jit of a program with FP8 GEMMs.

  On GPU XLA's Triton may take an FP8 GEMM with tiles too small for the FP8 instruction: it then
  converts both operands and multiplies in 16 bits. cuBLASLt never does. The XLA of jax 0.11 may put
  a GEMM into the fusion that stores its result among those of all layers, and multiply a second
  time for its other readers; 0.12 does not.

  Args:
    in_flight: collectives that the schedule may have under way. With one, gathers and
      reduce-scatters share the places beside products. Above 1 XLA no longer carries a layer's
      reduce-scatters into the next layer's pass either.
  """
  if device.platform != "gpu":
    return None
  options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
  if not write_in_loops(device):
    options["xla_gpu_enable_dynamic_slice_fusion"] = False
  if in_flight > 1:
    options["xla_gpu_experimental_parallel_collective_overlap_limit"] = in_flight
    options["xla_gpu_pipeline_reduce_scatter"] = "COLLECTIVE_PIPELINING_MODE_OFF"
  return options


def write_in_loops(device: Device) -> bool:
  """Whether XLA lets a product or a kernel write its slice of an array where a loop's counter says.

  That of jax 0.12 does: it is the "dynamic-slice fusion" of `compiler_options`.
  """
  return device.platform == "gpu" and jax.__version_info__ >= (0, 12)


@functools.lru_cache
def program(function: Callable, device: Device, static: tuple[str, ...] = ()):
  """jax.jit with these arguments static: one for all callers, who compile equal calls once."""
  return jax.jit(function, static_argnames=static, compiler_options=compiler_options(device))


def describe(problem: GemmProblem) -> str:
  gemm = problem.gemm
  return f"{problem.m}x{problem.n}x{problem.k} ({gemm.lhs} by {gemm.rhs})"
