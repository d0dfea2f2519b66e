"""CPU-seconds of a training step, by recipe and backend, by tokens and by width.

command: python experiments/bench/cpu/steps.py [recipes] [curve WIDTH TOKENS,TOKENSxBATCHES,...]
  [--arms ARM,ARM] [--source DIR]
hardware: any CPU; other work on the machine disturbs caches, and wall time altogether

Arms take turns in one process; a figure is the median of process_time over their turns, with the
faults of memory pages beside it, once with malloc as it is and once with huge pages, as launch.py
runs. `recipes` is 3.4M parameters and 2,048 tokens per step. `curve` is 4 layers; 8192x4 are 8,192
tokens in four microbatches. `--source` measures another checkout. Appends to steps.json beside this
file, with provenance and the machine's load.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
SOURCE = pathlib.Path(os.environ.get("STEPS_SOURCE", HERE.parents[2])).resolve()
sys.path[:0] = [str(SOURCE), str(HERE.parent)]

HUGE = "glibc.malloc.hugetlb=1"
LENGTH, VOCABULARY = 256, 4096
ARMS = (
  "bf16", "block_128", "block_128 dequantized", "block_128 dequantized per_step",
  "block_128_pow2 dequantized",
)  # fmt: skip


class Arm:
  """One way to take a step, on tokens drawn at random.

  Attributes:
    seconds, faults: CPU-seconds and page faults of every step that `run` took.
  """

  def __init__(self, name: str, layers: int, width: int, tokens: int, microbatches: int = 1):
    import numpy as np

    from configs import base
    from fp8jax.config import resolve
    from fp8jax.data import batch_sharding
    from fp8jax.kernels import choose
    from fp8jax.step import train_step

    recipe, *how = name.split()
    c = base.get_config(recipe)
    c.kernels.matmul = how[0] if how else "auto"
    if len(how) > 1:
      c.memory.weight_operands = how[1]
    c.model.num_layers, c.model.hidden_size, c.model.intermediate_size = layers, width, 3 * width
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = width // 64, width // 128, 64
    c.model.vocab_size, c.mesh.fsdp = VOCABULARY, 1
    c.global_batch, c.seq_len, c.steps = tokens // LENGTH, LENGTH, 1000
    c.grad_accum_steps = microbatches
    spec = resolve.resolve(c, 1, choose.current_device())
    rows = c.global_batch // microbatches
    shape = (rows, LENGTH) if microbatches == 1 else (microbatches, rows, LENGTH)
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (2, *shape), np.int32)
    host = {
      "tokens_BL": drawn[0],
      "targets_BL": drawn[1],
      "weights_BL": np.ones(shape, np.float32),
      "positions_BL": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
      "segments_BL": np.ones(shape, np.int32),
    }
    self._batch = batch_sharding.BatchSharder(spec.run.layout, spec.microbatch).place(host)
    self._step, self._sites = train_step.make_step(spec), spec.sites()
    self._state = train_step.make_state(spec)
    self.seconds, self.faults = [], []
    self.run()  # compiles
    self.run()
    self.seconds, self.faults = [], []

  def run(self):
    import jax

    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.process_time()
    self._state, _ = jax.block_until_ready(self._step(self._state, self._batch, self._sites))
    self.seconds.append(time.process_time() - start)
    self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


def measure(names, layers: int, width: int, tokens: int, rounds: int, microbatches: int = 1):
  """{arm: {"cpu_seconds", "ratio", "us_per_token", "page_faults"}}, taking turns."""
  arms = {name: Arm(name, layers, width, tokens, microbatches) for name in names}
  for _ in range(rounds):
    for arm in arms.values():
      arm.run()
  first = statistics.median(arms[names[0]].seconds)
  return {
    name: {
      "cpu_seconds": round(median := statistics.median(arm.seconds), 4),
      "ratio": round(median / first, 3),
      "us_per_token": round(1e6 * median / tokens, 1),
      "page_faults": round(statistics.median(arm.faults)),
      "all_cpu_seconds": [round(s, 4) for s in arm.seconds],
    }
    for name, arm in arms.items()
  }


def main():
  """Runs itself again for every way of malloc, which is settled when a process begins."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("what", nargs="?", default="recipes", choices=("recipes", "curve"))
  parser.add_argument("width", nargs="?", type=int, default=256)
  parser.add_argument("tokens", nargs="?", default="512,2048,3072,8192")
  parser.add_argument("--arms", default="")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--source", default=str(SOURCE))
  asked = parser.parse_args()
  if "STEPS_SOURCE" not in os.environ:
    for tunables in ("", HUGE):
      environment = {**os.environ, "STEPS_SOURCE": asked.source, "GLIBC_TUNABLES": tunables}
      command = [sys.executable, str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
      subprocess.run(command, env=environment, check=True, cwd=asked.source)
    return
  import timing

  path, malloc = HERE / "steps.json", os.environ["GLIBC_TUNABLES"] or "as it is"
  is_curve = asked.what == "curve"
  cases = [(4, asked.width, n) for n in asked.tokens.split(",")] if is_curve else [(3, 256, "2048")]
  names = asked.arms.split(",") if asked.arms else ARMS[:3] if is_curve else ARMS
  for layers, wide, count in cases:
    total, _, microbatches = count.partition("x")
    arms = measure(names, layers, wide, int(total), asked.rounds, int(microbatches or 1))
    results, provenance = timing.read(path), timing.provenance()
    source = f", {asked.arms}" if asked.arms else ""
    source += "" if SOURCE == HERE.parents[2] else f", commit {provenance['commit'][:8]}"
    results[f"{asked.what} {layers}x{wide}, {count} tokens, malloc {malloc}{source}"] = {
      "arms": arms, "load": [round(x, 1) for x in os.getloadavg()], "provenance": provenance,
    }  # fmt: skip
    timing.write(path, results)
    ratios = json.dumps({k: (v["cpu_seconds"], v["ratio"]) for k, v in arms.items()})
    print(layers, wide, count, malloc, ratios, flush=True)


if __name__ == "__main__":
  main()
