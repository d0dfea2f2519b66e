"""Adapters beside a frozen model: numbers, gradients, state, and FP8 checkpoints as their base."""

import dataclasses
import io
import json
import math
import struct

import grain
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import rich.console
from harness import tiny_config, tiny_spec

from fp8jax import params as params_lib
from fp8jax.config import identity, resolve
from fp8jax.jobs import start
from fp8jax.models import lora, transformer
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site as site_lib
from fp8jax.ops import stored_params
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.run import checkpoint
from fp8jax.step import train_step

RANK = {"model.lora.rank": 4}
SMALL = {
  "global_batch": 1, "seq_len": 128, "eval.batch": 1, "model.num_layers": 2, "steps": 4,
  "model.num_heads": 2, "model.num_kv_heads": 1, "model.intermediate_size": 256,
  "optim.decay_steps": 1, "optim.warmup_steps": 0, "optim.peak_lr": 1e-2,
}  # fmt: skip


def _spec(recipe="block_128", **changes):
  return tiny_spec(tiny_config(recipe, **SMALL | changes))


def _weights(spec):
  """Random weights that BF16 holds, so that every storage begins with the same numbers."""
  params = params_lib.init(jax.random.key(3), transformer.params(lora.without(spec.model)),
                           spec.model.dims)  # fmt: skip
  return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)


def _host():
  return {name: value[:1] for name, value in harness.host_batches()[0].items()}


def _logits(spec, params):
  return jax.jit(lambda p, b: transformer.logits(p, spec.sites(), b, spec.model, spec.run))(
    params, _host()
  )


# Recipe of a base in codes and the bytes of a code: tiles of 128x128; or one scale, of the rotated
# weight in INT8 and E3M2, and of the plain one.
IN_CODES = {
  "block_fp8": ("block_128", ml_dtypes.float8_e4m3fn),
  "int8_h64": ("halo_int8_2_hq", np.int8),
  "e3m2_h64": ("halo_fp6_1_hq", ml_dtypes.float8_e4m3fn),
  "e4m3": ("halo_fp8_0", ml_dtypes.float8_e4m3fn),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe, base", [(IN_CODES[b][0], b) for b in ("block_fp8", "int8_h64")])
def test_step_0_is_the_base_to_the_bit(recipe, base):
  plain, spec = _spec(recipe), _spec(recipe, **RANK, **{"model.lora.base": base})
  want = _logits(plain, train_step.make_state(plain, _weights(plain)).params)
  params = train_step.make_state(spec, _weights(spec)).params
  np.testing.assert_array_equal(_logits(spec, params), want)
  assert np.any(np.asarray(_logits(spec, harness.random_adapters(params))) != want)


@pytest.mark.slow
def test_gradients_of_adapters_are_those_of_the_merged_weights():
  """d loss / d a = s (d loss / d w) b', d loss / d b = s a' (d loss / d w), in float32."""
  spec = _spec("bf16", **RANK, **{"model.lora.base": "bf16", "model.lora.targets": (".*",)})
  plain = _spec("bf16")
  params = harness.random_adapters(train_step.make_state(spec, _weights(spec)).params)
  merged = lora.merged(params, spec.declaration, spec.model)
  scale = spec.model.lora.alpha / spec.model.lora.rank
  got = params_lib.flatten(train_step.gradients(spec, params, spec.sites(), _host())[1])
  want = params_lib.flatten(train_step.gradients(plain, merged, plain.sites(), _host())[1])
  flat, checked = params_lib.flatten(params), 0
  for path in want:
    if path + "_lora_a" not in flat:
      assert got[path] == ()
      continue
    a, b = (np.asarray(flat[path + end], np.float64) for end in ("_lora_a", "_lora_b"))
    layers, rank = a.shape[0], a.shape[-1]
    a, b = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
    dw = np.asarray(want[path], np.float64).reshape(layers, a.shape[1], b.shape[2])
    assert_close(got[path + "_lora_a"].reshape(a.shape), scale * dw @ b.swapaxes(1, 2))
    assert_close(got[path + "_lora_b"].reshape(b.shape), scale * a.swapaxes(1, 2) @ dw)
    checked += 1
  assert checked == 7


def assert_close(got, want):
  assert np.abs(np.asarray(got) - want).max() < 1e-4 * np.abs(want).max()


def _on_two(saved, recipe, changes):
  """Parameters of a checkpoint of step 2, split over two devices: all inputs, or all outputs."""
  shape = (1, 1, 2) if recipe == "block_128" else (1, 2, 1)
  changes = SMALL | changes | {"global_batch": 2, "eval.batch": 2}
  spec = tiny_spec(tiny_config(recipe, **changes), shape)
  return saved.restore(2, train_step.abstract_state(spec, 2)).params


@pytest.mark.slow
@pytest.mark.parametrize("base", IN_CODES)
def test_frozen_parameters_have_no_state_and_never_move_and_a_resumed_run_is_bitwise(
  tmp_path, base
):
  """On one device, to the bit; what is restored onto two, of half of each weight, is the same."""
  (recipe, dtype), changes = IN_CODES[base], RANK | {"model.lora.base": base}
  changes["model.num_kv_heads"] = 2
  spec = _spec(recipe, **changes)
  runner, host = harness.Runner(spec), [_host()] * 4
  state = train_step.make_state(spec, _weights(spec))
  declared = params_lib.flatten(spec.declaration)
  before = jax.tree.map(np.asarray, params_lib.flatten(state.params))
  for path, p in declared.items():
    opt = params_lib.flatten(state.opt)[path]
    is_moved = lora.is_adapter(path)
    assert p.trainable == is_moved and bool(jax.tree.leaves(opt)) == is_moved
    stored = before[path]
    if path.startswith("layers/") and p.inputs and not is_moved:
      assert isinstance(stored, StoredMatrix) and stored.data.dtype == dtype
      shape = params_lib.shape(p, spec.model.dims)
      assert stored.data.nbytes == math.prod(shape)
      assert base == "block_fp8" or stored.scale.nbytes == 4 * shape[0]  # one per layer
  _, whole = runner.run(host, jax.tree.map(jnp.copy, state))
  _, half = runner.run(host[:2], state)
  kept = jax.tree.map(np.asarray, half.params)
  saved = checkpoint.Checkpoints(str(tmp_path))
  saved.save(2, half, iter(grain.MapDataset.range(4).to_iter_dataset()), {})
  saved.wait()
  _, resumed = runner.run(host[2:], saved.restore(2, train_step.abstract_state(spec, 2)))
  jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
  for path, w in params_lib.flatten(_on_two(saved, recipe, changes)).items():
    jax.tree.map(np.testing.assert_array_equal, w, params_lib.flatten(kept)[path])
    if isinstance(w, StoredMatrix):
      assert w.data.addressable_shards[1].data.size == w.data.size // 2
  saved.close()
  after = jax.tree.map(np.asarray, params_lib.flatten(whole.params))
  for path in declared:
    same = jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), before[path], after[path]))
    assert same != lora.is_adapter(path), path


@pytest.mark.slow
def test_the_step_multiplies_codes_forward_and_back_and_has_no_weight_gradient_of_them():
  spec = _spec(**RANK)
  rows = harness.strict(spec)
  quantized = {str(row.key) for row in rows if row.expected}
  assert all(row.is_proven for row in rows)
  for name in transformer.linear_layers(spec.model):
    assert {f"layers/{name} fwd", f"layers/{name} dgrad"} <= quantized
    assert not any(str(row.key) == f"layers/{name} wgrad" for row in rows)


# --- FP8 checkpoints -----------------------------------------------------------------------------


def _write_fp8_folder(folder, cfg, rng, scale_dtype):
  """A folder in DeepSeek's format, written by hand: {path: (codes, scales)} of what is in FP8."""
  from fp8jax.models.hf import names

  tensors, codes = {}, {}
  for entry in names.entries(lora.without(cfg)):
    shape = entry.hf_shape(cfg.dims)
    if entry.layer is None or entry.inputs is None:
      tensors[entry.name] = np.ones(shape) if len(shape) == 1 else 0.05 * rng.standard_normal(shape)
      tensors[entry.name] = tensors[entry.name].astype(ml_dtypes.bfloat16)
      continue
    data = rng.integers(-120, 121, shape).astype(np.int8).view(ml_dtypes.float8_e4m3fn)
    data = np.where(np.isnan(data.astype(np.float32)), 0, data).astype(data.dtype)
    tiles = tuple(-(-n // 128) for n in shape)
    scale = np.exp2(rng.integers(-14, -11, tiles)).astype(np.float32)
    if scale_dtype == np.float32:
      scale = (scale * rng.uniform(1, 2, tiles)).astype(np.float32)
    tensors[entry.name] = data
    tensors[entry.name.removesuffix("weight") + "weight_scale_inv"] = scale.astype(scale_dtype)
    codes[entry.path, entry.layer] = (data, scale)
  kinds = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "float32": "F32",
           "bfloat16": "BF16"}  # fmt: skip
  header, offset = {}, 0
  for name, x in tensors.items():
    spot = [offset, offset + x.nbytes]
    header[name] = {"dtype": kinds[x.dtype.name], "shape": list(x.shape), "data_offsets": spot}
    offset += x.nbytes
  text = json.dumps(header).encode()
  with open(folder / "model.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text + b"".join(x.tobytes() for x in tensors.values()))
  config = hf_config.config_to_hf(lora.without(cfg), "bfloat16")
  config["quantization_config"] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
  }  # fmt: skip
  if scale_dtype != np.float32:
    config["quantization_config"]["scale_fmt"] = "ue8m0"
  (folder / "config.json").write_text(json.dumps(config))
  return codes


@pytest.mark.slow
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.float8_e8m0fnu],
                         ids=["float32", "ue8m0"])  # fmt: skip
def test_an_fp8_checkpoint_is_the_base_to_the_bit(tmp_path, rng, scale_dtype):
  spec = _spec(**RANK)
  written = _write_fp8_folder(tmp_path, spec.model, rng, scale_dtype)
  params, _ = hf_weights.load_params(str(tmp_path), spec.model)
  state = train_step.make_state(spec, params)
  flat = params_lib.flatten(state.params)
  for (path, layer), (data, scale) in written.items():
    stored = flat[path]
    got = np.asarray(stored.data[layer]).reshape(data.T.shape)
    np.testing.assert_array_equal(got.view(np.uint8), data.T.view(np.uint8))
    np.testing.assert_array_equal(stored.scale[layer], scale.T)
  # What they multiply is the model that a plain import of the folder gives, in float32.
  plain = _spec("bf16")
  want = _logits(plain, hf_weights.load_params(str(tmp_path), plain.model)[0])
  got = _logits(_spec("bf16", **RANK), state.params)
  assert_close(got, np.asarray(want))


@pytest.mark.slow
def test_a_stage_keeps_the_codes_of_its_base_and_begins_adapters_where_there_are_none(
  tmp_path, rng
):
  """The scales are no powers of two, so that a base that is requantized has other codes."""
  spec, console = _spec(**RANK), rich.console.Console(file=io.StringIO())
  _write_fp8_folder(tmp_path, spec.model, rng, np.float32)
  runs = {}
  for name, own in (("adapted", spec), ("plain", _spec())):
    params, _ = hf_weights.load_params(str(tmp_path), own.model)
    state = train_step.make_state(own, params)
    if name == "adapted":
      state = dataclasses.replace(state, params=harness.random_adapters(state.params))
    saved = checkpoint.Checkpoints(str(tmp_path / name))
    data = iter(grain.MapDataset.range(4).to_iter_dataset())
    meta = {
      "config": identity.identity(own), "data_fingerprint": "", "readers": {}, "evaluations": {},
      "documents": {}, "weights_dtype": "bfloat16",
    }  # fmt: skip
    saved.save(0, state, data, meta)
    saved.wait()
    saved.close()
    found, _ = start.stage(spec, str(tmp_path / name), str(tmp_path / "stage"), console)
    runs[name] = state.params, found.params
  before, after = (params_lib.flatten(x) for x in runs["adapted"])
  for path in before:
    jax.tree.map(np.testing.assert_array_equal, after[path], before[path])
  before, after = (params_lib.flatten(x) for x in runs["plain"])
  assert after.keys() - before.keys() == {path for path in after if lora.is_adapter(path)} != set()
  for path, w in after.items():
    if path.endswith("_lora_b"):
      assert not np.any(w)
    elif isinstance(w, StoredMatrix):
      want = np.asarray(before[path])
      assert np.abs(w.unpack() - want).max() <= 2.0**-4 * np.abs(want).max()
    elif path in before:  # embedding, head and norms, which BF16 holds
      np.testing.assert_array_equal(stored_params.dequantize_tree(w), before[path])


# --- merge and refusals --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("base", ["bf16", "e3m2_h64"])
def test_merged_weights_are_the_adapted_model(base):
  spec, plain = _spec("bf16", **RANK, **{"model.lora.base": base}), _spec("bf16")
  params = harness.random_adapters(train_step.make_state(spec, _weights(spec)).params)
  merged = lora.merged(params, spec.declaration, spec.model)
  assert_close(_logits(spec, params), np.asarray(_logits(plain, merged)))
  q, a, b = (np.asarray(stored_params.compute_copy(params["layers"]["attn"][n]), np.float64)
             for n in ("q", "q_lora_a", "q_lora_b"))  # fmt: skip
  exact = np.asarray(_weights(spec)["layers"]["attn"]["q"], np.float64)
  assert np.linalg.norm(q - exact) <= (0.08 if base != "bf16" else 0) * np.linalg.norm(exact)
  want = q + 4.0 * np.einsum("ndr,nrhk->ndhk", a, b)
  np.testing.assert_allclose(merged["layers"]["attn"]["q"], want, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("changes, words", [
  ({"model.lora.rank": -1}, "model.lora.rank=-1 must be at least 1"),
  ({"model.lora.targets": ("attn/z",)}, "'attn/z' matches no linear layer; there are attn/q"),
  ({"model.lora.targets": ("(",)}, "'(' is no regular expression"),
  ({"model.lora.targets": (5,)}, "model.lora.targets: 5 is no regular expression"),
  ({"model.lora.rank": 10**9}, "model.lora.rank=1000000000 must be at most model.hidden_size=128"),
  ({"model.lora.base": "int4"}, "model.lora.base='int4' is not one of block_fp8, e4m3"),
  ({"optim.in_backward": True}, "optim.in_backward=True with model.lora.rank=4"),
  ({"precision.smooth_swiglu": "token"}, "precision.smooth_swiglu='token' with model.lora.rank=4"),
  ({"precision.rules": ((".*", "tensor_current"),)}, "has recipe 'tensor_current' and model.lora"),
])  # fmt: skip
def test_settings_that_exclude_adapters_are_refused(changes, words):
  with pytest.raises(resolve.ConfigError) as e:
    _spec(**{**RANK, **changes})
  assert words in str(e.value)


BLOCKS = {"global_batch": 4, "eval.batch": 4, "model.num_kv_heads": 2, "model.head_dim": 64,
          "model.lora.base": "block_fp8"}  # fmt: skip


@pytest.mark.parametrize("recipe, changes, shape, words", [
  ("block_128", {}, None,
   "attn/q has recipe 'block_128' and model.lora.base='int8_h64' keeps its weight in codes of "
   "int8 *x* f32 hadamard64 unsigned: give it recipe 'halo_int8_2_hq' or 'bf16', or set "
   "model.lora.base='block_fp8' or 'bf16'"),
  ("halo_int8_2", {}, None, "'halo_int8_2_hq' or 'bf16', or set model.lora.base='bf16'"),
  ("bf16", {"model.intermediate_size": 96}, None,
   "mlp/down: model.lora.base='int8_h64' rotates blocks of 64, and the product contracts 96"),
  ("bf16", {"global_batch": 4, "eval.batch": 4}, (1, 4, 1),
   "on this mesh would split tiles of int8 *x* f32 hadamard64 unsigned over devices; take a "
   "smaller mesh.fsdp, or set"),
  ("block_128", BLOCKS, (1, 2, 2), "smaller mesh.fsdp or mesh.tensor, or"),
  ("block_128", BLOCKS, (1, 1, 2), "take a smaller mesh.tensor, or set"),
  # A device dequantizes its own part: half a tile would get the scale of another.
  ("bf16", BLOCKS | {"model.hidden_size": 192}, (1, 2, 1), "smaller mesh.fsdp, or set"),
  ("bf16", BLOCKS | {"model.hidden_size": 256}, (1, 2, 1), ""),
  ("halo_int8_2_hq", {"global_batch": 2, "eval.batch": 2}, (1, 2, 1), ""),
])  # fmt: skip
def test_a_rotated_base_has_its_recipes_whole_blocks_and_whole_shards(
  recipe, changes, shape, words
):
  c = tiny_config(recipe, **SMALL | RANK | {"model.lora.base": "int8_h64"} | changes)
  if not words:
    tiny_spec(c, shape)
    return
  with pytest.raises(resolve.ConfigError) as e:
    tiny_spec(c, shape)
  assert words in str(e.value)


def test_a_fresh_adapter_is_drawn_with_the_deviation_of_its_inputs():
  """Uniform in +-fan_in**-0.5 (arXiv:2106.09685 takes a random a; PEFT Kaiming's) has this one."""
  cfg = dataclasses.replace(_spec(**RANK).model, num_layers=48)
  layers = params_lib.init(jax.random.key(5), transformer.params(cfg), cfg.dims)["layers"]
  for key, name, fan_in in (("attn", "q", 128), ("attn", "o", 256), ("mlp", "down", 256)):
    a = np.asarray(layers[key][f"{name}_lora_a"], np.float64)
    assert a.shape[0] == 48 and a[0].size == fan_in * 4
    assert a.std() == pytest.approx((3 * fan_in) ** -0.5, rel=0.02)
    assert not np.any(layers[key][f"{name}_lora_b"])


def test_adapters_have_sites_in_bf16():
  spec = _spec(**RANK)
  recipes = {name: s.recipe.name for name, s in site_lib.flatten(spec.sites()).items()}
  assert recipes["layers/attn/q"] == "block_128"
  assert recipes["layers/attn/q_lora_a"] == recipes["layers/mlp/down_lora_b"] == "bf16"


def test_products_of_an_adapter_follow_those_of_their_layer():
  """a reads what the layer reads, b what a makes; R is the rank."""
  spec = _spec(**RANK, **{"model.lora.targets": ("attn/o", "mlp/.*")})
  sites = transformer.gemm_sites(spec.model)
  names = ["q", "k", "v", "o", "o_lora_a", "o_lora_b"]
  of_mlp = ("gate", "up", "down")
  wanted = [f"layers/attn/{name}" for name in names]
  wanted += [f"layers/mlp/{n}{part}" for n in of_mlp for part in ("", "_lora_a", "_lora_b")]
  assert [*sites] == [*wanted, "head"]
  ours = {name: (one.eqn, one.input) for name, one in sites.items() if "_lora_" in name}
  inputs = {"o": ("BLHK", sites["layers/attn/o"].input, "HK", "D")}
  inputs |= {n: ("BLD", sites["layers/mlp/up"].input, "D", "F") for n in ("gate", "up")}
  inputs["down"] = ("BLF", sites["layers/mlp/down"].input, "F", "D")
  for name, (x, read, contracted, produced) in inputs.items():
    key = "attn" if name == "o" else "mlp"
    of_a, of_b = (ours.pop(f"layers/{key}/{name}_lora_{part}") for part in "ab")
    assert of_a == (f"{x},{contracted}R->BLR", read)
    assert of_b == (f"BLR,R{produced}->BL{produced}", f"{name}_lora_a")
  assert not ours
