"""What is declared to wait for the backward pass is what differentiation keeps."""

import dataclasses

import harness
import jax
import jax.numpy as jnp
import pytest
import variants

from fp8jax.compiled import saved_tensors
from fp8jax.models import presets, transformer
from fp8jax.ops import site_tree
from fp8jax.step import train_step

GROUPS = {"memory.save_norm_inputs": "e4m3_16", "memory.save_gate_up": "e4m3_16"}
CASES = [
  ("debug", "bf16", {}),
  ("debug", "bf16", {"memory.save_norm_inputs": "mxfp4", "memory.save_gate_up": "bf16"}),
  ("debug", "block_128 saved", {"memory.remat_policy": "operands"}),
  ("debug", "block_128 saved",
   {"memory.remat_policy": "operands", "memory.save_norm_inputs": "e4m3_16"}),
  ("debug", "tensor_current saved", {"memory.remat_policy": "operands", **GROUPS}),
  ("debug", "block_128 saved", {"precision.first_bf16": 2, "model.num_layers": 5, **GROUPS}),
  ("debug", "block_128", {"memory.remat_policy": "full", "memory.save_layer_inputs": "e4m3_16"}),
  ("qwen3", "tensor_current saved", {}),
  ("qwen3", "block_128", {"memory.remat_policy": "linears", **GROUPS}),
]  # fmt: skip


@pytest.mark.parametrize("preset, recipe, changes", CASES, ids=str)
def test_declared_is_what_differentiation_keeps(monkeypatch, preset, recipe, changes):
  """Arrays over layers that the backward pass is given, parameters and sites' amaxes aside."""
  qwen3 = dataclasses.replace(harness.TINY, architecture="qwen3", qk_norm=True)
  monkeypatch.setitem(presets.PRESETS, "qwen3", qwen3)
  # A number of layers that is no other dimension's size.
  changes = {
    "model.preset": preset, "model.num_layers": 3, "precision.compute_dtype": "bfloat16",
    "model.num_kv_heads": 2 if preset == "qwen3" else 4,
  } | changes  # fmt: skip
  changes |= variants.changes(recipe)
  spec = harness.tiny_spec(harness.tiny_config(**changes))
  sites = spec.sites()
  weights = train_step.abstract_state(spec, 1).params
  known = {leaf.shape[1:] for leaf in jax.tree.leaves(weights["layers"])}
  batch = {n: jax.ShapeDtypeStruct((8, 128), jnp.int32) for n in ("tokens_BL", "targets_BL")}
  batch |= {n: jax.ShapeDtypeStruct((8, 128), jnp.int32) for n in ("positions_BL", "segments_BL")}
  batch["weights_BL"] = jax.ShapeDtypeStruct((8, 128), jnp.float32)

  def leaves(weights, batch):
    loss = lambda weights: transformer.loss(weights, sites, batch, spec.model, spec.run)  # noqa: E731
    return jax.tree.leaves(jax.vjp(loss, weights)[1])

  of_layers = [run.stop - run.start for run, _ in transformer.runs(spec.sites())]
  kept = [
    leaf for leaf in jax.eval_shape(leaves, weights, batch)
    if leaf.shape[:1] and leaf.shape[0] in of_layers and leaf.shape[1:] not in known
    and leaf.size >= 8 * 128
  ]  # fmt: skip
  # Two numbers of E2M1 in a byte.
  there = sum(leaf.size * leaf.dtype.itemsize / (1 + (leaf.dtype.name == "float4_e2m1fn"))
              for leaf in kept)  # fmt: skip
  assert there == pytest.approx(
    sum(item.nbytes for item in saved_tensors.of_layers(spec)), rel=0.01
  )


def test_two_numbers_of_four_bits_share_a_byte():
  wanted = {"f4e2m1fn": 3, "f8e4m3fn": 6, "pred": 6, "u8": 6, "bf16": 12, "f32": 24}
  assert {name: saved_tensors.nbytes(name, 6) for name in wanted} == wanted


def test_backends_of_one_device_are_chosen_for_its_sizes(monkeypatch):
  """8 x 128 tokens over 2 devices; 4 heads of 128 and 1024 channels over 4 others."""
  sizes = set()

  def choose(recipe, size, device, matmul):
    sizes.add((size.tokens, size.produced, size.contracted))
    return ("reference",) * 3

  config = harness.tiny_config("block_128", **{"model.intermediate_size": 1024})
  spec = harness.tiny_spec(config, (1, 2, 4))
  monkeypatch.setattr(site_tree.choose, "backends", choose)
  saved_tensors._OneDevice(spec).sites()
  q_k_v_o, gate_up, down = (512, 128, 128), (512, 256, 128), (512, 128, 256)
  assert sizes - {(512, 512, 128)} == {q_k_v_o, gate_up, down}  # the head is not of a layer


@pytest.mark.parametrize("shape, whole, heads", [
  ((2, 1, 4), True, (2, 1)), ((4, 1, 2), True, (4, 1)), ((4, 1, 2), False, (4, 1)),
  ((8, 1, 1), True, (8, 2)),
])  # fmt: skip
def test_a_device_has_the_keys_that_its_queries_read(shape, whole, heads):
  changes = {"model.num_heads": 8, "model.num_kv_heads": 2}
  changes |= {"sharding.weights.G": "", "sharding.acts.G": ""} if whole else {}
  spec = harness.tiny_spec(harness.tiny_config("bf16", **changes), shape)
  model = saved_tensors._OneDevice(spec).model
  assert (model.num_heads, model.num_kv_heads) == heads
  assert saved_tensors.of_layers(spec)
