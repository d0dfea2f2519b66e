"""Layers add their gradients to the sums of microbatches in place: the sums of autodiff's."""

import functools

import harness
import jax
import numpy as np
import pytest

from fp8jax.kernels import choose
from fp8jax.ops import quantizer
from fp8jax.ops.gemm_spec import Role
from fp8jax.quantization import quantize, scaled_matrix, tensor_stats
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.step import gradients, layer_loop, train_step

SMALL = {
  "model.num_layers": 3, "memory.loss_chunk": 64, "seq_len": 64, "global_batch": 12,
  "grad_accum_steps": 3, "memory.remat_policy": "full", "kernels.matmul": "reference",
  "optim.warmup_steps": 0,
}  # fmt: skip
HEAD = ("head", "bf16")
# By the length of windows: loud steps compile three times as long.
STATISTICS = {64: tensor_stats.QUIET, 128: tensor_stats.QUIET, 32: tensor_stats.LOUD}
BLOCKS = {"precision.rules": (HEAD, ("layers/.*/down", "bf16"), ("layers/.*", "block_128"))}
# Three sites: two whose input a prologue computes, one that reads a plain array. Two blocks along
# the letters that are contracted: products are unrolled along blocks.
FEW = {
  "precision.rules": (HEAD, ("layers/.*/(gate|up|o)", "block_128"), ("layers/.*", "bf16")),
  "model.intermediate_size": 256, "model.num_heads": 2, "model.num_kv_heads": 2,
}  # fmt: skip
SAVED = {"memory.remat_policy": "none"}
LINEARS = {"memory.remat_policy": "linears"}
# Changes, mesh, and how often kernels read a layer's weight in its stack: those of three or six
# sites, forward, forward again if it is, for the data gradient; or once, of all layers or per site.
CASES = {
  "16-bit masters, a head of its own, operands made once and saved": (
    FEW | {"optim.master_format": "bf16_remainder", "model.tie_embeddings": False,
           "memory.weight_operands": "per_step", "memory.remat_policy": "operands",
           "memory.save_gemm_inputs": "quantized"}, None, 3),
}  # fmt: skip
SLOW = {
  "adapters, nothing computed again": (
    FEW | SAVED | {"model.lora.rank": 4, "model.lora.base": "bf16", "model.num_layers": 2,
                   "memory.save_gate_up": "e4m3_16"}, None, 0),
  "two runs of layers, tied, compressed inputs": (
    FEW | {"precision.first_bf16": 1, "memory.save_layer_inputs": "e4m3_16",
           "model.tie_embeddings": True}, None, 9),
  "a mesh, 16-bit masters, operands made once": (
    BLOCKS | {"global_batch": 24, "model.hidden_size": 256, "optim.master_format": "bf16_remainder",
              "memory.weight_operands": "per_step", "memory.remat_policy": "operands",
              "memory.save_gemm_inputs": "quantized"}, (2, 2, 2), 6),
  "wires of 16 bits, compressed inputs, shards of whole tiles and of parts of tiles": (
    BLOCKS | {"global_batch": 24, "model.hidden_size": 256, "model.intermediate_size": 576,
              "optim.grad_wire": "bf16", "memory.save_layer_inputs": "bf16"}, (2, 2, 1), 18),
  "two runs of layers, every statistic": (
    BLOCKS | SAVED | {"precision.first_bf16": 1, "seq_len": 32}, None, 12),
  "masters in 16 bits": (BLOCKS | LINEARS | {"optim.master_format": "bf16_sr"}, None, 0),
  "masters in 16 bits, operands made once": (
    BLOCKS | LINEARS | {"optim.master_format": "bf16_sr", "memory.weight_operands": "per_step"},
    None, 0),
  "a base in codes, operands made once": (
    BLOCKS | SAVED | {"model.lora.rank": 4, "model.lora.base": "block_fp8",
                      "memory.weight_operands": "per_step", "model.num_layers": 2}, None, 0),
  "a base in codes, gathered once": (
    SAVED | {"precision.rules": (HEAD, ("layers/.*", "halo_int8_2_hq")), "model.num_layers": 2,
             "model.lora.rank": 4, "model.lora.base": "int8_h64", "global_batch": 24,
             "memory.weight_operands": "per_step"}, (1, 2, 1), 0),
  "one scale per tensor": (
    {"precision.rules": (HEAD, ("layers/.*", "tensor_current"))}, None, 21),
  "random bits, masks": (
    SAVED | {"precision.rules": (HEAD, ("layers/1/.*", "fp4_dge"), ("layers/.*", "nvfp4_sr")),
             "seq_len": 128}, None, None),
  "adapters on a mesh": (
    BLOCKS | SAVED | {"model.lora.rank": 4, "model.lora.base": "bf16", "global_batch": 24},
    (2, 2, 1), 0),
  "unit scaling, a width of its own": (
    {"precision.rules": (("head", "unit_head"), (".*", "unit_scaling")), "model.init_std": 1.0,
     "model.unit_scaling": "all", "model.residual_tau": 0.36, "model.tie_embeddings": False,
     "optim.grad_clip_norm": 0.0, "seq_len": 128}, None, None),
}  # fmt: skip
BOTH = [pytest.param(*case, id=name) for name, case in CASES.items()]
BOTH += [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()]


def spec_of(changes, shape=None):
  return harness.tiny_spec(harness.tiny_config("bf16", **SMALL | changes), shape)


def differentiated(spec):
  """(compiled gradients of three microbatches, their arguments)."""
  if spec.model.lora or spec.flat["optim.master_format"] != "float32":
    params = train_step.make_state(spec).params
  else:
    params = harness.init_params(spec.model)
  if spec.model.lora:  # half of them begin as 0, and so do gradients then
    params = harness.random_adapters(params)
  take = jax.jit(functools.partial(gradients.gradients, spec))
  sites = spec.sites(statistics=STATISTICS[spec.flat["seq_len"]])
  arguments = params, sites, harness.placed_uneven_batch(spec)
  return take.lower(*arguments), arguments


def reading_kernels(patch) -> list[tuple[int, str]]:
  """Plain JAX in the place of a quantizer that reads layers; the stacks that it is called with."""
  read = []

  def quantize_matrix(x, quants, amax=None, over=(), watched=False):
    if isinstance(x, Entry):
      read.append((x.stack.shape[0], x.stack.dtype.name))
    x, places = scaled_matrix.taken(x), (over, ())
    made = {
      axis: quantize.quantize(x, quant, contraction=axis, amax=amax, amax_axes=places)
      for axis, quant in quants.items()
    }
    return made, tensor_stats.amax(x) if watched else None

  def quantize_stack(x, quants):
    read.append((x.shape[0], x.dtype.name))
    made, amax = jax.lax.map(
      lambda one: (
        {axis: quantize.quantize(one, quant, contraction=axis) for axis, quant in quants.items()},
        tensor_stats.amax(one),
      ),
      x,
    )
    return made, amax

  def kernels_read(spec):
    return None not in (spec.quant(Role.W_FWD), spec.quant(Role.W_DGRAD))

  is_entry = lambda self, matrix, contraction: isinstance(matrix, Entry)  # noqa: E731
  patch.setattr(quantizer.Quantizer, "has_kernel", is_entry)
  patch.setattr(quantizer, "kernels_read", kernels_read)
  patch.setattr(quantizer.mosaic_sm90, "quantize_matrix", quantize_matrix)
  patch.setattr(quantizer.mosaic_sm90, "quantize_stack", quantize_stack)
  return read


@pytest.mark.parametrize("changes, shape, calls", BOTH)
def test_loss_sums_and_observations_are_those_of_autodiff_to_the_bit(
  changes, shape, calls, monkeypatch
):
  """Layers that are read where they lie, and added where they lie, against neither."""
  spec = spec_of(changes, shape)
  assert gradients.adds_in_place(spec)
  with monkeypatch.context() as patch:
    read = [] if calls is None else reading_kernels(patch)
    program, arguments = differentiated(spec)
  found = jax.device_get(program.compile()(*arguments))
  masters = "bfloat16" if "optim.master_format" in changes else "float32"
  assert read == [(spec.model.num_layers, masters)] * (calls or 0)
  monkeypatch.setattr(gradients, "adds_in_place", lambda spec: False)
  program, arguments = differentiated(spec)
  wanted = jax.device_get(program.compile()(*arguments))
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  assert all(np.any(g) for g in jax.tree.leaves(wanted[1]))
  harness.assert_trees_equal(found, wanted)


@pytest.mark.parametrize("policy", [
  "none", pytest.param("linears", marks=pytest.mark.slow),
  pytest.param("full", marks=pytest.mark.slow),
])  # fmt: skip
def test_gradients_of_all_layers_exist_once(policy, monkeypatch):
  """What XLA assigns falls by the stack that autodiff's gradients take, and by nothing else."""
  spec = spec_of({"model.num_layers": 12, "global_batch": 3, "memory.remat_policy": policy})
  sizes = {}
  for in_place in (True, False):
    monkeypatch.setattr(gradients, "adds_in_place", lambda spec, is_on=in_place: is_on)
    memory = differentiated(spec)[0].compile().memory_analysis()
    sizes[in_place] = memory.temp_size_in_bytes
  stack = 4 * 12 * (4 * 128 * 512 + 3 * 128 * 512)  # q, k, v, o; gate, up, down; float32
  assert 0.9 * stack < sizes[False] - sizes[True] < 1.2 * stack


WITHOUT = {
  "one batch": {"grad_accum_steps": 1},
  "gradients in 16 bits": {"optim.grad_format": "bf16_sr"},
  "a loss scale": {"loss_scale.kind": "dynamic", "precision.compute_dtype": "float16"},
  "an invariant pass": {"precision.invariant": True, "global_batch": 3,
                        "precision.rules": (HEAD, ("layers/.*", "fp8_dynamic"))},
}  # fmt: skip


@pytest.mark.parametrize("changes", WITHOUT.values(), ids=WITHOUT)
def test_elsewhere_gradients_are_added_when_all_are_there(changes):
  assert not gradients.adds_in_place(spec_of(changes))


@pytest.mark.slow
def test_products_that_write_what_is_saved_into_stacks_give_the_same_bits(monkeypatch):
  """As on a GPU: gate and up of two runs of layers."""
  spec = spec_of(SLOW["two runs of layers, every statistic"][0])
  placed, write = [], layer_loop._in_place

  def spy(loop, of_loop, x_BLD):
    placed.append(len(of_loop.placed))
    return write(loop, of_loop, x_BLD)

  program, arguments = differentiated(spec)
  wanted = jax.device_get(program.compile()(*arguments))
  monkeypatch.setattr(choose, "write_in_loops", lambda device: True)
  monkeypatch.setattr(layer_loop, "_in_place", spy)
  program, arguments = differentiated(spec)
  assert placed == [2, 2]
  harness.assert_trees_equal(jax.device_get(program.compile()(*arguments)), wanted)
