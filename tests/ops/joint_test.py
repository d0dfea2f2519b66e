"""Weights that multiply one input have the first of NVFP4's levels in common, as in servers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from fp8jax import params as params_lib
from fp8jax.generation import weights as generation_weights
from fp8jax.kernels import choose
from fp8jax.kernels.device import Device
from fp8jax.models import presets, transformer
from fp8jax.ops import dots, joint, site_tree, swiglu_mlp
from fp8jax.ops import site as site_lib
from fp8jax.recipe.gemm import Gemm
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.quant import Quant, Scale
from fp8jax.recipe.served import SERVED

_QUANT = SERVED["nvfp4a16"].fwd.rhs


def _matrices(rng):
  """q, and k of amaxes far below, whose E4M3 scales are subnormal under q's."""
  q, k = rng.standard_normal((2, 32, 48)).astype(np.float32)
  return q, k * np.float32(3e-4)


def _values(w, amax):
  data, scale = oracle.quantize(w.T, "e2m1", (1, 16), "e4m3_over_f32", amax)
  return (data.astype(np.float32) * scale).T


def test_products_of_one_input_share_the_first_level(rng):
  """To the bit, of a unit matrix as the input; gradients pass; alone each has its own level."""
  ws, x, amax = _matrices(rng), jnp.eye(32), np.float32(0)
  for w in ws:
    amax = max(amax, np.abs(w).max())

  @jax.jit
  def multiply(x, ws):
    sites = [site_lib.single("nvfp4a16", name=name) for name in "qk"]
    eqns = ("BD,DF->BF",) * 2
    y, back = jax.vjp(lambda ws: dots.dots(eqns, x, ws, sites), ws)
    return y, back(y)[0], dots.dot(eqns[0], x, ws[1], site_lib.single("nvfp4a16"))

  ys, gradients, alone = multiply(x, ws)
  for w, y, gradient in zip(ws, ys, gradients, strict=True):
    np.testing.assert_array_equal(y, _values(w, amax))
    np.testing.assert_array_equal(gradient, y)  # straight through
  np.testing.assert_array_equal(alone, _values(ws[1], None))
  assert not np.array_equal(alone, ys[1])


def test_the_fused_feed_forward_layer_has_the_joint_level_of_gate_and_up(monkeypatch):
  """As traced for Hopper, whose kernels fuse it: down alone has its own."""
  lent = []

  def fused(static, x, ws, taps, inputs):
    del static, ws, taps
    lent.extend(i.joint_amax is not None for i in inputs)
    return x

  monkeypatch.setattr(choose, "current_device", lambda: Device("gpu", 90))
  monkeypatch.setattr(swiglu_mlp, "_swiglu_mlp", fused)
  block = RECIPES["block_128"]
  of_two = dataclasses.replace(block, name="mine", fwd=Gemm(None, _QUANT))
  jax.eval_shape(*_for_hopper({"gate": of_two, "up": of_two, "down": block}))
  assert lent == [True, True, False]


def test_a_gradient_of_the_fused_layer_s_rounding_is_refused(monkeypatch):
  monkeypatch.setattr(choose, "current_device", lambda: Device("gpu", 90))
  layer, x, *ws = _for_hopper(dict.fromkeys(("gate", "up", "down"), RECIPES["block_128"]))
  loss = lambda x: layer(x, *ws).astype(jnp.float32).sum()  # noqa: E731
  assert jax.eval_shape(jax.grad(loss), x).shape == x.shape
  with pytest.raises(TypeError, match="site 'gate': its gradients are differentiated"):
    jax.eval_shape(jax.grad(lambda x: (jax.grad(loss)(x).astype(jnp.float32) ** 2).sum()), x)


def _for_hopper(recipes):
  """The fused layer with these recipes, and operands of it."""
  size, eqns = choose.GemmSize(256, 256, 256), ("BLD,DF->BLF", "BLD,DF->BLF", "BLF,FD->BLD")
  sites = [
    site_lib.fresh(r, n, backends=choose.backends(r, size, choose.current_device(), "auto"))
    for n, r in recipes.items()
  ]
  x, w = jnp.zeros((1, 256, 256), jnp.bfloat16), jnp.zeros((256, 256))
  return lambda x, *ws: swiglu_mlp.swiglu_mlp(eqns, x, ws, sites, "linear"), x, w, w, w


def test_a_site_that_is_lent_an_amax_serves_one_product(rng):
  def twice(site):
    sites = joint.lent(_matrices(rng), [site, site_lib.single("nvfp4a16")])
    return joint.lent(_matrices(rng), [site, *sites[1:]])

  with pytest.raises(ValueError, match="is used by two products"):
    jax.eval_shape(twice, site_lib.single("nvfp4a16", name="q"))
  plain = [site_lib.single("nvfp4_sr_rht"), site_lib.single("nvfp4a16")]
  assert joint.lent(_matrices(rng), plain) is plain  # papers' recipes have no joint level


def test_weights_for_inference_have_the_levels_of_training(rng):
  cfg = dataclasses.replace(presets.DEBUG, num_layers=2, hidden_size=32, intermediate_size=48,
                            num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=64)  # fmt: skip
  params = jax.tree.map(
    lambda p: np.float32(rng.standard_normal(p.shape) * 10.0 ** rng.integers(-3, 3)),
    jax.eval_shape(lambda: params_lib.init(jax.random.key(0), transformer.params(cfg), cfg.dims)),
  )
  rules = (("head", "bf16"), ("layers/.*", "nvfp4a16"))
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, rules)
  made = generation_weights.for_inference(params, sites, cfg, jnp.dtype(jnp.float32))
  for key, names in (("attn", "qkv"), ("mlp", ("gate", "up")), ("attn", "o"), ("mlp", ("down",))):
    ws = {n: params["layers"][key][n] for n in names}
    ws = {n: w.reshape(2, -1, 32) if n in ("o", "down") else w.reshape(2, 32, -1)
          for n, w in ws.items()}  # fmt: skip
    for layer in range(2):
      amax = max(np.abs(w[layer]).max() for w in ws.values())
      for name, w in ws.items():
        codes = made["layers"][0][key][name]
        one = jax.tree.map(lambda x, layer=layer: x[layer], codes).matrix().dequantize()
        np.testing.assert_array_equal(one, _values(w[layer], amax).T, name)


def test_what_has_no_two_levels_of_its_own_amax_has_no_joint_one():
  with pytest.raises(ValueError, match="is_joint with scale='f32'.*set scale='e4m3_over_f32'"):
    Quant(_QUANT.format, (1, 16), is_joint=True)
  plain = Quant(_QUANT.format, (1, 16), Scale.E4M3_OVER_F32)
  for quant in (_QUANT, plain):
    assert Quant.from_dict(quant.to_dict()) == quant
  assert "is_joint" not in plain.to_dict()
