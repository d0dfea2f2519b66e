"""A model quantized layer by layer: what is kept, what is shared, what stays the same."""

import dataclasses
import gc

import harness
import jax
import numpy as np
import numpy_model
import oracle
import pytest

from configs import base
from fp8jax.config import resolve
from fp8jax.kernels.choose import Device
from fp8jax.models import transformer
from fp8jax.ptq import methods
from fp8jax.ptq import run as ptq_run
from fp8jax.run import evaluator

# Grouped queries, biases and a tied head; every width holds whole groups of 64.
SIZES = dict(vocab_size=264, hidden_size=128, intermediate_size=192, num_layers=2, num_heads=4,
             num_kv_heads=2, head_dim=32, max_positions=64, init_std=0.1,
             tie_embeddings=True)  # fmt: skip


def spec_of(rules):
  c = base.get_config()
  c.model.update(SIZES)
  c.precision.rules = (*rules, ("head", "bf16"))
  c.global_batch, c.seq_len = 4, 32
  spec = resolve.resolve(c, 1, Device("cpu"))
  model = dataclasses.replace(spec.model, architecture="qwen2", qkv_bias=True)
  return dataclasses.replace(spec, model=model, declaration=transformer.params(model))


@pytest.fixture(scope="module")
def model():
  spec = spec_of([("layers/.*", "w4a16_g64")])
  params = harness.init_params(spec.model)
  rng = np.random.default_rng(0)
  layers = {key: dict(of) for key, of in params["layers"].items()}
  for name in ("q_bias", "k_bias", "v_bias"):  # zeros at the start
    layers["attn"][name] = rng.standard_normal(layers["attn"][name].shape).astype(np.float32)
  layers["attn"]["v"] = 3 * layers["attn"]["v"]  # of q, k and v the largest
  for key in ("attn", "mlp"):  # gains that differ, as of a trained model
    shape = layers[key]["norm"].shape
    layers[key]["norm"] = np.exp(rng.standard_normal(shape)).astype(np.float32)
  windows = [rng.integers(0, 264, (3, 32)).astype(np.int32) for _ in range(2)]
  return {**params, "layers": layers}, windows


def input_amaxes(cfg, params, windows):
  """Of the inputs of every linear layer, in order of computation, in float64."""
  amaxes = []

  def product(x, w):
    amaxes.append(abs(x).max())
    return numpy_model.plain(x, w)

  tokens_BL = np.concatenate(windows)
  positions_BL = np.broadcast_to(np.arange(tokens_BL.shape[1]), tokens_BL.shape)
  numpy_model.logits(cfg, params, {"tokens_BL": tokens_BL, "positions_BL": positions_BL}, product)
  return amaxes


def quantized(model, tmp_path, rules, *texts, said=lambda *_: None):
  params, windows = model
  chosen = methods.in_order(map(methods.by_name, texts))
  spec = spec_of(rules)
  return ptq_run.quantize(spec, params, windows, chosen, str(tmp_path), said)


def test_an_interrupted_call_goes_on_to_the_same_codes(model, tmp_path):
  rules, told, held = [("layers/.*", "w4a16_g64")], [], []

  def weigh(*_):
    gc.collect()
    held.append(sum(x.nbytes for x in jax.live_arrays()))

  whole = quantized(model, tmp_path / "whole", rules, "gptq", "bias_correction", said=weigh)
  assert held[1] == held[0]  # no moments, codes or activations of a finished layer stay

  def stop(done, of, line):
    told.append(done)
    if done == 1:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    quantized(model, tmp_path / "cut", rules, "gptq", "bias_correction", said=stop)
  (folder,) = (tmp_path / "cut").iterdir()
  kept = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
  assert [*kept] == ["layer_0.npz"]
  again = quantized(model, tmp_path / "cut", rules, "gptq", "bias_correction")
  assert (folder / "layer_0.npz").stat().st_mtime_ns == kept["layer_0.npz"]  # not made again
  jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
  assert again.inputs == whole.inputs and again.rows == whole.rows and len(whole.codes) == 14
  for name, read in whole.codes.items():
    for mine, other in zip(
      jax.tree.leaves(read()), jax.tree.leaves(again.codes[name]()), strict=True
    ):
      np.testing.assert_array_equal(mine, other)
  # Another text, recipe or method has files of its own; so has a damaged one.
  (folder / "layer_1.npz").write_bytes(b"PK")
  assert quantized(model, tmp_path / "cut", rules, "gptq", "bias_correction").rows == whole.rows
  quantized(model, tmp_path / "cut", [("layers/.*", "int8")])
  negated = jax.tree.map(lambda x: -x, model[0]), model[1]
  quantized(negated, tmp_path / "cut", [("layers/.*", "int8")])
  assert len([*(tmp_path / "cut").iterdir()]) == 3
  again.discard()
  assert len([*(tmp_path / "cut").iterdir()]) == 2


def test_to_the_nearest_codes_are_those_of_the_format_and_fused_ones_share_a_scale(model, tmp_path):
  params, _ = model
  rules = [
    ("layers/0/attn/.*", "nvfp4a16"),
    ("layers/0/mlp/.*", "int8"),
    ("layers/1/mlp/down", "bf16"),
    ("layers/1/.*", "fp8"),
  ]
  made = quantized(model, tmp_path, rules)
  assert "layers/1/mlp/down" not in made.codes and len(made.codes) == 13
  assert ("layers/1/mlp/down", "x") in made.inputs  # "fp8" has static scales of inputs
  # Two levels: one factor for q, k and v, that of their common amax.
  of_qkv = [np.asarray(params["layers"]["attn"][name][0]).reshape(128, -1).T for name in "qkv"]
  amax = max(abs(w).max() for w in of_qkv)
  factors = {made.tensor_scales[f"layers/0/attn/{name}"] for name in "qkv"}
  assert factors == {float(np.float32(1) / (np.float32(448 * 6) / np.float32(amax)))}
  assert made.tensor_scales["layers/0/attn/o"] not in factors
  codes = made.codes["layers/0/mlp/up"]()
  w_NK = np.asarray(params["layers"]["mlp"]["up"][0]).T
  scale = abs(w_NK).max(1, keepdims=True) * np.float32(1 / 127)
  np.testing.assert_array_equal(codes.scale, scale)
  np.testing.assert_array_equal(codes.data, oracle.cast(w_NK * (1 / scale), "int8"))
  # One scale per tensor: of q, k and v together.
  scales = [made.codes[f"layers/1/attn/{name}"]().scale for name in "qkv"]
  assert scales[0] == scales[1] == scales[2] and scales[0].shape == (1, 1)
  assert made.codes["layers/1/attn/k"]().data.dtype.name == "float8_e4m3fn"  # and not bytes


def test_a_layer_sees_what_the_quantized_layers_before_it_give(model, tmp_path):
  params, windows = model
  spec, rules = spec_of([("layers/.*", "int8_static")]), [("layers/.*", "int8_static")]
  rules = [("layers/0/.*", "e2m1_dynamic"), *rules]  # coarse, so that the difference is large
  made = quantized(model, tmp_path, rules)
  layers = {key: {n: np.array(w) for n, w in of.items()} for key, of in params["layers"].items()}
  for name, read in made.codes.items():
    _, layer, key, site = name.split("/")
    if layer == "0":
      codes = read()
      w_NK = np.asarray(codes.data, np.float32) * np.asarray(codes.scale)
      layers[key][site][0] = w_NK.T.reshape(layers[key][site][0].shape)
  both = (layers, params["layers"])
  # The eighth product is layer 1's q.
  amaxes = [input_amaxes(spec.model, {**params, "layers": of}, windows)[7] for of in both]
  got = made.inputs["layers/1/attn/q", "x"]
  np.testing.assert_allclose(got, amaxes[0], rtol=1e-5)
  assert abs(amaxes[1] / amaxes[0] - 1) > 1e-3


@pytest.mark.parametrize(
  "texts",
  [
    # Rotations and scales alone: fold_test.py.
    pytest.param(("rotate", "equalize", "awq"), marks=pytest.mark.slow),
    ("smooth_quant", "gptq"),
  ],
  ids="-".join,
)
def test_folds_leave_the_function_and_help_the_codes(model, tmp_path, texts):
  params, windows = model
  rules = [("layers/.*", "w4afp8_g64")]
  made = quantized(model, tmp_path, rules, *texts)
  plain = quantized(model, tmp_path, rules, "learned_rounding(steps=1)")

  def logits(spec, params):
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), windows[0].shape)
    batch = {"tokens_BL": windows[0], "positions_BL": positions}
    sites = spec.sites(evaluator.BF16)
    return np.asarray(transformer.logits(params, sites, batch, spec.model, spec.run))

  want = logits(plain.spec, params)
  np.testing.assert_allclose(logits(made.spec, made.params), want, atol=1e-4 * abs(want).max())
  assert made.spec.model.tie_embeddings == ("rotate" not in texts)
  # Static scales are of the inputs after the folds.
  sites = ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down")
  amaxes = input_amaxes(made.spec.model, made.params, windows)[: len(sites)]
  got = [made.inputs[f"layers/0/{site}", "x"] for site in sites]
  np.testing.assert_allclose(got, amaxes, rtol=1e-4)
  mean = [np.mean([row["error"] for row in of.rows.values()]) for of in (made, plain)]
  assert mean[0] < mean[1]
