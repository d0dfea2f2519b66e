"""FP8 in Hugging Face folders: the codes of training written, both formats read, refusals."""

import dataclasses
import functools
import json

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from fp8jax import params
from fp8jax.errors import UserError
from fp8jax.export import fp8 as fp8_export
from fp8jax.export import write
from fp8jax.generation import weights as generation_weights
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.models import transformer
from fp8jax.models.config import Lora, ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names, scheme_config, schemes
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.models.hf import weights as hf_weights
from fp8jax.models.hf.schemes import COMPRESSED, FINE_GRAINED
from fp8jax.ops import gemm_spec, linear, site, site_tree, stored_params
from fp8jax.ops.site import ScalingInputs
from fp8jax.quantization import amax_history, bf16_remainder, stored_matrix
from fp8jax.recipe.quant import Hadamard

TINY = ModelConfig(
  architecture="llama", vocab_size=128, hidden_size=128, intermediate_size=256, num_layers=2,
  num_heads=2, num_kv_heads=2, head_dim=64, max_positions=64,
)  # fmt: skip
BLOCKS = schemes.fp8(FINE_GRAINED)
CHANNELS, TENSORS = schemes.fp8(COMPRESSED, "channel"), schemes.fp8(COMPRESSED, "tensor")
E4M3 = ml_dtypes.float8_e4m3fn
# In the order of a layer's declaration.
MULTIPLIED = (
  *(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up", "down"))
)  # fmt: skip
UP = "model.layers.1.mlp.up_proj.weight"


def _weights(cfg=TINY):
  return harness.init_params(cfg, 1)


def _sites(recipe, cfg=TINY):
  rules = (("head", "bf16"), ("layers/.*", recipe))
  return site_tree.build_sites(
    transformer.site_params(cfg), cfg.dims, rules, backends=site_tree.Backends("reference")
  )


def _plan(fp8, recipe="bf16", cfg=TINY, trained=None, inputs=None, **wishes):
  recipes, entries = site_tree.recipes_of(_sites(recipe, cfg)), names.entries(cfg)
  plan = fp8_export.choose(entries, cfg.dims, recipes, fp8, **wishes)
  return fp8_export.with_amaxes(plan, entries, trained or {}, inputs or {})


def _scale_name(scheme, name):
  return name.removesuffix("weight") + scheme.layout.scale[0]


def _raw(folder) -> dict[str, tuple[str, np.ndarray]]:
  """{tensor: (dtype code, values)} by safetensors' own reader of bytes."""
  dtypes = {"F8_E4M3": E4M3, "F32": np.float32, "BF16": ml_dtypes.bfloat16}
  return {
    name: (t["dtype"], np.frombuffer(t["data"], dtypes[t["dtype"]]).reshape(t["shape"]))
    for path in folder.glob("*.safetensors")
    for name, t in safetensors.deserialize(path.read_bytes())
  }


def _multiplied(monkeypatch, weights, recipe, amaxes) -> dict[str, list[np.ndarray]]:
  """{name of a weight of layer 1: [codes, scales] that its forward GEMM multiplies}."""

  def layer(flat):
    seen = []

    def watched(a, b, **how):
      seen.append([b.data, b.scale])
      return jnp.zeros((a.shape[0], b.shape[0]), how["out_dtype"])

    monkeypatch.setattr(gemm_api, "scaled_matmul", watched)
    for path, gemm in transformer.gemm_sites(TINY).items():
      if path != "head":
        letters = gemm.eqn.partition(",")[0].replace("B", "").replace("L", "")
        x = jnp.ones((1, 2, *(TINY.dims[c] for c in letters)))
        one = site.single(recipe, "reference")
        if one.scaling_state is not None:
          amax_3 = jnp.float32([amaxes[path.replace("/", "/1/", 1), t] for t in "xwg"])
          state = amax_history.calibrated(one.recipe, amax_3)
          one = dataclasses.replace(one, scaling_state=state)
        w = jax.tree.map(lambda a: a[1], flat[path])
        spec = gemm_spec.make_spec(gemm.eqn, x, w, one)
        linear.forward_only((spec,), x, (w,), (ScalingInputs.of(one),))
    monkeypatch.undo()
    return seen

  seen = jax.device_get(jax.jit(layer)(params.flatten(weights)))
  return dict(zip((f"model.layers.1.{name}.weight" for name in MULTIPLIED), seen, strict=True))


@pytest.mark.parametrize(
  "recipe, fp8, scale_fmt, is_split",
  [
    pytest.param("block_128", BLOCKS, "float32", False, marks=pytest.mark.slow),
    pytest.param(
      "block_128", schemes.fp8(COMPRESSED, "block"), "float32", True, marks=pytest.mark.slow
    ),
    ("block_128_pow2", BLOCKS, "ue8m0", True),
    pytest.param("rowwise", CHANNELS, "float32", False, marks=pytest.mark.slow),
    ("tensor_delayed", TENSORS, "float32", False),
  ],
)
def test_export_writes_the_codes_that_the_training_gemm_multiplies(
  tmp_path, monkeypatch, recipe, fp8, scale_fmt, is_split
):
  weights = _weights()
  amaxes = {(n, t): 0.05 + 0.01 * i for i, n in enumerate(site_tree.recipes_of(_sites(recipe)))
            for t in "xwg"}  # fmt: skip
  stored = weights
  if is_split:  # a GEMM reads the BF16 half of such masters
    flat = {k: bf16_remainder.split(v) if v.ndim > 2 else v
            for k, v in params.flatten(weights).items()}  # fmt: skip
    stored = params.unflatten(flat)
  want = _multiplied(monkeypatch, stored, recipe, amaxes)
  plan = _plan(fp8, recipe, trained=amaxes)
  assert plan.scale_fmt == scale_fmt and not plan.unquantized
  operands = jax.tree.map(stored_params.compute_copy, stored, is_leaf=stored_params.is_stored)
  rows = {}
  how = dict(shard_bytes=200_000, fp8=plan, operands=operands, rows=rows)
  write.save(str(tmp_path), write.model(weights, TINY, "bfloat16", **how))
  raw = _raw(tmp_path)
  assert len(list(tmp_path.glob("*.safetensors"))) > 1 and len(want) == 7
  assert all(r["kept"] and 20 < r["snr_db"] < 40 for r in rows.values()) and len(rows) == 14
  if fp8 == TENSORS:  # the scale is that of the amax that training saw
    assert [r["scale_ratio"] for r in rows.values()] == pytest.approx([1.0] * 14)
  for name, (codes, scales) in want.items():
    kind, data = raw[name]
    assert kind == "F8_E4M3"
    np.testing.assert_array_equal(data.view(np.uint8), codes.view(np.uint8), err_msg=name)
    kind, written = raw[_scale_name(fp8, name)]
    assert kind == "F32" and written.shape == fp8.scale_shape(codes.shape)
    np.testing.assert_array_equal(written.reshape(scales.shape), scales, err_msg=name)
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  assert index["weight_map"].keys() == raw.keys()
  unquantized = {name for name, (kind, _) in raw.items() if kind == "BF16"}
  norms = {n for n in raw if "norm" in n}
  assert unquantized == norms | {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("fp8", [BLOCKS, CHANNELS, TENSORS, schemes.fp8(COMPRESSED, "block")])
def test_export_reads_back_as_codes_times_scales(tmp_path, fp8):
  weights = _weights()
  write.save(str(tmp_path), write.model(weights, TINY, "bfloat16", fp8=_plan(fp8)))
  raw = _raw(tmp_path)
  cfg = hf_config.read_config(str(tmp_path))
  got, dtype = hf_weights.load_params(str(tmp_path), cfg)
  assert cfg == TINY and dtype == "bfloat16"
  codes, scale = raw[UP][1].astype(np.float64), raw[_scale_name(fp8, UP)][1]
  rows, cols = {"block": (128, 128), "channel": (1, 128), "tensor": (256, 128)}[fp8.label]
  want = codes * np.kron(scale.reshape(-1, 1), np.ones((rows, cols)))
  np.testing.assert_array_equal(got["layers"]["mlp"]["up"][1], want.T.astype(np.float32))
  # E4M3 rounds by at most 1/16 of a number, and 2^-10 of the scale near 0.
  error = np.abs(want.T - np.asarray(weights["layers"]["mlp"]["up"][1]))
  assert np.all(error <= np.abs(want.T) / 15 + scale.max() * 2**-9)
  np.testing.assert_array_equal(got["embed"], weights["embed"].astype(jnp.bfloat16))


@pytest.mark.parametrize("recipe, is_kept", [("block_128", True), ("tensor_current", False)])
def test_generation_multiplies_the_codes_of_a_folder_as_they_are(tmp_path, recipe, is_kept):
  """The folder's scales are powers of two; block_128 would choose others."""
  fp8 = _plan(BLOCKS, scale_fmt="ue8m0")
  write.save(str(tmp_path), write.model(_weights(), TINY, "bfloat16", fp8=fp8))
  raw, sites = _raw(tmp_path), _sites(recipe)
  kept = generation_weights.multiplied_as_codes(site_tree.recipes_of(sites))
  loaded, _ = hf_weights.load_params(str(tmp_path), TINY, codes_of=kept)
  made = generation_weights.for_inference(loaded, sites, TINY, jnp.float32)["layers"][0]
  for layer in range(TINY.num_layers):
    name = UP.replace("1", str(layer))
    matrix = made["mlp"]["up"]
    got, scale = np.asarray(matrix.data[layer]), np.asarray(matrix.scale[layer])
    want, of_want = raw[name][1], raw[_scale_name(BLOCKS, name)][1]
    same = np.array_equal(got.view(np.uint8), want.view(np.uint8))
    assert (same and np.array_equal(scale, of_want)) == is_kept


def test_export_states_both_names_of_skipped_modules_and_the_scales_of_inputs(tmp_path):
  write.save(str(tmp_path), write.model(_weights(), TINY, "bfloat16", fp8=_plan(BLOCKS)))
  stated = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
  assert stated == {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
    "ignored_layers": ["lm_head"],
  }  # fmt: skip
  static = schemes.fp8(COMPRESSED, "tensor", static_inputs=True)
  seen = {(n, "x"): 448.0 + i for i, n in enumerate(site_tree.recipes_of(_sites("bf16")))}
  plan = _plan(static, inputs=seen)
  target = tmp_path / "static"
  write.save(str(target), write.model(_weights(), TINY, "bfloat16", fp8=plan))
  raw = _raw(target)
  position = list(seen).index(("layers/1/mlp/up", "x"))
  scale = raw[UP.replace("weight", "input_scale")][1]
  np.testing.assert_allclose(scale, [1 + position / 448], rtol=1e-6)
  # One scale for matrices that a server fuses, so that it quantizes none a second time.
  shared = [raw[UP.replace("up_proj.weight", f"{n}_proj.weight_scale")][1] for n in ("gate", "up")]
  w = _weights()["layers"]["mlp"]
  amax = max(float(jnp.max(jnp.abs(w[n][1]))) for n in ("gate", "up"))
  np.testing.assert_allclose(shared, amax / 448, rtol=1e-6)
  hf_weights.load_params(str(target), hf_config.read_config(str(target)))
  with pytest.raises(UserError, match="no amax of tensor x of site layers/1/mlp/up"):
    _plan(static, inputs={k: v for k, v in seen.items() if k != ("layers/1/mlp/up", "x")})


@pytest.mark.parametrize(
  "fp8, weights, inputs",
  [
    (CHANNELS, {"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
    (TENSORS, {"strategy": "tensor"}, {"strategy": "token", "dynamic": True}),
    (schemes.fp8(COMPRESSED, "tensor", static_inputs=True), {"strategy": "tensor"},
     {"strategy": "tensor", "dynamic": False}),
    (schemes.fp8(COMPRESSED, "block"), {"strategy": "block", "block_structure": [128, 128]},
     {"strategy": "group", "group_size": 128, "dynamic": True}),
  ],
)  # fmt: skip
def test_export_states_compressed_tensors_as_a_whole(fp8, weights, inputs):
  """As compressed-tensors 0.20 writes it; a name that is not ignored needs scales."""
  common = {"num_bits": 8, "type": "float", "symmetric": True}
  assert scheme_config.to_config({"w": fp8}, ["model.layers.1.mlp.up_proj"]) == {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "quantization_status": "compressed", "kv_cache_scheme": None,
    "ignore": ["lm_head", "model.layers.1.mlp.up_proj"],
    "config_groups": {"group_0": {
      "targets": ["Linear"], "weights": common | weights | {"dynamic": False},
      "input_activations": common | inputs, "format": "float-quantized",
    }},
  }  # fmt: skip


@pytest.mark.parametrize(
  "at, key, value, word",
  [
    ((), "transform_config", {"config_groups": {"R4": {"type": "hadamard"}}}, "transform_config="),
    (("config_groups", "group_0"), "output_activations", {"num_bits": 8}, "output_activations="),
  ],
)
def test_what_a_folder_computes_beside_its_codes_is_refused(at, key, value, word):
  stated = scheme_config.to_config({"w": CHANNELS}, ["lm_head"])
  assert scheme_config.of_config({"quantization_config": stated | {"transform_config": {}}}, "c")
  node = stated
  for name in at:
    node = node[name]
  node[key] = value
  with pytest.raises(UserError, match=word):
    scheme_config.of_config({"quantization_config": stated}, "c")


def test_auto_scales_are_powers_of_two_only_where_all_codes_of_training_have_such():
  entries, recipes = names.entries(TINY), site_tree.recipes_of(_sites("block_128"))
  pow2 = site_tree.recipes_of(_sites("block_128_pow2"))
  mixed = {name: pow2[name] if "layers/1/" in name else r for name, r in recipes.items()}
  for of_sites, fmt in ((recipes, "float32"), (mixed, "float32"), (pow2, "ue8m0")):
    plan = fp8_export.choose(entries, TINY.dims, of_sites, BLOCKS)
    assert plan.scale_fmt == fmt and len(plan.matrices) == 14
    assert all(m.is_trained for m in plan.matrices.values())


def test_a_static_input_of_which_a_calibration_saw_zeros_alone_is_refused():
  static = schemes.fp8(COMPRESSED, "channel", static_inputs=True)
  seen = {(n, "x"): 3.0 for n in site_tree.recipes_of(_sites("bf16"))}
  assert len(_plan(static, inputs=seen).matrices) == 14
  with pytest.raises(UserError, match="no amax above 0 of tensor x of site layers/1/mlp/up; set"):
    _plan(static, inputs=seen | {("layers/1/mlp/up", "x"): 0.0})


def test_what_a_folder_has_in_16_bits_stays_so_and_its_static_scales_of_inputs_stay(tmp_path):
  static = schemes.fp8(COMPRESSED, "channel", static_inputs=True)
  seen = {(n, "x"): 448.0 + i for i, n in enumerate(site_tree.recipes_of(_sites("bf16")))}
  recipes = site_tree.recipes_of(_sites("rowwise"))
  wide = site_tree.recipes_of(_sites("bf16"))
  mixed = {name: wide[name] if "layers/0/attn" in name else r for name, r in recipes.items()}
  entries = names.entries(TINY)
  first = fp8_export.choose(entries, TINY.dims, mixed, static)
  first = fp8_export.with_amaxes(first, entries, {}, seen)
  write.save(str(tmp_path), write.model(_weights(), TINY, "bfloat16", fp8=first))
  stored = fp8_export.of_folder(hf_tensors.Folder(str(tmp_path)), entries)
  again = fp8_export.choose(entries, TINY.dims, wide, CHANNELS, stored=stored)
  again = fp8_export.with_amaxes(again, entries, {}, {})
  assert again.to_config() == first.to_config() and set(again.unquantized) == set(first.unquantized)
  assert set(again.unquantized.values()) == {"16 bits in the folder"}
  scales = [{n: m.input_scale for n, m in p.matrices.items()} for p in (first, again)]
  assert scales[0] == scales[1] and len(set(scales[1].values())) == 10


def test_the_frozen_base_of_adapters_keeps_codes_and_scales(tmp_path):
  """Its scales are powers of two here, which no quantizer of float32 scales would choose."""
  fp8 = _plan(BLOCKS, scale_fmt="ue8m0")
  write.save(str(tmp_path / "a"), write.model(_weights(), TINY, "bfloat16", fp8=fp8))
  cfg = dataclasses.replace(TINY, lora=Lora(4, 8.0, ("attn/q",), "block_fp8"))
  tree, _ = hf_weights.load_params(str(tmp_path / "a"), cfg)
  entries, flat = names.entries(TINY), params.flatten(tree)
  stored = fp8_export.of_stacks(flat, entries)
  wide = site_tree.recipes_of(_sites("bf16"))
  merged = {"layers/attn/q"}
  plan = fp8_export.choose(entries, TINY.dims, wide, BLOCKS, merged=merged, stored=stored)
  assert sum(m.stored is not None for m in plan.matrices.values()) == 12 and not plan.unquantized
  read = jax.tree.map(stored_params.compute_copy, tree, is_leaf=stored_params.is_stored)
  write.save(str(tmp_path / "b"), write.model(read, TINY, "bfloat16", fp8=plan))
  before, after = _raw(tmp_path / "a"), _raw(tmp_path / "b")
  for name in [n for n in before if "_proj" in n and "q_proj" not in n]:
    np.testing.assert_array_equal(before[name][1], after[name][1], err_msg=name)


def test_codes_of_rotated_weights_are_no_codes_of_a_folder():
  """A server would multiply them by what nobody rotated; requantized, they are those of the
  weight."""
  rotated = dataclasses.replace(stored_matrix.QUANT, transform=Hadamard(64, "none"))
  pack = functools.partial(stored_matrix.pack, inputs=1, lead=1, quant=rotated)
  down = jax.ShapeDtypeStruct((2, 256, 128), np.float32)
  tree = {"layers/mlp/down": jax.eval_shape(pack, down)}
  entries = names.entries(TINY)
  stored = fp8_export.of_stacks(tree, entries)
  wide = site_tree.recipes_of(_sites("bf16"))
  with pytest.raises(
    UserError, match="weights as e4m3 128x128 .* unsigned.* Set export.format='hf-bf16'"
  ):
    fp8_export.choose(entries, TINY.dims, wide, BLOCKS, stored=stored)
  plan = fp8_export.choose(entries, TINY.dims, wide, BLOCKS, stored=stored, requantize=True)
  assert [m.stored or m.is_trained for m in plan.matrices.values()] == [False] * 2


def test_export_keeps_partial_tiles_and_their_partners_wide():
  cfg = dataclasses.replace(TINY, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=512)
  plan = _plan(BLOCKS, cfg=cfg)  # k and v have 64 rows
  unquantized = {name.split(".")[4] for name in plan.unquantized}
  assert unquantized == {"q_proj", "k_proj", "v_proj"}
  skipped = plan.to_config()["modules_to_not_convert"]
  assert len(skipped) == 1 + 6 and "model.layers.1.self_attn.k_proj" in skipped
  total = 2 * 512 * 128 + 2 * (128 * 128 * 2 + 64 * 128 * 2 + 3 * 256 * 128 + 2 * 128) + 128
  assert plan.share == 2 * (128 * 128 + 3 * 256 * 128) / total
  odd = dataclasses.replace(cfg, hidden_size=192)
  with pytest.raises(
    UserError, match="no matrix of this model would be quantized .*export.strategy='ch"
  ):
    _plan(BLOCKS, cfg=odd)
  assert len(_plan(CHANNELS, cfg=odd).matrices) == 14


@pytest.mark.parametrize(
  "recipe, fp8, fix",
  [
    ("block_128", CHANNELS, "Set export.strategy='auto' to keep .* export.requantize=True"),
    ("rowwise", BLOCKS, "Set export.format='compressed-tensors' to keep"),
    ("tensor_current_e5m2", CHANNELS, "Set export.strategy='auto' to keep"),
    ("mxfp4", BLOCKS, "Set export.format='compressed-tensors'"),
    ("e5m2_weights", BLOCKS, "Set export.format='hf-bf16' to keep"),
    ("nvfp4", CHANNELS, "recipe 'nvfp4' multiplied weights as e2m1 16x16"),
  ],
)
def test_export_refuses_to_change_the_codes_of_training_unasked(recipe, fp8, fix):
  with pytest.raises(UserError, match=fix):
    _plan(fp8, recipe)
  plan = _plan(fp8, recipe, requantize=True)
  assert len(plan.matrices) == 14 and not any(m.is_trained for m in plan.matrices.values())


def test_export_refuses_codes_of_weights_that_training_scaled_first():
  down = {"layers/mlp/down"}
  with pytest.raises(UserError, match="layers/mlp/down is not the weight whose codes training"):
    _plan(BLOCKS, "block_128", changed=down)
  plan = _plan(BLOCKS, "block_128", changed=down, requantize=True)
  anew = {name.split(".")[4] for name, m in plan.matrices.items() if not m.is_trained}
  assert anew == {"down_proj"}


def test_export_with_float32_scales_is_no_power_of_two_unless_asked():
  with pytest.raises(UserError, match="and this format has e4m3 128x128 pow2"):
    _plan(BLOCKS, "block_128", scale_fmt="ue8m0")
  anew = _plan(BLOCKS, "block_128", scale_fmt="ue8m0", requantize=True)
  assert anew.to_config()["scale_fmt"] == "ue8m0"
  as_float = _plan(BLOCKS, "block_128_pow2", scale_fmt="float32")
  assert all(m.is_trained for m in as_float.matrices.values())
  assert "scale_fmt" not in as_float.to_config()


# --- import --------------------------------------------------------------------------------------


def _deepseek(tmp_path, change=lambda tensors: None, **config):
  """A block-FP8 folder by safetensors' own writer; its matrices are codes * 2^(row + col)."""
  weights = _weights()
  write.save(str(tmp_path), write.model(weights, TINY, "bfloat16"))
  tensors = dict(safetensors.numpy.load_file(tmp_path / "model.safetensors"))
  for name in [n for n in tensors if "_proj" in n]:
    rows, cols = (n // 128 for n in tensors[name].shape)
    scale = 2.0 ** np.add.outer(np.arange(rows), np.arange(cols)) / 4096
    tensors[name] = (tensors[name].astype(np.float32) * 4096).astype(E4M3)
    tensors[name.removesuffix("weight") + "weight_scale_inv"] = scale.astype(np.float32)
  change(tensors)
  safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
  path = tmp_path / "config.json"
  stated = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]} | config
  path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))
  return tmp_path, tensors


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16])
def test_import_dequantizes_blocks_whatever_the_dtype_of_scales(tmp_path, dtype):
  def change(tensors):
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
      tensors[name] = tensors[name].astype(dtype)

  folder, tensors = _deepseek(tmp_path, change, scale_fmt="ue8m0", activation_scheme="dynamic")
  got, _ = hf_weights.load_params(str(folder), hf_config.read_config(str(folder)))
  codes = tensors[UP].astype(np.float32).reshape(2, 128, 128)
  want = (codes * np.float32([1, 2])[:, None, None] / 4096).reshape(256, 128)
  np.testing.assert_array_equal(got["layers"]["mlp"]["up"][1], want.T)


def _without(name):
  return lambda tensors: tensors.pop(name)


def _with(name, value):
  return lambda tensors: tensors.update({name: value})


INV = UP.replace("weight", "weight_scale_inv")


@pytest.mark.parametrize(
  "change, config, message",
  [
    (_without(INV), {}, f"{UP} is F8_E4M3 and its scales {INV} are missing"),
    (_with(INV, np.ones((1, 2), np.float32)), {}, r"has shape \(1, 2\), expected \(2, 1\)"),
    (_with(INV, np.ones((2, 1), np.int32)), {}, "weight_scale_inv has dtype I32"),
    (_with(INV, np.full((2, 1), -3.4e38, np.float32)), {}, "has 2 of 2 scales that are not from"),
    (_with(INV, np.float32([[1], [np.inf]])), {}, f"{INV} has 1 of 2 scales .* e.g. inf"),
    (_with(INV, np.float32([[1e37], [1]])), {}, f"{INV} has 1 of 2 scales .* e.g. 1e.37"),
    (_with(INV, np.float32([[1], [1e-45]])), {}, f"{INV} has 1 of 2 scales .* e.g. 1.4e-45"),
    (_with(UP, np.full((256, 128), np.nan, E4M3)), {}, "up_proj.weight has .* NaN"),
    (_with("model.norm.weight", np.ones(128, E4M3)), {}, "norm.weight has dtype F8_E4M3, expected"),
    (_with(UP, np.ones((256, 128), np.float32)), {}, f"surplus tensor {INV}"),
    (lambda t: None, {"weight_block_size": [64]}, r"weight_block_size=\[64\], expected two pos"),
    (lambda t: None, {"fmt": "e5m2"}, "fmt='e5m2' is not supported, expected 'e4m3'"),
    (lambda t: None, {"activation_scheme": "static"}, "activation_scheme='static' is not supp"),
    (lambda t: None, {"scale_fmt": "e5m3"}, "scale_fmt='e5m3', expected one of float32, ue8m0"),
    (lambda t: None, {"quant_method": "compressed-tensors", "format": "marlin-24"},
     "format='marlin-24' is not supported, expected 'float-quantized'"),
  ],
)  # fmt: skip
def test_import_refuses_damaged_fp8_by_name(tmp_path, change, config, message):
  folder, _ = _deepseek(tmp_path, change, **config)
  for codes_of in ((), ("layers/mlp/up",)):  # as numbers, and as codes beside adapters
    with pytest.raises(UserError, match=message):
      cfg = hf_config.read_config(str(folder))
      hf_weights.load_params(str(folder), cfg, codes_of=codes_of)


def test_import_takes_scales_at_their_bounds(tmp_path):
  bounds = np.float32([[2.0**-127], [1e6]])
  folder, tensors = _deepseek(tmp_path, _with(INV, bounds))
  got, _ = hf_weights.load_params(str(folder), hf_config.read_config(str(folder)))
  want = tensors[UP].astype(np.float32) * np.repeat(bounds, 128, 0)
  np.testing.assert_array_equal(got["layers"]["mlp"]["up"][1], want.T)


def test_import_refuses_fp8_that_config_json_does_not_state(tmp_path):
  folder, _ = _deepseek(tmp_path)
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
  with pytest.raises(UserError, match="F8_E4M3, .* and config.json has no quantization_config"):
    hf_weights.load_params(str(folder), hf_config.read_config(str(folder)))


def test_import_names_an_fp8_file_that_is_cut_off(tmp_path):
  write.save(str(tmp_path), write.model(_weights(), TINY, "bfloat16", fp8=_plan(BLOCKS)))
  path = tmp_path / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(UserError, match="model.safetensors is no whole safetensors file"):
    hf_weights.load_params(str(tmp_path), hf_config.read_config(str(tmp_path)))


def test_import_dequantizes_partial_tiles_of_other_writers():
  codes = schemes.Codes(np.ones((130, 64), E4M3), np.float32([[2], [3]]))
  got = schemes.dequantize(codes, (128, 128))
  np.testing.assert_array_equal(got[:, 0], [2] * 128 + [3, 3])
