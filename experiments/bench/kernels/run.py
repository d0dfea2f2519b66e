"""Speed of the FP8 kernels on the GPU at hand, beside BF16, XLA's FP8 and every rival found.

command: python experiments/bench/kernels/run.py            checks, then times; resumes
         python experiments/bench/kernels/run.py --tune     also tries tiles for every shape
         python experiments/bench/kernels/run.py --dry      the same on a CPU, in little: times
                                                              mean nothing there and are not kept
needs:   jax, optax and this package; a Hopper GPU. Rivals: whatever of transformer_engine, torch
         and torchao can be imported (rivals.py); the others are listed with the reason

Writes results/<device>.json beside this file, with provenance, after every line (timing.py), and
tuned tiles to fp8jax/kernels/gemm/tuned/<device>.json. Ceilings come first: a large copy, a large
BF16 product. Every result is held against the float32 one before it is timed.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]
if "--dry" in sys.argv:  # interpreted kernels take a thread each, and each device brings one
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import fused  # noqa: E402
import isolation  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optimizer  # noqa: E402
import rivals  # noqa: E402
import rivals_te  # noqa: E402
import rivals_torch  # noqa: E402
import timing  # noqa: E402
from rivals import BLOCK  # noqa: E402

from fp8jax.kernels import (  # noqa: E402
  self_test,
)
from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib  # noqa: E402
from fp8jax.kernels.gemm import tile_config  # noqa: E402
from fp8jax.kernels.quantize import mosaic_sm90 as quantizer  # noqa: E402

OWN = ("bf16", "tensor_xla", "tensor_ours", "block_ours")
# (tokens, in, out): Transformer Engine's 5B set (its docs/examples/gemm_profiling), InfiR2's 7B
# (arXiv:2509.22536), DeepGEMM's README.
LAYERS = {
  "te_5b_qkv": (15872, 4096, 12288), "te_5b_proj": (15872, 4096, 4096),
  "te_5b_fc1": (15872, 4096, 16384), "te_5b_fc2": (15872, 16384, 4096),
  "infir2_7b_gate_up": (8192, 3584, 37888), "infir2_7b_down": (8192, 18944, 3584),
  "deepgemm_7168x16384": (4096, 16384, 7168), "deepgemm_4096x7168": (4096, 7168, 4096),
}  # fmt: skip
# Where FP8 begins to pay: layers alone.
SMALL = {
  f"{tokens}x{inner}x{outer}": (tokens, inner, outer)
  for tokens in (1024, 4096, 16384)
  for inner, outer in ((512, 512), (1024, 1024), (2048, 512), (2048, 2048), (4096, 4096))
}  # fmt: skip
DRY = {"dry": (256, 256, 384)}
PASSES = ("fwd", "dgrad", "wgrad")


def race(bench: timing.Bench, prefix: str, calls, sets, want, flops: float, num_bytes, ceilings):
  """{rival: milliseconds} of those whose result is right; BF16, the first, and ours must be.

  Args:
    calls: (rival, Call) of each.
    sets, want: see rivals.measure.
    flops: of a call.
    num_bytes: precision of a rival -> what a call has to read and write.
    ceilings: GB/s and TFLOP/s of this device.
  """
  found = {}
  for rival, call in calls:
    name = f"{prefix}/{rival.name}"
    if "failed" in bench.results["lines"].get(name, {}):
      del bench.results["lines"][name]  # it may have been the machine

    def measure(rival=rival, call=call):
      line = rivals.measure(bench, rival, call, sets, want)
      if "ms" in line:
        rates = num_bytes(rival.precision) / line["ms"] / 1e6, flops / line["ms"] / 1e9
        line |= {"gb_per_s": rates[0], "tflops": rates[1]}
        line |= {"share_of_copy": rates[0] / ceilings[0], "share_of_bf16": rates[1] / ceilings[1]}
        line["x_bf16"] = found.get("bf16", line["ms"]) / line["ms"]
      return line

    line = bench.line(name, measure)
    if "ms" in line:
      found[rival.name] = line["ms"]
    elif rival.name in OWN:
      sys.exit(f"{name}: {line['failed']}")
  return found


class Product(NamedTuple):
  """One product of one layer.

  Attributes:
    prefix: of its lines.
    m, n, k: its sizes.
    out: the result's dtype.
  """

  prefix: str
  product: str
  m: int
  n: int
  k: int
  out: Any

  @classmethod
  def of(cls, name: str, product: str, sizes) -> "Product":
    """Args: sizes: (tokens, inner, outer) of the layer."""
    tokens, inner, outer = sizes
    mnk = {"fwd": (tokens, outer, inner), "dgrad": (tokens, inner, outer),
           "wgrad": (inner, outer, tokens)}[product]  # fmt: skip
    out = jnp.float32 if product == "wgrad" else jnp.bfloat16
    return cls(f"gemm/{name}/{product}", product, *mnk, out)

  @property
  def tiles(self):
    """M, N, K and the kind, as tile_config takes them."""
    return self.m, self.n, self.k, self.product != "wgrad", self.out

  def race(self, bench: timing.Bench, calls, ceilings) -> dict[str, float]:
    """Milliseconds of each call: (rival, program)."""

    def operands(key):
      a, b = jax.random.split(key)
      return timing.normal(a, self.m, self.k), timing.normal(b, self.n, self.k)

    read = (self.m + self.n) * self.k
    written = self.m * self.n * jnp.dtype(self.out).itemsize
    moved = lambda precision: read * (2 if precision == "bf16" else 1) + written  # noqa: E731
    sets, flops = timing.sets(operands, 2 * read), 2 * self.m * self.n * self.k
    return race(bench, self.prefix, calls, sets, rivals.gemm_in_float32, flops, moved, ceilings)


def tune(bench: timing.Bench, products: list[Product], having, ceilings):
  """Keeps the fastest tiles of every product; forgets times of ours if any tiles change.

  All before any is timed: a shape also takes the tiles of a near one.
  """
  before = [tile_config.best(*p.tiles) for p in products]
  for p in products:
    tried = {}
    for config in tile_config.candidates(*p.tiles[3:]):
      key = json.dumps(dataclasses.asdict(config))
      one = dataclasses.replace(having["gemm"][0], name=key, precision="fp8")
      tried |= p.race(bench, [(one, rivals.ours(p.product, p.out, config))], ceilings)
    best = min(tried, key=tried.get)
    if not bench.is_dry:
      tile_config.store(
        p.tiles[:3], *p.tiles[3:], mosaic_sm90_lib.Config(**json.loads(best)),
        {"ms": tried[best], "jax": jax.__version__,
         **{k: bench.results["provenance"].get(k) for k in ("commit", "time", "driver")}},
      )  # fmt: skip
  if [tile_config.best(*p.tiles) for p in products] != before:
    lines = bench.results["lines"]
    for name in list(lines):
      if name.startswith(("gemm/", "layer/")) and name.endswith("/block_ours"):
        del lines[name]


def gemm(bench: timing.Bench, p: Product, having, ceilings):
  """One product, operands ready, GEMM alone."""
  calls = [(rival, rival.gemm(p.product, p.out)) for rival in having["gemm"]]
  ms = p.race(bench, calls, ceilings)
  share = bench.results["lines"][f"{p.prefix}/block_ours"]["share_of_bf16"]
  print(f"{p.prefix:44s} ours: {beside(ms)}; {share:.2f} of the BF16 ceiling")


def beside(ms: dict[str, float]) -> str:
  """How many times faster ours is than each of the others."""
  return ", ".join(
    f"{time / ms['block_ours']:.2f} x {name}" for name, time in ms.items() if name != "block_ours"
  )


def layer(bench: timing.Bench, name: str, sizes, having, ceilings) -> dict[str, float]:
  """All three products with their quantization, as a training step has them: {rival: ms}."""
  tokens, inner, outer = sizes

  def operands(key):
    of_x, of_w, of_g = jax.random.split(key, 3)
    w = timing.normal(of_w, inner, outer, dtype=jnp.float32)
    return timing.normal(of_x, tokens, inner), w, timing.normal(of_g, tokens, outer)

  sets = timing.sets(operands, 2 * tokens * (inner + outer) + 4 * inner * outer)
  calls = [(rival, rival.layer()) for rival in having["layer"]]
  # x, g and w are read, y, dx and dw written; what stands between is each one's own matter.
  moved = lambda _: 2 * 2 * tokens * (inner + outer) + 2 * 4 * inner * outer  # noqa: E731
  flops = 6 * tokens * inner * outer
  ms = race(bench, f"layer/{name}", calls, sets, rivals.layer_in_float32, flops, moved, ceilings)
  print(f"{f'layer/{name}':44s} ours: {beside(ms)}")
  return ms


def quantizers(bench: timing.Bench, name: str, sizes, rate: float):
  """Reading x once, writing both operands."""
  tokens, inner, _ = sizes
  sets = timing.sets(lambda key: (timing.normal(key, tokens, inner),), 2 * tokens * inner)
  both = {1: BLOCK.fwd.lhs, 0: BLOCK.wgrad.lhs}

  def measure():
    for along, made in jax.jit(lambda x: quantizer.quantize_matrix(x, both)[0])(*sets[0]).items():
      x = sets[0][0] if along == 1 else sets[0][0].T
      if not (error := rivals.distance(made.dequantize(), x)) <= rivals.BUDGET["fp8"]:
        sys.exit(f"quantize/{name}: {error:.3g} away from what it read, along axis {along}")
    found = bench.time(lambda x: quantizer.quantize_matrix(x, both), *sets)
    found["gb_per_s"] = (2 + 1 + 1 + 2 * 4 / 128) * tokens * inner / found["ms"] / 1e6
    return found | {"share_of_copy": found["gb_per_s"] / rate}

  bench.line(f"quantize/{name}/both", measure)


def entrants(bench: timing.Bench) -> dict[str, list[rivals.Rival]]:
  """Part -> rivals that have it; lists all of them, and why others have not."""
  found, absent = rivals.find(rivals_te.MAKERS | rivals_torch.MAKERS)
  found = [*rivals.own(), *found]
  listed = bench.results["rivals"] = rivals.parts(found, absent)
  for name, has in listed.items():
    text = "; ".join(f"{part}: {why}" for part, why in has.items())
    print(f"rival {name:20s} {f'absent: {absent[name]}' if name in absent else text}")
  return {part: [r for r in found if listed[r.name][part] == "yes"] for part in ("gemm", "layer")}


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--dry", action="store_true", help="on a CPU, in little")
  parser.add_argument("--tune", action="store_true", help="try tiles for every shape")
  flags = parser.parse_args()
  device = jax.devices()[0]
  is_hopper = device.platform == "gpu" and device.compute_capability == "9.0"
  if not (is_hopper or flags.dry):
    sys.exit(f"needs a Hopper GPU; this is {device.device_kind}. --dry shows the program on a CPU")
  context = contextlib.nullcontext()
  if flags.dry:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from fp8jax.kernels.quantize import tile_program

    print("dry: kernels are interpreted; these times mean nothing and are not kept")
    context = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    mosaic_sm90_lib.num_cores, tile_program.CLIPS = lambda: 2, "always"  # a cluster
  with context:
    bench = timing.Bench.open(HERE, flags.dry)
    uses = {("mosaic_sm90", getattr(BLOCK, product)): () for product in PASSES}
    self_test.products(uses, *[(144, 160, 256), (144, 160)] * flags.dry)
    print("checked: exact on lattices, norm and SwiGLU as close as their formats")
    ceilings = timing.ceilings(bench)
    optimizer.measure(bench)
    isolation.measure(bench)
    fused.measure(bench, ceilings)
    having = entrants(bench)
    totals = {}
    layers = DRY if flags.dry else LAYERS
    products = {
      name: [Product.of(name, p, sizes) for p in PASSES] for name, sizes in layers.items()
    }
    if flags.tune:
      tune(bench, [p for of_layer in products.values() for p in of_layer], having, ceilings)
    for name, sizes in layers.items():
      quantizers(bench, name, sizes, ceilings[0])
      for product in products[name]:
        gemm(bench, product, having, ceilings)
      totals[name] = layer(bench, name, sizes, having, ceilings)
    for name, sizes in ({} if flags.dry else SMALL).items():
      totals[name] = layer(bench, name, sizes, having, ceilings)
  of_set = [ms for name, ms in totals.items() if name.startswith("te_5b") or flags.dry]
  ran = [name for name in of_set[0] if all(name in ms for ms in of_set)]
  sums = {name: sum(ms[name] for ms in of_set) for name in ran}
  listed = ", ".join(f"{name} {ms:.3f}" for name, ms in sums.items())
  print("all layers of the 5B set, quantize + GEMM, three products, in ms:")
  print(f"{listed}; ours: {beside(sums)}")


if __name__ == "__main__":
  main()
