"""Speed of the FP8 kernels on the GPU at hand, beside BF16 and XLA's FP8, right answers first.

command: python experiments/bench_kernels/bench.py            checks, then times; resumes
         python experiments/bench_kernels/bench.py --tune     also tries tiles for every shape
         python experiments/bench_kernels/bench.py --dry      the same on a CPU, in little: times
                                                              mean nothing there and are not kept
needs:   jax, optax and this package; a Hopper GPU

Writes results/<device>.json beside this file, with provenance, after every line (timing.py), tuned
tiles to fp8jax/kernels/scaled_matmul/tuned/<device>.json, and what layers of each size gain to
fp8jax/kernels/advice/<device>.json. Ceilings come first: a large copy, a large BF16 product.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
if "--dry" in sys.argv:  # interpreted kernels take a thread each, and each device brings one
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import timing  # noqa: E402

from fp8jax import recipes  # noqa: E402
from fp8jax.kernels import advice, check, scaled_matmul  # noqa: E402
from fp8jax.kernels.quantize import mosaic_sm90 as quantizer  # noqa: E402
from fp8jax.kernels.scaled_matmul import mosaic_sm90, tiles  # noqa: E402
from fp8jax.quant import quantize  # noqa: E402

BLOCK, TENSOR = recipes.RECIPES["block_128"], recipes.RECIPES["tensor_current"]
# (tokens, in, out): Transformer Engine's 5B set (its docs/examples/gemm_profiling), InfiR2's 7B
# (arXiv:2509.22536), DeepGEMM's README.
LAYERS = {
  "te_5b_qkv": (15872, 4096, 12288), "te_5b_proj": (15872, 4096, 4096),
  "te_5b_fc1": (15872, 4096, 16384), "te_5b_fc2": (15872, 16384, 4096),
  "infir2_7b_gate_up": (8192, 3584, 37888), "infir2_7b_down": (8192, 18944, 3584),
  "deepgemm_7168x16384": (4096, 16384, 7168), "deepgemm_4096x7168": (4096, 7168, 4096),
}  # fmt: skip
# Where FP8 begins to pay: layers alone, for the advice that a run is given at its start.
SMALL = {
  f"{tokens}x{inner}x{outer}": (tokens, inner, outer)
  for tokens in (1024, 4096, 16384)
  for inner, outer in ((512, 512), (1024, 1024), (2048, 512), (2048, 2048), (4096, 4096))
}  # fmt: skip
DRY = {"dry": (256, 256, 384)}
PASSES = ("fwd", "dgrad", "wgrad")


def gemm(bench: timing.Bench, name: str, product: str, sizes, peak: float, tune: bool):
  """One product of one layer: BF16, XLA's FP8 per tensor, ours; operands ready, GEMM alone."""
  tokens, inner, outer = sizes
  m, n, k = {"fwd": (tokens, outer, inner), "dgrad": (tokens, inner, outer),
             "wgrad": (inner, outer, tokens)}[product]  # fmt: skip
  out = jnp.float32 if product == "wgrad" else jnp.bfloat16
  wide = timing.sets(
    lambda key: (timing.normal(key, m, k), timing.normal(key, n, k)), 2 * (m + n) * k
  )

  def rated(function, sets):
    found = bench.time(function, *sets)
    found["tflops"] = 2 * m * n * k / found["ms"] / 1e9
    return found | {"share_of_bf16_ceiling": found["tflops"] / peak}

  def bf16():
    return rated(lambda a, b: jax.lax.dot_general(
      a, b, (((1,), (1,)), ((), ())), preferred_element_type=out), wide)  # fmt: skip

  def narrow(recipe, backend, **how):
    spec = getattr(recipe, product)
    make = jax.jit(lambda a, b: (quantize.quantize(a, spec.lhs), quantize.quantize(b, spec.rhs)))
    sets = [make(a, b) for a, b in wide]
    if backend == "mosaic_sm90":
      return rated(functools.partial(mosaic_sm90.matmul, out_dtype=out, **how), sets)
    multiply = functools.partial(
      scaled_matmul.scaled_matmul, accumulate=spec.accumulate, backend=backend, out_dtype=out
    )
    return rated(multiply, sets)

  prefix = f"gemm/{name}/{product}"
  base = bench.line(f"{prefix}/bf16", bf16)
  bench.line(f"{prefix}/tensor_xla", lambda: narrow(TENSOR, "xla"))
  ours = bench.line(f"{prefix}/block_ours", lambda: narrow(BLOCK, "mosaic_sm90"))
  print(f"{prefix:44s} {base['ms'] / ours['ms']:.2f} x BF16")
  if tune:
    is_tiled = product != "wgrad"
    tried = {}
    for config in tiles.candidates(is_tiled, out):
      key = json.dumps(dataclasses.asdict(config))
      measure = functools.partial(narrow, BLOCK, "mosaic_sm90", config=config)
      try:
        tried[key] = bench.line(f"{prefix}/{key}", measure)["ms"]
      except jax.errors.JaxRuntimeError as e:
        print(f"{prefix}/{key}: {str(e).splitlines()[0]}")
    best = min(tried, key=tried.get)
    if not bench.is_dry:
      tiles.store(
        (m, n, k), is_tiled, out, mosaic_sm90.Config(**json.loads(best)),
        {"ms": tried[best], **{k: bench.results["provenance"].get(k) for k in ("commit", "time")}},
      )  # fmt: skip


def layer(bench: timing.Bench, name: str, sizes):
  """All three products with their quantization, as a training step has them: ours and BF16."""
  tokens, inner, outer = sizes

  def operands(key):
    x, g = timing.normal(key, tokens, inner), timing.normal(key, tokens, outer)
    return x, timing.normal(key, inner, outer, dtype=jnp.float32), g

  sets = timing.sets(operands, 2 * tokens * (inner + outer) + 4 * inner * outer)

  def bf16(x, w, g):
    w = w.astype(jnp.bfloat16)
    return x @ w, g @ w.T, jax.lax.dot_general(
      x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)  # fmt: skip

  def block(x, w, g):
    xs = quantizer.quantize_matrix(x, {1: BLOCK.fwd.lhs, 0: BLOCK.wgrad.lhs})
    gs = quantizer.quantize_matrix(g, {1: BLOCK.dgrad.lhs, 0: BLOCK.wgrad.rhs})
    ws = quantizer.quantize_matrix(w, {0: BLOCK.fwd.rhs, 1: BLOCK.dgrad.rhs})
    multiply = mosaic_sm90.matmul
    return (multiply(xs[1], ws[0], out_dtype=jnp.bfloat16),
            multiply(gs[1], ws[1], out_dtype=jnp.bfloat16),
            multiply(xs[0], gs[0], out_dtype=jnp.float32))  # fmt: skip

  base = bench.line(f"layer/{name}/bf16", lambda: bench.time(bf16, *sets))
  ours = bench.line(f"layer/{name}/block_ours", lambda: bench.time(block, *sets))
  print(f"{f'layer/{name}':44s} {base['ms'] / ours['ms']:.2f} x BF16")
  return base["ms"], ours["ms"]


def quantizers(bench: timing.Bench, name: str, sizes, rate: float):
  """Reading x once, writing both operands."""
  tokens, inner, _ = sizes
  sets = timing.sets(lambda key: (timing.normal(key, tokens, inner),), 2 * tokens * inner)
  both = {1: BLOCK.fwd.lhs, 0: BLOCK.wgrad.lhs}

  def measure():
    found = bench.time(lambda x: quantizer.quantize_matrix(x, both), *sets)
    found["gb_per_s"] = (2 + 1 + 1 + 2 * 4 / 128) * tokens * inner / found["ms"] / 1e6
    return found | {"share_of_copy": found["gb_per_s"] / rate}

  bench.line(f"quantize/{name}/both", measure)


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

    print("dry: kernels are interpreted; these times mean nothing and are not kept")
    context = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    mosaic_sm90.num_cores = lambda: 1
  with context:
    bench = timing.Bench.open(HERE, flags.dry)
    for product in PASSES:
      check.hopper(getattr(BLOCK, product), *[(144, 160, 256)] * flags.dry)
    print("checked: exact on lattices")
    rate, peak = timing.ceilings(bench)
    totals = []
    for name, sizes in (DRY if flags.dry else LAYERS).items():
      quantizers(bench, name, sizes, rate)
      for product in PASSES:
        gemm(bench, name, product, sizes, peak, flags.tune)
      totals.append((name, *layer(bench, name, sizes)))
    for name, sizes in ({} if flags.dry else SMALL).items():
      totals.append((name, *layer(bench, name, sizes)))
  if not flags.dry:
    shapes = LAYERS | SMALL
    measured = (advice.Layer("block_128", *shapes[name], *times) for name, *times in totals)
    advice.store(measured, bench.results["provenance"])
  te = np.array([t[1:] for t in totals if t[0].startswith("te_5b") or flags.dry])
  print(f"all layers of the 5B set, quantize + GEMM, three products: BF16 {te[:, 0].sum():.3f} ms, "
        f"ours {te[:, 1].sum():.3f} ms, {te[:, 0].sum() / te[:, 1].sum():.2f} x")  # fmt: skip


if __name__ == "__main__":
  main()
