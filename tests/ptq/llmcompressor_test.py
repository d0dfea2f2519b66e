"""Rounding, GPTQ, SmoothQuant and AWQ beside llm-compressor's on the same weights and inputs.

Where both choose the same scales, codes are equal to the bit. What differs by definition:

- INT4 and INT8: theirs is amax / 7.5 with the codes -8 to 7, so that a largest weight that is
  positive has no code and loses half a step; ours is amax / 7 with -7 to 7 (127.5, -128).
- MXFP4: theirs is what Scale.EVEN is; the recipes of served.py round their scales up.
- A tile of zeros: its scale is the least number there, ours is 1.
- GPTQ: scales of groups are those of the weight as given; ours with order="as_is" are of the
  weight when the group is reached. A dead column's weights become 0; ours go to the nearest.
- SmoothQuant: ranges max - min of activations and 2 amax of weights; ours are amaxes. A dead
  channel is multiplied by 1e5 there, and by 1 here.
- AWQ: a dead channel counts as the smallest, which changes the factor that all channels share.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from golden import write_llmcompressor as theirs

from configs import base
from fp8jax.config import resolve
from fp8jax.formats import E2M1, INT4, INT8
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ptq import awq, gptq, methods, moments, run, smooth
from fp8jax.quantization import quantize
from fp8jax.recipe import served
from fp8jax.recipe.quant import WHOLE, Quant, Scale

SLOW = pytest.mark.slow
QUANTS = {
  "int4_64": Quant(INT4, (1, 64)), "int4_128": Quant(INT4, (1, 128)),
  "int8": Quant(INT8, (1, WHOLE)), "fp8": served.SERVED["fp8_dynamic"].fwd.rhs,
  "mxfp4": Quant(E2M1, (1, 32), Scale.EVEN), "nvfp4": served.SERVED["nvfp4a16"].fwd.rhs,
}  # fmt: skip
_SITES = [
  f"layers/{layer}/{site}"
  for layer in range(2)
  for site in ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down")
]
ULP = 2.0**-22  # of float32 numbers that two divisions, or a product with a reciprocal, give


@pytest.fixture(scope="module")
def golden():
  path = pathlib.Path(theirs.__file__).with_name("llmcompressor.npz")
  with np.load(path) as f:
    made = {name: f[name] for name in f.files}
  assert json.loads(str(made.pop("about")))["versions"]["llmcompressor"] == "0.14.0.1"
  return made


@pytest.fixture(scope="module")
def inputs():
  return theirs.case()


def _quant(name) -> Quant:
  return QUANTS[name.removesuffix("_max")]


def _codes(stored, name):
  """Numbers of the format, float32."""
  if name == "fp8":
    return stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  return stored.astype(np.float32) / (1 if name.startswith("int") else 2)


def _scales(golden, key, name):
  """[rows, tiles]: of two levels, over the tensor's."""
  factor = golden["nearest.nvfp4.factor"] if name == "nvfp4" else np.float32(1)
  return golden[key] / factor


def _loss(w, x, codes, scale):
  back = np.float64(codes) * np.repeat(np.float64(scale), w.shape[1] // scale.shape[1], 1)
  return np.sum(((w - back) @ np.float64(x).T) ** 2)


@pytest.mark.parametrize("name", [n for n in theirs.FORMATS if n.endswith("_max") or "fp" in n])
def test_nearest_codes_are_llmcompressors(golden, inputs, name):
  """All of them, to the bit; scales to the last bit, but of tiles of zeros."""
  w = theirs.with_zeros(inputs[0][0])
  made = jax.jit(lambda w: quantize.quantize(w, _quant(name)))(w)
  np.testing.assert_array_equal(
    np.asarray(made.data, np.float32), _codes(golden[f"nearest.{name}.codes"], name)
  )
  scale, ours = _scales(golden, f"nearest.{name}.scale", name), np.asarray(made.scale)
  tile = w.shape[1] // scale.shape[1]
  is_zero = np.abs(w).reshape(len(w), -1, tile).max(-1) == 0
  assert is_zero.sum() == 128 // tile
  np.testing.assert_allclose(ours[~is_zero], scale[~is_zero], rtol=ULP)


@pytest.mark.parametrize("name", ["int4_64", "int4_128", "int8"])
def test_integers_of_llmcompressor_divide_by_half_more_and_saturate_a_positive_amax(
  golden, inputs, name
):
  w = theirs.with_zeros(inputs[0][0])
  scale, codes = golden[f"nearest.{name}.scale"], golden[f"nearest.{name}.codes"]
  most, group = int(_quant(name).format.max), w.shape[1] // scale.shape[1]
  amax = np.abs(w).reshape(len(w), -1, group).max(-1)
  live = amax > 0
  np.testing.assert_allclose(scale[live], amax[live] / (most + 0.5), rtol=ULP)
  ours = golden[f"nearest.{name}_max.scale"]  # see above
  np.testing.assert_allclose(ours[live], amax[live] / most, rtol=ULP)
  values = w / scale.repeat(group, 1)
  np.testing.assert_array_equal(codes, np.clip(np.rint(values), -most - 1, most))
  is_amax = np.abs(w) == amax.repeat(group, 1)
  is_amax &= w != 0
  assert (codes[is_amax & (w > 0)] == most).all() and (codes[is_amax & (w < 0)] <= -most).all()
  assert (codes < -most).any() and 0 < (w > 0)[is_amax].mean() < 1


AS_IS = ("int4_64_max", "none")  # whose scales of groups differ
FAST = (("int4_64_max", "static"), ("nvfp4", "static"), ("int8_max", "none"))


@pytest.mark.parametrize(
  "name, order",
  [pytest.param(*of, marks=() if of in FAST else SLOW) for of in theirs.GPTQ if of != AS_IS],
)
def test_gptq_codes_are_llmcompressors_up_to_a_code_that_we_have_not(golden, inputs, name, order):
  """In every row up to where theirs is -8, which is -7 here and moves what follows.

  Some values lie within 1e-6 of a tie, so that sums in another order may take a row along: one of
  20 may differ. On x86 none does.
  """
  (w, _), x = inputs
  own = {"static": "by_activation", "none": "as_is"}[order]
  of_x = moments.of(x)
  made = gptq.quantize(w, of_x, _quant(name), theirs.DAMP, theirs.BLOCK, own)
  codes = _codes(golden[f"gptq.{name}.{order}.codes"], name)
  scale = _scales(golden, f"gptq.{name}.{order}.scale", name)
  np.testing.assert_allclose(made.scale, scale, rtol=ULP)
  turns = np.arange(w.shape[1])
  if own == "by_activation":
    turns = np.argsort(-np.diag(np.float64(x).T @ np.float64(x)), kind="stable")
  ours = np.asarray(made.data, np.float32)
  assert not codes[:, theirs.DEAD].any() and ours[:, theirs.DEAD].any()
  turns = turns[turns != theirs.DEAD]
  ours, codes = ours[:, turns], codes[:, turns]
  is_lower = codes < -_quant(name).format.max
  reached = np.where(is_lower.any(1), is_lower.argmax(1), len(turns))
  before = np.arange(len(turns)) < reached[:, None]
  assert ((ours != codes) & before).any(1).sum() <= 1
  assert before.mean() > 0.5
  (rows,) = np.nonzero(is_lower.any(1))
  assert np.sum(ours[rows, reached[rows]] != -7) <= 1 and (codes[rows, reached[rows]] == -8).all()
  assert bool(rows.size) == name.startswith("int4")


@SLOW
def test_gptq_with_scales_of_the_weight_as_it_stands_leaves_no_more_error(golden, inputs):
  """The same order of columns: scales of a group that waits for its turn against theirs."""
  (w, _), x = inputs
  made = gptq.quantize(w, moments.of(x), _quant(AS_IS[0]), theirs.DAMP, theirs.BLOCK)
  ours = _loss(w, x, np.asarray(made.data, np.float32), np.asarray(made.scale))
  codes, scale = (golden[f"gptq.{'.'.join(AS_IS)}.{part}"] for part in ("codes", "scale"))
  assert 0.95 < ours / _loss(w, x, codes, scale) < 1
  assert not np.allclose(made.scale, scale, rtol=0.05)


@pytest.mark.parametrize("alpha", theirs.ALPHAS)
def test_smooth_quant_scales_are_llmcompressors_of_its_ranges(golden, inputs, alpha):
  ws, x = inputs
  amax_w, live = np.abs(np.concatenate(ws)).max(0), np.arange(x.shape[1]) != theirs.DEAD
  made = golden[f"smooth.{alpha}"]
  of_range = smooth.scales(np.ptp(x, 0), 2 * amax_w, alpha)
  np.testing.assert_allclose(of_range[live], made[live], rtol=1e-6)
  # Of activations about zero, at one half, both definitions are the same; elsewhere they are not.
  of_amax = smooth.scales(np.abs(x).max(0), amax_w, alpha)
  both = smooth.scales(np.ptp(np.concatenate([x, -x]), 0), 2 * amax_w, alpha)
  np.testing.assert_allclose(both[live], 4.0 ** (alpha - 0.5) * of_amax[live], rtol=1e-6)
  assert np.abs(of_amax[live] / made[live] - 1).max() > 0.1
  assert of_range[theirs.DEAD] == 1 and made[theirs.DEAD] == np.float32(1e-5)


@pytest.mark.parametrize(
  "name", ["int4_64_max", "nvfp4", *(pytest.param(n, marks=SLOW) for n in ("fp8", "mxfp4"))]
)
def test_awq_losses_are_llmcompressors_over_the_whole_grid(golden, inputs, name):
  """Of two layers with one input: mean squared errors of 20 ratios, and the scales of the best."""
  ws, x = inputs
  of_x = moments.of(theirs.alive(x))
  made = awq.search(tuple(map(jnp.asarray, ws)), of_x, (_quant(name),) * 2, theirs.GRID - 1)
  losses = golden[f"awq.{name}.losses"]
  count = len(x) * sum(len(w) for w in ws)
  np.testing.assert_allclose(np.asarray(made.losses) / count, losses[:-1], rtol=1e-5)
  assert losses.argmin() < len(losses) - 1  # theirs ends at 1, ours before it
  assert round(float(made.ratio) * (theirs.GRID - 1)) == losses.argmin() > 0
  np.testing.assert_allclose(made.scale_K, golden[f"awq.{name}.scale"], rtol=1e-6)


def test_awq_of_llmcompressor_spares_loud_channels_less_in_its_own_integers(golden, inputs):
  """A loud channel becomes its group's largest weight, which amax / 7.5 has no code for."""
  assert 4 * golden["awq.int4_64_max.losses"].min() < golden["awq.int4_64.losses"].min()
  # With a dead channel the scales of all others are ours times one factor.
  mean = np.abs(inputs[1]).mean(0)
  live = np.arange(len(mean)) != theirs.DEAD
  raised = mean[live] ** (golden["awq.dead.losses"].argmin() / (theirs.GRID - 1))
  factor = golden["awq.dead.scale"][live] * np.sqrt(raised.max() * raised.min()) / raised
  np.testing.assert_allclose(factor, factor[0], rtol=1e-6)
  assert abs(factor[0] - 1) > 0.1


@SLOW
def test_gptq_of_a_whole_llama_is_llmcompressors(golden, tmp_path):
  """Layer after layer on inputs that quantized layers give, q, k, v and gate, up under one factor.

  On x86 all 30,720 codes are equal; a tie may take a row along, and shift what comes after it.
  """
  weights, tokens = theirs.llama()
  safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
  stated = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **theirs.SIZES}
  (tmp_path / "config.json").write_text(json.dumps(stated))
  c, cfg = base.get_config(), hf_config.read_config(str(tmp_path))
  c.precision.rules = (("layers/.*", "nvfp4a16"), ("head", "bf16"))
  c.precision.compute_dtype, c.global_batch, c.seq_len = "float32", 4, tokens.shape[1]
  spec = resolve.resolve(c, 1, choose.Device("cpu"))
  spec = dataclasses.replace(spec, model=cfg, declaration=transformer.params(cfg))
  params, _ = hf_weights.load_params(str(tmp_path), cfg)
  method = methods.Gptq(theirs.DAMP, "by_activation", theirs.BLOCK)
  made = run.quantize(spec, params, [tokens.astype(np.int32)], [method], str(tmp_path), print)
  ours = [made.codes[site]() for site in _SITES]
  sizes = [weights[name].shape for name in theirs.llama_matrices(weights)]
  assert [of.data.shape for of in ours] == sizes and len(made.codes) == len(ours)
  data = np.concatenate([np.asarray(of.data, np.float32).ravel() for of in ours])
  assert np.mean(data != _codes(golden["llama.codes"], "nvfp4")) < 0.02
  counts = [of.scale.size for of in ours]
  scale = golden["llama.scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  scale /= golden["llama.factor"].repeat(counts)
  np.testing.assert_allclose(np.concatenate([of.scale.ravel() for of in ours]), scale, rtol=ULP)
  q, k, v, o, gate, up, _ = golden["llama.factor"][:7]
  assert q == k == v != o and gate == up
