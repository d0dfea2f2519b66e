"""--job=doctor: the abilities of this machine, in words: devices, wheels, extras, recipes."""

import dataclasses
import importlib.util
import pathlib
import shlex
import sys
from collections.abc import Callable

import jax
import rich.console

from fp8jax import console as console_lib
from fp8jax.errors import EXTRAS, UserError
from fp8jax.kernels import choose
from fp8jax.kernels.device import Device
from fp8jax.kernels.gemm import tile_config
from fp8jax.recipe.gemm import PASSES, Recipe
from fp8jax.recipe.library import RECIPES
from fp8jax.run import machine, metrics

# A linear layer whose sizes every backend accepts: 8,192 tokens, 4,096 to 4,096 channels.
_SIZES = (8192, 4096, 4096)
# The first of these that runs on FP8 hardware is advised.
_PREFERRED = ("block_128", "tensor_current")
_HOPPER_ONLY = ("attention",)  # extras that other devices have no use for
# The memory half of the project, which needs no FP8 units.
_NARROW = {
  "optim.moment_format": "coat", "optim.master_format": "bf16_remainder",
  "memory.save_norm_inputs": "e4m3_16", "memory.save_gate_up": "e4m3_16",
}  # fmt: skip
_HALF = {"precision.compute_dtype": "float16", "loss_scale.kind": "dynamic"}


@dataclasses.dataclass(frozen=True)
class Machine:
  """The facts that the advice follows from.

  Attributes:
    device: as backends ask about it.
    kind, count: JAX's name for it, and how many there are.
    driver: of NVIDIA, or None.
    jax: version of JAX.
    missing: modules of extras that are not installed.
    wanted: the value of JAX_PLATFORMS, or None.
  """

  device: Device
  kind: str
  count: int
  driver: str | None
  jax: str
  missing: tuple[str, ...] = ()
  wanted: str | None = None


@dataclasses.dataclass(frozen=True)
class RecipeRow:
  """A recipe on a device: the backend of each product, or why it is refused."""

  name: str
  backends: tuple[str, ...]
  refusal: str = ""


@dataclasses.dataclass(frozen=True)
class FirstRun:
  """The options of a first run on a device.

  Attributes:
    recipe: of the layers, for --config=FILE:RECIPE.
    changes: {config key: value} beside it.
    reason: the advice in words, without the options.
  """

  recipe: str
  changes: dict[str, str]
  reason: str

  @property
  def options(self) -> str:
    """As words of a command line."""
    changes = (f"--config.{key}={value}" for key, value in self.changes.items())
    return " ".join((f"--config=FILE:{self.recipe}", *changes))


def this_machine() -> Machine:
  """Asks JAX, the driver and the installed packages."""
  devices = jax.devices()
  missing = tuple(name for name in EXTRAS if importlib.util.find_spec(name) is None)
  return Machine(
    choose.current_device(), devices[0].device_kind, len(devices), machine.driver_version(),
    jax.__version__, missing, jax.config.jax_platforms,
  )  # fmt: skip


def recipes(device: Device) -> list[RecipeRow]:
  """Every named recipe on a device, for a linear layer that divides into every tile."""
  return [_row(name, recipe, device) for name, recipe in RECIPES.items()]


def _row(name: str, recipe: Recipe, device: Device) -> RecipeRow:
  backends = []
  for which in PASSES:
    problem = choose.GemmProblem(*_SIZES, getattr(recipe, which), device)
    if reason := choose.reason_against(problem):
      return RecipeRow(name, (), reason)
    backends.append(choose.gemm(problem).backend)
  return RecipeRow(name, tuple(backends))


def first_run(device: Device, untried: bool = False) -> FirstRun:
  """The options of a first run on a device, and their reason; `untried` advises FP8 products on
  one that choose.caution warns of, too."""
  if device.platform == "cpu":
    return FirstRun("block_128", {}, "any recipe, emulated: exact products, no speed")
  if (native := _native(device)) and (untried or choose.caution(device) is None):
    return FirstRun(native, {}, "FP8 products")
  reason = "no FP8 products; FP8 moments, narrow masters and saved activations"
  half = _HALF if choose.lacks_dtype(device, "bfloat16") else {}
  return FirstRun("bf16", {**_NARROW, **half}, reason)


def _native(device: Device) -> str:
  """The first of _PREFERRED that runs on FP8 hardware, or ""."""
  native = choose.native_recipes(choose.GemmProblem(*_SIZES, RECIPES[_PREFERRED[0]].fwd, device))
  return next((name for name in _PREFERRED if name in native), "")


def advice(device: Device) -> str:
  """`first_run` as a sentence."""
  run = first_run(device)
  line = f"{run.reason}: {run.options}"
  if device.platform == "cpu" or run.recipe in _PREFERRED:
    return line
  if native := _native(device):
    return f"{line}. --config=FILE:{native} multiplies in FP8 all the same; see the caution"
  emulate = "--config.kernels.matmul=reference emulates the other recipes, slowly"
  return f"{line}. {emulate}, for a look at their numerics"


def next_line(device: Device) -> str:
  """The jobs that say whether the advice pays, by the options of a first run."""
  first = first_run(device)
  is_fp8 = RECIPES[first.recipe].is_quantized
  sites = ", then --job=sensitivity for the layers that lose" if is_fp8 else ""
  command = f"python launch.py {first.options} --job=memory"
  return f"next: {command} for the bytes of a step{sites} (experiments/guide/pays.md)"


def install_lines(here: Machine, in_clone: bool) -> list[str]:
  """Commands that install what is missing, each with its reason."""
  lines, pip = [], f"{shlex.quote(sys.executable)} -m pip install"
  if here.device.platform == "cpu" and here.driver:
    try:
      package = f"jax[{machine.wheels(here.driver)}]=={here.jax}"
      lines.append(f"{pip} {shlex.quote(package)}  # for the driver {here.driver}")
    except UserError as e:
      lines.append(f"# {e}")
  for extra in dict.fromkeys(map(EXTRAS.__getitem__, here.missing)):
    if extra not in _HOPPER_ONLY or here.device.capability == 90:
      package = f"-e '.[{extra}]'" if in_clone else f"'fp8jax[{extra}]'"
      modules = ", ".join(name for name in here.missing if EXTRAS[name] == extra)
      lines.append(f"{pip} {package}  # {modules}")
  return lines


def show(here: Machine, out: rich.console.Console, in_clone: bool):
  """Prints everything."""
  peak = metrics.peak_flops(here.kind)
  flops = f", {peak / 1e12:.0f} TFLOP/s dense in 16 bits" if peak else ""
  capability = f", {choose.name_of(here.device)}" if here.device.capability else ""
  out.print(f"device: {here.count} x {here.kind}{capability}{flops}")
  out.print(
    f"jax {here.jax} computes on {here.device.platform}; NVIDIA driver {here.driver or 'none'}; "
    f"activations in {choose.compute_dtype(here.device)}"
  )
  if here.device.platform == "cpu" and here.driver:
    asked = f"JAX_PLATFORMS={here.wanted}" if here.wanted else "the CUDA wheels are missing"
    out.print(f"the GPU is not used: {asked}")
  if note := choose.caution(here.device):
    out.print(f"caution: {note}")
  if here.device.capability == 90:
    for note in tile_config.notes():
      out.print(f"kernels: {note}")
  rows = recipes(here.device)
  table = [[r.name, ", ".join(dict.fromkeys(r.backends)) or "refused"] for r in rows]
  out.print(console_lib.table("backends of a linear layer's products", ["recipe", ""], table))
  for reason in dict.fromkeys(row.refusal for row in rows if row.refusal):
    names = ", ".join(row.name for row in rows if row.refusal == reason)
    out.print(f"refused, {names}: {reason}")
  out.print(f"first run: {advice(here.device)}")
  out.print(next_line(here.device))
  lines = install_lines(here, in_clone)
  out.print("to install:" if lines else "all extras are installed")
  for line in lines:
    out.print(f"  {line}")


def run(find: Callable[[], Machine] = this_machine) -> int:
  """Prints the report; returns the exit code."""
  in_clone = (pathlib.Path(__file__).resolve().parents[2] / "pyproject.toml").exists()
  show(find(), console_lib.console(), in_clone)
  return 0
