"""The Hopper kernels compiled to machine code for an H200, without one: make test-aot.

`python tests/kernels/mosaic_aot_test.py > NEW; mv NEW tests/golden/kernel_resources.json` compiles
every shape of InfiR2's models and of Transformer Engine's 5B set, some of SmolLM2's, and every
kernel that is shipped in every configuration that tuning may choose, and writes what the compiler
reports; with names or folders ("tiles/") for arguments only those, and the rest stays as it is.
A report is of a version of jax; the file keeps what others found.

jax 0.11.2 compiles whole programs (with the ptxas on PATH, or the wheels'; 13.0 and 13.5 agree), in
which setmaxnreg is honoured: of a kernel that uses it ptxas reports the 168 registers with which
its threads start. jaxlib 0.12.0.1 compiles for nvJitLink, where setmaxnreg is ignored (C7504), and
reports what a thread needs: tiles that do not fit are not chosen there. "instructions" are of a
GEMM's loops or of a whole program (machine_code.py) and may only become fewer.
"""

import collections
import importlib.metadata
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import machine_code
import pytest
from gemm_shapes import TABLE, gemms, tile_name

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Experts of DeepSeek-V3 (arXiv:2412.19437 §4.2) on a device that has 8: tokens with 8 experts each.
EXPERTS, EXPERT_TOKENS, EXPERT_SIZES = 8, 32768, (7168, 2048)
# A weight gathered along K, read as it arrives.
GATHERED, SHARDS = "infir2_7b/tp1/3584x37888/fwd", 4
# A weight of InfiR2's 7B; preset of the moments, the gradient's dtype, whether the master is two.
ADAM_SHAPE = (3584, 18944)
ADAM = {
  "adam/coat": ("coat", "bfloat16", False),
  "adam/coat_pair": ("coat", "bfloat16", True),
  "adam/coat_float32_gradient": ("coat", "float32", False),
  "adam/sqrt_v": ("sqrt_v", "bfloat16", False),
  "adam/e4m3_256": ("e4m3_256", "bfloat16", False),
  "adam/float32": ("float32", "float32", False),
}
LAYERS = 28
# Fewer tiles than multiprocessors, so that the loop over tiles is none; part of the last 128 of K.
FEW = {"few/fwd": ("fwd", 2048, 128, 192), "few/wgrad": ("wgrad", 192, 128, 2048),
       "few/blocks": ("fwd", 16384, 192, 192)}  # fmt: skip
# Kernels without products.
ELEMENTWISE = ("quantize", "adam/")
# What the default test leaves to the slow one: compiled by `shipped`.
SHIPPED = ("tiles/", "float32/", "add_to/", "layers/", "hybrid/", "quantize_pow2/",
           "quantize_e5m2/", "quantize_tensor/")  # fmt: skip
# The quantizer writes both orientations of these.
QUANTIZED = {"quantize_pow2/both": "block_128_pow2", "quantize_e5m2/both": "block_128_hybrid",
             "quantize_tensor/both": "tensor_current"}  # fmt: skip


def shipped(array, narrow) -> dict:
  """name -> (function, operands) of what no table of layers has: see SHIPPED.

  Args:
    array: (dtype, *shape) -> an abstract array on the GPU.
    narrow: (quant, rows, depth) -> an abstract ScaledMatrix.
  """
  import functools

  import jax.numpy as jnp

  from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
  from fp8jax.kernels.gemm import tile_config
  from fp8jax.kernels.quantize import mosaic_sm90 as quantizer
  from fp8jax.recipe import library

  found, sizes = {}, gemms()

  def add(name, product, out, recipe="block_128", **how):
    gemm = getattr(library.RECIPES[recipe], product)
    _, m, n, k = sizes[f"infir2_7b/tp1/3584x4608/{product}"]
    multiply = functools.partial(mosaic_sm90_lib.matmul, out_dtype=out, **how)
    found[name] = (multiply, (narrow(gemm.lhs, m, k), narrow(gemm.rhs, n, k)))

  add("float32/fwd", "fwd", jnp.float32)
  for product, out in (("dgrad", jnp.bfloat16), ("wgrad", jnp.float32)):
    add(f"hybrid/{product}", product, out, "block_128_hybrid")
  for product, out in (("fwd", jnp.bfloat16), ("fwd", jnp.float32), ("wgrad", jnp.float32)):
    for config in tile_config.candidates(product == "fwd", out):
      # Of several rasters the last.
      add(tile_name(config, product, out), product, out, config=config)
  _, m, n, _ = sizes["infir2_7b/tp1/3584x4608/wgrad"]
  add("add_to/wgrad", "wgrad", jnp.float32)
  multiply, args = found["add_to/wgrad"]
  into = lambda a, b, d: mosaic_sm90_lib.matmul(a, b, out_dtype=jnp.float32, add_to=d)  # noqa: E731
  found["add_to/wgrad"] = (into, (*args, array(jnp.float32, m, n)))
  found |= _layers(array, narrow)
  add("add_to/dgrad", "dgrad", jnp.bfloat16)
  multiply, args = found["add_to/dgrad"]
  _, m, n, _ = sizes["infir2_7b/tp1/3584x4608/dgrad"]
  sum_ = lambda a, b, d: mosaic_sm90_lib.matmul(a, b, out_dtype=jnp.bfloat16, add_to=d)  # noqa: E731
  found["add_to/dgrad"] = (sum_, (*args, array(jnp.bfloat16, m, n)))
  rows, quant = EXPERT_TOKENS + EXPERTS * 128, library.RECIPES["block_128"].wgrad.lhs
  into = lambda a, b, g, d: mosaic_sm90_lib.matmul(  # noqa: E731
    a, b, out_dtype=jnp.float32, groups=g, num_groups=EXPERTS, add_to=d
  )
  tokens, d = (
    [narrow(quant, size, rows) for size in EXPERT_SIZES],
    array("float32", EXPERTS, *EXPERT_SIZES),
  )
  found["add_to/grouped_wgrad"] = (into, (*tokens, array(jnp.int32, rows // 128), d))
  for name, recipe in QUANTIZED.items():
    of = library.RECIPES[recipe]
    quants = {1: of.dgrad.lhs, 0: of.wgrad.rhs}
    for end, watched in (("", False), ("_watched", True)):
      make = lambda x, q=quants, w=watched: quantizer.quantize_matrix(x, q, watched=w)  # noqa: E731
      found[name + end] = (make, (array(jnp.bfloat16, 32768, 3584),))
  return found


def _layers(array, narrow) -> dict:
  """Products that read a layer of a stack of weights, and that add to one of sums of gradients."""
  import jax
  import jax.numpy as jnp

  from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
  from fp8jax.quantization.scaled_matrix import Entry
  from fp8jax.recipe import library

  found, number = {}, array(jnp.int32)
  for product in ("fwd", "dgrad", "wgrad"):
    gemm = getattr(library.RECIPES["block_128"], product)
    _, m, n, k = gemms()[f"infir2_7b/tp1/3584x37888/{product}"]
    a, b = narrow(gemm.lhs, m, k), narrow(gemm.rhs, n, k)
    if product == "wgrad":
      into = lambda a, b, sums, i: mosaic_sm90_lib.matmul(  # noqa: E731
        a, b, out_dtype=jnp.float32, add_to=Entry(sums, i)
      )
      found["layers/wgrad"] = (into, (a, b, array(jnp.float32, LAYERS, m, n), number))
    else:
      read = lambda a, b, i: mosaic_sm90_lib.matmul(a, Entry(b, i), out_dtype=jnp.bfloat16)  # noqa: E731
      stack = jax.tree.map(lambda x: array(x.dtype, LAYERS, *x.shape), b)
      found[f"layers/{product}"] = (read, (a, stack, number))
  return found


def compile_all(wanted: list[str]) -> dict[str, dict]:
  """name -> what the compiler says of these and of all in these folders, or of all; in the process
  that calls, which must have no GPU."""
  folder = tempfile.mkdtemp()
  os.environ.update(
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_TO=folder,
    MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_SASS_CTRL="1",
  )  # fmt: skip
  sys.path[:0] = [str(ROOT)]
  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies

  from fp8jax.formats import E4M3
  from fp8jax.kernels.adamw import api as adamw_api
  from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
  from fp8jax.kernels.quantize import mosaic_sm90 as quantizer
  from fp8jax.kernels.quantize import prologues
  from fp8jax.optim import storage
  from fp8jax.quantization import bf16_remainder, quantized_tensor, scaled_matrix
  from fp8jax.quantization.scaled_matrix import Entry
  from fp8jax.recipe import library

  topology = topologies.get_topology_desc(
    platform="cuda", topology="1x1x1",
    target_config=(ROOT / "fp8jax" / "compiled" / "topologies" / "h200.txtpb").read_text(),
  )  # fmt: skip
  there = jax.sharding.SingleDeviceSharding(topology.devices[0])

  def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=there)

  def narrow(quant, rows, depth):
    scale = array(jnp.float32, -(-rows // quant.tile[0]), -(-depth // quant.tile[1]))
    return scaled_matrix.ScaledMatrix(array(quant.format.dtype, rows, depth), scale, quant.tile)

  recipe = library.RECIPES["block_128"]
  programs = {}
  for name, (product, m, n, k) in gemms().items():
    gemm = getattr(recipe, product)
    dtype = jnp.float32 if product == "wgrad" else jnp.bfloat16
    args = narrow(gemm.lhs, m, k), narrow(gemm.rhs, n, k)
    multiply = lambda a, b, dtype=dtype: mosaic_sm90_lib.matmul(a, b, out_dtype=dtype)  # noqa: E731
    programs[name] = (multiply, args)
  for name, dtype, quants in (
    ("quantize/rows", jnp.bfloat16, {1: recipe.fwd.lhs}),
    ("quantize/columns", jnp.bfloat16, {0: recipe.wgrad.lhs}),
    ("quantize/both", jnp.bfloat16, {1: recipe.fwd.lhs, 0: recipe.wgrad.lhs}),
    ("quantize/weight", jnp.float32, {1: recipe.fwd.rhs, 0: recipe.dgrad.rhs}),
  ):
    for end, watched in (("", False), ("_watched", True)):
      make = lambda x, q=quants, w=watched: quantizer.quantize_matrix(x, q, watched=w)  # noqa: E731
      programs[name + end] = (make, (array(dtype, 32768, 3584),))

  quants = {1: recipe.fwd.rhs, 0: recipe.dgrad.rhs}
  of_layer = lambda x, i: quantizer.quantize_matrix(Entry(x, i), quants, watched=True)  # noqa: E731
  stack = array(jnp.float32, LAYERS, 32768, 3584), array(jnp.int32)
  programs["quantize/weight_of_layer_watched"] = (of_layer, stack)
  of_all = lambda x: quantizer.quantize_stack(x, quants)  # noqa: E731
  programs["quantize/weights_of_layers"] = (of_all, stack[:1])
  matrix, both = array(jnp.bfloat16, 32768, 3584), {1: recipe.fwd.lhs, 0: recipe.wgrad.lhs}
  lines = [array(jnp.float32, n) for n in (32768, 3584)]
  for producer in (prologues.RMS_NORM, prologues.SWIGLU, prologues.SWIGLU_BACKWARD):
    args = ([matrix] * producer.matrices, [lines[axis] for axis in producer.factors])
    make = lambda x, f, p=producer: quantizer.quantize_produced(  # noqa: E731
      p, x, f, [both] * p.results, watched=True
    )
    programs[f"quantize/{producer.name}"] = (make, args)
  _, m, n, k = gemms()[GATHERED]
  weight = narrow(recipe.fwd.rhs, n, k)
  weight = scaled_matrix.ScaledMatrix(
    array(E4M3.dtype, SHARDS, n, k // SHARDS), weight.scale, weight.tile
  )
  multiply = lambda a, b: mosaic_sm90_lib.matmul(a, b, out_dtype=jnp.bfloat16)  # noqa: E731
  programs["gathered/fwd"] = (multiply, (narrow(recipe.fwd.lhs, m, k), weight))
  rows, (inner, outer) = EXPERT_TOKENS + EXPERTS * 128, EXPERT_SIZES
  groups = array(jnp.int32, rows // 128)
  for product, n, k in (("fwd", outer, inner), ("dgrad", inner, outer)):
    weight = narrow(recipe.fwd.rhs, n, k)
    weight = jax.tree.map(lambda x: array(x.dtype, EXPERTS, *x.shape), weight)
    multiply = lambda a, b, g: mosaic_sm90_lib.matmul(a, b, out_dtype=jnp.bfloat16, groups=g)  # noqa: E731
    programs[f"grouped/{product}"] = (multiply, (narrow(recipe.fwd.lhs, rows, k), weight, groups))
  multiply = lambda a, b, g: mosaic_sm90_lib.matmul(  # noqa: E731
    a, b, out_dtype=jnp.float32, groups=g, num_groups=EXPERTS
  )
  tokens = [narrow(recipe.wgrad.lhs, size, rows) for size in (inner, outer)]
  programs["grouped/wgrad"] = (multiply, (*tokens, groups))

  for name, (preset, dtype, is_pair) in ADAM.items():
    wide, kept = array(jnp.float32, *ADAM_SHAPE), storage.MOMENTS[preset]
    mu, nu = (
      jax.eval_shape(lambda x, q=q: quantized_tensor.pack(x, q), wide) if q else wide
      for q in (kept.mu, kept.nu)
    )
    state = jax.eval_shape(bf16_remainder.split, wide) if is_pair else wide, mu, nu
    state = jax.tree.map(lambda x: array(x.dtype, *x.shape), state)
    args = (*state, array(dtype, *ADAM_SHAPE), array("int32"), array("float32"), array("bool"))

    def step(master, mu, nu, gradient, count, rate, is_applied):
      return adamw_api.update(
        gradient, master, mu, nu, count=count, rate=rate, is_applied=is_applied, b1=0.9, b2=0.95,
        eps=1e-8, weight_decay=0.1, backend="mosaic_sm90",
      )  # fmt: skip

    programs[name] = (step, args)

  for name, (product, m, n, k) in FEW.items():
    gemm, dtype = getattr(recipe, product), jnp.float32 if product == "wgrad" else jnp.bfloat16
    multiply = lambda a, b, dtype=dtype: mosaic_sm90_lib.matmul(a, b, out_dtype=dtype)  # noqa: E731
    programs[name] = (multiply, (narrow(gemm.lhs, m, k), narrow(gemm.rhs, n, k)))
  programs |= shipped(array, narrow)
  found, reports = {}, {}
  folders = tuple(w for w in wanted if w.endswith("/"))
  for name in (n for n in programs if not wanted or n in wanted or n.startswith(folders)):
    function, args = programs[name]
    # The compiler remembers kernels, and is silent about those that it has seen.
    own = name.startswith((*ELEMENTWISE, *SHIPPED, "few/")) and name
    kind = (own, name.endswith("wgrad"), str(args))
    if kind not in reports:
      in_place = (0, 1, 2) if name in ADAM else ()
      compiled = jax.jit(function, donate_argnums=in_place).lower(*args).compile()
      files = list(pathlib.Path(folder).iterdir())
      said = [f.read_text(errors="ignore") for f in files if f.suffix != ".sass_ctrl"]
      reports[kind] = _report("".join(said))
      code = [f.read_text() for f in files if f.suffix == ".sass_ctrl"]
      assert len(code) == 1, "no nvdisasm: make test-aot installs nvidia-cuda-nvdisasm"
      is_gemm = reports[kind]["wgmma"] and not name.startswith("few/")
      count = machine_code.loops_of if is_gemm else machine_code.program_of
      reports[kind]["instructions"] = count(code[0])
      for file in files:
        file.unlink()
      if in_place:
        reports[kind]["bytes_per_parameter"] = _moved(compiled, args, math.prod(ADAM_SHAPE))
        said = adamw_api.num_bytes(args[3], *args[:3]) / math.prod(ADAM_SHAPE)
        assert abs(said - reports[kind]["bytes_per_parameter"]) < 1e-3, (name, said)
    found[name] = reports[kind]
  return found


def _moved(compiled, args, size: int) -> float:
  """Read and written; nothing is copied, and nothing else is allocated but sums of rows."""
  import jax

  spec = compiled.memory_analysis()
  in_place = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(args[:3]))
  assert spec.temp_size_in_bytes < size / 8 + 2**14 and spec.alias_size_in_bytes == in_place, spec
  return round((spec.argument_size_in_bytes + spec.output_size_in_bytes) / size, 3)


def _report(text: str) -> dict:
  """What ptxas and the allocator of shared memory said of one kernel."""
  instructions = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.([\w.]+)", text))
  return {
    "registers": int(re.findall(r"Used (\d+) registers", text)[0]),
    "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text))),
    "shared_memory_bytes": int(re.findall(r"smem_scratch_bytes=(\d+)", text)[0]),
    "wgmma": ", ".join(sorted(instructions)),
    # What hides behind each other otherwise: a call is enough (C7509).
    "serialized": "instructions are serialized" in text,
    # Of the promotion, per thread: half a row of the tile for each step that is written out, and
    # none if the compiler has concluded that nobody can see the sums.
    "fma": len(re.findall(r"\bfma\.rn\.(?:ftz\.)?f32", text)),
  }


def _version() -> str:
  return importlib.metadata.version("jax")


def _elsewhere(wanted: list[str]) -> dict[str, dict]:
  code = f"import sys, json; sys.path.insert(0, {str(ROOT / 'tests' / 'kernels')!r}); "
  code += f"import mosaic_aot_test as t; print(json.dumps(t.compile_all({wanted!r})))"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
  assert done.returncode == 0, done.stderr[-4000:]
  return json.loads(done.stdout.splitlines()[-1])


def _check(names: list[str]):
  """That they compile to what the table says of this version, if it says anything."""
  table, wrong = _table(), {}
  for name, report in _elsewhere(names).items():
    known, now = table.get(name, {}).get(_version(), report), report["instructions"]
    more = any(known["instructions"].get(k, 0) < count for k, count in now.items())
    is_other = now.keys() != known["instructions"].keys()
    is_other |= {**known, "instructions": 0} != {**report, "instructions": 0}
    if more or is_other or report["spilled_bytes"] or report["serialized"]:
      wrong[name] = report
  assert not wrong


def _table() -> dict[str, dict[str, dict]]:
  """name -> version of jax -> report."""
  return json.loads(TABLE.read_text())["kernels"] if TABLE.exists() else {}


@pytest.mark.aot
def test_kernels_compile_to_what_the_table_says_and_spill_nothing():
  """One shape of every kernel that the table tells apart, and every kind of state of the
  optimizer's; all of them: see the top."""
  table = _table()
  assert set(table) >= set(gemms())
  kinds = collections.defaultdict(list)
  for name, reports in table.items():
    if name.startswith(SHIPPED) or not (report := reports.get(_version())):
      continue
    if name.startswith(ELEMENTWISE):
      kinds[json.dumps(report)].append(name)
    else:
      # Where M or N is smaller, a few registers more or less make no other kernel.
      kind = (name.startswith("grouped/"), name.endswith("wgrad"), report["shared_memory_bytes"])
      kinds[kind].append(name)
  chosen = [names[0] for names in kinds.values()]
  chosen += ["infir2_7b/tp4/18944x3584/fwd", "gathered/fwd", "grouped/dgrad"]
  _check(list(dict.fromkeys([*chosen, *ADAM])))
  for name, report in ((n, r) for n, reports in table.items() for r in reports.values()):
    assert report["spilled_bytes"] == 0 and report["registers"] <= 255, name
    assert not report["serialized"], name
    is_gemm = not name.startswith(ELEMENTWISE)
    of = {"hybrid/dgrad": "e5m2.e4m3", "hybrid/wgrad": "e4m3.e5m2"}.get(name, "e4m3.e4m3")
    assert is_gemm == (f".f32.{of}" in report["wgmma"]), name
    assert not is_gemm or report["fma"] >= 56, name  # half of 112 columns, the fewest


@pytest.mark.aot
@pytest.mark.slow
def test_every_shipped_kernel_compiles_to_what_the_table_says():
  """Every configuration that tuning may choose among them."""
  names = [n for n in _table() if n.startswith(SHIPPED)]
  assert {name.partition("/")[0] + "/" for name in names} == set(SHIPPED)
  _check(names)


if __name__ == "__main__":
  before, version = _table(), _version()
  kernels = {name: {version: report} for name, report in _elsewhere(sys.argv[1:]).items()}
  for name, report in kernels.items():
    others = {v: r for v, r in before.get(name, {}).items() if v != version}
    kernels[name] = dict(sorted((others | report).items()))
  # What this version does not have, others may; all of a version are written at once.
  for name, reports in before.items():
    kept = {v: r for v, r in reports.items() if v != version or sys.argv[1:]}
    if name not in kernels and kept:
      kernels[name] = kept
  print(json.dumps({"target": "sm_90a", "kernels": kernels}, indent=1))
