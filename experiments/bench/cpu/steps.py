"""CPU-seconds of a training step, by recipe and backend, by tokens and by width.

command: python experiments/bench/cpu/steps.py [recipes] [curve WIDTH TOKENS,TOKENSxBATCHES,...]
hardware: any CPU; other work on the machine disturbs caches, and wall time altogether

Arms take turns in one process; a figure is the median of process_time over their turns, with the
faults of memory pages beside it. `recipes` is 3.4M parameters and 2,048 tokens per step, once with
malloc as it is and once with huge pages, as launch.py runs. `curve` is 4 layers, with huge pages;
8192x4 are 8,192 tokens in four microbatches. Appends to steps.json beside this file, with
provenance and the machine's load.
"""

import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]

HUGE = "glibc.malloc.hugetlb=1"
LENGTH, VOCABULARY = 256, 4096
ARMS = ("bf16", "block_128", "block_128 dequantized", "block_128_pow2 dequantized")


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

    recipe, _, backend = name.partition(" ")
    c = base.get_config(recipe)
    c.kernels.matmul = backend or "auto"
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


def main(what="recipes", width="256", tokens="512,2048,3072,8192", rounds="7"):
  """Runs itself again for every way of malloc, which is settled when a process begins."""
  if "STEPS_BENCH" not in os.environ:
    for tunables in ("", HUGE) if what == "recipes" else (HUGE,):
      environment = {**os.environ, "STEPS_BENCH": "1", "GLIBC_TUNABLES": tunables}
      command = [sys.executable, __file__, what, width, tokens, rounds]
      subprocess.run(command, env=environment, check=True)
    return
  import timing

  path, malloc = HERE / "steps.json", os.environ["GLIBC_TUNABLES"] or "as it is"
  cases = (
    [(3, 256, "2048")] if what == "recipes" else [(4, int(width), n) for n in tokens.split(",")]
  )
  names = ARMS if what == "recipes" else ARMS[:3]
  for layers, wide, count in cases:
    total, _, microbatches = count.partition("x")
    arms = measure(names, layers, wide, int(total), int(rounds), int(microbatches or 1))
    results = timing.read(path)
    results[f"{what} {layers}x{wide}, {count} tokens, malloc {malloc}"] = {
      "arms": arms, "load": [round(x, 1) for x in os.getloadavg()],
      "provenance": timing.provenance(),
    }  # fmt: skip
    timing.write(path, results)
    ratios = json.dumps({k: (v["cpu_seconds"], v["ratio"]) for k, v in arms.items()})
    print(layers, wide, count, malloc, ratios, flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
