"""The harness of the benchmarks: time, provenance, and files of results.

Of those on a GPU, Bench keeps a file that a second call goes on with. Its time is the median of
several rounds, each a number of calls that are waited for together; calls take turns among operands
that together exceed the L2 cache.
"""

import dataclasses
import hashlib
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp

from fp8jax.kernels import choose
from fp8jax.kernels.gemm import tile_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROUNDS, SECONDS = 7, 0.1
L2_BYTES = 128 * 2**20


def seconds(call, count: int) -> list[float]:
  """Of so many calls, one after the other; each is waited for."""
  times = []
  for _ in range(count):
    start = time.perf_counter()
    jax.block_until_ready(call())
    times.append(time.perf_counter() - start)
  return times


def provenance(*more: str, seed: int = 0, num_devices: int | None = None) -> dict:
  """When, of which commit and where results were made, and what else of a run's provenance."""
  from fp8jax.run import provenance as provenance_lib  # needs the extra `train`

  made = provenance_lib.provenance({}, "", seed, num_devices)
  return {k: made[k] for k in ("time", "commit", "dirty", "versions", "devices", "host", *more)}


def read(path: pathlib.Path) -> dict:
  """The results in a file; none where there is no file."""
  return json.loads(path.read_text()) if path.exists() else {}


def write(path: pathlib.Path, results: dict, indent: int = 2):
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(results, indent=indent) + "\n")


@dataclasses.dataclass
class Bench:
  """Results of one device, kept in folder/results/<device>.json after every line.

  What is in the file already, from the same commit, sources, versions, devices and driver, is not
  measured again.
  """

  path: pathlib.Path
  is_dry: bool
  results: dict

  @classmethod
  def open(cls, folder: pathlib.Path, is_dry: bool) -> "Bench":
    """Args: folder of the benchmark; whether it only shows that it runs, and keeps nothing."""
    from fp8jax.run import provenance as provenance_lib

    path = folder / "results" / f"{tile_config.device_name()}.json"
    provenance = provenance_lib.provenance({}, "", 0) | {"sources": sources(folder)}
    results = {"provenance": provenance, "lines": {}}
    if not is_dry and (found := read(path)):
      same = ("commit", "sources", "versions", "devices", "driver")
      if all(found["provenance"].get(k) == provenance.get(k) for k in same):
        results = found
    return cls(path, is_dry, results)

  def line(self, name: str, measure):
    """Measures unless it is there; prints; keeps."""
    lines = self.results["lines"]
    if name not in lines:
      lines[name] = measure()
      if not self.is_dry:
        from fp8jax.run import provenance as provenance_lib

        self.path.parent.mkdir(exist_ok=True)
        provenance_lib.write_json(str(self.path.parent), self.path.name, self.results)
    print(f"{name:44s}", json.dumps(lines[name]), flush=True)
    return lines[name]

  def time(self, function, *sets, in_place: int = 0) -> dict[str, float]:
    """Median milliseconds of function(*operands) and their spread, operands taking turns.

    Args:
      in_place: so many first operands are donated; as many first results take their place.
    """
    options = choose.compiler_options(choose.current_device())  # as steps are compiled
    function = jax.jit(function, donate_argnums=range(in_place), compiler_options=options)
    turns = list(sets)

    def call(i: int):
      results = function(*turns[i])
      if in_place:
        turns[i] = (*results[:in_place], *turns[i][in_place:])
      return results

    jax.block_until_ready([call(i) for i in range(len(turns))])
    start = time.perf_counter()
    jax.block_until_ready(call(0))
    calls = num_calls(self, len(turns), time.perf_counter() - start)
    rounds, last = [], None
    for _ in range(num_rounds(self)):
      start = time.perf_counter()
      for i in range(calls):
        last = call(i % len(turns))  # and no other, or results of all calls would have to fit
      jax.block_until_ready(last)
      rounds.append((time.perf_counter() - start) / calls)
    return {"ms": 1e3 * statistics.median(rounds), "spread_ms": 1e3 * (max(rounds) - min(rounds))}


def sources(folder: pathlib.Path) -> str:
  """Hash of the program: the package, the configurations and the benchmark in `folder`.

  What benchmarks write (results, tuned tiles) is no program.
  """
  root, digest = folder.parents[2], hashlib.sha256()
  files = [folder.parent / "timing.py", *folder.rglob("*.py")]
  files += [path for name in ("fp8jax", "configs") for path in (root / name).rglob("*.py")]
  for path in sorted(files):
    digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
  return digest.hexdigest()[:16]


def num_rounds(bench: Bench) -> int:
  return 1 if bench.is_dry else ROUNDS


def num_calls(bench: Bench, num_sets: int, seconds: float) -> int:
  """Calls per round, of something that takes so many seconds."""
  return 1 if bench.is_dry else max(num_sets, int(SECONDS / max(seconds, 1e-6)))


def sets(make, num_bytes: int):
  """As many different operands, make(key), as exceed the L2 cache."""
  count = min(8, -(-L2_BYTES // num_bytes) + 1)
  return [make(key) for key in jax.random.split(jax.random.key(0), count)]


def normal(key, *shape, dtype=jnp.bfloat16):
  return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def ceilings(bench: Bench) -> tuple[float, float]:
  """(GB/s of a copy, reads and writes counted; TFLOP/s of a BF16 product)."""
  size = 256 if bench.is_dry else 8192

  def copy():
    x = [(normal(jax.random.key(i), 16 * size, size),) for i in range(2)]
    found = bench.time(lambda x: -x, *x)
    return found | {"gb_per_s": 2 * 2 * 16 * size**2 / found["ms"] / 1e6}

  def product():
    x = [(normal(jax.random.key(i), size, size),) * 2 for i in range(2)]
    found = bench.time(jnp.matmul, *x)
    return found | {"tflops": 2 * size**3 / found["ms"] / 1e9}

  rate = bench.line("ceiling/copy", copy)["gb_per_s"]
  return rate, bench.line("ceiling/bf16", product)["tflops"]
