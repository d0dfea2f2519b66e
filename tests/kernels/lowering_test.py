"""The Hopper kernels lowered for an H200, without one: make test-aot.

Mosaic refuses, when it lowers, what its TMA cannot move; interpretation knows nothing of that. Here
sizes are drawn on what TMA moves and beside it, and taken from whatever runs on Hopper.

`python tests/kernels/lowering_test.py [count]` prints the table of supports() against lowering.
"""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
UNITS = (1, 4, 8, 16, 32, 64, 96, 128)
SIDES = {"gemm": 4096, "quantize": 4096, "producers": 1024, "grouped": 1024}
PRODUCTS = {"fwd": "bfloat16", "dgrad": "bfloat16", "wgrad": "float32"}
RECIPES = ("block_128", "block_128_hybrid")
PRESETS = ("coat", "sqrt_v", "e4m3_256", "float32", "bf16")
# What a configuration's header says it runs on.
CONFIGS = {
  "cpt_7b": 8, "cpt_1p5b": 8, "cpt_7b_1gpu": 1, "cpt_7b_1gpu_32k": 1, "debug": 1, "smollm2_cpt": 1,
}  # fmt: skip


@functools.cache
def _place():
  """Where abstract arrays lie: an H200; nowhere without CUDA's packages."""
  import importlib.util

  import jax
  from jax.experimental import topologies

  if importlib.util.find_spec("jax_plugins") is None:
    return None
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
  config = (ROOT / "fp8jax" / "compiled" / "topologies" / "h200.txtpb").read_text()
  found = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=config)
  return jax.sharding.SingleDeviceSharding(found.devices[0])


def _array(dtype, *shape):
  import jax

  return jax.ShapeDtypeStruct(shape, dtype, sharding=_place())


def _narrow(quant, *shape):
  from fp8jax.quantization import scaled_matrix

  *lead, rows, depth = shape
  scale = _array("float32", *lead, -(-rows // quant.tile[0]), -(-depth // quant.tile[1]))
  return scaled_matrix.ScaledMatrix(_array(quant.format.dtype, *shape), scale, quant.tile)


# --- one shape of a kernel: (what supports() says, function, operands) ---------------------------


def gemm(recipe: str, product: str, m: int, n: int, k: int, dtype: str = "", **how):
  from fp8jax.kernels.choose import Device, GemmProblem
  from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
  from fp8jax.recipe import library

  of = getattr(library.RECIPES[recipe], product)
  reason = mosaic_sm90_lib.supports(GemmProblem(m, n, k, of, Device("gpu", 90)))
  dtype = dtype or PRODUCTS[product]
  multiply = functools.partial(mosaic_sm90_lib.matmul, out_dtype=dtype, **how)
  return reason, multiply, (_narrow(of.lhs, m, k), _narrow(of.rhs, n, k))


def grouped(product: str, tiles: int, n: int, k: int):
  """K and N, or the two sizes of a weight; its package refuses no size."""
  from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
  from fp8jax.recipe import library

  of, groups = getattr(library.RECIPES["block_128"], product), _array("int32", tiles)
  how = {"num_groups": 3} if product == "wgrad" else {}
  multiply = lambda a, b, g: mosaic_sm90_lib.matmul(  # noqa: E731
    a, b, out_dtype=PRODUCTS[product], groups=g, **how
  )
  if product == "wgrad":
    return (
      None,
      multiply,
      (_narrow(of.lhs, n, tiles * 128), _narrow(of.rhs, k, tiles * 128), groups),
    )
  return None, multiply, (_narrow(of.lhs, tiles * 128, k), _narrow(of.rhs, 3, n, k), groups)


def quantize(recipe: str, tensor: str, dtype: str, rows: int, columns: int, watched=False):
  """An activation, a gradient or a weight, in both directions from one reading."""
  from fp8jax.kernels.quantize import mosaic_sm90
  from fp8jax.recipe import library

  of = library.RECIPES[recipe]
  quants = {
    "x": {1: of.fwd.lhs, 0: of.wgrad.lhs}, "g": {1: of.dgrad.lhs, 0: of.wgrad.rhs},
    "w": {0: of.fwd.rhs, 1: of.dgrad.rhs}, "rows": {1: of.fwd.lhs}, "columns": {0: of.wgrad.lhs},
  }[tensor]  # fmt: skip
  x = _array(dtype, rows, columns)
  reason = next(filter(None, (mosaic_sm90.supports(x, q, a) for a, q in quants.items())), None)
  make = lambda x: mosaic_sm90.quantize_matrix(x, quants, watched=watched)  # noqa: E731
  return reason, make, (x,)


def produce(name: str, dtype: str, directions: str, rows: int, columns: int, watched=True):
  from fp8jax.kernels.quantize import mosaic_sm90, prologues
  from fp8jax.recipe import library

  four = prologues.Producer("FOUR", 4, (), 1, lambda *x: (sum(x),))
  of, producer = library.RECIPES["block_128"], getattr(prologues, name, four)
  both = {1: of.fwd.lhs, 0: of.wgrad.lhs}
  quants = both if directions == "both" else {int(directions): both[int(directions)]}
  x, results = _array(dtype, rows, columns), [quants] * producer.results
  reason = next(filter(None, (mosaic_sm90.supports(x, q, a) for a, q in quants.items())), None)
  reason = reason or mosaic_sm90.too_large(producer, x.dtype, results, watched)
  make = lambda m, f: mosaic_sm90.quantize_produced(  # noqa: E731
    producer, m, f, results, watched=watched
  )
  factors = [_array("float32", (rows, columns)[axis]) for axis in producer.factors]
  return reason, make, ([x] * producer.matrices, factors)


def adam(preset: str, is_pair: bool, dtype: str, *shape: int):
  import jax
  import jax.numpy as jnp

  from fp8jax.kernels import adamw
  from fp8jax.kernels.adamw import reference
  from fp8jax.kernels.choose import Device
  from fp8jax.optim import storage
  from fp8jax.quantization import bf16_remainder, quantized_tensor

  kept, wide = storage.MOMENTS[preset], _array("float32", *shape)
  made = [
    jax.eval_shape(lambda x, q=q: quantized_tensor.pack(x, q), wide) if q else wide
    for q in (kept.mu, kept.nu)
  ]
  master = jax.eval_shape(bf16_remainder.split, wide) if is_pair else wide
  state = jax.tree.map(lambda x: _array(x.dtype, *x.shape), (master, *made))
  arrays = (_array(dtype, *shape), *state)
  by = reference.StepScalars(*[jnp.float32(1.0)] * len(reference.StepScalars._fields))
  rule = reference.AdamWHparams(0.9, 0.95, 1e-8, 0.1)
  step = lambda *arrays: adamw.mosaic_sm90.update(*arrays, by, True, rule)  # noqa: E731
  return adamw.mosaic_sm90.supports(*arrays, Device("gpu", 90)), step, arrays


def draw(kernel: str, count: int) -> list[tuple]:
  """So many shapes: multiples of what one TMA or another moves, and of nothing."""
  import numpy as np

  rng = np.random.default_rng(zlib.crc32(kernel.encode()))
  pick = lambda options: options[rng.integers(len(options))]  # noqa: E731

  def size():
    unit = pick(UNITS)
    return int(unit * rng.integers(1, SIDES[kernel] // unit + 1))

  def one():
    if kernel == "gemm":
      dtype = pick(("bfloat16", "float32"))
      return gemm, pick(RECIPES), pick([*PRODUCTS]), size(), size(), size(), dtype
    if kernel == "grouped":
      return grouped, pick([*PRODUCTS]), int(rng.integers(3, 12)), size(), size()
    if kernel == "quantize":
      recipe = pick((*RECIPES, "tensor_current"))
      tensor = pick(("x", "g", "w", "rows", "columns"))
      return quantize, recipe, tensor, pick(("bfloat16", "float32")), size(), size()
    if kernel == "producers":
      of = pick(("RMS_NORM", "SWIGLU", "SWIGLU_BACKWARD"))
      dtype = pick(("bfloat16", "float32"))
      return produce, of, dtype, pick(("0", "1", "both")), size(), size(), bool(rng.integers(2))
    preset = pick(PRESETS)
    row = {"e4m3_256": 256, "float32": 64, "bf16": 64}.get(preset, 128)
    rows = int(pick((1, 1, 2, 4, 8, 16)) * rng.integers(1, pick((5, 200, 200))))
    shape = pick(((rows, row), (rows, 2 * row), (2, rows, row)))
    return adam, preset, bool(rng.integers(2)), pick(("bfloat16", "float32")), *shape

  return [one() for _ in range(count)]


def tried(cases) -> dict:
  """Of (function of this module, its arguments): how many were accepted, what of these failed to
  lower, what is refused although it lowers, by its reason, and how many were refused rightly."""
  import jax

  found = {"accepted": 0, "accepted_fails": {}, "refused_lowers": {}, "refused_fails": 0}
  for make, *args in cases:
    name = f"{make.__name__}{tuple(args)}"
    reason, function, operands = make(*args)
    try:
      jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
      failed = None
    except Exception as e:  # whatever Mosaic raises
      failed = f"{type(e).__name__}: {e}"
    if reason is None:
      found["accepted"] += 1
      if failed:
        found["accepted_fails"][name] = failed
    elif failed:
      found["refused_fails"] += 1
    else:
      # Numbers differ, reasons do not.
      kind = re.sub(r"\[[\d, ]+\] is \d+ rows of \d+", "[...] is R rows of C", reason)
      found["refused_lowers"].setdefault(kind, []).append(name)
  return found


# Shapes drawn of each; one of AdamW takes more than a second.
KERNELS = {"gemm": 50, "grouped": 50, "quantize": 50, "producers": 50, "adam": 20}


@pytest.mark.aot
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_supports_accepts_lowers(kernel):
  count = KERNELS[kernel]
  found = tried(draw(kernel, count))
  print(json.dumps({kernel: found}, indent=1))
  assert not found["accepted_fails"]
  # AdamW alone refuses sizes; of those that lower it has fewer rows than one tile.
  assert all("multiple of 8" in reason for reason in found["refused_lowers"])
  if kernel == "adam":
    assert found["accepted"] > count / 3 and found["refused_fails"] > count / 10
  else:
    assert found["accepted"] == count


def test_prologues_that_have_room_lower_and_the_others_do_not():
  """Every prologue in every dtype; without CUDA's packages, too."""
  cases = [
    (produce, name, dtype, directions, 264, 392, directions == "both")
    for name in ("RMS_NORM", "SWIGLU", "SWIGLU_BACKWARD", "FOUR")
    for dtype in ("bfloat16", "float32")
    for directions in ("0", "both")
  ]
  found = tried(cases)
  refused = [args for make, *args in cases if make(*args)[0]]
  assert refused == [["FOUR", "float32", d, 264, 392, d == "both"] for d in ("0", "both")]
  assert (found["accepted"], found["refused_fails"]) == (14, 2) and not found["accepted_fails"]


@pytest.mark.slow
def test_a_step_in_float32_lowers_for_hopper():
  import harness

  from fp8jax.step import train_step

  spec = harness.debug_plan("block_128", device=harness.HOPPER, precision__compute_dtype="float32")
  arguments = harness.step_arguments(spec)
  step = train_step.make_step(spec)
  text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
  assert "mosaic_gpu" in text


# --- what runs on Hopper -------------------------------------------------------------------------


def _of_layer(tokens: int, inner: int, outer: int, recipe: str = "block_128"):
  """Three products and the operands of a linear layer."""
  if recipe.startswith("block"):
    yield gemm, "block_128", "fwd", tokens, outer, inner
    yield gemm, "block_128", "dgrad", tokens, inner, outer
    yield gemm, "block_128", "wgrad", inner, outer, tokens
  yield quantize, recipe, "x", "bfloat16", tokens, inner
  yield quantize, recipe, "g", "bfloat16", tokens, outer
  yield quantize, recipe, "w", "float32", inner, outer


def _of_plan(spec):
  """The same of every layer of a configuration, its norm and SwiGLU."""
  from fp8jax.compiled import expected_gemms

  for (backend, of), shapes in expected_gemms.uses(spec).items():
    if backend not in ("mosaic_sm90", "xla_sm90") or of.rhs.tile[0] == 1:
      continue
    for m, n, k in sorted(shapes):
      yield from _of_layer(m, k, n, "block_128" if backend == "mosaic_sm90" else "tensor_current")
  tokens, model = spec.tokens_per_device, spec.model
  yield produce, "RMS_NORM", "bfloat16", "both", tokens, model.hidden_size
  yield produce, "SWIGLU", "bfloat16", "both", tokens, model.intermediate_size
  yield produce, "SWIGLU_BACKWARD", "bfloat16", "both", tokens, model.intermediate_size


def used_by_configs():
  import aot_harness

  from fp8jax.compiled import aot

  for name, num in CONFIGS.items():
    # On a GPU the backend is chosen as it is there.
    changes = {"kernels.matmul": "auto"}
    spec, _ = aot.resolve(aot_harness.load(f"configs/{name}.py", changes), f"h200:{num}")
    found = list(_of_plan(spec))
    assert name == "debug" or any(case[0] is gemm for case in found), name
    yield from found


def used_by_bench_step(monkeypatch):
  from bench.step import run as bench

  from fp8jax.kernels import choose

  monkeypatch.setattr(choose, "current_device", lambda: choose.Device("gpu", 90))
  for case in bench.CASES.values():
    for recipe in bench.RECIPES[1:]:
      yield from _of_plan(bench.make_plan(case, recipe, case.num_layers or 2))


def used_by_bench_kernels():
  from bench.kernels import fused, optimizer
  from bench.kernels import run as bench

  for layer in (bench.LAYERS | bench.SMALL).values():
    yield from _of_layer(*layer)
  tiles = fused.TOKENS // 128 + fused.EXPERTS
  yield grouped, "fwd", tiles, fused.SIZES[1], fused.SIZES[0]
  yield grouped, "dgrad", tiles, *fused.SIZES
  yield grouped, "wgrad", tiles, *fused.SIZES
  for name in ("RMS_NORM", "SWIGLU", "SWIGLU_BACKWARD"):
    yield produce, name, "bfloat16", "both", *fused.MATRIX
  for shape in optimizer.SHAPES.values():
    for preset, is_pair, dtype in optimizer.KINDS.values():
      yield adam, preset, is_pair, dtype.__name__, *shape


def used_by_the_self_test():
  import inspect

  from fp8jax.kernels import self_test

  for recipe in RECIPES:
    for product in PRODUCTS:
      yield gemm, recipe, product, *self_test._SIZES
    for tensor in ("x", "g", "w"):
      yield quantize, recipe, tensor, "bfloat16", *self_test._MATRIX
  yield quantize, "tensor_current", "x", "bfloat16", *self_test._MATRIX
  m, n, k = self_test._SIZES
  yield quantize, "block_128", "rows", "bfloat16", m, k
  yield quantize, "block_128", "columns", "float32", k, n
  for name in ("RMS_NORM", "SWIGLU", "SWIGLU_BACKWARD"):
    yield produce, name, "bfloat16", "both", *self_test._MATRIX
  sizes = inspect.signature(self_test.optimizer).parameters["sizes"].default
  for preset in PRESETS:
    for is_pair in (False, True):
      yield adam, preset, is_pair, "bfloat16", *sizes


def used_by_tests():
  import kernel_cases
  import shapes

  for product in PRODUCTS:
    for sizes in (*shapes.HOPPER, kernel_cases.LARGE, (136, 136, 256), (64, 64, 192)):
      yield gemm, "block_128", product, *sizes
  for tensor in ("x", "g", "w"):
    for sizes in ((208, 272), (131, 201), (133, 210)):
      yield quantize, "block_128", tensor, "bfloat16", *sizes
  for name in ("RMS_NORM", "SWIGLU", "SWIGLU_BACKWARD"):
    yield produce, name, "bfloat16", "both", *kernel_cases.PROLOGUE
  tokens, depth, columns = kernel_cases.GROUPED
  for product in PRODUCTS:
    yield grouped, product, tokens // 128 + 3, columns, depth
  for name, (dtype, is_pair, shape, _) in kernel_cases.ADAMW.items():
    yield adam, name, is_pair, dtype.__name__, *shape


@pytest.mark.aot
@pytest.mark.parametrize("by", [
  "configs", "the_self_test", "tests", pytest.param("bench_step", marks=pytest.mark.slow),
  pytest.param("bench_kernels", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_runs_on_hopper_lowers(monkeypatch, by):
  monkeypatch.syspath_prepend(str(ROOT / "experiments"))
  for folder in ("bench", "bench/kernels"):
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / folder))
  monkeypatch.syspath_prepend(str(ROOT / "tests"))
  cases = globals()[f"used_by_{by}"](*[monkeypatch] * (by == "bench_step"))
  found = tried(dict.fromkeys(cases))
  assert found["accepted"] and found["accepted"] == sum(map(_count, found.values())), found


def _count(what) -> int:
  return what if isinstance(what, int) else len(what)


@pytest.mark.aot
def test_every_way_to_cut_up_the_work_lowers():
  """Tiles and clusters that tests and tuning try, on sizes that fill no tile."""
  import kernel_cases

  from fp8jax.kernels.gemm import tile_config

  cases = []
  for product, dtype in (("fwd", "bfloat16"), ("wgrad", "float32")):
    configs = {*kernel_cases.CONFIGS, *tile_config.candidates(product != "wgrad", dtype)}
    for config in sorted(configs, key=str):
      if tile_config.smem_bytes(config, dtype) <= tile_config.SMEM_BYTES:
        make = functools.partial(gemm, config=config)
        make.__name__ = str(config)  # pyright: ignore[reportAttributeAccessIssue]
        cases.append((make, "block_128", product, 456, 400, 576))
  found = tried(cases)
  assert not found["accepted_fails"] and found["accepted"] == len(cases)


# --- machine code --------------------------------------------------------------------------------


def ptx(stages: int, producer: str) -> str:
  """PTX of a GEMM in clusters; in a process that has no GPU and does nothing else."""
  folder = tempfile.mkdtemp()
  os.environ.update(
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_TO=folder,
    MOSAIC_GPU_DUMP_PTX="1",
  )  # fmt: skip
  sys.path[:0] = [str(ROOT)]
  import jax

  from fp8jax.kernels.gemm.tile_config import Config

  config = Config(stages=stages, cluster_m=2, producer=producer)
  _, function, operands = gemm("block_128", "fwd", 456, 400, 2048, config=config)
  jax.jit(function).lower(*operands).compile()
  (path,) = pathlib.Path(folder).glob("*.ptx")
  return path.read_text()


@pytest.mark.aot
@pytest.mark.parametrize("producer", ["warpgroup", "inline"])
def test_a_program_waits_for_the_last_arrivals_before_it_ends(producer):
  """After the last copy it waits at every barrier where its cluster's other program arrives, and
  goes there at once if it has no tiles."""
  stages = 3
  code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'kernels')!r}); "
  code += f"import lowering_test as t; print(t.ptx({stages}, {producer!r}))"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
  assert done.returncode == 0, done.stderr[-4000:]
  lines = done.stdout.splitlines()
  find = lambda pattern: [n for n, line in enumerate(lines) if re.search(pattern, line)]  # noqa: E731
  loads = find(r"cp\.async\.bulk\.tensor\.4d\.shared::c\w+\.global")
  arrivals = [lines[n] for n in find(r"mapa\.shared::cluster\.u32 mapped_addr, %r\d+")]
  waits, (end,) = find(r"mbarrier\.try_wait\.parity"), find(r"^\s*ret;")
  # The first consumer fetches in its own loop; a producer has one without products.
  loop = find(r"wgmma\.mma_async") if producer == "inline" else loads
  last = [n for n in waits if n > max(*loads, *loop)]
  assert len(last) == stages and max(last) < end
  # `empty` of every slot, each once: those at which consumers arrive before the first step.
  barrier = lambda line: re.search(r"\[(%r\d+)\]|mapped_addr, (%r\d+)", line)  # noqa: E731
  assert {barrier(lines[n])[1] for n in last} == {barrier(x)[2] for x in arrivals[:stages]}
  # Whatever skips the loop comes out before the first of these waits.
  label = max(n for n in find(r"^\$L__BB0_\d+:") if n < last[0])
  name = lines[label].rstrip(":").strip()
  assert label > max(*loads, *loop)
  assert any(n < min(loop) for n in find(rf"bra\S*\s+{re.escape(name)};"))


def main(counts: dict[str, int]):
  os.environ["JAX_PLATFORMS"] = "cpu"
  sys.path[:0] = [str(ROOT)]
  import importlib.metadata

  print(f"jax {importlib.metadata.version('jax')}, H200: shapes of each kernel drawn: {counts}")
  print("| kernel | accepted | of these fail | refused and fail | refused though they lower |")
  print("|---|---|---|---|---|")
  for kernel, count in counts.items():
    found = tried(draw(kernel, count))
    listed = "; ".join(f"{len(v)}: {k}" for k, v in found["refused_lowers"].items())
    fails = len(found["accepted_fails"])
    print(f"| {kernel} | {found['accepted']} | {fails} | {found['refused_fails']} | {listed} |")


if __name__ == "__main__":
  main(dict.fromkeys(KERNELS, int(sys.argv[1])) if sys.argv[1:] else KERNELS)
