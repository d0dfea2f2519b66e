"""What the host does beside the steps, against what the machine could do at most.

command: export GLIBC_TUNABLES=glibc.malloc.hugetlb=1 JAX_PLATFORMS=cpu
         python experiments/bench/cpu/host.py LABEL [ROW ...]
         python experiments/bench/cpu/host.py        the table of host.json
         ... --source DIR: of the package in another checkout, "before" say
needs:   assets/smollm2-135m (make run fetches it), assets/corpora; 8 GB of memory, 8 GB of disk

LABEL names a column of host.json. Medians of ROUNDS, with the CPU-seconds of the process. A limit
is measured in the same call: a copy in memory, a file written to disk and read from the page cache,
a product of matrices. State is random: optimizers' moments of a first step are zeros, which any
compression loves.
"""

import argparse
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
MODEL, ROUNDS, TOKENS = "assets/smollm2-135m", 3, 2 * 1024 * 4096
SMALL = ("bf16", "block_128_pow2", "quartet")  # recipes
STARTS = {
  "--help": (["--help"], 0),
  "--job=doctor": (["--job=doctor"], 0),
  "an unknown key": (["--config=configs/debug.py", "--config.optim.peaklr=1"], 1),
}


def timed(call, rounds: int = ROUNDS) -> dict:
  """{"seconds", "cpu"}: medians of calls."""
  took = []
  for _ in range(rounds):
    began, cpu = time.perf_counter(), time.process_time()
    call()
    took.append((time.perf_counter() - began, time.process_time() - cpu))
  seconds, cpu = map(statistics.median, zip(*took, strict=True))
  return {"seconds": round(seconds, 3), "cpu": round(cpu, 3)}


def limits() -> dict:
  """Bytes per second of memory and disk, floating-point operations per second of a product."""
  import jax
  import numpy as np

  of, into = np.ones(2**28, np.uint8), np.zeros(2**28, np.uint8)
  found = {"copy": 2 * of.nbytes / timed(lambda: np.copyto(into, of))["seconds"]}
  with tempfile.TemporaryDirectory(dir=".") as folder:
    path = pathlib.Path(folder, "x")

    def write():
      with path.open("wb") as f:
        for _ in range(4):
          f.write(of)
        os.fsync(f.fileno())

    def read():
      with path.open("rb", buffering=0) as f:
        while f.readinto(into[: 2**24]):
          pass

    found |= {"write": 4 * of.nbytes / timed(write)["seconds"],
              "read": 4 * of.nbytes / timed(read)["seconds"]}  # fmt: skip
  x, product = np.ones((2048, 2048), np.float32), jax.jit(lambda x: x @ x)
  product(x).block_until_ready()
  found["product"] = 2 * 2048**3 / timed(lambda: product(x).block_until_ready())["seconds"]
  return {k: float(f"{v:.3g}") for k, v in found.items()}


def _config():
  from configs import smollm2_cpt

  c = smollm2_cpt.get_config("bf16")
  c.eval.precisions, c.eval.tokens = ("recipe",), 8192
  return c


def _spec(c=None):
  from fp8jax.config import resolve
  from fp8jax.kernels import choose

  return resolve.resolve(c or _config(), 1, choose.current_device())


def _state(spec):
  """As after some steps: numbers, no zeros."""
  import jax
  import numpy as np

  from fp8jax.step import train_step

  rng = np.random.default_rng(0)

  def noise(x):
    if x.dtype != np.float32 or x.ndim == 0:
      return x
    return jax.device_put(rng.standard_normal(x.shape, np.float32) * np.float32(1e-3), x.sharding)

  return jax.tree.map(noise, train_step.make_state(spec))


def _size(folder) -> int:
  return sum(p.stat().st_size for p in pathlib.Path(folder).rglob("*") if p.is_file())


def checkpoint() -> dict:
  """A whole state: from the call to the last byte in the page cache, and back."""
  import jax

  from fp8jax.data import batch_sharding
  from fp8jax.run import checkpoint as checkpoint_lib
  from fp8jax.step import train_step

  spec = _spec()
  state = _state(spec)
  moved = sum(x.nbytes for x in jax.tree.leaves(state))
  data = batch_sharding.TrainBatches(
    spec.data, spec.run.layout, spec.microbatch, spec.grad_accum_steps
  )
  next(data.iterator)
  with tempfile.TemporaryDirectory(dir=".") as folder:
    saved, steps = checkpoint_lib.Checkpoints(folder, keep=1), iter(range(1, 9))

    def save():
      saved.save(next(steps), state, data.iterator, {"config": {}})
      saved.wait()

    save()
    save_row = timed(save) | {"bytes": moved, "limit": "write"}
    (last,) = saved.steps()
    save_row["on_disk"] = _size(pathlib.Path(folder, "checkpoints", str(last)))
    abstract = train_step.abstract_state(spec, last)
    restore_row = timed(lambda: jax.block_until_ready(saved.restore(last, abstract).params))
    saved.close()
  data.iterator.close()
  return {"save a checkpoint": save_row,
          "restore it": restore_row | {"bytes": 2 * moved, "limit": "copy"}}  # fmt: skip


def folders() -> dict:
  """SmolLM2's folder in BF16, read into float32 and written again."""
  import jax

  from fp8jax.export import write
  from fp8jax.models.hf import weights

  spec, made = _spec(), []

  def read():
    made[:] = [weights.load_params(MODEL, spec.model, spec.run.layout)[0]]
    jax.block_until_ready(made[0])

  read()
  moved = _size(MODEL) + sum(x.nbytes for x in jax.tree.leaves(made[0]))
  with tempfile.TemporaryDirectory(dir=".") as folder:

    def save():
      shutil.rmtree(folder)
      write.save(folder, write.model(made[0], spec.model, "bfloat16"))

    return {
      "import a folder": timed(read) | {"bytes": moved, "limit": "copy"},
      "write a folder": timed(save) | {"bytes": moved, "limit": "copy"},
    }


def loader() -> dict:
  """Two blocks of windows: read, tokenized, packed, shuffled; and tokenized before."""
  from configs import base
  from fp8jax.jobs import dispatch

  with tempfile.TemporaryDirectory() as folder:
    c = _config()
    c.global_batch, c.seq_len = 8, 4096
    rows = {"load text": timed(_take(c), rounds=1) | {"tokens": TOKENS}}
    dispatch.call("prepare", c, base.get_config(), folder, out=f"{folder}/out")
    c.data.sources = {"main": base.source("prepared", f"{folder}/out/main")}
    rows["load prepared tokens"] = timed(_take(c), rounds=1) | {"tokens": TOKENS}
  return rows


def _take(c):
  from fp8jax.data import loader as loader_lib

  spec = _spec(c)

  def call():
    iterator, read = loader_lib.train_batches(spec.data, spec.global_batch), 0
    while read < TOKENS:
      batch = next(iterator)
      read += batch["tokens_BL"].size
    iterator.close()

  return call


def evaluation() -> dict:
  """Held-out loss in float32: products of weights and of the head alone are counted."""
  from fp8jax.models.hf import weights
  from fp8jax.run import evaluator

  spec = _spec()
  params, _ = weights.load_params(MODEL, spec.model, spec.run.layout)
  evaluate, results = evaluator.Evaluator(spec), []

  def run():
    results[:] = [evaluate.run(params, {})]

  run()
  row = timed(run)
  tokens = sum(v["tokens"] for of in results[0].values() for v in of.values())
  return {"evaluate": row | {"tokens": tokens, "operations": 2 * 134.5e6 * tokens,
                             "limit": "product"}}  # fmt: skip


def starts(source: pathlib.Path) -> dict:
  """From the command to its end, or to a run's first step; the second call finds compiled ones."""
  python, rows = [sys.executable, str(source / "launch.py")], {}

  def call(arguments, code):
    done = subprocess.run([*python, *arguments], capture_output=True, text=True, cwd=source)
    if done.returncode != code:
      raise SystemExit(f"{arguments} ended with {done.returncode}: {done.stderr[-500:]}")

  for name, of in STARTS.items():
    rows[name] = {"seconds": timed(lambda of=of: call(*of))["seconds"]}
  with tempfile.TemporaryDirectory() as workdir:
    arguments = [*python, "--config=configs/smollm2_cpt.py", f"--workdir={workdir}"]
    began = time.perf_counter()
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             cwd=source, text=True)  # fmt: skip
    while not (path := pathlib.Path(workdir, "metrics.jsonl")).exists() or not path.read_text():
      if child.poll() is not None:
        raise SystemExit(f"make run ended: {child.stdout.read()[-500:] if child.stdout else ''}")
      time.sleep(0.1)
    rows["make run, to its first line"] = {"seconds": round(time.perf_counter() - began, 1)}
    child.terminate()
    child.communicate()
  return rows


def small_runs(source: pathlib.Path) -> dict:
  """CPU-seconds of two steps of the lab's smallest model: programs new, and in the cache."""
  rows, runs = {}, {"first": (), "again": (), "another seed": ("seed=1",),
                    "another rate": ("optim.peak_lr=1e-3",)}  # fmt: skip
  for recipe in SMALL:
    with tempfile.TemporaryDirectory() as folder:
      for number, (name, changes) in enumerate(runs.items()):
        keys = ("steps=2", "optim.warmup_steps=1", "optim.decay_steps=1", "eval.tokens=0", *changes)
        arguments = [
          f"--config=configs/pretrain_tiny.py:0p8m-python_docs-{recipe}",
          f"--workdir={folder}/{number}",
          *(f"--config.{key}" for key in keys),
        ]
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, str(source / "launch.py"), *arguments], env=env,
                              cwd=source, capture_output=True, text=True)  # fmt: skip
        if done.returncode:
          raise SystemExit(f"{arguments} ended with {done.returncode}: {done.stderr[-500:]}")
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows[f"{recipe}: {name}"] = {"seconds": round(seconds, 1), "cpu": round(cpu, 1)}
  return rows


ROWS = {"checkpoint": checkpoint, "folders": folders, "loader": loader, "evaluation": evaluation}
STARTING = {"starts": starts, "small_runs": small_runs}


def table(results: dict) -> str:
  """Seconds of every column, and the share of the limit in the last one."""
  names = [*results]
  rows = dict.fromkeys(name for of in results.values() for name in of["rows"])
  lines = [f"| | {' | '.join(f'{n}, s (CPU-s)' for n in names)} | limit, s |",
           "|---" * (len(names) + 2) + "|"]  # fmt: skip
  for row in rows:
    cells, limits = [], []
    for of in results.values():
      one = of["rows"].get(row)
      cells.append(f"{one['seconds']} ({one['cpu']})" if one and "cpu" in one
                   else str(one["seconds"]) if one else "")  # fmt: skip
      if one and "limit" in one:
        least = one.get("bytes", one.get("operations")) / of["limits"][one["limit"]]
        limits.append(f"{least:.2f} by {one['limit']}")
    lines.append(f"| {row} | {' | '.join(cells)} | {', '.join(limits)} |")
  return "\n".join(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("label", nargs="?", default="")
  parser.add_argument("rows", nargs="*", metavar="ROW")
  parser.add_argument("--source", type=lambda p: pathlib.Path(p).resolve(),
                      default=HERE.parents[2])  # fmt: skip
  asked = parser.parse_args()
  sys.path[:0] = [str(asked.source), str(HERE.parent)]
  os.chdir(asked.source)
  import timing

  import fp8jax

  assert pathlib.Path(fp8jax.__file__).is_relative_to(asked.source), fp8jax.__file__
  path = HERE / "host.json"
  results = timing.read(path)
  if asked.label:
    of = results.setdefault(asked.label, {"rows": {}})
    of["limits"] = limits()
    for name in asked.rows or [*ROWS, *STARTING]:
      print(f"{name} ...", flush=True)
      found = STARTING[name](asked.source) if name in STARTING else ROWS[name]()
      of["rows"] |= found
      print(json.dumps(found, indent=2))
    of["provenance"] = timing.provenance()
    timing.write(path, results)
  print(table(results))


if __name__ == "__main__":
  main()
