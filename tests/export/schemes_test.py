"""Containers of quantized matrices: against compressed-tensors' own tensors, folders, refusals."""

import dataclasses
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

from fp8jax import params
from fp8jax.export import fp8 as fp8_export
from fp8jax.export import served, write
from fp8jax.formats import E4M3
from fp8jax.generation import weights as generation_weights
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names, scheme_config, schemes
from fp8jax.models.hf import weights as hf_weights
from fp8jax.models.hf.schemes import COMPRESSED, MODELOPT, Scheme
from fp8jax.ops import site_tree
from fp8jax.recipe import rules
from fp8jax.recipe.quant import Quant, Scale

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "containers"
THEIRS = json.loads(GOLDEN.with_suffix(".json").read_text())["configs"]
# Presets of compressed-tensors, and our recipes of the same products.
RECIPES = {
  "FP8": "fp8", "FP8_DYNAMIC": "fp8_dynamic", "FP8_BLOCK": "fp8_block", "INT8": "int8",
  "W4A16": "w4a16", "W4AFP8": "w4afp8", "MXFP8": "mxfp8_ste", "MXFP4": "mxfp4_ste",
  "MXFP4A16": "mxfp4a16", "NVFP4": "nvfp4_ste", "NVFP4A16": "nvfp4a16",
}  # fmt: skip


def _scheme(recipe, method=COMPRESSED) -> Scheme:
  fwd = rules.recipe_by_name(recipe).fwd
  return served.scheme(fwd.rhs, fwd.lhs, method)


def _tensors(preset, suffixes):
  """{"X.weight_packed": array} of the golden file, in the dtypes that a folder has."""
  with np.load(GOLDEN.with_suffix(".npz")) as arrays:
    made = {}
    for key in arrays.files:
      name, _, last = key.partition(".")
      if name == preset and last != "back":
        x = arrays[key]
        is_fp8 = x.dtype == np.uint8 and last in suffixes
        made[f"X.{last}"] = x.view(ml_dtypes.float8_e4m3fn) if is_fp8 else x
    return made, arrays[f"{preset}.back"]


@pytest.mark.parametrize("preset", THEIRS)
def test_tensors_and_codes_are_those_of_compressed_tensors(preset):
  quantization = scheme_config.of_config({"quantization_config": THEIRS[preset]}, "config.json")
  scheme = quantization.scheme("model.layers.0.mlp.up_proj.weight")
  assert quantization.scheme("lm_head.weight") is None
  stored, back = _tensors(preset, [n for n, code in (scheme.layout.codes, scheme.layout.scale)
                                   if code == "F8_E4M3"])  # fmt: skip
  if preset == "FP8_BLOCK":  # of which every 64th row is there
    block = Quant(E4M3, (2, 128))
    scheme = dataclasses.replace(scheme, weight=block)
  codes = scheme.unpacked(lambda name: stored[name], "X.weight")
  assert codes.data.dtype == scheme.weight.format.dtype
  got = schemes.dequantize(codes, scheme.tile)
  if scheme.container in ("mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"):
    got = got.astype(ml_dtypes.bfloat16).astype(np.float32)  # theirs is rounded
  np.testing.assert_array_equal(got, back)
  shape = codes.data.shape
  described = {n: (x.shape, code) for n, code, x in zip(
    stored, (_code(x) for x in stored.values()), stored.values())}  # fmt: skip
  assert not scheme.problems("X.weight", described, shape)
  made = scheme.packed(codes, None)
  for (name, code, size), x in zip(scheme.tensors("X.weight", shape, False), made, strict=True):
    assert (x.shape, x.dtype) == (size, schemes.DTYPES[code]) and code == _code(x)
    np.testing.assert_array_equal(x.view(np.uint8), stored.pop(name).view(np.uint8), err_msg=name)
  assert not stored or {*stored} == {"X.weight_scale"}


def _code(x):
  return next(code for code, dtype in schemes.DTYPES.items() if dtype == x.dtype)


@pytest.mark.parametrize("preset, recipe", RECIPES.items())
def test_a_recipe_is_written_as_the_preset_of_its_product(preset, recipe):
  ours = scheme_config.to_config({"X.weight": _scheme(recipe)}, [])
  theirs = dict(THEIRS[preset])
  group, mine = theirs["config_groups"]["group_0"], ours["config_groups"]["group_0"]
  for part in ("weights", "input_activations"):
    want = {k: v for k, v in (group[part] or {}).items() if v is not None and k != "observer"}
    assert mine.get(part, {}) == want
  # The package takes another one by default, which vLLM does not read.
  container = "pack-quantized" if preset == "W4AFP8" else group["format"]
  assert mine["targets"] == ["Linear"] and mine["format"] == ours["format"] == container
  for key in ("quant_method", "quantization_status", "ignore", "kv_cache_scheme"):
    assert ours[key] == theirs[key]


@pytest.mark.parametrize(
  "recipe, said",
  [
    ("e5m2_dynamic", "weights in e5m2: the kernels of servers .* take fp8_dynamic"),
    ("e3m4_30_dynamic", "weights in e3m4_30: .* take fp8_dynamic or int8"),
    ("int5_weights", r"int5: servers multiply weights of 8 bits .*\(w4a16, mxfp4, nvfp4\)"),
    ("e3m2_dynamic", "weights in e3m2: servers multiply weights of 8 bits"),
    ("int4_dynamic", "servers multiply int4 1x. f32 by e4m3 of a token"),
    ("tensor_current_e5m2", "servers multiply e4m3 .* by e4m3 of a token or a tensor, not by e5m2"),
    ("fp4_w4a8", "no container has scales of e2m1"),
    ("quartet", "no server rotates or draws"),
  ],
)
def test_what_no_server_multiplies_is_refused_by_name(recipe, said):
  with pytest.raises(ValueError, match=said):
    _scheme(recipe)


def test_modelopt_holds_nvfp4_alone_and_its_scales_are_reciprocals_of_compressed_tensors(rng):
  with pytest.raises(ValueError, match="'modelopt' holds NVFP4 alone, not e4m3"):
    _scheme("fp8", MODELOPT)
  w = rng.normal(size=(64, 8)).astype(np.float32)
  made = {}
  for method in (COMPRESSED, MODELOPT):
    scheme = _scheme("nvfp4_ste", method)
    codes = fp8_export.codes(w, fp8_export.Matrix(scheme, False), None)
    described = scheme.tensors("X.weight", (8, 64), True)
    arrays = dict(zip((n for n, *_ in described), scheme.packed(codes, 0.25), strict=True))
    back = scheme.unpacked(lambda name, arrays=arrays: arrays[name], "X.weight")
    np.testing.assert_array_equal(back.scale, codes.scale)
    np.testing.assert_array_equal(back.data, codes.data)
    assert scheme.input_scale(lambda name, arrays=arrays: arrays[name], "X.weight") == 0.25
    made[method] = arrays
  ours, theirs = made[COMPRESSED], made[MODELOPT]
  assert ours["X.input_global_scale"] == 4.0 and theirs["X.input_scale"] == 0.25
  np.testing.assert_array_equal(ours["X.weight_packed"], theirs["X.weight"])
  amax = np.abs(w).max()
  np.testing.assert_allclose(ours["X.weight_global_scale"], [2688 / amax], rtol=2e-7)
  np.testing.assert_allclose(theirs["X.weight_scale_2"], amax / 2688, rtol=2e-7)
  assert np.float32(1) / ours["X.weight_global_scale"][0] == theirs["X.weight_scale_2"]


def test_a_reciprocal_gives_its_number_back():
  """Of random float32 numbers, by exact division of float64 (double rounding is innocuous here)."""
  for x in np.random.default_rng(0).uniform(1e-6, 1e6, 2000).astype(np.float32):
    inverse = np.float32(1) / x  # what a quantizer's decoding factor is
    y = schemes.reciprocal(inverse)
    assert np.float32(1) / y == inverse


# --- folders -------------------------------------------------------------------------------------

CFG = ModelConfig(
  architecture="llama", vocab_size=64, hidden_size=128, intermediate_size=256, num_layers=2,
  num_heads=2, num_kv_heads=2, head_dim=64, max_positions=64, init_std=0.05,
)  # fmt: skip
SERVED = (
  "fp8_channel_static", "fp8_block", "fp8_240_dynamic", "int8", "w8a16", "w4a16", "w4afp8",
  "mxfp8_ste", "mxfp4a16", "nvfp4_ste", "nvfp4a16_4or6",
)  # fmt: skip
UP = "model.layers.1.mlp.up_proj.weight"


def _recipes(*of_rules):
  sites = site_tree.build_sites(
    transformer.site_params(CFG), CFG.dims, (("head", "bf16"), *of_rules),
    backends=site_tree.Backends("reference"),
  )  # fmt: skip
  return site_tree.recipes_of(sites), sites


@pytest.fixture(scope="module")
def weights():
  return jax.device_get(params.init(jax.random.key(1), transformer.params(CFG), CFG.dims))


def _write(folder, weights, recipes, default=None, **how):
  entries = names.entries(CFG)
  default = default or schemes.fp8(COMPRESSED, "channel")
  plan = fp8_export.choose(entries, CFG.dims, recipes, default, follows=True, **how)
  inputs = {(fp8_export.site_of(e), "x"): 3.0 for e in entries if e.layer is not None}
  plan = fp8_export.with_amaxes(plan, entries, {}, inputs)
  rows = {}
  write.save(str(folder), write.model(weights, CFG, "bfloat16", fp8=plan, rows=rows))
  return plan, rows


def _fused_amax(weights, name):
  """Of layer 1's matrices that a server fuses with this one."""
  of = weights["layers"]["attn" if name in "qkv" else "mlp"]
  group = next(g for g in (("q", "k", "v"), ("gate", "up"), (name,)) if name in g)
  return max(float(np.abs(of[n][1]).max()) for n in group)


@pytest.mark.parametrize("recipe, method", [*((r, COMPRESSED) for r in SERVED),
                                            ("nvfp4_ste", MODELOPT)])  # fmt: skip
def test_a_served_recipe_reads_back_as_what_its_product_multiplies(
  tmp_path, weights, recipe, method
):
  recipes, sites = _recipes(("layers/.*", recipe))
  default = Scheme(MODELOPT, schemes.NVFP4, schemes.NVFP4_INPUTS) if method == MODELOPT else None
  plan, rows = _write(tmp_path, weights, recipes, default)
  assert len(plan.matrices) == 14 and not plan.unquantized
  folder, quant = hf_weights.Folder(str(tmp_path)), recipes["layers/1/mlp/up"].fwd.rhs
  hf_weights.check(folder, hf_config.read_config(str(tmp_path)))
  # What the forward product multiplies, but for the scale of the tensor that fused ones share.
  w = np.asarray(weights["layers"]["mlp"]["up"][1])
  from fp8jax.quantization import quantize

  amax = _fused_amax(weights, "up") if quant.scale is Scale.E4M3_OVER_F32 else None
  want = quantize.quantize(w, quant, contraction=0, tensor_amax=amax)
  np.testing.assert_array_equal(folder.read_float(UP), want.dequantize())
  assert folder.read_float("model.norm.weight").dtype == ml_dtypes.bfloat16
  assert {r["scheme"] for r in rows.values()} == {plan.matrices[UP].scheme.label}
  kept = generation_weights.multiplied_as_codes(recipes)
  loaded, dtype = hf_weights.load_params(str(tmp_path), CFG, codes_of=kept)
  stack = loaded["layers"]["mlp"]["up"]
  assert dtype == "bfloat16"
  if quant.format == E4M3 or recipe != "fp8_240_dynamic":
    np.testing.assert_array_equal(stack.unpack()[1], want.dequantize().T)
    made = generation_weights.for_inference(loaded, sites, CFG, np.float32)
    matrix = made["layers"][0]["mlp"]["up"]
    np.testing.assert_array_equal(matrix.data[1], want.data)
    np.testing.assert_array_equal(matrix.scale[1], want.scale)
  # Exported again, the folder is the same to the byte.
  stored = fp8_export.of_folder(folder, names.entries(CFG))
  plain, _ = _recipes(("layers/.*", "bf16"))
  again = tmp_path / "again"
  numbers, _ = hf_weights.load_params(str(tmp_path), CFG)
  _write(again, numbers, plain, default, stored=stored)
  for name in ("model.safetensors", "config.json", scheme_config.MODELOPT_FILE):
    if (tmp_path / name).exists():
      assert (again / name).read_bytes() == (tmp_path / name).read_bytes(), name
  assert (again / scheme_config.MODELOPT_FILE).exists() == (method == MODELOPT)
