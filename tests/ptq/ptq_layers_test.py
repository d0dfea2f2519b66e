"""Moments of the inputs of every linear layer against a float64 forward pass."""

import harness
import numpy as np
import numpy_model
import pytest
import tolerances

from configs import base
from fp8jax.config import resolve
from fp8jax.kernels.choose import Device
from fp8jax.ptq import layers as layers_lib


def _spec(**model):
  c = base.get_config("block_128")
  sizes = dict(vocab_size=264, hidden_size=72, intermediate_size=144, num_layers=3, num_heads=6,
               num_kv_heads=2, head_dim=16, max_positions=64, init_std=0.15)  # fmt: skip
  c.model.update(sizes | model)
  c.global_batch, c.seq_len = 4, 32
  return resolve.resolve(c, 1, Device("cpu"))


# The GEMMs of a layer in order of computation, by the input that they read.
READ = (("attn", "norm"),) * 3 + (("attn", "mixed"),) + (("mlp", "norm"),) * 2 + (("mlp", "gated"),)


@pytest.mark.parametrize("layer", [0, 2])
def test_moments_are_those_of_float64_inputs(rng, layer):
  spec = _spec()
  params = harness.init_params(spec.model)
  windows = [rng.integers(0, 96, (rows, 24)).astype(np.int32) for rows in (2, 2, 1)]
  text = layers_lib.Layers(spec, params, windows)
  for number in range(layer):
    text.advance(layers_lib.layer_of(params, number))
  made = text.moments(layers_lib.layer_of(params, layer))
  inputs = [[] for _ in READ]
  for tokens_BL in windows:
    calls = []

    def product(x, w, calls=calls):
      calls.append(x.reshape(-1, x.shape[-1]))
      return numpy_model.plain(x, w)

    positions_BL = np.broadcast_to(np.arange(24), tokens_BL.shape)
    batch = {"tokens_BL": tokens_BL, "positions_BL": positions_BL}
    numpy_model.logits(spec.model, params, batch, product)
    for of, call in zip(inputs, calls[len(READ) * layer :], strict=False):
      of.append(call)
  for (mixer, name), parts in zip(READ, inputs, strict=True):
    got, x_TK = made[mixer][name], np.concatenate(parts)
    assert float(got.count) == len(x_TK) == 120
    for value, want in (
      (got.gram_KK, x_TK.T @ x_TK), (got.sum_K, x_TK.sum(0)), (got.abs_sum_K, abs(x_TK).sum(0)),
      (got.amax_K, abs(x_TK).max(0)),
    ):  # fmt: skip
      np.testing.assert_allclose(value, want, atol=tolerances.FLOAT32_SUM * abs(want).max())


def test_moments_cost_no_backward_pass():
  """What is differentiated is dead code: the products are those of the forward pass, and grams."""
  spec = _spec(num_layers=1)
  params = harness.init_params(spec.model)
  text = layers_lib.Layers(spec, params, [np.zeros((1, 8), np.int32)])
  of_layer, sites = layers_lib.layer_of(params, 0), text._own_sites()
  batch = text._batches[0]

  def dots(jitted):
    lowered = jitted.func.lower(of_layer, sites, text._x[0], batch, **jitted.keywords)
    return lowered.compile().as_text().count(" dot(")

  # Four inputs of linear layers; the layer's last product and its input's norm are of no use.
  assert dots(text._moments) - dots(text._advance) == 4 - 1
