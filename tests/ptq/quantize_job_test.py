"""--job=quantize: from a folder to a folder that is read back, and what it refuses."""

import json
import shutil
import types

import harness
import jax
import numpy as np
import oracle
import pytest
import safetensors.numpy

from configs import base, debug
from fp8jax.config import resolve
from fp8jax.jobs import dispatch, table
from fp8jax.kernels.choose import Device
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.ptq import apply
from fp8jax.recipe.served import SERVED
from fp8jax.run import restore


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  return harness.folder_of_blocks(tmp_path_factory.mktemp("source"))


@pytest.fixture
def quantize(source, tmp_path, monkeypatch, capsys):
  """The job in this process: (exit code, its printed result, stderr, the folder)."""
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  text = tmp_path / "text.txt"
  text.write_text("every layer is quantized for the inputs that it will see; " * 40)

  def run(recipe="w4a16", out=tmp_path / "target", job="quantize", **changes):
    c = debug.get_config()
    changes = {
      "model.preset": "hf", "init.hf": "", "weights.hf": str(source), "data.tokenizer": "bytes",
      "seq_len": 64, "eval.batch": 4, "global_batch": 2, "export.gate_tokens": 64,
      "export.format": "compressed-tensors", "export.max_kl": 5.0, "quantize.tokens": 512,
      "precision.rules": (("layers/.*", recipe), ("head", "bf16")), "quantize.text": str(text),
    } | changes  # fmt: skip
    c.update_from_flattened_dict(changes)
    capsys.readouterr()
    options = {"out": str(out)} if job != "train" else {}
    code = dispatch.run(
      job, c, base.get_config(), "configs/debug.py", str(tmp_path / "run"), **options
    )
    printed, err = capsys.readouterr()
    made = json.loads(printed[printed.index("{") :]) if options and not code else None
    return types.SimpleNamespace(code=code, made=made, stderr=err, target=out, config=c)

  return run


def test_a_folder_becomes_a_folder_of_codes_and_of_the_same_function(quantize, source, tmp_path):
  done = quantize(**{"quantize.methods": ("rotate", "gptq")})
  assert not done.code, done.stderr
  assert done.made["codes_of_calibration"] == 14
  assert done.made["methods"] == ["rotate", "gptq"] and done.made["calibration_tokens"] == 512
  assert 0 < done.made["gate"]["fp8jax"]["kl"] < 0.1
  assert "1/2 layer 0" in done.stderr and "2/2 layer 1" in done.stderr
  tensors = safetensors.numpy.load_file(done.target / "model.safetensors")
  stem = "model.layers.1.mlp.down_proj."
  assert {n.removeprefix(stem) for n in tensors if n.startswith(stem)} == {
    "weight_packed", "weight_scale", "weight_shape"
  }  # fmt: skip
  assert tensors[stem + "weight_packed"].shape == (128, 256 // 8)
  # A rotation unties the head, and folds the gains of the norms.
  assert "lm_head.weight" in tensors
  assert not json.loads((done.target / "config.json").read_text())["tie_word_embeddings"]
  np.testing.assert_array_equal(tensors["model.norm.weight"].astype(np.float32), 1.0)
  # Nothing of the work is left, and codes are codes: eight levels of either sign.
  assert not [*(tmp_path / "run" / "quantize").iterdir()]
  read = hf_tensors.Folder(str(done.target)).read_float(stem + "weight")
  scale = tensors[stem + "weight_scale"].astype(np.float32)
  codes = read / np.repeat(scale, 128, 1)
  np.testing.assert_allclose(codes, np.rint(codes), atol=1e-4)
  assert abs(codes).max() <= 8
  # Its codes are not rounded again unless that is asked for.
  again = quantize(out=tmp_path / "again", **{"weights.hf": str(done.target)})
  stated = f"weights.hf={str(done.target)!r} holds codes already (int4 1x128 f32)"
  assert again.code and stated in again.stderr
  # A scale that no weights have, named, also where rounding again is asked for.
  tensors = safetensors.numpy.load_file(done.target / "model.safetensors")
  tensors[stem + "weight_scale"] = -tensors[stem + "weight_scale"]
  safetensors.numpy.save_file(tensors, done.target / "model.safetensors")
  damaged = {"weights.hf": str(done.target), "export.requantize": True}
  again = quantize(out=tmp_path / "again", **damaged)
  assert again.code == 1 and f"{stem}weight_scale has 256 of 256 scales" in again.stderr
  assert not (tmp_path / "again").exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SERVED)
def test_every_served_recipe_passes_the_gate(quantize, recipe):
  """To the nearest, read back as numbers and, where activations are quantized, as codes."""
  done = quantize(recipe)
  assert not done.code, done.stderr
  assert done.made["codes_of_calibration"] == 14
  has_inputs = SERVED[recipe].fwd.lhs is not None
  assert {*done.made["gate"]} == {"tokens", "noise_floor", "fp8jax", *["served"] * has_inputs}
  kls = [of["kl"] for name, of in done.made["gate"].items() if name in ("fp8jax", "served")]
  # Weights that a server multiplies are those that are read: quantized activations alone differ.
  assert all(0 < kl < 0.2 for kl in kls), kls


@pytest.mark.slow  # folders: above; checkpoints that leave: jobs/jobs_test.py
def test_a_checkpoint_that_was_trained_in_fp8_becomes_a_folder_in_int8(quantize, tmp_path):
  """The checkpoint's float32 masters, to the nearest; the codes of training are not in between."""
  trained = {
    "weights.hf": "", "model.preset": "debug", "steps": 2, "optim.warmup_steps": 1,
    "optim.decay_steps": 1, "eval.tokens": 0, "export.gate_text": str(tmp_path / "text.txt"),
    **{f"model.{k}": v for k, v in harness.BLOCKS.items()},
  }  # fmt: skip
  assert not quantize("block_128", job="train", **trained).code
  done = quantize("int8", **trained)
  assert not done.code, done.stderr
  assert done.made["step"] == 2 and done.made["codes_of_calibration"] == 14
  spec = resolve.resolve(done.config, 1, Device("cpu"), needs=table.JOBS["quantize"].needs)
  layers = restore.restore_params(spec, str(tmp_path / "run"))[0]["layers"]
  folder = hf_tensors.Folder(str(done.target))
  for name, w in (("self_attn.o_proj", "attn/o"), ("mlp.down_proj", "mlp/down")):
    key, _, site = w.partition("/")
    w_NK = np.asarray(layers[key][site][1]).reshape(-1, 128).T
    scale = abs(w_NK).max(1, keepdims=True) * np.float32(1 / 127)
    stem = f"model.layers.1.{name}."
    np.testing.assert_array_equal(folder.read(f"{stem}weight_scale"), scale)
    np.testing.assert_array_equal(folder.read(f"{stem}weight"), oracle.cast(w_NK / scale, "int8"))


@pytest.mark.slow
def test_gaudi_2_gets_one_of_its_scales_with_back_off(quantize, source, tmp_path):
  """Weights keep half of the range to 240, activations three quarters (arXiv:2503.09975)."""
  model = shutil.copytree(source, tmp_path / "model")
  tensors = safetensors.numpy.load_file(model / "model.safetensors")
  tensors["model.layers.0.input_layernorm.weight"] *= 1.5  # inputs that need the room
  tensors["model.layers.1.mlp.gate_proj.weight"] *= 3  # and weights
  safetensors.numpy.save_file(tensors, model / "model.safetensors", {"format": "pt"})
  plain, made = (
    quantize(recipe, tmp_path / recipe, **{"weights.hf": str(model)})
    for recipe in ("fp8", "fp8_gaudi2")
  )
  assert not made.code, made.stderr
  folder, free, own = (hf_tensors.Folder(str(f)) for f in (model, plain.target, made.target))

  def hardware(amax):
    return min(s for s in (2**-8, 2**-4, 1.0, 2**4) if amax <= 240 * s)

  for layer in (0, 1):
    stem = f"model.layers.{layer}.mlp."
    amax = max(abs(folder.read_float(f"{stem}{n}_proj.weight")).max() for n in ("gate", "up"))
    assert own.read(f"{stem}up_proj.weight_scale") == hardware(2 * amax)
    assert (hardware(2 * amax) != hardware(amax)) == (layer == 1)
    assert abs(own.read(f"{stem}up_proj.weight").astype(np.float32)).max() <= 120
  # Layer 0's attention reads what no rounding has changed: 448 is the largest of "fp8".
  stem = "model.layers.0.self_attn.q_proj."
  amax = float(free.read(f"{stem}input_scale")[0]) * 448
  assert own.read(f"{stem}input_scale") == hardware(4 * amax) != hardware(amax)


def test_a_fold_that_changes_the_model_does_not_pass_the_gate(quantize, monkeypatch):
  """The folder is compared with the model as it was, not with what methods made of it."""
  folded = apply.to_model

  def wrong(model, params, chosen):
    model, params = folded(model, params, chosen)
    return model, {**params, "norm": 2 * params["norm"]}

  monkeypatch.setattr(apply, "to_model", wrong)
  done = quantize(recipe="fp8_dynamic", **{"export.max_kl": 0.01})
  assert done.code == 1 and "the model differs from its source by KL" in done.stderr
  assert not done.target.exists()


REFUSED = {
  "no such method": (
    {"quantize.methods": ("gptk",)},
    "quantize.methods: method 'gptk' is unknown; did you mean 'gptq'",
  ),
  "two ways to codes": (
    {"quantize.methods": ("gptq", "learned_rounding")},
    "quantize.methods: gptq and learned_rounding each choose the codes",
  ),
  "outliers of no activations": ({"quantize.methods": ("smooth_quant",)}, "Take awq()"),
  "a method that a format cannot": (
    {"quantize.methods": ("learned_rounding",),
     "precision.rules": (("layers/.*", "lns8"), ("head", "bf16"))}, "logarithmic",
  ),
  "zeros that would be filled": (
    {"quantize.methods": ("gptq",), "optim.sparsity": "2:4"}, "they move zeros of the mask"
  ),
  "no text": ({"quantize.text": "nowhere.txt"}, "quantize.text"),
  "too little text": (
    {"quantize.tokens": 100_000, "quantize.methods": ("gptq",)}, "set quantize.tokens=2304"
  ),
  "no whole window": (
    {"seq_len": 4096, "quantize.tokens": 1, "quantize.methods": ("gptq",),
     "model.max_positions": 4096}, "give more text, or set a smaller seq_len"
  ),
  "two formats of a fused group": (
    {"precision.rules": (("layers/1/attn/q", "int8"), ("layers/.*", "w4a16"), ("head", "bf16"))},
    "self_attn.q_proj.weight is int8 1x* f32, model.layers.1.self_attn.k_proj.weight is int4 1x128",
  ),
  "nothing to write codes in": ({"export.format": "hf-bf16"}, "holds no codes"),
  "codes of another container": (
    {"export.format": "hf-fp8-block"}, "set export.format='compressed-tensors', or take 'fp8_block'"
  ),
  "scales of another strategy": (
    {"export.strategy": "tensor"},
    "export.strategy='tensor' holds e4m3 *x* f32, and recipe 'w4a16' of precision.rules has "
    "int4 1x128 f32; set export.strategy='auto'",
  ),
  "weights that are multiplied by something first": (
    {"precision.smooth_swiglu": "channel", "export.fold_smooth_batches": 1},
    "is not the weight whose codes training multiplied",
  ),
  "a format that no server reads": (
    {"precision.rules": (("layers/.*", "e3m4_30_dynamic"), ("head", "bf16"))}, "take fp8_dynamic"
  ),
}  # fmt: skip


@pytest.mark.parametrize("changes, words", REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused_before_the_work(quantize, changes, words):
  done = quantize(**changes)
  assert done.code == 1 and words in done.stderr and "layer 0" not in done.stderr, done.stderr
  assert not done.target.exists()
