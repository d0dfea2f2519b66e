"""How FP8 products accumulate: the recipes' values, the program that XLA gets and makes of it, and
the check that reads it back.

A CPU adds in float32 whatever it is asked for, so that only programs tell here: the lowered one,
and (marker aot) the one compiled for an H200 without a GPU.
"""

import dataclasses
import json
import re
import types

import aot_harness
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import HOPPER

from fp8jax.compiled import fp8_gemms, hlo
from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import reference, xla
from fp8jax.ops import dots
from fp8jax.ops import site as site_lib
from fp8jax.quantization import quantize
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import PASSES, Accumulation, Gemm, Recipe, accumulate_name
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.quant import Hadamard
from fp8jax.run import start as run_start

# As the sources have it. Transformer Engine 2.x: recipe.MMParams, fp8_gemm_fprop False, dgrad and
# wgrad True; 128 by definition of Float8BlockScaling. torchao: Float8LinearConfig's defaults, which
# its rowwise recipes leave alone. MS-AMP: use_split_accumulator in backward.
TENSOR = ("fast", "precise", "precise")
WANTED = {
  "tensor_current": TENSOR,
  "tensor_delayed": TENSOR,
  "tensor_current_e5m2": ("fast", "precise", None),
  "tensor_delayed_latest": TENSOR,
  "e4m3_static": TENSOR,
  "fp8lm": TENSOR,
  "rowwise": TENSOR,
  "rowwise_gw_hp": ("fast", "precise", None),
  "mxfp8": ("32",) * 3,
  "nvfp4": ("16",) * 3,
  "nvfp4_sr_rht": ("16",) * 3,
  "bf16": (None,) * 3,
} | {f"block_128{suffix}": ("128",) * 3 for suffix in ("", "_pow2", "_hybrid")}
PRECISION = {"fast": "DEFAULT", "precise": "HIGHEST"}  # XLA's


def test_named_recipes_accumulate_as_their_sources():
  found = {
    name: tuple(accumulate_name(g.accumulate) if g.is_quantized else None for g in gemms)
    for name, r in RECIPES.items()
    for gemms in [(r.fwd, r.dgrad, r.wgrad)]
  }
  assert found == WANTED


def _three(recipe):
  """y, dx, dw of a linear layer as XLA multiplies it."""
  site = site_lib.single(recipe, matmul="xla")

  def run(x, w, g):
    y, pull = jax.vjp(lambda x, w: dots.dot("TD,DF->TF", x, w, site), x, w)
    return y, *pull(g)

  return run


# --- the program that XLA gets -------------------------------------------------------------------


def _asked_for(recipe: str) -> dict[str, str]:
  """{pass: operand precision} of the FP8 dots in the lowered program."""
  shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 32), (32, 48), (64, 48))]
  text = jax.jit(_three(recipe)).lower(*shapes).as_text("hlo", debug_info=True)
  dtypes = dict(re.findall(r"^\s+(?:ROOT )?(\S+) = (\w+)\[", text, re.M))
  found = {}
  for operands, rest in re.findall(r" dot\(([^)]*)\)(.*)", text):
    if all(dtypes[name].startswith("f8e") for name in operands.split(", ")):
      listed = re.search(r"operand_precision=\{(\w+),\1\}", rest)
      found[re.search(r"dot:(\w+)", rest)[1]] = listed[1].upper() if listed else "DEFAULT"
  return found


@pytest.mark.parametrize("recipe", ["tensor_current", "fp8lm", "tensor_delayed(accumulate=fast)"])
def test_xla_is_asked_for_the_recipes_accumulation(recipe):
  passes = ("fast",) * 3 if "(" in recipe else WANTED[recipe]
  assert _asked_for(recipe) == dict(zip(PASSES, (PRECISION[p] for p in passes)))


def test_a_default_precision_of_jax_does_not_change_fast_accumulation():
  with jax.default_matmul_precision("highest"):
    assert _asked_for("rowwise(accumulate=fast)") == dict.fromkeys(PASSES, "DEFAULT")


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_on_a_cpu_the_sums_are_the_same(rng, backend):
  a, b = (jnp.asarray(rng.standard_normal((16, 640)), jnp.float32) for _ in range(2))
  quant = RECIPES["tensor_current"].fwd.lhs
  made = [quantize.quantize(x, quant) for x in (a, b)]
  fast, precise = (
    gemm_api.scaled_matmul(*made, accumulate=how, backend=backend) for how in Accumulation
  )
  np.testing.assert_array_equal(fast, precise)


# --- a recipe with another accumulation ----------------------------------------------------------


def _named(name: str) -> list[str]:
  recipe = rules.recipe_by_name(name)
  assert (
    recipe.name == name and Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
  )
  return [accumulate_name(getattr(recipe, p).accumulate) for p in PASSES]


def test_a_recipes_name_may_say_how_it_accumulates():
  assert _named("tensor_current(accumulate=fast)") == ["fast"] * 3
  assert _named("rowwise(accumulate=precise/fast/128)") == ["precise", "fast", "128"]
  assert _named("rowwise_gw_hp(accumulate=fast)") == ["fast", "fast", "precise"]  # the last is wide
  assert _named("block_128(accumulate=64)") == ["64"] * 3
  name = "tensor_delayed(steps=16, accumulate=fast, margin=1)"
  assert _named(name) == ["fast"] * 3
  source = rules.recipe_by_name(name).fwd.lhs.source
  assert (source.steps, source.margin) == (16, 1)


@pytest.mark.parametrize(
  "name, message",
  [
    ("block_128(accumulate=fast)", "accumulate must be a divisor of 128; got accumulate=fast"),
    ("block_128(accumulate=96)", "accumulate must be a divisor of 128; got accumulate=96"),
    ("rowwise(accumulate=0)", "accumulate=0 must be Accumulation.FAST"),
    ("rowwise(accumulate=fast/fast)", "'accumulate=fast/fast' is none of"),
    ("rowwise(accumulate=slow)", "accumulate=fast, accumulate=precise, accumulate=N"),
  ],
)
def test_an_accumulation_that_a_recipe_cannot_have_is_refused(name, message):
  with pytest.raises(ValueError, match=re.escape(f"recipe {name!r}: ") + ".*" + re.escape(message)):
    rules.recipe_by_name(name)


def test_the_compute_dtype_has_no_accumulation_to_choose():
  with pytest.raises(ValueError, match="the compute dtype accumulates in float32"):
    Gemm(accumulate=Accumulation.FAST)


def test_a_description_without_accumulation_is_what_xla_did():
  """Up to this version: null, with which XLA accumulated fast."""
  old = RECIPES["rowwise_gw_hp"].to_dict()
  for p in PASSES:
    old[p]["accumulate"] = None
  found = Recipe.from_dict(old)
  assert [getattr(found, p).accumulate.value for p in PASSES] == ["fast", "fast", "precise"]


# --- which backend does which --------------------------------------------------------------------


@pytest.mark.parametrize("how", [*Accumulation, 128])
def test_backends_refuse_an_accumulation_that_is_not_theirs(how):
  quant = RECIPES["tensor_current"].fwd.lhs
  problem = choose.GemmProblem(256, 256, 256, Gemm(quant, quant, how), HOPPER)
  refused = {name: module.supports(problem) for name, module in gemm_api.BACKENDS.items()}
  assert "128" in refused["mosaic_sm90"]
  for name in ("xla", "xla_sm90"):
    assert (refused[name] is None) == isinstance(how, Accumulation)
  assert (refused["reference"] is None) == (how is not Accumulation.FAST)
  if how is Accumulation.FAST:
    assert "accumulate=precise" in refused["reference"]
    on_cpu = dataclasses.replace(problem, device=choose.Device("cpu"))
    assert gemm_api.BACKENDS["reference"].supports(on_cpu) is None
  rotated = dataclasses.replace(quant, transform=Hadamard(128))
  changed = dataclasses.replace(problem, gemm=Gemm(rotated, rotated, Accumulation.FAST))
  assert "its quantizer" in gemm_api.BACKENDS["xla_sm90"].supports(changed)
  assert gemm_api.BACKENDS["xla"].supports(changed) is None
  block = RECIPES["block_128"].fwd
  other = dataclasses.replace(block, accumulate=64)
  problem = choose.GemmProblem(256, 256, 256, other, HOPPER)
  assert "accumulate is 64" in gemm_api.BACKENDS["mosaic_sm90"].supports(problem)


# --- read back -----------------------------------------------------------------------------------


def test_a_lowered_program_that_accumulates_otherwise_is_refused(monkeypatch):
  """As all did before recipes said how: XLA's default, for a gradient that should be precise."""

  def default(a, b, accumulate, out_dtype):
    del accumulate
    return xla.scaled_matmul(a, b, Accumulation.FAST, out_dtype)

  broken = types.SimpleNamespace(**(vars(xla) | {"scaled_matmul": default}))
  monkeypatch.setitem(gemm_api.BACKENDS, "default", broken)

  def change(site):
    chosen = site.backends[:2] + ("default",)
    return dataclasses.replace(site, backends=chosen) if site.name == "layers/mlp/up" else site

  spec = harness.debug_plan("tensor_current")
  with pytest.raises(fp8_gemms.NotFp8) as e:
    harness.strict(spec, lambda sites: site_lib.tree_map(change, sites))
  m = str(e.value)
  assert m.startswith("layers/mlp/up wgrad: recipe 'tensor_current' accumulates 'precise' and ")
  assert "accumulates 'fast' (dot" in m and "(accumulate=fast) behind" in m and "So do" not in m


def test_partial_sums_that_are_too_long_are_refused(monkeypatch):
  monkeypatch.setattr(reference, "step_of", lambda accumulate: 192)
  with pytest.raises(fp8_gemms.NotFp8) as e:
    harness.strict(harness.debug_plan("block_128"))
  assert "accumulates '128' and the program's FP8 GEMM accumulates 192 products in one" in str(
    e.value
  )


def _compiled(changes: dict):
  """A program for Hopper with every planned product, some of which accumulate otherwise."""
  spec = harness.debug_plan(
    "tensor_current", device=HOPPER, precision__compute_dtype="float32", memory__remat_policy="full"
  )
  calls = harness.planned_calls(spec)
  for key, precision in changes.items():
    calls[key] = dataclasses.replace(calls[key], precision=precision)
  return spec, harness.program_text(calls.values())


@pytest.mark.parametrize(
  "key, precision, there",
  [
    (hlo.GemmKey("layers/mlp/up", "dgrad"), "DEFAULT", "fast"),
    (hlo.GemmKey("layers/attn/q", "fwd", True), "HIGHEST", "precise"),
  ],
)
def test_a_compiled_program_that_accumulates_otherwise_is_refused(key, precision, there):
  with pytest.raises(fp8_gemms.NotFp8) as e:
    fp8_gemms.check(*_compiled({key: precision}))
  assert str(e.value).startswith(f"{key}: recipe 'tensor_current' accumulates ")
  assert f"accumulates {there!r} (cuBLASLt FP8, backend 'xla_sm90')" in str(e.value)


def test_an_algorithm_says_how_it_accumulates():
  spec, text = _compiled({})
  up = "layers/mlp/up:dgrad"
  for algorithm, is_refused in (
    ("ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM", True),
    ("ALG_DOT_F32", False),
  ):
    lines = [
      line.replace("ALG_UNSET", algorithm) if up in line else line for line in text.splitlines()
    ]
    rows = fp8_gemms.compare(spec, hlo.gemms("\n".join(lines), "gpu"))
    assert [str(r.key) for r in rows if not r.is_proven] == [up.replace(":", " ")] * is_refused


def test_stacked_sites_accumulate_as_the_stack_does():
  q, k, v = (hlo.GemmKey(f"layers/attn/{s}", "fwd") for s in "qkv")
  spec, _ = _compiled({})
  calls = harness.planned_calls(spec)
  n = sum(calls.pop(key).n for key in (k, v)) + calls[q].n
  calls[q] = dataclasses.replace(calls[q], n=n, precision="HIGHEST")
  rows = fp8_gemms.compare(spec, hlo.gemms(harness.program_text(calls.values()), "gpu"))
  assert [r.key for r in rows if not r.is_proven] == [k, q, v]
  assert all(r.is_multiplied for r in rows)


def test_the_table_of_sites_shows_it():
  changes = {"precision__rules": (("head", "bf16"), (".*", "rowwise_gw_hp")), "seq_len": 128}
  spec = harness.debug_plan(device=HOPPER, **changes)
  shown = {r["site"]: run_start.accumulation(r["definition"]) for r in run_start.site_rows(spec)}
  assert shown["head"] == "-" and shown["layers/mlp/up"] == "fast/precise/-"
  assert run_start.accumulation(RECIPES["block_128"].to_dict()) == "every 128"


# --- what XLA makes of it for an H200 ------------------------------------------------------------


def compiled_for_h200(recipes: list[str]) -> dict[str, list[list[str]]]:
  """{recipe: [pass, operand precision] of every __cublas$lt$matmul$f8}."""
  from jax.sharding import SingleDeviceSharding

  from fp8jax.compiled import aot

  device = aot.resolve(aot_harness.load("configs/base.py", {}), "h200:1")[1][0]
  put = SingleDeviceSharding(device)
  sizes = ((2048, 1024), (1024, 1536), (2048, 1536))
  arguments = [jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=put) for size in sizes]
  options = choose.compiler_options(HOPPER)
  found = {}
  for recipe in recipes:
    text = jax.jit(_three(recipe), compiler_options=options).lower(*arguments).compile().as_text()
    calls = [x for x in text.splitlines() if 'custom_call_target="__cublas$lt$matmul$f8"' in x]
    patterns = (r"dot:(\w+)", r'"operand_precision":\[([^]]*)')
    found[recipe] = [[re.search(p, call)[1] for p in patterns] for call in calls]
  return found


@pytest.mark.aot
def test_an_h200_accumulates_as_the_recipe_says():
  """HIGHEST reaches cuBLASLt, and costs no FP8 product."""
  names = ["tensor_current", "fp8lm", "e4m3_static", "rowwise", "rowwise_gw_hp"]
  others = ["tensor_delayed(accumulate=fast)", "rowwise(accumulate=precise)"]
  found = aot_harness.elsewhere(f"compiled_for_h200({names + others})", __file__)
  passes = {name: WANTED[name] for name in names} | dict(
    zip(others, (("fast",) * 3, ("precise",) * 3))
  )
  for name, wanted in passes.items():
    pairs = [(p, PRECISION[how]) for p, how in zip(PASSES, wanted) if how]
    assert sorted(found[name]) == sorted([p, f'"{how}","{how}"'] for p, how in pairs), name
