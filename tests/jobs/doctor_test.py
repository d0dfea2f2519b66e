"""--job=doctor on GPUs that are not here: recipes, advice and install lines."""

import io
import shlex

import pytest
import rich.console
from harness import text_config

from fp8jax.config import resolve
from fp8jax.jobs import doctor
from fp8jax.kernels.device import Device
from fp8jax.kernels.gemm import tile_config

TENSOR = {
  "tensor_current", "tensor_current_e5m2", "tensor_delayed", "tensor_delayed_latest", "e4m3_static",
  "fp8lm",
}  # fmt: skip
ROWS = {"rowwise", "rowwise_gw_hp"}
BLOCKS = {"block_128", "block_128_pow2", "block_128_hybrid"}
# capability of a GPU: recipes that run there beside bf16 (README, "What runs where"), and advice.
GPUS = {
  "Tesla T4": (75, set(), "--config=FILE:bf16 --config.optim.moment_format=coat"),
  "NVIDIA A100-SXM4-40GB": (80, set(), "--config=FILE:bf16 --config.optim.moment_format=coat"),
  "NVIDIA L4": (89, TENSOR | ROWS, "--config=FILE:bf16 --config.optim.moment_format=coat"),
  "NVIDIA H100 80GB HBM3": (90, TENSOR | ROWS | BLOCKS, "--config=FILE:block_128"),
  "NVIDIA B200": (100, TENSOR | ROWS, "--config=FILE:tensor_current"),
  "NVIDIA RTX PRO 6000 Blackwell": (
    120, TENSOR | ROWS, "--config=FILE:bf16 --config.optim.moment_format=coat",
  ),  # G4
}  # fmt: skip
CAUTIONED = (89, 120)  # experiments/guide/gpu.md: FP8 products are accepted and not advised


def _report(machine, in_clone=True):
  out = io.StringIO()
  doctor.show(machine, rich.console.Console(file=out, width=2000, markup=False), in_clone)
  return out.getvalue()


@pytest.mark.parametrize("kind", GPUS)
def test_report_on_a_gpu_names_what_runs_and_why_not(kind):
  capability, runs, advice = GPUS[kind]
  rows = {r.name: r for r in doctor.recipes(Device("gpu", capability))}
  assert {name for name, row in rows.items() if row.backends} == runs | {"bf16"}
  assert not any("reference" in row.backends for row in rows.values())
  found = doctor.Machine(Device("gpu", capability), kind, 1, "580.65.06", "0.12.0")
  text = _report(found)
  assert f"1 x {kind}, sm_{capability}" in text and advice in text and "all extras" in text
  for name, row in rows.items():
    if not row.backends:
      assert len(row.refusal) > 20 and row.refusal in text and name in text
  (line,) = [line for line in text.splitlines() if line.startswith("next: ")]
  assert f"python launch.py {advice}" in line and "--job=memory" in line
  is_advised = bool(runs) and capability not in CAUTIONED
  assert ("--job=sensitivity" in line) == is_advised  # BF16 has no sites to measure
  assert (f"caution: sm_{capability}" in text) == (capability in CAUTIONED)
  assert ("FILE:tensor_current multiplies in FP8 all the same" in text) == (capability in CAUTIONED)
  device, opted = Device("gpu", capability), doctor.first_run(Device("gpu", capability), True)
  assert (opted != doctor.first_run(device)) == (capability in CAUTIONED)
  assert ("float16" in text.split("first run")[1]) == (capability == 75)
  says = capability == 90 and not tile_config.has_register_pools()
  assert ("kernels: jax" in text) == says
  assert ("kernels: tiles by a model" in text) == (capability == 90)


@pytest.mark.parametrize("kind", GPUS)
def test_advised_options_resolve_on_the_gpu(kind):
  """The resolver, which refuses what a run would refuse, is the oracle."""
  device = Device("gpu", GPUS[kind][0])
  words = doctor.advice(device).replace(";", " ").split(". ")[0].split()
  recipe = next(w for w in words if w.startswith("--config=FILE:")).partition(":")[2]
  options = dict(w.removeprefix("--config.").split("=") for w in words if w.startswith("--config."))
  options = {k: v.rstrip(")") for k, v in options.items()}
  sizes = {"model.hidden_size": 256, "model.intermediate_size": 512}
  c = text_config(recipe, **sizes, **options)
  spec = resolve.resolve(c, 1, device)
  assert "reference" not in {b for row in spec.sites().values() for b in _backends(row)}


def _backends(node):
  if isinstance(node, dict):
    return [b for inner in node.values() for b in _backends(inner)]
  return list(getattr(node, "backends", ()))


def test_missing_wheels_and_extras_come_with_their_commands():
  machine = doctor.Machine(
    Device("cpu"), "cpu", 1, "530.30.02", "0.12.0", ("optuna", "pyarrow", "tokamax")
  )
  text = _report(machine)
  lines = [shlex.split(x, comments=True) for x in text.split("to install:")[1].splitlines() if x]
  assert [words[-1] for words in lines] == ["jax[cuda12]==0.12.0", ".[sweep]", ".[data]"]
  assert all(words[1:4] == ["-m", "pip", "install"] for words in lines)
  assert "'fp8jax[data]'" in _report(machine, in_clone=False)
  assert "the GPU is not used" in text and "emulated" in text
