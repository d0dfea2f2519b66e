"""Whether the FP8 GEMMs of a step are those of the spec: every recipe, and what must be refused.

On CPU the program that XLA is handed is read. What XLA makes of it on GPU is read from programs
written out here, line by line as XLA prints them, and from compiled ones in aot_test.py.
"""

import dataclasses
import io
from typing import Any

import aot_harness
import harness
import pytest
import rich.console
from harness import HOPPER
from jax.extend import core as jex_core

from fp8jax import formats
from fp8jax.compiled import expected_gemms, fp8_gemms, hlo
from fp8jax.formats import E4M3, E5M2
from fp8jax.kernels.gemm import xla
from fp8jax.recipe import library, papers
from fp8jax.recipe.gemm import PASSES, Gemm, Recipe
from fp8jax.recipe.quant import WHOLE, Quant, Scale
from fp8jax.step import train_step

NARROW = [name for name, recipe in library.RECIPES.items() if recipe.is_quantized]


def _narrow_dots(jaxpr, times=1) -> int:
  """FP8 dots that a jaxpr executes: a count that owes nothing to XLA, to names or to the spec."""
  total = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      total += times * all(v.aval.dtype.itemsize == 1 for v in eqn.invars)
    runs = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
    total += sum(_narrow_dots(sub, runs) for sub in jex_core.jaxprs_in_params(eqn.params))
  return total


def _counts(rows, site: str) -> dict[str, int]:
  """{"fwd", "fwd again", ...: FP8 GEMMs found} of a site."""
  return {r.key.product + " again" * r.key.is_recompute: r.fp8 for r in rows if r.key.site == site}


# --- what is lowered -----------------------------------------------------------------------------


def _proven(rules) -> list:
  """The rows of a step under these rules: as many FP8 GEMMs as its jaxpr executes."""
  spec = harness.debug_plan(precision__rules=rules, memory__remat_policy="full")
  state, batch, sites = harness.step_arguments(spec)
  step_fn = train_step.make_step(spec)
  rows = fp8_gemms.strict(spec, step_fn, state, batch, sites)
  traced = step_fn.trace(state, batch, sites).jaxpr
  assert sum(row.expected for row in rows) == _narrow_dots(traced.jaxpr)
  assert all(row.fp8 == row.expected for row in rows)
  return rows


def _is_carried(name: str) -> bool:
  return any(xla.is_fp8(getattr(library.RECIPES[name], p)) for p in PASSES)


def _is_emulated(name: str) -> bool:
  uses = [q for quants in library.RECIPES[name].uses().values() for q in quants]
  return any(q.format not in (E4M3, E5M2) for q in uses)


@pytest.mark.parametrize("mixture", aot_harness.mixtures("full"), ids=lambda m: m["attn/q"])
def test_every_recipe_is_proven_beside_others(mixture):
  """A recipe per site: three programs hold them all."""
  rows = _proven((*((f".*/{s}", name) for s, name in mixture.items()), ("head", "bf16")))
  for site, name in mixture.items():
    own = [row for row in rows if row.key.site == f"layers/{site}"]
    assert {row.recipe for row in own} == {name}
    assert (sum(row.expected for row in own) > 0) == _is_carried(name)
    assert ("(emulated)" in _printed(own)) == _is_emulated(name)


@pytest.mark.slow  # recipes beside others: above
@pytest.mark.parametrize("name", NARROW)
def test_every_recipe_is_proven(name):
  rows = _proven((("head", "bf16"), (".*", name)))
  assert (sum(row.expected for row in rows) > 0) == _is_carried(name)
  assert ("(emulated)" in _printed(rows)) == _is_emulated(name)


def _emulated(name: str, monkeypatch, **changes):
  """A spec whose recipe multiplies rows of a format that no matrix unit has, "e3m2" or "int8"."""
  quant = Quant(formats.by_name(name), (1, WHOLE), Scale.POW2)
  recipe = f"{name}_throughout"
  monkeypatch.setitem(library.RECIPES, recipe, Recipe(recipe, *(Gemm(quant, quant),) * 3))
  return harness.debug_plan(precision__rules=(("layers/.*", recipe), ("head", "bf16")), **changes)


def test_a_format_that_float32_carries_has_no_fp8_gemm(monkeypatch):
  spec = _emulated("int8", monkeypatch)
  rows = harness.strict(spec)
  sites = [row for row in rows if row.recipe == "int8_throughout"]
  assert len(sites) >= 7 * 3 and all(row.is_emulated and row.unquantized for row in sites)
  assert {row.expected for row in rows} == {row.fp8 for row in rows} == {0}
  printed = _printed(rows)
  assert "int8_throughout (emulated)" in printed and "2 emulated" in printed and "0/" not in printed


@pytest.mark.slow
def test_a_format_that_fp8_carries_is_counted_and_named_emulated(monkeypatch):
  rows = harness.strict(_emulated("e3m2", monkeypatch))
  sites = [row for row in rows if row.recipe == "e3m2_throughout"]
  assert all(row.is_emulated and row.fp8 == row.expected > 0 for row in sites)
  assert "e3m2_throughout (emulated)" in _printed(rows)


def test_on_a_gpu_emulation_is_asked_for_and_is_never_taken_for_fp8(monkeypatch):
  with pytest.raises(ValueError, match="cuBLASLt does not multiply int8 by int8") as e:
    _emulated("int8", monkeypatch, device=HOPPER)
  assert "kernels.matmul='reference' emulates every recipe" in str(e.value)
  spec = _emulated("int8", monkeypatch, device=HOPPER, kernels__matmul="reference")
  fp8_gemms.check(spec, harness.program_text([harness.Call(Q, 256, 192, 192, 2, dtype="f32")]))
  said = _refused(spec, [harness.Call(Q, 256, 192, 192, 2)])
  assert said.startswith("layers/attn/q fwd: the program has 2 FP8 GEMMs that the plan does not")


# What Hopper's FP8 GEMMs multiply: E4M3, E5M2, and E2M1 as E4M3, under scales that they know.
HOPPERS = (
  "bf16_dge", "fp4_w4a8", "fp4_w4a4", "fp4_dge", "fp4_occ", "fp4", "halo_fp4_2", "halo_fp8_0",
  "fp8_unscaled",
  "block_128_requantized", "unit_scaling", "unit_scaling_wide", "unit_head", "munit_scaling",
  "munit_scaling_wide", "munit_head",
)  # fmt: skip


@pytest.mark.parametrize("name", papers.PAPERS)
def test_on_hopper_a_papers_recipe_has_its_kernels_or_is_refused_with_the_way_out(name):
  changes: dict[str, Any] = {"precision__rules": (("layers/.*", name), ("head", "bf16"))}
  changes["device"] = HOPPER
  if name in HOPPERS:
    rows = expected_gemms.expected(harness.debug_plan(**changes))
    assert {row.backend for row in rows} <= {"xla", "xla_sm90", "mosaic_sm90"}
    return
  with pytest.raises(ValueError, match="no FP8 kernel for sm_90 runs ") as e:
    harness.debug_plan(**changes)
  assert "kernels.matmul='reference' emulates every recipe" in str(e.value)


@pytest.mark.parametrize("remat", aot_harness.REMAT)
def test_every_recipe_is_compiled_for_h200_too(remat):
  compiled = [
    mixture[site] for mixture in aot_harness.mixtures(remat) for site in aot_harness.SITES
  ]
  assert set(compiled) == set(NARROW)


GROUPS = "e4m3_16"
# (policy, what waits in a narrow copy, sites of a layer whose forward product is repeated).
REPEATED = [
  # Slow: the default, whose rows the tests below count.
  pytest.param("none", {}, "", marks=pytest.mark.slow),
  pytest.param("linears", {}, "attn/o", marks=pytest.mark.slow),
  pytest.param("operands", {}, "attn/o", marks=pytest.mark.slow),
  ("full", {}, "attn/k attn/o attn/q attn/v mlp/gate mlp/up"),
  ("linears", {"memory__save_norm_inputs": GROUPS}, ""),
  pytest.param(
    "full",
    {"memory__save_layer_inputs": GROUPS},
    "attn/k attn/o attn/q attn/v mlp/gate mlp/up",
    marks=pytest.mark.slow,
  ),
]


@pytest.mark.parametrize("remat, copies, repeated", REPEATED, ids=str)
def test_recomputed_products_are_counted(remat, copies, repeated):
  save = "none" if remat == "linears" else "quantized"  # refused with "linears"
  memory = dict(memory__save_gemm_inputs=save, memory__remat_policy=remat)
  rows = harness.strict(harness.debug_plan("block_128", **memory, **copies))
  repeated = repeated.split()
  assert {r.key.site for r in rows if r.key.is_recompute} == {f"layers/{s}" for s in repeated}
  # Two layers; steps of 128 along K: 192 forward, 128 backward, 256 tokens.
  again = {"fwd again": 4} if "mlp/gate" in repeated else {}
  assert _counts(rows, "layers/attn/q") == {"fwd": 4, **again, "dgrad": 2, "wgrad": 4}


def test_microbatches_and_chunks_of_the_head_are_counted():
  rules = ((".*", "block_128"),)
  changes = dict(precision__rules=rules, grad_accum_steps=2, seq_len=256, memory__loss_chunk=96)
  rows = harness.strict(harness.debug_plan(**changes))
  # Of 256 positions 96, 96 and 64, in two sequences: K = 192 tokens, 192 and 128.
  assert _counts(rows, "head") == {"fwd": 2 * 3 * 2, "dgrad": 2 * 3 * 4, "wgrad": 2 * (2 + 2 + 1)}
  assert _counts(rows, "layers/attn/q") == {"fwd": 8, "dgrad": 4, "wgrad": 4 * 4}


def test_layers_that_multiply_differently_are_told_apart():
  rows = harness.strict(harness.debug_plan("block_128", precision__first_bf16=1))
  assert _counts(rows, "layers/0-0/attn/q") == {"fwd": 0, "dgrad": 0, "wgrad": 0}
  assert _counts(rows, "layers/1-1/attn/q") == {"fwd": 2, "dgrad": 1, "wgrad": 2}
  assert [r.unquantized for r in rows if r.key.site == "layers/0-0/attn/q"] == [1, 1, 1]
  harness.strict(
    harness.debug_plan("block_128", precision__first_bf16=1, memory__remat_policy="full")
  )


def test_products_on_a_mesh_have_the_sizes_of_one_device():
  sizes = dict(intermediate_size=512, num_heads=8, num_kv_heads=8)
  changes = {f"model__{k}": v for k, v in sizes.items()} | dict(mesh__fsdp=2, mesh__tensor=2)
  rows = harness.strict(harness.debug_plan("block_128", devices=4, global_batch=8, **changes))
  found = {r.key.product: r.size for r in rows if r.key.site == "layers/mlp/down"}
  assert found == {"fwd": (256, 192, 256), "dgrad": (256, 256, 192), "wgrad": (256, 192, 256)}
  assert _counts(rows, "layers/mlp/down") == {"fwd": 4, "dgrad": 4, "wgrad": 4}


# --- a site that is not FP8 ----------------------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
  "product", ["fwd", pytest.param("dgrad", marks=SLOW), pytest.param("wgrad", marks=SLOW)]
)
def test_a_site_that_multiplies_wide_is_named(product, monkeypatch):
  spec = harness.debug_plan("block_128", memory__remat_policy="full")
  with pytest.raises(fp8_gemms.NotFp8) as e:
    harness.strict(
      spec,
      lambda sites: harness.with_dequantized_product(sites, "layers/mlp/up", product, monkeypatch),
    )
  m = str(e.value)
  assert m.startswith(f"layers/mlp/up {product}: the plan has ")
  assert "2 unquantized ones, the first f32[" in m and "are dequantized before" in m
  # 'xla' cannot multiply in blocks.
  assert (
    "Fix: another recipe for this site in precision.rules, or precision.verify_fp8_gemms=False" in m
  )
  # The same product computed again, and nothing else.
  again = " So do 1 more: layers/mlp/up fwd (recompute)."
  assert m.endswith(again) if product == "fwd" else "So do" not in m


# --- what XLA makes of it on GPU -----------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_plan():
  changes = dict(precision__compute_dtype="float32", memory__remat_policy="full")
  return harness.debug_plan("tensor_current", device=HOPPER, **changes)


Q, K, V = (hlo.GemmKey(f"layers/attn/{s}", "fwd") for s in "qkv")


def test_a_compiled_program_is_proven(gpu_plan):
  rows = fp8_gemms.check(gpu_plan, harness.program_text(harness.planned_calls(gpu_plan).values()))
  # Seven sites: three products and, but for the last of a layer, the forward one again.
  assert [r.fp8 for r in rows if r.expected] == [2] * (7 * 3 + 6)


def _refused(spec, calls) -> str:
  with pytest.raises(fp8_gemms.NotFp8) as e:
    fp8_gemms.check(spec, harness.program_text(calls))
  return str(e.value)


@pytest.mark.parametrize("target", ["__cublas$lt$matmul", "__cublas$gemm"])
def test_a_product_in_16_bits_is_refused(gpu_plan, target):
  calls = harness.planned_calls(gpu_plan)
  calls[Q] = dataclasses.replace(calls[Q], dtype="bf16", target=target)
  m = _refused(gpu_plan, calls.values())
  assert (
    m.startswith("layers/attn/q fwd: ") and "2 unquantized ones, the first bf16[256,192] x " in m
  )
  assert "XLA did not match it" in m and "Fix: kernels.matmul='xla', " in m


def test_a_product_in_fp8_and_again_in_16_bits_is_refused(gpu_plan):
  calls = harness.planned_calls(gpu_plan)
  wide = dataclasses.replace(calls[Q], dtype="bf16", target="__cublas$lt$matmul")
  m = _refused(gpu_plan, [*calls.values(), wide])
  assert m.startswith("layers/attn/q fwd: ") and "has 2 FP8 ones and 2 unquantized ones" in m


def test_a_missing_product_is_refused(gpu_plan):
  calls = harness.planned_calls(gpu_plan)
  del calls[V]
  m = _refused(gpu_plan, calls.values())
  assert m.startswith("layers/attn/v fwd: ") and "and the program has nothing." in m


@pytest.mark.parametrize("change", [dict(times=1), dict(k=96), dict(times=3), dict(n=256)])
def test_work_that_differs_is_refused(gpu_plan, change):
  calls = harness.planned_calls(gpu_plan)
  calls[Q] = dataclasses.replace(calls[Q], **change)
  assert _refused(gpu_plan, calls.values()).startswith("layers/attn/q fwd: ")


def test_fp8_of_no_site_is_refused(gpu_plan):
  calls = [
    *harness.planned_calls(gpu_plan).values(),
    harness.Call(hlo.GemmKey("elsewhere", "fwd"), 64, 64, 64, 1),
  ]
  m = _refused(gpu_plan, calls)
  assert m.startswith("elsewhere fwd: the program has 1 FP8 GEMMs that the plan does not")


def test_an_unplanned_recomputation_is_refused(gpu_plan):
  down = hlo.GemmKey("layers/mlp/down", "fwd")
  calls = harness.planned_calls(gpu_plan)
  again = dataclasses.replace(calls[down], key=dataclasses.replace(down, is_recompute=True))
  m = _refused(gpu_plan, [*calls.values(), again])
  assert m.startswith("layers/mlp/down fwd (recompute): the program has 2 FP8 GEMMs that the plan")


def test_sites_stacked_into_one_product_are_told_apart(gpu_plan):
  calls = harness.planned_calls(gpu_plan)
  one = dataclasses.replace(calls[Q], n=sum(calls.pop(key).n for key in (Q, K, V)))
  rows = fp8_gemms.check(gpu_plan, harness.program_text([*calls.values(), one]))
  shared = {r.key: (r.fp8, r.shared) for r in rows if r.shared}
  assert shared == dict.fromkeys((Q, K, V), (2, "layers/attn/q"))
  # One of them less, and it proves none.
  less = dataclasses.replace(one, n=one.n - 64)
  assert "layers/attn/" in _refused(gpu_plan, [*calls.values(), less])
  # As much work in more calls is something else.
  more = dataclasses.replace(one, n=one.n // 2, times=4)
  assert "layers/attn/" in _refused(gpu_plan, [*calls.values(), more])


def test_sites_of_different_recipes_may_be_stacked():
  """Where they make their common input narrow alike."""
  rules = (("layers/.*/q", "rowwise"), ("head", "bf16"), (".*", "rowwise_gw_hp"))
  spec = harness.debug_plan(
    device=HOPPER, precision__compute_dtype="float32", precision__rules=rules
  )
  calls = harness.planned_calls(spec)
  one = dataclasses.replace(calls[K], n=sum(calls.pop(key).n for key in (Q, K, V)))
  rows = fp8_gemms.check(spec, harness.program_text([*calls.values(), one]))
  assert [r.key for r in rows if r.shared] == [K, Q, V]


def test_padding_to_multiples_of_16_is_the_plan(gpu_plan):
  spec = dataclasses.replace(
    gpu_plan, model=dataclasses.replace(gpu_plan.model, hidden_size=200, head_dim=30)
  )
  calls = harness.planned_calls(spec)
  q = calls[Q]
  assert q.n == 120
  calls[Q] = dataclasses.replace(q, n=128, k=208)
  assert fp8_gemms.check(spec, harness.program_text(calls.values()))
  calls[Q] = dataclasses.replace(q, n=144, k=208)
  _refused(spec, calls.values())


def test_a_single_layer_computes_forward_once_or_twice():
  """Its loop is unrolled, and XLA may see that the recomputation has been computed already."""
  changes = dict(
    precision__compute_dtype="float32", memory__remat_policy="full", precision__first_bf16=1
  )
  spec = harness.debug_plan("tensor_current", device=HOPPER, **changes)
  calls = harness.planned_calls(spec)
  q, k, v = (hlo.GemmKey(f"layers/1-1/attn/{s}", "fwd") for s in "qkv")
  again = dataclasses.replace(calls[q], key=dataclasses.replace(q, is_recompute=True))
  assert fp8_gemms.check(spec, harness.program_text(calls.values()))
  assert fp8_gemms.check(spec, harness.program_text([*calls.values(), again]))
  _refused(spec, [*calls.values(), again, again])
  # Stacked, computed once, and named as if computed again.
  n = sum(calls.pop(key).n for key in (q, k, v))
  stacked = dataclasses.replace(again, n=n)
  assert fp8_gemms.check(spec, harness.program_text([*calls.values(), stacked]))
  assert fp8_gemms.check(spec, harness.program_text([*calls.values(), stacked, stacked]))
  _refused(spec, [*calls.values(), dataclasses.replace(stacked, n=n - 64)])
  _refused(spec, [*calls.values(), stacked, stacked, stacked])


TRITON = """
%gemm (a: f8e4m3fn[256,64], b: f8e4m3fn[128,64]) -> f32[256,128] {{
  %a = f8e4m3fn[256,64]{{1,0}} parameter(0)
  %b = f8e4m3fn[128,64]{{1,0}} parameter(1)
  ROOT %d = f32[256,128]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}, metadata={{op_name="jit(f)/head:fwd/dot_general"}}, backend_config={{"sizes":["{k}"]}}
}}

ENTRY %main (x: f8e4m3fn[256,64], y: f8e4m3fn[128,64]) -> f32[256,128] {{
  %x = f8e4m3fn[256,64]{{1,0}} parameter(0)
  %y = f8e4m3fn[128,64]{{1,0}} parameter(1)
  ROOT %f = f32[256,128]{{1,0}} fusion(%x, %y), kind={kind}, calls=%gemm, metadata={{op_name="jit(f)/another:wgrad/add"}}, backend_config={{"fusion_backend_config":{{"kind":"{name}","block_level_fusion_config":{{"num_warps":"{warps}","output_tiles":[{{"sizes":["{m}","{n}"]}}]}}}}}}
}}
"""  # noqa: E501


@pytest.mark.parametrize(
  "m, n, k, warps, is_fp8",
  [
    (64, 16, 32, 4, True),
    (128, 128, 64, 8, True),
    (32, 64, 32, 4, False),
    (64, 8, 32, 4, False),
    (64, 64, 16, 4, False),
    (64, 64, 32, 2, False),
  ],
)
def test_triton_is_fp8_where_its_tiles_are_large_enough(m, n, k, warps, is_fp8):
  """As the PTX had it: wgmma with e4m3, or a conversion and mma with f16."""
  name = "__triton_nested_gemm_fusion"
  text = TRITON.format(m=m, n=n, k=k, warps=warps, name=name, kind="kCustom")
  (found,) = hlo.gemms(text, "gpu")
  assert (found.key, found.is_fp8) == (hlo.GemmKey("head", "fwd"), is_fp8)
  assert found.work == 256 * 128 * 64
  assert ("too small" in found.why) == (not is_fp8)


@pytest.mark.parametrize("m, n, is_fp8", [(16, 64, False), (64, 16, False), (64, 64, True)])
def test_tiles_of_a_transposed_product_suit_fp8_either_way_round(m, n, is_fp8):
  """Which side is wgmma's 64 rows is not known then: both have to be."""
  text = TRITON.format(m=m, n=n, k=32, warps=4, name="__triton_gemm", kind="kCustom")
  text = text.replace("%f = f32[256,128]", "%f = f32[128,256]")
  (found,) = hlo.gemms(text, "gpu")
  assert found.is_fp8 == is_fp8


@pytest.mark.parametrize("operand", ["f8e4m3fn[256,64]", "f8e4m3fn[128,64]"])
def test_a_product_with_one_wide_operand_is_not_fp8(operand):
  text = TRITON.format(m=64, n=64, k=32, warps=4, name="__triton_gemm", kind="kCustom")
  (found,) = hlo.gemms(text, "gpu")
  (wide,) = hlo.gemms(text.replace(operand, operand.replace("f8e4m3fn", "bf16")), "gpu")
  assert found.is_fp8 and not wide.is_fp8


def test_a_dot_in_a_loop_fusion_is_not_fp8():
  text = TRITON.format(m=64, n=64, k=64, warps=4, name="", kind="kLoop")
  (found,) = hlo.gemms(text, "gpu")
  assert not found.is_fp8 and "scalar" in found.why


def test_a_kernel_of_ours_is_known_by_its_scope():
  text = """
ENTRY %main (x: f8e4m3fn[256,512]) -> f32[256,128] {
  %x = f8e4m3fn[256,512]{1,0} parameter(0)
  %s = f32[256,4]{1,0} parameter(1)
  %w = f8e5m2[128,512]{1,0} parameter(2)
  ROOT %k = f32[256,128]{1,0} custom-call(%x, %s, %w, %s), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/layers/mlp/up:dgrad/pallas_call"}
}
"""  # noqa: E501
  (found,) = hlo.gemms(text, "gpu")
  assert found.key == hlo.GemmKey("layers/mlp/up", "dgrad") and found.is_fp8
  assert (found.work, found.kernel) == (256 * 512 * 128, "mosaic_gpu_v2")
  assert not hlo.gemms(text.replace("layers/mlp/up:dgrad/", ""), "gpu")


def test_a_shared_loop_belongs_to_each_of_its_callers():
  """Two sites with equal sizes may share the body of their loops, with the names of one of them."""
  text = """
body {
  x = f8e4m3fn[64,32]{1,0} parameter(0)
  ROOT d = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="a/layers/mlp/gate:fwd/while/body/dot_general"}
}

condition {
  i = s32[] parameter(0)
  n = s32[] constant(9)
  ROOT less = pred[] compare(i, n), direction=LT
}

ENTRY main {
  i = s32[] parameter(0)
  gate = (s32[], /*index=1*/f32[64,64]{1,0}) while(i), condition=condition, body=body, metadata={op_name="a/layers/mlp/gate:fwd/while"}
  up = (s32[], f32[64,64]{1,0}) while(i), condition=condition, body=body, metadata={op_name="a/rematted_computation/layers/mlp/up:fwd/while"}
}
"""  # noqa: E501
  keys = [hlo.GemmKey("layers/mlp/gate", "fwd"), hlo.GemmKey("layers/mlp/up", "fwd", True)]
  assert [(p.key, p.times) for p in hlo.gemms(text, "cpu")] == [(key, 9) for key in keys]


def _printed(rows) -> str:
  out = io.StringIO()
  rich.console.Console(file=out, width=160).print(fp8_gemms.table(rows))
  return out.getvalue()


def test_the_table_shows_found_and_planned(gpu_plan):
  calls = harness.planned_calls(gpu_plan)
  calls[Q] = dataclasses.replace(calls[Q], dtype="bf16", target="__cublas$lt$matmul")
  calls[K] = dataclasses.replace(calls[K], times=1)
  products = hlo.gemms(harness.program_text(calls.values()), "gpu")
  lines = _printed(fp8_gemms.compare(gpu_plan, products)).splitlines()
  (q,), (k,) = ([line for line in lines if f"attn/{s}" in line] for s in "qk")
  assert "0/2, 2 unquantized" in q and "cuBLASLt, cuBLASLt FP8" in q
  assert "1/2" in k and "2/2" in k
