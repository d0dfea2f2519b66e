"""Phases of training by precision: forward, backward, optimizer, data wait, decoding, energy.

command: python experiments/bench/phases/run.py [--config=configs/debug.py] [--steps=8]
         [--arms=fp32,fp16,bf16,block_128]
needs:   any device; energy needs a GPU and `pip install nvidia-ml-py`

Arms: fp32, fp16 (with a dynamic loss scale) and bf16 are unquantized with that compute dtype; every
other name is a recipe. The backward pass is the program of the gradients less that of the forward
pass, the optimizer is the step less the gradients. Data wait is measured with the device busy, as
in training. Allocation is that of the compiled step: arguments and temporaries. Decoding: 8
sequences at once. Energy is NVML's counter over the timed steps. Writes results/<device>.json
beside this file.
"""

import argparse
import functools
import importlib.util
import json
import pathlib
import re
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]

import jax  # noqa: E402
import numpy as np  # noqa: E402
import timing  # noqa: E402

from fp8jax.config import resolve  # noqa: E402
from fp8jax.data import batch_sharding, loader, tokenize  # noqa: E402
from fp8jax.generation import api  # noqa: E402
from fp8jax.generation.settings import Sampling  # noqa: E402
from fp8jax.jobs import doctor  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models import transformer  # noqa: E402
from fp8jax.step import train_step  # noqa: E402

WIDE = {
  "fp32": {"precision.compute_dtype": "float32"},
  "fp16": {"precision.compute_dtype": "float16", "loss_scale.kind": "dynamic"},
  "bf16": {"precision.compute_dtype": "bfloat16"},
}
DECODED, SLOTS = 32, 8


def plan_of(path: str, arm: str):
  """The configuration in a precision, resolved."""
  spec = importlib.util.spec_from_file_location("benched", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  c = module.get_config("bf16" if arm in WIDE else arm)
  c.update_from_flattened_dict(WIDE.get(arm, {}))
  return resolve.resolve(c, 1, choose.current_device())


class Energy:
  """Joules of GPU 0 since the last call; None without NVML."""

  def __init__(self):
    self._read = None
    if choose.current_device().platform == "gpu" and importlib.util.find_spec("pynvml"):
      import pynvml

      pynvml.nvmlInit()
      handle = pynvml.nvmlDeviceGetHandleByIndex(0)
      self._read = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
      self._before = self._read()

  def joules(self) -> float | None:
    if self._read is None:
      return None
    now = self._read()
    used, self._before = now - self._before, now
    return used


def measure(path: str, arm: str, steps: int) -> dict:
  """Figures of one arm."""
  spec = plan_of(path, arm)
  spread = batch_sharding.BatchSharder(spec.run.layout, spec.microbatch, spec.grad_accum_steps)
  stream = loader.train_batches(spec.data, spread.local_batch, spread.shard)
  batch = spread.place(next(stream))
  state = train_step.calibrate(spec, train_step.make_state(spec), batch, 0)
  start = time.perf_counter()
  step = train_step.make_step(spec)
  sizes = step.lower(state, batch, spec.sites()).compile().memory_analysis()
  compiled = time.perf_counter() - start
  state, values = jax.block_until_ready(step(state, batch, spec.sites()))
  energy, times, waits = Energy(), [], []
  energy.joules()
  for _ in range(steps):
    start = time.perf_counter()
    state, values = step(state, batch, spec.sites())
    asked = time.perf_counter()
    host = next(stream)
    waits.append(time.perf_counter() - asked)
    jax.block_until_ready(values)
    times.append(time.perf_counter() - start)
    batch = spread.place(host)
  used = energy.joules()
  stream.close()
  seconds = float(np.median(times))
  forward, gradients = passes(spec, state, batch, steps)
  return {
    "compile_s": round(compiled, 2),
    "step_s": round(seconds, 4),
    "forward_s": round(forward, 4),
    "backward_s": round(gradients - forward, 4),
    "optimizer_s": round(seconds - gradients, 4),
    "all_step_s": [round(t, 4) for t in times],
    "tokens_per_s": round(spec.tokens_per_step / seconds),
    "data_wait_s": round(float(np.median(waits)), 5),
    "arguments_mib": round(sizes.argument_size_in_bytes / 2**20, 1),
    "temporaries_mib": round(sizes.temp_size_in_bytes / 2**20, 1),
    "joules_per_step": None if used is None else round(used / steps, 2),
    "loss": float(values["loss"]),
    "decode": decode(spec, state.params, state.scaling_states),
  }


def passes(spec, state, batch, steps: int) -> tuple[float, float]:
  """Median seconds of the forward pass, and of forward and backward pass."""
  scale, sites = state.loss_scale.get("scale"), spec.sites()

  def forward(params, sites, batch, scale):
    del scale
    return transformer.loss_and_aux(params, sites, batch, spec.model, spec.run)[0]

  def gradients(params, sites, batch, scale):
    return train_step.gradients(spec, params, sites, batch, scale)[:2]

  found, options = [], choose.compiler_options(spec.device)
  for function in (forward, gradients):
    program = jax.jit(function, compiler_options=options)
    jax.block_until_ready(program(state.params, sites, batch, scale))
    run = functools.partial(program, state.params, sites, batch, scale)
    found.append(float(np.median(timing.seconds(run, steps))))
  return found[0], found[1]


def decode(spec, params, states) -> dict | None:
  """Tokens per second of decoding, without the compilation; None for delayed or static scales."""
  if states:
    return None
  tokenizer = tokenize.Tokenizer("bytes")
  made = api.Generator(
    params, spec.sites(), spec.model, spec.run, tokenizer, (), slots=SLOTS, max_length=64
  )
  prompts = [tokenizer.encode_prompt("The import statement")] * SLOTS
  sampling = Sampling(max_new_tokens=DECODED)
  made.generate(prompts, sampling)
  start = time.perf_counter()
  found = made.generate(prompts, sampling)
  count = sum(len(c.tokens) for row in found for c in row)
  return {"tokens": count, "tokens_per_s": round(count / (time.perf_counter() - start), 1)}


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--config", default="configs/debug.py")
  parser.add_argument("--steps", type=int, default=8)
  first = doctor.first_run(choose.current_device(), untried=True).recipe
  parser.add_argument("--arms", default=",".join(dict.fromkeys((*WIDE, first))))
  given = parser.parse_args()
  kind = jax.devices()[0].device_kind
  path = HERE / "results" / f"{re.sub(r'[^A-Za-z0-9]+', '_', kind).lower()}.json"
  results = {"config": given.config, "provenance": timing.provenance(num_devices=1), "arms": {}}
  for arm in given.arms.split(","):
    results["arms"][arm] = measure(given.config, arm, given.steps)
    print(arm, json.dumps(results["arms"][arm]), flush=True)
    timing.write(path, results)


if __name__ == "__main__":
  main()
