"""Containers of quantized matrices: against compressed-tensors' own tensors, folders, refusals."""

import dataclasses
import json
import pathlib
import types

import harness
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fp8jax.errors import UserError
from fp8jax.export import fp8 as fp8_export
from fp8jax.export import served, served_pass, serving, write
from fp8jax.formats import E2M1, E4M3, INT4
from fp8jax.generation import weights as generation_weights
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names, scheme_config, schemes
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.models.hf import weights as hf_weights
from fp8jax.models.hf.schemes import COMPRESSED, MODELOPT, Scheme
from fp8jax.ops import site_tree
from fp8jax.quantization import quantize, stored_matrix
from fp8jax.recipe import rules
from fp8jax.recipe import served as served_recipes
from fp8jax.recipe.quant import Quant, Scale, Static

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


def test_in_a_folder_that_is_loaded_in_bfloat16_other_matrices_have_bfloat16_scales(rng):
  """NVFP4 beside FP8: value = bfloat16(code * bfloat16(scale)); FP8 alone stays in float32."""
  fp8 = _scheme("fp8_channel_static")
  exported = {n: fp8_export.Matrix(s, False) for n, s in (("a", fp8), ("b", _scheme("nvfp4a16")))}
  w, x = rng.normal(size=(64, 8)).astype(np.float32), rng.normal(size=(4, 64)).astype(np.float32)
  codes = fp8_export.codes(w, exported["a"], None)
  wide, scale = codes.data.astype(np.float32), codes.scale.reshape(8, 1)
  narrow = lambda v: np.asarray(v, ml_dtypes.bfloat16).astype(np.float32)  # noqa: E731
  got = served_pass.client_values(exported)("a", codes, fp8)
  np.testing.assert_array_equal(got, narrow(wide * narrow(scale)))
  alone = served_pass.client_values({"a": exported["a"]})("a", codes, fp8)
  np.testing.assert_array_equal(alone, wide * scale)
  matrix = fp8_export.Matrix(fp8, False, input_scale=0.0123)
  of = {d: served_pass.client_inputs(x, matrix, d) for d in ("float32", "bfloat16")}
  for dtype, s in (("float32", np.float32(0.0123)), ("bfloat16", narrow(0.0123))):
    want = np.clip(x / s, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * s
    np.testing.assert_allclose(of[dtype], want, rtol=3e-7)


@pytest.mark.parametrize("preset", [*(p for p in RECIPES if "A16" not in p), "INT8_STATIC"])
def test_activations_are_rounded_as_compressed_tensors_rounds_them(preset):
  """To its own numbers, but for float32's last bit of a scale."""
  scheme = _scheme((RECIPES | {"INT8_STATIC": "int8_static"})[preset])
  with np.load(GOLDEN.with_suffix(".npz")) as arrays:
    x, want, scale = arrays["x"], arrays[f"inputs {preset}"], float(arrays["input_scale"])
  if scheme.inputs == schemes.NVFP4_INPUTS:  # from the largest magnitude of all
    scale = float(np.abs(x).max()) / (448 * 6)
  matrix = fp8_export.Matrix(scheme, False, input_scale=scale if scheme.static_inputs else None)
  got = served_pass.client_inputs(x, matrix)
  assert (got != 0).any(1).tolist() == (want != 0).any(1).tolist()
  np.testing.assert_allclose(got, want, rtol=3e-7)


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "FP8_BLOCK", "W4AFP8"])
def test_activations_between_two_codes_are_rounded_to_the_same_side(preset):
  """Products of reciprocals, as our quantizer has them, put some of them on the other one."""
  with np.load(GOLDEN.with_suffix(".npz")) as arrays:
    x, want = arrays["normed"], arrays[f"normed {preset}"]
  matrix = fp8_export.Matrix(_scheme(RECIPES[preset]), False)
  np.testing.assert_allclose(served_pass.client_inputs(x, matrix), want, rtol=3e-7)
  ours = quantize.quantize(x, matrix.scheme.inputs, contraction=1).dequantize()
  assert 0 < np.sum(abs(ours - want) > 1e-2 * abs(want)) < 0.01 * x.size


@pytest.mark.parametrize("recipe, inputs", [
  ("block_128_pow2", Quant(E4M3, (1, 128))), ("block_128", Quant(E4M3, (1, 128))),
  ("mxfp8_ste", Quant(E4M3, (1, 32), Scale.POW2)), ("mxfp4_ste", Quant(E2M1, (1, 32), Scale.EVEN)),
])  # fmt: skip
def test_readers_scale_blocks_of_activations_by_their_own_rule(recipe, inputs):
  """A folder has no place to say that training's scales are powers of two."""
  scheme = _scheme(recipe)
  assert scheme.inputs == inputs
  config = {"quantization_config": scheme_config.to_config({"X.weight": scheme}, [])}
  assert scheme_config.of_config(config, "config.json").scheme("X.weight").inputs == inputs


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
    (
      "int5_weights",
      r"int5: servers multiply weights of 8 bits .*\(take w4a16, mxfp4a16 or nvfp4a16\)",
    ),
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


def test_a_folder_holds_any_static_scale():
  """A reader sees the number, however its recipe made it of an amax."""
  static = served_recipes.SERVED["fp8"].fwd

  def inputs(**how):
    return served._inputs("float-quantized", static.rhs, dataclasses.replace(static.lhs, **how))

  for how in ({"scale": Scale.POW2}, {"scale": Scale.GAUDI2}, {"source": Static(margin=1)}):
    assert inputs(**how) == inputs() == Quant(E4M3, source=Static())


@pytest.mark.parametrize("name", served_recipes.SERVED)
def test_the_pass_of_a_folder_multiplies_the_codes_that_a_reader_finds(name):
  """The gate's: of E4M3-240 a reader finds codes of E4M3, under whatever scale."""
  plan = {f"model.layers.{i}.mlp.up_proj.weight": _scheme(name) for i in range(CFG.num_layers)}
  found = scheme_config.of_config(
    {"quantization_config": scheme_config.to_config(plan, [])}, "config.json"
  )
  matrices = {n: fp8_export.Matrix(s, False) for n, s in plan.items()}
  spec = types.SimpleNamespace(
    model=CFG, run=ComputeConfig(), device=choose.Device("cpu"), tokens_per_device=64
  )
  sites = served_pass.sites(spec, fp8_export.Plan(matrices, {}, 0.0), {"layers/mlp/up"})
  recipe = site_tree.recipes_of(sites)["layers/1/mlp/up"]
  scheme = found.scheme(UP)
  read = dataclasses.replace(scheme.weight, tile=scheme.tile)
  assert stored_matrix.is_compatible(recipe.fwd.rhs, read)
  assert recipe.fwd.lhs == scheme.inputs


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


@pytest.mark.parametrize("method", [COMPRESSED, MODELOPT])
def test_nvfp4_is_dequantized_as_compressed_tensors_divides(rng, method):
  """value = bfloat16(code * (E4M3 scale / global scale)), from the tensors of the folder alone."""
  scheme, differ = _scheme("nvfp4_ste", method), 0
  for amax in (203, 217, 245):  # 7 divides them and 2688: products of few bits, ties of bfloat16
    w = rng.normal(size=(256, 64)).astype(np.float32)
    w[0, 0] = amax / 32
    codes = fp8_export.codes(w, fp8_export.Matrix(scheme, False), None)
    names = [n for n, *_ in scheme.tensors("X.weight", (64, 256), False)]
    packed, first, factor = scheme.packed(codes, None)
    assert len(names) == 3
    whole = factor.reshape(()) if scheme.layout.inverse else np.float32(1) / factor.reshape(())
    scale = np.repeat(first.astype(np.float32) / whole, 16, 1)
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(64, 256)
    code = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    want = (code * scale).astype(ml_dtypes.bfloat16)
    tensors = dict(zip(names, (packed, first, factor)))
    back = scheme.unpacked(tensors.__getitem__, "X.weight")
    exported = {"X.weight": fp8_export.Matrix(scheme, False)}
    got = served_pass.client_values(exported)("X.weight", back, scheme)
    np.testing.assert_array_equal(got, want.astype(np.float32))
    differ += np.sum(schemes.dequantize(back, scheme.tile).astype(ml_dtypes.bfloat16) != want)
  assert differ  # a product with the reciprocal falls to another side of a tie


def test_a_calibration_may_give_the_scale_of_the_tensor(rng):
  """Activations of NVFP4 checkpoints: as if the tensor had the amax, block by block."""
  x = rng.normal(size=(4, 64)).astype(np.float32)
  static = schemes.NVFP4_INPUTS
  got = quantize.quantize(x, static, amax=np.float32(9.0))
  want = quantize.quantize(x, schemes.NVFP4, tensor_amax=np.float32(9.0))
  np.testing.assert_array_equal(got.scale, want.scale)
  np.testing.assert_array_equal(got.data, want.data)
  # Scales are E4M3 numbers times 9 / 2688, and those of amaxes / 6 but for that rounding.
  first = np.asarray(got.scale, np.float64) * 2688 / 9
  np.testing.assert_allclose(first, first.astype(ml_dtypes.float8_e4m3fn).astype(float), rtol=1e-6)
  np.testing.assert_allclose(got.scale, np.abs(x).reshape(4, 4, 16).max(-1) / 6, rtol=1 / 15)


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
  "fp8_channel_static", "fp8_block", "fp8_240_dynamic", "int8", "w8a16", "w4afp8", "mxfp8_ste",
  "mxfp4a16", "nvfp4a16_4or6",
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
  return jax.device_get(harness.init_params(CFG, 1))


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


@pytest.mark.parametrize(
  "recipe, method",
  [
    ("w4a16", COMPRESSED), ("nvfp4_ste", MODELOPT),
    *(pytest.param(r, COMPRESSED, marks=pytest.mark.slow) for r in ("nvfp4_ste", *SERVED)),
  ],
)  # fmt: skip
def test_a_served_recipe_reads_back_as_what_its_product_multiplies(
  tmp_path, weights, recipe, method
):
  recipes, sites = _recipes(("layers/.*", recipe))
  default = Scheme(MODELOPT, schemes.NVFP4, schemes.NVFP4_INPUTS) if method == MODELOPT else None
  plan, rows = _write(tmp_path, weights, recipes, default)
  assert len(plan.matrices) == 14 and not plan.unquantized
  folder, quant = hf_tensors.Folder(str(tmp_path)), recipes["layers/1/mlp/up"].fwd.rhs
  hf_weights.check(folder, hf_config.read_config(str(tmp_path)))
  # What the forward product multiplies, but for the scale of the tensor that fused ones share.
  w = np.asarray(weights["layers"]["mlp"]["up"][1])
  amax = _fused_amax(weights, "up") if quant.scale is Scale.E4M3_OVER_F32 else None
  make = lambda w: quantize.quantize(w, quant, contraction=0, tensor_amax=amax)  # noqa: E731
  want, values = jax.jit(lambda w: (make(w), make(w).dequantize()))(w)
  np.testing.assert_array_equal(folder.read_float(UP), values)
  assert folder.read_float("model.norm.weight").dtype == ml_dtypes.bfloat16
  assert {r["scheme"] for r in rows.values()} == {plan.matrices[UP].scheme.label}
  kept = generation_weights.multiplied_as_codes(recipes)
  loaded, dtype = hf_weights.load_params(str(tmp_path), CFG, codes_of=kept)
  stack = loaded["layers"]["mlp"]["up"]
  assert dtype == "bfloat16"
  if quant.format == E4M3 or recipe != "fp8_240_dynamic":
    np.testing.assert_array_equal(stack.unpack()[1], values.T)
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


MIXED = (("layers/.*/mlp/.*", "w4a16"), ("layers/.*/attn/o", "bf16"), ("layers/.*", "fp8_dynamic"))


def test_a_mixed_folder_names_its_groups_and_reads_back(tmp_path, weights):
  plan, _ = _write(tmp_path, weights, _recipes(*MIXED)[0])
  stated = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
  assert stated["format"] == "mixed-precision"
  assert stated["ignore"] == ["lm_head", *(f"model.layers.{i}.self_attn.o_proj" for i in (0, 1))]
  groups = {g["format"]: g["targets"] for g in stated["config_groups"].values()}
  assert groups.keys() == {"pack-quantized", "float-quantized"}
  assert sum(groups.values(), []) and len({*sum(groups.values(), [])}) == 12 == len(plan.matrices)
  assert all(
    ("mlp" in name) == (form == "pack-quantized") for form, of in groups.items() for name in of
  )
  folder = hf_tensors.Folder(str(tmp_path))
  hf_weights.check(folder, CFG)
  assert folder.scheme(UP).weight == Quant(INT4, (1, 128)) and folder.scheme(UP).inputs is None
  of_q, of_o = (UP.replace("mlp.up", f"self_attn.{n}") for n in "qo")
  assert folder.scheme(of_q).weight == folder.scheme(of_q).inputs == Quant(E4M3, (1, 0))
  assert folder.scheme(of_o) is None
  assert serving.degrees(plan, CFG) == [1, 2]
  # Of INT4 groups of 128 inputs half of down's 256 are a shard; of attention's 128 none is cut.
  whole, _ = _write(tmp_path / "w4", weights, _recipes(("layers/.*", "w4a16"))[0])
  assert serving.degrees(whole, CFG) == [1]
  assert serving.degrees(None, CFG) == [1, 2]
  four = dataclasses.replace(CFG, num_heads=8, num_kv_heads=2, hidden_size=512)
  assert serving.degrees(None, four) == [1, 2, 4, 8]


def test_targets_are_preferred_by_name_then_by_pattern_then_by_class():
  schemes_ = [_scheme(r) for r in ("w4a16", "w8a16", "int8")]
  targets = (("Linear",), ("re:.*mlp.*",), ("model.layers.1.mlp.up_proj",))
  of = scheme_config.Quantization(
    COMPRESSED, tuple(zip(targets, schemes_)), ("re:.*gate_proj$", "lm_head")
  )  # fmt: skip
  for module, want in (("mlp.up", 2), ("mlp.down", 1), ("self_attn.q", 0), ("mlp.gate", None)):
    found = of.scheme(f"model.layers.1.{module}_proj.weight")
    assert found == (None if want is None else schemes_[want])


@pytest.mark.parametrize(
  "of_rules, how, said",
  [
    ((("layers/.*/attn/q", "w4a16"), ("layers/.*", "w8a16")), {},
     "servers multiply them as one, and .*q_proj.weight is .*v_proj.weight is .*one recipe"),
    ((("layers/.*", "int5_weights"),), {},
     "recipe 'int5_weights' multiplied weights as int5 .*: weights in int5: servers multiply"),
    ((("layers/.*", "fp8_dynamic"),), {"method": MODELOPT},
     "'modelopt' holds NVFP4 alone, not e4m3 .*; take export.format='compressed-tensors'"),
  ],
)  # fmt: skip
def test_an_export_that_servers_would_not_read_is_refused(weights, tmp_path, of_rules, how, said):
  default = Scheme(MODELOPT, schemes.NVFP4, schemes.NVFP4_INPUTS) if how else None
  with pytest.raises(UserError, match=said):
    _write(tmp_path, weights, _recipes(*of_rules)[0], default)
  assert not any(tmp_path.iterdir())


def test_a_folder_that_is_quantized_already_is_quantized_again_only_if_asked(tmp_path, weights):
  _write(tmp_path / "a", weights, _recipes(("layers/.*", "w8a16"))[0])
  stored = fp8_export.of_folder(hf_tensors.Folder(str(tmp_path / "a")), names.entries(CFG))
  recipes, _ = _recipes(("layers/.*", "w4a16"))
  said = "the folder is quantized already, .*_proj.weight as int8 1x. f32, and recipe 'w4a16' asks"
  with pytest.raises(UserError, match=said):
    _write(tmp_path / "b", weights, recipes, stored=stored)
  plan, _ = _write(tmp_path / "b", weights, recipes, stored=stored, requantize=True)
  assert {m.scheme for m in plan.matrices.values()} == {_scheme("w4a16")}
  assert not any(m.stored for m in plan.matrices.values())


PACKED = UP.replace("weight", "")


@pytest.mark.parametrize(
  "name, value, said",
  [
    ("weight_global_scale", np.zeros(1, np.float32), "weight_global_scale has 1 of 1 scales"),
    ("weight_global_scale", None, "is U8 and its scales .*weight_global_scale are missing"),
    ("weight_scale", np.full((256, 8), np.nan, ml_dtypes.float8_e4m3fn), "2048 of 2048 scales"),
    ("weight_scale", np.ones((256, 4), ml_dtypes.float8_e4m3fn), r"has shape \(256, 4\), expected"),
    ("weight_packed", np.zeros((256, 64), np.int8), "has dtype I8, expected one of U8"),
    ("weight_packed", None, f"missing tensor {PACKED}weight_packed"),
  ],
)
def test_damaged_tensors_of_two_levels_are_refused_by_name(
  tmp_path_factory, weights, name, value, said
):
  source, folder = _nvfp4(tmp_path_factory, weights), tmp_path_factory.mktemp("damaged")
  tensors = {n: source.read(n) for n in source.files}
  tensors |= {PACKED + name: value} if value is not None else {}
  tensors = {n: x for n, x in tensors.items() if value is not None or n != PACKED + name}
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  (folder / "config.json").write_bytes((pathlib.Path(source.folder) / "config.json").read_bytes())
  with pytest.raises(UserError, match=said):
    hf_weights.load_params(str(folder), CFG)


_MADE = {}


def _nvfp4(factory, weights) -> hf_tensors.Folder:
  if not _MADE:
    _MADE["folder"] = factory.mktemp("nvfp4")
    _write(_MADE["folder"], weights, _recipes(("layers/.*", "nvfp4a16"))[0])
  return hf_tensors.Folder(str(_MADE["folder"]))


def test_fused_matrices_share_the_scale_of_the_tensor(tmp_path_factory, weights):
  folder = _nvfp4(tmp_path_factory, weights)
  scale = lambda last: folder.read(f"model.layers.1.{last}_proj.weight_global_scale")  # noqa: E731
  assert (
    scale("self_attn.q") == scale("self_attn.k") == scale("self_attn.v") != scale("self_attn.o")
  )
  assert scale("mlp.gate") == scale("mlp.up") != scale("mlp.down")
  stored = fp8_export.of_folder(folder, names.entries(CFG))
  stored[UP] = dataclasses.replace(stored[UP], tensor_scale=2.0)
  with pytest.raises(UserError, match="gate_proj.weight, .* under different scales of their tens"):
    _write(tmp_path_factory.mktemp("x"), weights, _recipes(("layers/.*", "bf16"))[0], stored=stored)
