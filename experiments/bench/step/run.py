"""Speed of training steps on the GPU at hand, FP8 beside BF16, proof first, and where time goes.

command: python experiments/bench/step/run.py            resumes where it stopped
         python experiments/bench/step/run.py layer_7b   only the cases named
         python experiments/bench/step/run.py --dry      small models on a CPU: times mean nothing
                                                           there and are not kept
needs:   jax, optax, ml_collections, grain and this package; one GPU of compute capability 8.9 or
         newer

Cases: one layer of InfiR2's 7B at 8k tokens, forward and backward; a step of the 1.5B at 8k tokens;
a step of as many layers of the 7B as fit. Every case in every recipe of RECIPES: our kernels are
tried on the device (kernels/self_test.py), what the compiled program multiplies is held against the
plan, then a layer's results and gradients, or losses and gradient norms of the first steps, against
BF16's, then it is timed, then a few steps are profiled and their time is divided by phase. Writes
results/<device>.json beside this file (timing.py).
"""

import argparse
import collections
import dataclasses
import functools
import glob
import pathlib
import re
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import timing  # noqa: E402

from configs import base  # noqa: E402
from fp8jax import params  # noqa: E402
from fp8jax.compiled import expected_gemms, fp8_gemms  # noqa: E402
from fp8jax.config import resolve  # noqa: E402
from fp8jax.kernels import choose, self_test  # noqa: E402
from fp8jax.models import transformer  # noqa: E402
from fp8jax.step import (  # noqa: E402
  train_spec,
  train_step,  # noqa: E402
)

RECIPES = ("bf16", "tensor_current", "block_128", "block_128_pow2")
STEPS = 8  # timed, of every recipe in every case
# Largest relative difference to BF16: of what the first steps say and, in the norm, of what a layer
# gives. The gradients of q and k have six FP8 products in a row behind them, each at most 0.059
# away (E5M2; bench/kernels/rivals.py), 0.145 in all; a product that is wrong is nearer to 1.
STEP_BUDGET = {"loss": 0.02, "grad_norm": 0.05}
LAYER_BUDGET = 0.15
MEMORY_SHARE = 0.9  # of the device, that a step may need
# What a piece of the program belongs to: the first that its name contains.
PHASES = {
  "gemm fwd": r":fwd", "gemm dgrad": r":dgrad", "gemm wgrad": r":wgrad", "quantize": r"quantize",
  "attention": r"attention", "norm": r"norm", "swiglu": r"swiglu", "rope": r"rope",
  "loss": r"loss", "optimizer": r"optimizer",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
  """A model and how much of it: num_layers None takes all, 0 as many as fit."""

  preset: str
  num_layers: int | None
  tokens: int
  is_layer: bool = False


CASES = {
  "layer_7b": Case("qwen25_7b", 1, 8192, is_layer=True),
  "step_1p5b": Case("qwen25_1p5b", None, 8192),
  "step_7b": Case("qwen25_7b", 0, 8192),
}
DRY = {
  "layer_7b": Case("debug", 1, 256, is_layer=True),
  "step_1p5b": Case("debug", None, 256),
  "step_7b": Case("debug", 0, 256),
}


def make_plan(case: Case, recipe: str, num_layers: int | None = None) -> train_spec.TrainSpec:
  c = base.get_config(recipe)
  c.model.preset, c.model.max_positions = case.preset, 32768
  c.model.num_layers = num_layers or case.num_layers or None
  c.global_batch = c.eval.batch = 1
  c.seq_len, c.memory.loss_chunk = case.tokens, min(1024, case.tokens)
  c.data.cross_document = True  # cudnn's own causal mask and no other
  c.steps, c.optim.warmup_steps, c.optim.decay_steps = 1000, 1, 100
  return resolve.resolve(c, 1, choose.current_device())


# --- what runs -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Program:
  """Something to time: compiled, its operands, and how its results become the next operands."""

  compiled: object
  operands: tuple
  advance: object
  flops: float
  given: object = lambda operands: {}  # keyword arguments of a call

  def __call__(self):
    """Runs it once; returns what a step says of itself, or what a layer gives."""
    out = self.compiled(*self.operands, **self.given(self.operands))
    self.operands, result = self.advance(self.operands, out)
    return result


def step_program(case: Case, recipe: str, num_layers: int | None) -> Program:
  spec = make_plan(case, recipe, num_layers)
  step, compiled, text = _compiled_step(spec)
  fp8_gemms.check(spec, text)
  state = train_step.make_state(spec)
  advance = lambda operands, out: ((out[0], *operands[1:]), out[1])  # noqa: E731
  operands = (state, _batch(spec), spec.sites())
  given = lambda operands: step.given(operands[0])  # noqa: E731
  return Program(compiled, operands, advance, _flops(spec, with_head=True), given)


def _batch(spec: train_spec.TrainSpec):
  """Random tokens, the same for every recipe."""
  shape, vocabulary = (1, spec.data.seq_len), spec.model.vocab_size
  tokens = np.random.default_rng(0).integers(0, vocabulary, (1, shape[1] + 1), np.int32)
  return {
    "tokens_BL": jnp.asarray(tokens[:, :-1]),
    "targets_BL": jnp.asarray(tokens[:, 1:]),
    "weights_BL": jnp.ones(shape, jnp.float32),
    "positions_BL": jnp.arange(shape[1], dtype=jnp.int32)[None],
  }


def _compiled_step(spec: train_spec.TrainSpec):
  """(the step, its executable, the text that proof reads)."""
  step = train_step.make_step(spec)
  lowered = step.lower(train_step.abstract_state(spec), _batch(spec), spec.sites())
  compiled = lowered.compile()
  return step, compiled, _text(spec, lowered, compiled)


def _text(spec: train_spec.TrainSpec, lowered, compiled) -> str:
  """What proof reads."""
  on_cpu = spec.device.platform == "cpu"
  return lowered.as_text("hlo", debug_info=True) if on_cpu else compiled.as_text()


def layer_program(case: Case, recipe: str) -> Program:
  """Forward and backward of one layer: gradients of its input and of its weights."""
  spec = make_plan(case, recipe)
  # Weights that neither shrink nor grow what they multiply: with the model's own, the layer adds a
  # fiftieth of its input, and BF16's rounding of that sum hides what FP8 does.
  std = spec.model.hidden_size**-0.5
  model, run = dataclasses.replace(spec.model, num_layers=1, init_std=std), spec.run
  declaration = transformer.layer_params(model)
  weights = params.init(jax.random.key(0), declaration, model.dims)
  sites = jax.tree.map(lambda t: t[0], spec.sites()["layers"][0])
  x, g = (timing.normal(k, 1, case.tokens, model.hidden_size, dtype=run.dtype)
          for k in jax.random.split(jax.random.key(1)))  # fmt: skip

  def forward_and_backward(weights, x, g, sites):
    positions = jnp.arange(case.tokens, dtype=jnp.int32)[None]
    batch = {"tokens_BL": positions, "positions_BL": positions}
    context = transformer.layer_context(batch, model, run)

    def layer(weights, x):
      return transformer.layer(x, (weights, sites), context, model, run)[0]

    y, pull = jax.vjp(layer, weights, x)
    return y, pull(g)

  options = choose.compiler_options(spec.device)
  function = jax.jit(forward_and_backward, compiler_options=options)
  lowered = function.lower(weights, x, g, sites)
  compiled = lowered.compile()
  fp8_gemms.check(spec, _text(spec, lowered, compiled))
  advance = lambda operands, out: (operands, out)  # noqa: E731
  return Program(compiled, (weights, x, g, sites), advance, _flops(spec, with_head=False))


def _flops(spec: train_spec.TrainSpec, with_head: bool) -> float:
  """Of a step, by the algorithm: three products per weight, attention's causal half, no more."""
  m, tokens = spec.model, spec.data.seq_len
  heads = 2 * m.hidden_size * m.head_dim * (m.num_heads + m.num_kv_heads)
  weights = m.num_layers * (heads + 3 * m.hidden_size * m.intermediate_size)
  weights += with_head * m.hidden_size * m.vocab_size
  attention = m.num_layers * 2 * tokens**2 / 2 * m.num_heads * m.head_dim
  return 6.0 * weights * tokens + 6.0 * attention


def layers_that_fit(case: Case, is_dry: bool) -> dict[str, int]:
  """The largest number of layers at which the step of every recipe fits the device."""
  if is_dry:
    return {"num_layers": 2}
  limit = MEMORY_SHARE * jax.devices()[0].memory_stats()["bytes_limit"]
  fit = []
  for recipe in RECIPES:
    need = []
    for n in (2, 4):
      m = _compiled_step(make_plan(case, recipe, n))[1].memory_analysis()
      need.append(m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes
                  - m.alias_size_in_bytes)  # fmt: skip
    per_layer = (need[1] - need[0]) / 2
    fit.append(int((limit - need[0]) / per_layer) + 2)
  return {"num_layers": min(*fit, 28)}


# --- measuring -----------------------------------------------------------------------------------


def layer_errors(case: Case, program: Program) -> dict[str, float]:
  """Distances to BF16 of what a layer adds to its input, to its gradient, and of each weight's.

  Raises:
    ValueError: one is further away than FP8 explains.
  """
  got, want = layer_results(program), layer_results(layer_program(case, "bf16"))
  norm = lambda x: float(jnp.linalg.norm(x.astype(jnp.float32)))  # noqa: E731
  errors = {k: norm(got[k].astype(jnp.float32) - x) / norm(x) for k, x in want.items()}
  if wrong := {k: e for k, e in errors.items() if not e <= LAYER_BUDGET}:  # not a number is wrong
    raise ValueError(f"{wrong} away from BF16 in the norm: a wrong answer is not timed")
  return errors


def layer_results(program: Program) -> dict[str, jax.Array]:
  """Name -> array; input and residual gradient, which every recipe hands on, are taken out."""
  _, x, g, _ = program.operands
  y, (weights, dx) = program()
  return {"y": y - x, "dx": dx - g, **params.flatten(weights)}


def first_steps(program: Program, of_bf16: dict[str, list[float]]) -> dict[str, list[float]]:
  """Losses and gradient norms of three steps.

  Args:
    of_bf16: the same of BF16; nothing if this is it.

  Raises:
    ValueError: they are not BF16's.
  """
  said = [program() for _ in range(3)]
  found = {k: [float(values[k]) for values in said] for k in STEP_BUDGET}
  for k, theirs in of_bf16.items():
    if not all(abs(x - y) <= STEP_BUDGET[k] * abs(y) for x, y in zip(found[k], theirs)):
      raise ValueError(f"{k} {found[k]} is not BF16's {theirs}: a wrong answer is not timed")
  return found


def measure_recipe(case, recipe, num_layers, of_bf16, peak: float, is_dry: bool):
  """What its answers are like, time of steps, time by phase."""
  self_test.products(expected_gemms.uses(make_plan(case, recipe, num_layers)))
  if case.is_layer:
    program = layer_program(case, recipe)
    checked = {"errors": layer_errors(case, program) if recipe != "bf16" else {}}
  else:
    program = step_program(case, recipe, num_layers)
    checked = first_steps(program, of_bf16)
  times = timing.seconds(program, 1 if is_dry else STEPS)
  ms = 1e3 * float(np.median(times))
  tflops = program.flops / ms / 1e9
  return {
    **checked, "ms": ms, "spread_ms": 1e3 * (max(times) - min(times)), "tflops": tflops,
    "share_of_bf16_ceiling": tflops / peak, "phases_ms": phases(program),
  }  # fmt: skip


def phases(program: Program, steps: int = 3) -> dict[str, float]:
  """Milliseconds per step by phase, as a profile has them; "unnamed" is what it does not place."""
  names = _names(program.compiled.as_text())
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _ in range(steps):
        jax.block_until_ready(program())
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    data = jax.profiler.ProfileData.from_file(path)
  found = collections.Counter()
  for plane in data.planes:
    for line in plane.lines:
      if "GPU" in plane.name and "Stream" not in line.name:
        continue  # sums of what the streams show
      for event in line.events:
        op = next((value for name, value in event.stats if name == "hlo_op"), None)
        if op and not op.startswith(("while", "call", "conditional")):  # what is in them counts
          found[_phase(names.get(op, ""))] += event.duration_ns / 1e6 / steps
  return {name: round(ms, 3) for name, ms in found.most_common()}


def _names(text: str) -> dict[str, str]:
  """Instruction -> where in the model it comes from."""
  found = re.finditer(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"', text, re.MULTILINE)
  return {match[1]: match[2] for match in found}


def _phase(name: str) -> str:
  if not name:
    return "unnamed"
  return next((phase for phase, pattern in PHASES.items() if re.search(pattern, name)), "rest")


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
  parser.add_argument("--dry", action="store_true", help="small models, on a CPU")
  flags = parser.parse_args()
  device = choose.current_device()
  if not flags.dry and (device.platform != "gpu" or device.capability < 89):
    kind = jax.devices()[0].device_kind
    sys.exit(f"needs a GPU with FP8; this is {kind}. --dry shows the program on a CPU")
  bench = timing.Bench.open(HERE, flags.dry)
  _, peak = timing.ceilings(bench)
  for name, case in (DRY if flags.dry else CASES).items():
    if flags.cases and name not in flags.cases:
      continue
    run_case(bench, name, case, peak)


def run_case(bench: timing.Bench, name: str, case: Case, peak: float):
  """A line per recipe, and how they compare."""
  num_layers = case.num_layers
  if num_layers == 0:
    fit = functools.partial(layers_that_fit, case, bench.is_dry)
    num_layers = bench.line(f"{name}/layers", fit)["num_layers"]
  bf16 = None
  for recipe in RECIPES:
    measure = functools.partial(
      measure_recipe, case, recipe, num_layers,
      {k: bf16[k] for k in STEP_BUDGET if k in bf16} if bf16 else {}, peak, bench.is_dry,
    )  # fmt: skip
    found = bench.line(f"{name}/{recipe}", measure)
    bf16 = bf16 or found
    print(f"{name + '/' + recipe:44s} {bf16['ms'] / found['ms']:.2f} x BF16, "
          f"{found['share_of_bf16_ceiling']:.0%} of the BF16 ceiling")  # fmt: skip


if __name__ == "__main__":
  main()
