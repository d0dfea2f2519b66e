"""Steps compiled for H200s, without a GPU: what fits, and that FP8 is FP8. Needs the CUDA wheels:
make test-aot, or `pytest -m aot` for the slow ones too.

`PYTHONPATH=.:tests python tests/compiled/aot_test.py CONFIG[:arm] [--config.a.b=value...]` prints
the account of one config, the same with `--recipes CONFIG` a table of all recipes.
"""

import importlib.metadata
import json
import math
import pathlib
import re
import sys
import time

import aot_harness
import pytest
from aot_harness import EMULATED, REMAT, SMALL, configure_jax, load, lower, mixtures, prove


def _elsewhere(expression: str):
  return aot_harness.elsewhere(expression, __file__)


# --- the 7B model --------------------------------------------------------------------------------


def account(config_path: str, overrides: dict, gpu: str = "h200", num: int = 8) -> dict:
  """Compiles a config's train step; runs in a process of its own, since jax is configured there."""
  c = load(config_path, overrides)
  start = time.time()
  spec, lowered = lower(c, gpu, num)
  lowered_at = time.time()
  compiled = lowered.compile()
  text = compiled.as_text()
  memory = compiled.memory_analysis()
  # Started: (operands, results); elements of the largest matrix that each one gives.
  gathered = {}
  for result in re.findall(r"= \(\(?.*?\), \(?(.*?)\)?\) all-gather-start\(", text):
    for dtype, shape in re.findall(r"(\w+)\[([\d,]+)\]", result):
      size = 1
      for n in shape.split(","):
        size *= int(n)
      gathered[dtype] = gathered.get(dtype, 0) + size
  return {
    "seconds": {"lower": lowered_at - start, "compile": time.time() - lowered_at},
    "gib_per_gpu": {
      "arguments": memory.argument_size_in_bytes / 2**30,
      "outputs_not_aliased": (memory.output_size_in_bytes - memory.alias_size_in_bytes) / 2**30,
      "temporaries": memory.temp_size_in_bytes / 2**30,
    },
    "custom_calls": {
      name: len(re.findall(re.escape(name) + r'(?![$\w])', text))
      for name in ("__cublas$lt$matmul$f8", "__cublas$lt$matmul", "__cublas$gemm",
                   "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    },
    "elements_gathered": gathered,
    "proof": prove(spec, text),
    "text": text,
  }  # fmt: skip


def traffic(spec, compiled) -> dict[str, list[int]]:
  """{axis: [bytes of weights' gradients over it, those of them beside products]}."""
  from fp8jax.compiled import collectives

  rows, moved = collectives.account(compiled.as_text(), dict(spec.run.layout.mesh.shape)), {}
  for axis, kind in (("data", "all-reduce"), ("fsdp", "reduce-scatter")):
    own = [r for r in rows if (r.axes, r.kind, r.dtype) == ((axis,), kind, "f32")]
    moved[axis] = [sum(getattr(r, field) for r in own) for field in ("nbytes", "beside")]
  return moved


def in_flight(config_path: str, limits: tuple[int, ...]) -> list[dict]:
  """`traffic` and bytes of memory of a config's step, by mesh.collectives_in_flight."""
  from fp8jax.kernels import choose

  spec, lowered = lower(load(config_path, {}), "h200", 8)
  made = [lowered.compile(choose.compiler_options(spec.device, limit)) for limit in limits]
  return [traffic(spec, x) | {"memory": x.memory_analysis().temp_size_in_bytes} for x in made]


def _show(capsys, found: dict):
  with capsys.disabled():
    print(f"\n{found['table']}{found['refused']}")


SFT = [pytest.param(f"configs/sft_{size}.py:stage1", marks=pytest.mark.slow)
       for size in ("1p5b", "7b")]  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize("config", ["configs/cpt_7b.py", *SFT])
def test_infir2_fits_eight_h200_in_fp8(config, capsys):
  """Stage 2 of fine-tuning is the program of stage 1."""
  found = _elsewhere(f"account_without_text({config!r}, {{}})")
  proof = found.pop("proof")
  with capsys.disabled():
    print(json.dumps(found, indent=2))
  _show(capsys, proof)
  assert not proof["refused"] and proof["fp8"] == proof["planned"] > 0
  is_isolated = "sft" in config  # then attention is tokamax's
  assert (found["custom_calls"]["__cudnn$fmhaSoftmax"] > 0) != is_isolated
  if "7b" in config:  # --fp8-param-gather: 16 bits are of embedding and head alone
    gathered = found["elements_gathered"]
    assert gathered["u8"] > 0 and gathered["bf16"] == 152_064 * 3584
  assert sum(found["gib_per_gpu"].values()) < 141e9 / 2**30


@pytest.mark.aot
def test_gradients_travel_once_a_step_over_data_and_with_eight_in_flight_beside_products():
  one, eight = _elsewhere("in_flight('configs/cpt_7b.py', (1, 8))")
  for moved in (one, eight):
    # Of 30.5 GB of float32 in four shards a ring of two receives as much once; over fsdp 16 times.
    assert moved["data"][0] < 8e9
    assert moved["fsdp"][0] == pytest.approx(339.4e9, rel=0.01)
  assert one["fsdp"][1] > 0.5 * one["fsdp"][0]
  assert eight["fsdp"][1] > 0.7 * eight["fsdp"][0]
  assert eight["memory"] < 1.02 * one["memory"]


def account_without_text(*args) -> dict:
  return {k: v for k, v in account(*args).items() if k != "text"}


# --- every recipe --------------------------------------------------------------------------------


# All weights of layers have one shape: a kernel is compiled once per shape, most of the time.
ONE_SHAPE = {"model.intermediate_size": 3072, "model.num_heads": 24, "model.num_kv_heads": 24}


def matmul_of(*names: str) -> str:
  """What kernels.matmul must be for recipes on Hopper."""
  return "reference" if set(names) & set(EMULATED) else "auto"


def small(
  recipe_of: dict[str, str], remat: str, num: int, change=lambda s: s, gpu="h200", shape=None,
  **options,
) -> dict:  # fmt: skip
  """The proof of a small model with these recipes by site, bf16 elsewhere."""
  rules = tuple((f"layers/.*/{site}", recipe) for site, recipe in recipe_of.items())
  changes = {"precision.rules": (*rules, (".*", "bf16")), "memory.remat_policy": remat}
  changes |= {"global_batch": SMALL["global_batch"] * num, "eval.batch": num}
  changes |= {"kernels.matmul": matmul_of(*recipe_of.values())}
  spec, lowered = lower(load("configs/base.py", SMALL | (shape or {}) | changes), gpu, num, change)
  return prove(spec, lowered.compile(options).as_text())


def small_all(remat: str, emulated: bool) -> list[dict]:
  """The first with several shapes, by which its sites can be told apart."""
  return [
    small(recipe_of, remat, REMAT[remat], shape=ONE_SHAPE if n else None)
    for n, recipe_of in enumerate(mixtures(remat))
    if emulated == bool(set(recipe_of.values()) & set(EMULATED))
  ]


@pytest.mark.aot
@pytest.mark.parametrize("remat, emulated", [
  ("full", False), *(pytest.param(*case, marks=pytest.mark.slow)
                     for case in (("full", True), ("none", False), ("none", True))),
])  # fmt: skip
def test_every_recipe_runs_in_fp8_on_h200(remat, emulated, capsys):
  """Those that no Hopper kernel multiplies take half of the time and are in the slow suite."""
  assert (all_found := _elsewhere(f"small_all({remat!r}, {emulated})"))
  for found in all_found:
    _show(capsys, found)
    assert not found["refused"] and found["fp8"] == found["planned"] > 0


def small_broken() -> dict:
  """One product of one site dequantises its operands before it multiplies them."""
  import harness

  # What shares an input is stacked: the proof tells it apart.
  recipe_of = {"attn/.*": "tensor_current", "mlp/.*": "block_128"}
  with pytest.MonkeyPatch.context() as monkeypatch:

    def change(sites):
      return harness.with_dequantized_product(sites, "layers/mlp/up", "dgrad", monkeypatch)

    return small(recipe_of, "none", 1, change)


@pytest.mark.aot
def test_a_site_that_falls_back_is_caught_on_h200(capsys):
  found = _elsewhere("small_broken()")
  _show(capsys, found)
  assert found["refused"].startswith("layers/mlp/up dgrad: the plan has ")
  assert "unquantized ones, the first f" in found["refused"] and "So do" not in found["refused"]


@pytest.mark.aot
@pytest.mark.slow
def test_triton_that_widens_its_operands_is_caught_on_h200(capsys):
  """The tiles of a compilation without a GPU to choose them are too small for FP8."""
  options = {"xla_gpu_enable_triton_gemm": True}
  found = _elsewhere(f"small({{'mlp/.*': 'tensor_current'}}, 'none', 1, **{options})")
  _show(capsys, found)
  assert "too small for Hopper's FP8 instruction" in found["refused"]
  assert found["fp8"] == 0


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("gpu, recipe", [
  ("b200", "tensor_current"), ("b200", "rowwise"), ("l4", "tensor_current"),
  ("rtx4090", "rowwise"), ("rtx5090", "tensor_current"), ("rtx5090", "rowwise"),
  ("l4", "tensor_delayed"), ("rtx4090", "tensor_current_e5m2"), ("rtx5090", "fp8lm"),
])  # fmt: skip
def test_scales_constant_along_k_run_in_fp8_next_to_hopper(capsys, gpu, recipe):
  """All quantized products by cuBLASLt, which is given codes and the constant 1 for a scale.

  Of which generation of Blackwell does therefore not matter: the limit of pytorch#192707 is of
  scales per row that cuBLASLt multiplies itself. Which of its kernels, only the GPU would tell.
  """
  found = _elsewhere(f"small({{'.*': {recipe!r}}}, 'none', 1, gpu={gpu!r})")
  _show(capsys, found)
  assert not found["refused"] and found["fp8"] == found["planned"] > 0
  assert found["by"] == ["cuBLASLt FP8"]  # __cublas$lt$matmul$f8


def on_a100() -> dict:
  """Products, kernels and 8-bit arrays of the BF16 step that an A100 is advised, and the recipes
  that it is not refused."""
  from fp8jax.compiled import hlo, memory
  from fp8jax.errors import ConfigError
  from fp8jax.recipe import library
  from fp8jax.step import train_step

  changes = {
    "precision.rules": ((".*", "bf16"),), "memory.remat_policy": "none", "eval.batch": 1,
    "optim.moment_format": "coat", "optim.master_format": "bf16_remainder",
    "memory.save_norm_inputs": "e4m3_16", "memory.save_gate_up": "e4m3_16",
  }  # fmt: skip
  spec, lowered = lower(load("configs/base.py", SMALL | changes), "a100", 1)
  text = lowered.compile().as_text()
  given = re.findall(r"f8e4m3fn\[([\d,]+)\][^=]*parameter\(", text[text.index("\nENTRY") :])
  params = train_step.abstract_state(spec, 1).params
  accepted = []
  for name in (n for n, recipe in library.RECIPES.items() if recipe.is_quantized):
    try:
      lower(load("configs/base.py", SMALL | {"precision.rules": ((".*", name),)}), "a100", 1)
      accepted.append(name)
    except ConfigError as e:
      assert "FP8 needs compute capability 8.9 or newer and this device has 8.0" in str(e), e
  return {
    "products": [[p.key and p.key.site, p.kernel, p.text] for p in hlo.gemms(text, "gpu")],
    "calls": sorted(set(re.findall(r'custom_call_target="([^"]*)"', text))),
    "moments": sum(math.prod(map(int, dims.split(","))) for dims in given),
    "saved": memory.saved_by_layers(text, spec, params),
    "accepted": accepted,
  }


@pytest.mark.aot
@pytest.mark.slow
def test_an_a100_multiplies_in_bf16_keeps_bytes_in_8_bits_and_is_refused_fp8():
  found = _elsewhere("on_a100()")
  assert not found["accepted"]
  assert not [name for name in found["calls"] if name.endswith("$f8") or "mosaic" in name]
  of_layers = [p for p in found["products"] if (p[0] or "").startswith("layers/")]
  assert {site.removeprefix("layers/") for site, _, _ in of_layers} >= {"attn/q", "mlp/down"}
  assert {kernel for _, kernel, _ in found["products"]} == {"cuBLASLt"}
  assert all(re.match(r"bf16\S+ x bf16", text) for _, _, text in of_layers)
  hidden, wide, layers, tokens = 3072, 4608, 2, 9 * 256
  # Inputs of two norms, gate and up; q, k, v, o, gate, up, down and the embedding, twice.
  in_8_bits = sum(n for name, n in found["saved"].items() if name.startswith("f8e4m3fn"))
  assert in_8_bits == layers * tokens * (2 * hidden + 2 * wide)
  weights = layers * hidden * (2 * 512 + 2 * 256 + 3 * wide) + 1024 * hidden
  assert found["moments"] == 2 * weights


def narrow_work(recipe: str, num: int = 1) -> dict:
  """{instruction: times in the text} of what gives FP8, or moves the bytes that it is gathered as,
  in a small model's step on so many H200s, and of the kernels that are called; and what reads a
  matrix for its maximum."""
  import collections

  changes = {
    "precision.rules": (("layers/.*", recipe), (".*", "bf16")),
    "memory.remat_policy": "none",
    "kernels.attention": "cudnn",  # tokamax's kernels would be counted with ours
    "kernels.optimizer": "xla",  # so would AdamW's
  }
  changes |= {"global_batch": SMALL["global_batch"] * num, "eval.batch": num}
  _, lowered = lower(load("configs/base.py", SMALL | changes), "h200", num)
  gives, kernels = collections.Counter(), collections.Counter()
  text = lowered.compile().as_text()
  for line in text.splitlines():
    made = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(", line[:2000])
    if not made or made[2] in ("parameter", "get-tuple-element", "bitcast", "tuple", "while"):
      continue
    if 'custom_call_target="mosaic_gpu' in line:
      kernels[re.search(r"kernel_name = \"?(\w+)|(quantize_fp8|scaled_matmul)", line)[0]] += 1
    # A kernel that reads its slice of the layers' weights by itself is called in such a fusion.
    elif "calls=%dynamic-slice-fusion" in line:
      continue
    # Bytes: a collective, and what cuDNN scribbles on, are none of ours.
    elif re.search(r"\bf8e\w+\[\d", made[1]) or (
      re.search(r"\bu8\[\d", made[1])
      and made[2] not in ("all-gather-start", "all-gather-done", "custom-call")
    ):
      gives[f"{made[1][:60]} {made[2]}"] += 1
  return {"gives": dict(gives), "kernels": dict(kernels), "maxima": maxima(text)}


def maxima(text: str) -> list[str]:
  """Fusions that reduce an array as large as an activation by maximum."""
  sizes, found = {}, []
  for name, result, kind, operands, rest in re.findall(
    r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)(.*)$", text, re.M
  ):
    shapes = re.findall(r"\w+\[([\d,]+)\]", result)
    sizes[name] = max((math.prod(map(int, dims.split(","))) for dims in shapes), default=1)
    read = max(sizes.get(operand.strip(" %"), 1) for operand in operands.split(","))
    is_maximum = re.search(r'op_name="[^"]*/reduce_(max|or)"', rest)
    if kind == "fusion" and is_maximum and read > SMALL["model.hidden_size"] * 1024:
      found.append(f"{name} of {operands}")
  return found


@pytest.mark.aot
@pytest.mark.slow
def test_nothing_stands_between_quantizer_and_gemm():
  """No transpose, copy or second cast of an FP8 matrix anywhere in the program."""
  found = _elsewhere("narrow_work('block_128')")
  assert not found["gives"], found
  # Two layers in one loop: 7 sites, of which q, k, v and gate, up share x; the gradients of gate
  # and up are made in one reading.
  # Each product once: without choose.compiler_options jax 0.11 multiplies v, gate and up twice.
  assert found["kernels"] == {"scaled_matmul": 21, "quantize_fp8": 6 + 2 * 7 + 2 * 4}
  # What is watched comes out of the quantizer: x, w and g are not read again.
  assert not found["maxima"], found


@pytest.mark.aot
@pytest.mark.slow
def test_gathered_weights_are_multiplied_as_they_arrive():
  """Four devices, weights split along what half of the products contract: nothing is transposed."""
  found = _elsewhere("narrow_work('block_128', 4)")
  assert not found["gives"], found
  assert set(found["kernels"]) == {"scaled_matmul", "quantize_fp8"}


@pytest.mark.aot
@pytest.mark.slow
def test_nothing_is_transposed_before_cublas():
  found = _elsewhere("narrow_work('tensor_current')")
  # XLA stacks the operands of small GEMMs that share the other one, to multiply once.
  stacked = [line for line in found["gives"] if line.endswith(" concatenate")]
  assert len(found["gives"]) == 2 * len(stacked) == 6, found
  assert found["kernels"] == {"quantize_fp8": 7 + 2 * 7 + 2 * 4}


def amax_of_swiglu() -> list[list[str]]:
  """Results and operands of every fusion in silu(gate) * up and the scale of all of it, on H200."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import SingleDeviceSharding

  from fp8jax.compiled import aot
  from fp8jax.ops import prologue
  from fp8jax.quantization import quantize
  from fp8jax.recipe.library import TENSOR_CURRENT

  def both(gate, up):
    h = prologue.silu_mul(gate, up).value()
    return h, quantize.quantize(h, TENSOR_CURRENT.fwd.lhs, contraction=1).scale

  (device,) = aot.resolve(load("configs/base.py", SMALL | {"eval.batch": 1}), "h200:1")[1]
  x = jax.ShapeDtypeStruct((8192, 18944), jnp.bfloat16, sharding=SingleDeviceSharding(device))
  text = jax.jit(both).lower(x, x).compile().as_text()
  found = re.findall(r"= (.*?) fusion\((.*?)\)", text[text.index("\nENTRY") :])
  return [[re.sub(r"\{[^}]*\}", "", part) for part in pair] for pair in found]


@pytest.mark.aot
@pytest.mark.slow
def test_the_amax_of_a_tensor_begins_where_the_tensor_is_made():
  """COAT's group scaling: one pass gives silu(gate) * up and maxima, the next reads only these."""
  (first, _), *rest = _elsewhere("amax_of_swiglu()")
  assert re.search(r"\(.*bf16\[8192,18944\].*\)", first) and first.count("[") == 2, first
  assert rest and not any("8192,18944" in result for result, _ in rest)
  sizes = [int(n) for n in re.findall(r"\[(\d+)\]", first)]
  assert max(sizes) <= 18944


def updated_by(backend: str, num: int) -> dict:
  """What a small model's step on so many H200s does with the optimizer's state."""
  from fp8jax import params

  changes = {"global_batch": 8 * num, "eval.batch": num, "precision.rules": ((".*", "bf16"),)}
  changes |= {
    "optim.moment_format": "coat",
    "optim.master_format": "bf16_remainder",
    "memory.remat_policy": "none",
    "kernels.attention": "cudnn",  # tokamax's kernels would be counted with ours
  }
  changes |= {
    "optim.grad_format": "bf16_sr",
    "model.vocab_size": 2048,
    "mesh.tensor": num // 2 or 1,
  }
  c = load("configs/base.py", SMALL | changes | {"kernels.optimizer": backend})
  spec, lowered = lower(c, "h200", num)
  compiled = lowered.compile()
  text, memory = compiled.as_text(), compiled.memory_analysis()
  return {
    "temporaries": memory.temp_size_in_bytes,
    "calls": len(re.findall(r'custom_call_target="mosaic_gpu', text)),
    "matrices": sum(leaf.is_large for leaf in params.flatten(spec.leaves).values()),
    # Nothing else in this program has these dtypes: second halves of masters, and moments.
    "copies": re.findall(r"= ((?:s16|f8e4m3fn)\[\S*) (?:copy|transpose|copy-start)\(", text),
  }


@pytest.mark.aot
@pytest.mark.slow
def test_a_step_calls_the_optimizers_kernel_once_per_matrix():
  """In place: nothing that it moves is copied first."""
  # The XLA of jax 0.11 has the embedding's gradient wait in float32.
  longer = 4 * 2048 * 3072 * importlib.metadata.version("jax").startswith("0.11.")
  for num in (1, 4):
    found = _elsewhere(f"updated_by('mosaic_sm90', {num})")
    assert found["calls"] == found["matrices"] == 8 and not found["copies"], found
    if num == 1:  # on a mesh a gradient is laid in rows first, once per matrix in turn
      assert found["temporaries"] <= _elsewhere("updated_by('xla', 1)")["temporaries"] + longer


def table_of_recipes(config_path: str):
  """Markdown: every recipe of a config's model on eight H200s, as the compiled step has it."""
  from fp8jax.recipe import library

  print("| recipe | FP8 GEMMs found/planned | by | arguments GiB | temporaries GiB |")
  print("|---|---|---|---|---|")
  for name in (r for r in library.RECIPES if library.RECIPES[r].is_quantized):
    changes = {"kernels.matmul": matmul_of(name)}
    found = _elsewhere(f"account_without_text({f'{config_path}:{name}'!r}, {changes})")
    proof, gib = found["proof"], found["gib_per_gpu"]
    count = f"{proof['fp8']}/{proof['planned']}" + f" {proof['refused']}".rstrip()
    sizes = f"{gib['arguments']:.1f} | {gib['temporaries']:.1f}"
    print(f"| {name} | {count} | {', '.join(proof['by'])} | {sizes} |", flush=True)


if __name__ == "__main__" and sys.argv[1] == "--recipes":
  configure_jax()
  table_of_recipes(sys.argv[2])
elif __name__ == "__main__":
  configure_jax()
  changes = dict(a.removeprefix("--config.").split("=", 1) for a in sys.argv[2:])
  result = account(sys.argv[1], {k: __import__("ast").literal_eval(v) for k, v in changes.items()})
  pathlib.Path("step.hlo").write_text(result.pop("text"))
  proof = result.pop("proof")
  print(json.dumps(result, indent=2))
  print(f"{proof['table']}{proof['refused'] or 'every FP8 GEMM of the plan is there'}")
