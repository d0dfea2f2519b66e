"""Training from a quantized folder begins from weights that its recipe rounds to its codes."""

import dataclasses
import json
import re
import shutil

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from fp8jax import params as params_lib
from fp8jax.data import loader
from fp8jax.errors import ConfigError, UserError
from fp8jax.export import fp8 as fp8_export
from fp8jax.export import served, write
from fp8jax.jobs import start, start_codes
from fp8jax.models import lora, presets, transformer
from fp8jax.models.hf import names, peft, schemes
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.ops import site_tree, stored_params
from fp8jax.recipe.quant import WHOLE
from fp8jax.recipe.served import SERVED

_CFG = dataclasses.replace(presets.DEBUG, **harness.BLOCKS, init_std=0.05)
# The largest code of every tile but the last, which has the second: GPTQ leaves such tiles.
_LARGEST = {"int4": (7, 6), "int8": (127, 126), "e4m3": (448, 416), "e2m1": (6, 4)}
# Of NVFP4's tensors, as a reader has it: one for q, k and v, of which k is far below. The largest
# value, 6 * (448 * factor), has the factor next to it: the amax is below it, in "mlp" above.
_FACTORS = [np.float32(1) / (np.float32(2688) / np.float32(a)) for a in (0.1019, 0.1006)]
_GRID = {
  "int8": range(0, 126, 5),
  "e2m1": (0, 0.5, 1, 1.5, 2, 3),
  "e4m3": (0, 0.125, 3, 7.5, 40, 208),
}


def _drawn(rng, quant, shape, name, is_full):
  """(codes, their float32 scales): as a method leaves them, not as rounding does.

  is_full: every tile has the format's largest code, so that each code comes back.
  """
  grid = np.array(_GRID.get(quant.format.name, range(6)), np.float32)
  data = rng.choice(grid, shape) * rng.choice([-1, 1], shape)
  rows, k = (n if t == WHOLE else t for n, t in zip(shape, quant.tile))
  data[::rows, ::k] = _LARGEST[quant.format.name][0]
  if quant.scale.value != "e4m3_over_f32" and not is_full:
    data[-rows, -k] = _LARGEST[quant.format.name][1]
  grid = (shape[0] // rows, shape[1] // k)
  scale = np.float32(1 + rng.random(grid)) / 16
  if quant.scale.value == "pow2" and not is_full:
    data[:rows, :k] = np.sign(data[:rows, :k])
    data[0, 0] = quant.format.max / 2  # rounding gives it the next power of two
  if quant.scale.value == "pow2":
    scale = np.ldexp(np.float32(1), rng.integers(-6, -2, grid)).astype(np.float32)
  if quant.scale.value == "e4m3_over_f32":
    scale = np.round(scale * 128) / (32 if "k_proj" in name or "up_proj" in name else 1)
    scale[0, 0] = scale[0, 0] if scale[0, 0] < 1 else 448
    scale = scale.astype(np.float32) * _FACTORS["mlp" in name]
  return data.astype(quant.format.dtype), scale


def _folder(folder, name, rng, is_full=False):
  """{weight: (codes, scales)} of a folder in a recipe's format."""
  codes, stored, quant = {}, {}, SERVED[name].fwd.rhs
  linears = [e for e in names.entries(_CFG) if e.layer is not None and e.inputs is not None]
  scheme = served.scheme(quant, SERVED[name].fwd.lhs)
  for e in linears:
    codes[e.name] = _drawn(rng, quant, e.hf_shape(_CFG.dims), e.name, is_full)
    factor = float(_FACTORS["mlp" in e.name]) if scheme.layout.tensor_scale else None
    read = lambda name=e.name: codes[name]  # noqa: E731
    stored[e.name] = fp8_export.Stored(quant, read, None, factor, scheme)
  weights = harness.init_params(_CFG)
  _write(folder, name, weights, stored)
  (folder / "tokenizer_config.json").write_text("{}")
  return codes


def _write(folder, name, weights, stored=None):
  """The plan of a folder in a recipe's format, which it writes."""
  rules, recipe = (("head", "bf16"), ("layers/.*", name)), SERVED[name]
  recipes = site_tree.recipes_of(site_tree.build_sites(
    transformer.site_params(_CFG), _CFG.dims, rules, backends=site_tree.Backends("reference"),
  ))  # fmt: skip
  scheme = served.scheme(recipe.fwd.rhs, recipe.fwd.lhs)
  plan = fp8_export.choose(
    names.entries(_CFG), _CFG.dims, recipes, scheme, follows=True, stored=stored
  )
  write.save(str(folder), write.model(weights, _CFG, "bfloat16", fp8=plan))
  return plan


def _spec(folder, recipe, **changes):
  own = {f"model.{key}": None for key in harness.THREE_LAYERS}
  return harness.text_spec(recipe, **own, **{
    "model.preset": "hf", "init.hf": str(folder), "data.tokenizer": "bytes", "seq_len": 32,
    **changes,
  })  # fmt: skip


def _start(tmp_path, folder, recipe, **changes):
  """(the parameters of a state that the trainer begins with, what it prints)."""
  spec, said = _spec(folder, recipe, **changes), []
  console = type("Out", (), {"print": lambda _, line: said.append(line)})()
  state, _ = start.fresh(spec, str(tmp_path / "run"), console)
  return params_lib.flatten(jax.device_get(stored_params.dequantize_tree(state.params))), "\n".join(
    said
  )


@pytest.mark.parametrize(
  "recipe, changes",
  [
    ("w4a16", {}), ("w4a16", {"model.lora.rank": 2, "model.lora.base": "float32"}), ("int8", {}),
    ("fp8_block", {}), ("mxfp4a16", {}), ("nvfp4a16", {}),
  ],
)  # fmt: skip
def test_the_first_step_multiplies_the_codes_of_the_folder(tmp_path, rng, recipe, changes):
  codes, quant = _folder(tmp_path / "hf", recipe, rng), SERVED[recipe].fwd.rhs
  flat, said = _start(tmp_path, tmp_path / "hf", recipe, **changes)
  is_lost = quant.scale.value == "f32"  # one code a matrix, and no more
  names_of = {e.name: e for e in names.entries(_CFG)}
  for e in names.entries(_CFG):
    if e.name not in codes:
      continue
    data, scale = codes[e.name]
    w = flat[e.path][e.layer].reshape(e.hf_shape(_CFG.dims)[::-1]).T
    amax = max(np.abs(flat[names_of[n].path][e.layer]).max() for n in fp8_export.fused_with(e.name))
    again, of_w = oracle.quantize(w, quant.format.name, quant.tile, quant.scale.value, amax)
    differs = again.astype(np.float32) != data.astype(np.float32)
    assert differs.sum() == is_lost, e.name
    for axis, t in enumerate(quant.tile):
      scale = np.repeat(scale, data.shape[axis] if t == WHOLE else t, axis)
    of_codes = scale[: data.shape[0], : data.shape[1]]
    is_exact = quant.scale.value != "f32"
    np.testing.assert_allclose(of_w, of_codes, rtol=0 if is_exact else 2.0**-22)
  lines = [line for line in said.splitlines() if line.startswith("starts from codes of ")]
  assert len(lines) == 7 and all(("relative error" in x) == is_lost for x in lines)
  assert is_lost or all(line.endswith("all kept") for line in lines)
  assert any("lora" in path for path in flat) == bool(changes)
  if recipe == "nvfp4a16":  # exported again, what is trained is the folder's to the bit
    plan = _write(tmp_path / "again", recipe, params_lib.unflatten(flat))
    assert len(plan.matrices) == 14 and all(m.is_trained for m in plan.matrices.values())
    before, after = (hf_tensors.Folder(str(d)) for d in (tmp_path / "hf", tmp_path / "again"))
    own = [key for key in before.files if "_proj." in key]
    assert len(own) == 3 * 14 and before.files.keys() == after.files.keys()
    for key in own:
      assert before.read(key).tobytes() == after.read(key).tobytes(), key
    of_k = "model.layers.1.self_attn.k_proj.weight_global_scale"
    _double(tmp_path / "hf" / "model.safetensors", of_k)
    with pytest.raises(UserError, match="fused with it have other first-level .*servers fuse, or"):
      _start(tmp_path, tmp_path / "hf", recipe)


def _double(file, name):
  """A float32 tensor of a file, twice as large."""
  raw = bytearray(file.read_bytes())
  size = int.from_bytes(raw[:8], "little")
  start_, end = (8 + size + n for n in json.loads(raw[8 : 8 + size])[name]["data_offsets"])
  raw[start_:end] = (2 * np.frombuffer(bytes(raw[start_:end]), np.float32)).tobytes()
  file.write_bytes(raw)


def test_another_format_or_tile_is_refused_unless_asked_for(tmp_path, rng):
  codes = _folder(tmp_path / "hf", "w4a16", rng)
  for recipe in ("w4a16_g64", "fp8_dynamic"):
    with pytest.raises(UserError, match="second time.*train with one of w4a16, .*requantize=True"):
      _start(tmp_path, tmp_path / "hf", recipe)
  name = "model.layers.1.mlp.up_proj.weight"
  data, scale = codes[name]
  want = data.astype(np.float32) * np.repeat(scale, 128, 1)
  for recipe, changes in (("bf16", {}), ("fp8_dynamic", {"init.requantize": True})):
    flat, said = _start(tmp_path, tmp_path / "hf", recipe, **changes)
    np.testing.assert_array_equal(flat["layers/mlp/up"][1].T, want)
    assert ("14 matrices of" in said) == bool(changes)


def test_the_teacher_of_codes_is_another_model(tmp_path, rng):
  """Distilled towards themselves, codes recover nothing."""
  _folder(tmp_path / "hf", "w4a16", rng)
  shutil.copytree(tmp_path / "hf", tmp_path / "copy")
  own = ".*hf' holds codes .int4 1x128 f32., those that training starts from.*set distill.teacher"
  for more in ({}, {"distill.teacher": f"{tmp_path}/hf"}):
    with pytest.raises(ConfigError, match=f"the teacher {own}"):
      _spec(tmp_path / "hf", "w4a16", **{"distill.weight": 1.0}, **more)
  harness.folder_of_blocks(tmp_path / "plain")
  for name, codes in (("plain", ""), ("copy", r" \(of codes, int4 1x128 f32: not an unqu.*\)")):
    more = {"distill.weight": 1.0, "distill.teacher": str(tmp_path / name)}
    said = []
    console = type("Out", (), {"print": lambda _, line, said=said: said.append(line)})()
    start.teacher(_spec(tmp_path / "hf", "w4a16", **more), console)
    assert re.fullmatch(
      f"teacher: .*/{name}{codes}, multiplied in float32, unquantized; loss .*", said[0]
    )


_DOWN = "model.layers.0.mlp.down_proj.weight"
_MASTERS = ("bf16_sr", "bf16_remainder", "f16", "lns16")
# What may stand between the values of codes and their product: exact, or refused by its name.
_BETWEEN = [
  ({}, ""), ({"precision.smooth_swiglu": "token", "precision.compute_dtype": "bfloat16"}, ""),
  ({"optim.moment_format": "coat", "optim.grad_format": "e4m3"}, ""),
  ({"optim.in_backward": True, "optim.grad_clip_norm": 0.0, "memory.remat_policy": "full"}, ""),
  ({"precision.first_bf16": 1}, "bf16"),
  ({"model.lora.rank": 2, "model.lora.base": "float32"}, ""),
  ({"model.lora.rank": 2, "model.lora.base": "bf16"}, "model.lora.base='bf16' rounds .*'float32'"),
  ({"model.lora.rank": 2, "recipe": "bf16"}, "'block_fp8' rounds .* second .*'float32'"),
  *(({"optim.master_format": m}, f"master_format='{m}' rounds .*='float32'") for m in _MASTERS),
  ({"precision.smooth_swiglu": "channel"}, "smooth_swiglu='channel' multiplies .*set .*'none'"),
  ({"init.nudge": True}, "init.nudge=True moves .*set init.nudge=False"),
  ({"init.untie": True, "init.workdir": "there", "init.weights_only": True},
   "init.untie=True moves .*set init.untie=False"),
  ({"optim.sparsity": "2:4"}, "optim.sparsity='2:4' prunes some .*set optim.sparsity='none'"),
  ({"optim.sparsity": "2:4", "codes": "sparse"}, ""),
  ({"recipe": "unit_scaling"}, "'unit_scaling' has no scales; set precision.rules"),
  ({"recipe": "tensor_delayed(margin=1)"}, "has Delayed.*margin=1.*set precision.calibration=''"),
]  # fmt: skip


def test_what_changes_weights_before_their_product_is_exact_or_refused(rng):
  data = rng.integers(-127, 128, (64, 96)).astype(np.int8)
  data[:, 0] = 127
  scale = (1 + rng.random((64, 1), np.float32)) / 512
  scheme = served.scheme(SERVED["w8a16"].fwd.rhs, None)
  for changes, refusal in _BETWEEN:
    changes, own = dict(changes), data.copy()
    recipe, is_sparse = changes.pop("recipe", "w8a16"), changes.pop("codes", "")
    own[:, 1::2] = 0 if is_sparse else own[:, 1::2]
    rules = (("head", "bf16"), ("layers/.*", recipe))
    spec = harness.text_spec(**{"precision.rules": rules, "init.hf": "", **changes})
    start_from = start_codes.StartCodes(spec)
    if refusal not in ("", "bf16"):
      pattern = f"down_proj.weight is in codes, and .*{refusal}.*, or init.requantize=True"
      with pytest.raises(UserError, match=pattern):
        start_from(_DOWN, schemes.Codes(own, scale), scheme)
      continue
    w = start_from(_DOWN, schemes.Codes(own, scale), scheme)
    np.testing.assert_allclose(w, own * scale, rtol=2.0**-22)
    if not refusal:
      again, _ = oracle.quantize(w, "int8", (1, 0), "f32")
      np.testing.assert_array_equal(again, own)
      assert list(start_from.lines()) == ["starts from codes of : mlp/down: all kept"]


_ADAPTERS = {
  "model.lora.rank": 4, "model.lora.base": "float32", "optim.peak_lr": 1e-2, "steps": 3
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["w8a16", "w4a16", "nvfp4a16", "mxfp4a16"])
def test_adapters_train_beside_codes_that_stay(tmp_path, rng, recipe):
  """At the folder's own loss; they leave alone and come back beside the same codes."""
  folder = tmp_path / "hf"
  drawn, quant = _folder(folder, recipe, rng, is_full=True), SERVED[recipe].fwd.rhs
  spec = _spec(folder, recipe, **_ADAPTERS)
  console = type("Out", (), {"print": lambda *_: None})()
  state, _ = start.fresh(spec, str(tmp_path / "run"), console)
  before = params_lib.flatten(jax.device_get(stored_params.dequantize_tree(state.params)))
  # The folder's own loss: its codes times its scales, by NumPy, multiplied unquantized.
  wide = dict(before)
  for e in names.entries(_CFG):
    if e.name in drawn:
      values = schemes.dequantize(schemes.Codes(*drawn[e.name]), quant.tile)
      wide[e.path] = wide[e.path].copy()
      wide[e.path][e.layer] = values.T.reshape(wide[e.path][e.layer].shape)
  stream = loader.train_batches(spec.data, 2)
  hosts = [next(stream)] * 3
  stream.close()
  plain = params_lib.unflatten({k: v for k, v in wide.items() if not lora.is_adapter(k)})
  model = lora.without(spec.model)
  sites = dataclasses.replace(spec, model=model).sites("bf16")
  loss = jax.jit(lambda p, b: transformer.loss(p, sites, b, model, spec.run))
  want = float(loss(plain, hosts[0])) / hosts[0]["weights_BL"].sum()
  losses, state = harness.Runner(spec).run(hosts, state)
  np.testing.assert_allclose(losses[0], want, rtol=2e-6)
  assert losses[2] < losses[0]
  after = params_lib.flatten(jax.device_get(stored_params.dequantize_tree(state.params)))
  moved = {path for path in after if not np.array_equal(after[path], before[path])}
  assert moved and all(map(lora.is_adapter, moved))
  for e in names.entries(_CFG):
    if e.name in drawn:
      w = after[e.path][e.layer].reshape(e.hf_shape(_CFG.dims)[::-1]).T
      fused = fp8_export.fused_with(e.name)
      amax = max(np.abs(after[p.path][e.layer]).max() for p in names.entries(_CFG)
                 if p.name in fused)  # fmt: skip
      again, _ = oracle.quantize(w, quant.format.name, quant.tile, quant.scale.value, amax)
      np.testing.assert_array_equal(again.view(np.uint8), drawn[e.name][0].view(np.uint8), e.name)
  write.save(str(tmp_path / "peft"), write.adapters(state.params, spec.model, str(folder)))
  base = {k: v for k, v in after.items() if not lora.is_adapter(k)}
  read = peft.added(params_lib.unflatten(base), str(tmp_path / "peft"), spec.model, spec.run.layout)
  for path, value in params_lib.flatten(read).items():
    np.testing.assert_array_equal(value, after[path], path)


@pytest.mark.parametrize("dtype", [
  "float4_e2m1fn", "int4", "int8", "float8_e4m3fn", "bfloat16", "float32",
])  # fmt: skip
def test_a_digest_sees_a_changed_or_moved_number_in_every_format(dtype):
  rows = ([1, 0, 0, 1], [1, 0, 1, 0], [1, 0, 0, 0], [-1, 0, 0, 1])
  digests = {params_lib.digest({"w": jnp.asarray(row).astype(dtype)}) for row in rows}
  assert len(digests) == len(rows)
