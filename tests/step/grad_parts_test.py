"""Gradients of microbatches on a mesh: summed over devices once a step, to the same numbers."""

import functools

import harness
import jax
import numpy as np
import pytest

from fp8jax import params as params_lib
from fp8jax.compiled import collectives
from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.run import start
from fp8jax.step import gradients, train_step

SHAPE = (4, 2, 1)
SMALL = {"model.num_layers": 2, "memory.loss_chunk": 64, "seq_len": 64, "global_batch": 32}
PLAIN = {"precision.rules": ((".*", "bf16"),), **SMALL}
UNTIED = PLAIN | {"model.tie_embeddings": False}
CASES = {
  "a head of its own": UNTIED,
  "tied, BF16 masters": PLAIN | {
    "model.tie_embeddings": True, "optim.master_format": "bf16_remainder",
  },
  "a head of its own, layers recomputed": PLAIN | {
    "model.tie_embeddings": False, "memory.save_layer_inputs": "bf16",
    "memory.remat_policy": "full",
  },
  "unit scaling": SMALL | {
    "precision.rules": (("head", "unit_head"), (".*", "unit_scaling")), "model.unit_scaling": "all",
    "model.residual_tau": 0.36, "model.init_std": 1.0, "model.tie_embeddings": False,
    "optim.grad_clip_norm": 0.0,
  },
  "masked": PLAIN | {"precision.rules": (("layers/.*", "fp4_dge"), ("head", "bf16"))},
  "adapters": PLAIN | {"model.lora.rank": 4, "model.lora.base": "bf16"},
}  # fmt: skip


def spec_of(changes, microbatches=2, shape=SHAPE):
  c = harness.tiny_config("bf16", **changes, grad_accum_steps=microbatches)
  return harness.tiny_spec(c, shape)


def test_collectives_in_flight_reach_the_compiler_of_a_step_on_a_gpu(monkeypatch):
  options, asked = choose.compiler_options, []
  monkeypatch.setattr(choose, "compiler_options", lambda *of: asked.append(of) or options(*of))
  for changes, shape in (({}, SHAPE), ({"mesh.collectives_in_flight": 8}, SHAPE)):
    spec = spec_of(PLAIN | changes, shape=shape)
    train_step.make_step(spec)
  assert [of[1] for of in asked] == [1, 8]
  gpu = choose.Device("gpu", 90)
  assert (
    options(gpu).items() < (found := options(gpu, 8)).items() and options(spec.device, 8) is None
  )
  assert found["xla_gpu_experimental_parallel_collective_overlap_limit"] == 8
  assert found["xla_gpu_pipeline_reduce_scatter"].endswith("_OFF")


def test_spare_multiprocessors_reach_every_product_that_reads_codes(monkeypatch):
  multiply, asked = gemm_api.scaled_matmul, []

  def seen(*operands, spare, **how):
    asked.append(spare)
    return multiply(*operands, spare=spare, **how)

  monkeypatch.setattr(gemm_api, "scaled_matmul", seen)
  c = harness.tiny_config("block_128", **{"mesh.spare_multiprocessors": 16})
  spec = harness.tiny_spec(c, SHAPE)
  state, batch = train_step.abstract_state(spec), harness.placed_uneven_batch(spec)
  jax.eval_shape(functools.partial(gradients.gradients, spec), state.params, spec.sites(), batch)
  assert asked and set(asked) == {16}


def differentiated(spec):
  """(compiled program of the gradients, its arguments)."""
  params = train_step.make_state(spec).params
  if spec.model.lora:  # half of them begin as 0, and so do gradients then
    params = harness.random_adapters(params)
  take = jax.jit(functools.partial(gradients.gradients, spec))
  arguments = params, spec.sites(), harness.placed_uneven_batch(spec)
  return take.lower(*arguments).compile(), arguments


def large(spec) -> int:
  """Elements of the embedding and of all weights of products."""
  declared = params_lib.flatten(spec.declaration)
  sizes = {path: int(np.prod([spec.model.dims[c] for c in p.letters])) for path, p in
           declared.items()}  # fmt: skip
  return sum(n for path, n in sizes.items() if "norm" not in path)


BOTH = [pytest.param(changes, id=name) for name, changes in CASES.items()]


@pytest.mark.slow  # a step on a mesh: invariance_test.py; with a wire: below
@pytest.mark.parametrize("changes", BOTH)
def test_gradients_are_those_of_one_device(changes):
  # Products cut over `tensor` sum in another order, which FP8 amplifies.
  mesh = (2, 2, 2) if changes["precision.rules"] == PLAIN["precision.rules"] else SHAPE
  (program, arguments), (one, of_one) = (
    differentiated(spec_of(changes, shape=shape)) for shape in (mesh, None)
  )
  loss, found, *_ = jax.device_get(program(*arguments))
  want_loss, wanted, *_ = jax.device_get(one(*of_one))
  np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
  # Another order of float32 sums; of copies in 16 bits some are rounded the other way.
  bound = 1e-3 if "memory.save_layer_inputs" in changes else 1e-5
  found, wanted = params_lib.flatten(found), params_lib.flatten(wanted)
  for path, want in wanted.items():
    if not isinstance(want, tuple):  # frozen
      want = np.asarray(want, np.float64)
      assert np.linalg.norm(found[path] - want) <= bound * np.linalg.norm(want) > 0, path


def test_weights_are_summed_over_devices_once_however_many_microbatches():
  spec = spec_of(CASES["a head of its own, layers recomputed"], microbatches=4)
  rows = collectives.account(differentiated(spec)[0].as_text(), dict(spec.run.layout.mesh.shape))
  (of_data,) = [r for r in rows if r.kind == "all-reduce" and r.axes == ("data",)]
  # float32 of a device's half; around a ring of four devices twice three quarters of it.
  assert of_data.nbytes == large(spec) // 2 * 4 * 2 * 3 // 4


@pytest.mark.slow
def test_a_gradient_in_fewer_bits_is_summed_as_it_was():
  """A sum of codes would be another rounding: each microbatch's is made of the whole sum."""
  spec = spec_of(PLAIN | {"optim.grad_format": "bf16_sr"})
  rows = collectives.account(differentiated(spec)[0].as_text(), dict(spec.run.layout.mesh.shape))
  of_data = [r for r in rows if r.kind == "all-reduce" and r.axes == ("data",)]
  # float32 of a device's half, three quarters of it twice, in both microbatches.
  assert sum(r.nbytes for r in of_data) >= 2 * large(spec) // 2 * 4 * 2 * 3 // 4


@functools.cache
def of_one_device():
  """{path: gradient} without a wire."""
  program, arguments = differentiated(spec_of(UNTIED, shape=None))
  return params_lib.flatten(jax.device_get(program(*arguments))[1])


@pytest.mark.parametrize("wire, word, nbytes, error", [
  pytest.param("bf16", "u16", 2, 4e-3, marks=pytest.mark.slow), ("e4m3", "u8", 1, 5e-2),
  pytest.param("e4m3_shared", "u8", 1, 5e-2, marks=pytest.mark.slow),
])  # fmt: skip
def test_terms_travel_in_the_wire_s_format(wire, word, nbytes, error):
  changes = UNTIED
  spec = spec_of(changes | {"optim.grad_wire": wire})
  program, arguments = differentiated(spec)
  rows = collectives.account(program.as_text(), dict(spec.run.layout.mesh.shape))
  found = {(r.kind, r.axes): r.nbytes for r in rows if r.dtype == word}
  declared = params_lib.flatten(spec.declaration)
  sizes = {path: int(np.prod([spec.model.dims[c] for c in p.letters]))
           for path, p in declared.items() if p.inputs is not None or path == "embed"}  # fmt: skip
  # Each of two microbatches: of a weight a device keeps half and receives half of another's terms.
  # (The embedding's are not spread over fsdp.) Once: three quarters of its half from `data`, twice.
  products = sum(sizes.values()) - sizes["embed"]
  assert found["all-to-all", ("fsdp",)] == 2 * products // 2 * nbytes
  of_data = sum(sizes.values()) // 2 * nbytes * 3 // 4
  assert found["all-to-all", ("data",)] == found["all-gather", ("data",)] == of_data
  assert not [r for r in rows if r.dtype == "f32" and r.kind == "reduce-scatter"]
  got, want = params_lib.flatten(jax.device_get(program(*arguments))[1]), of_one_device()
  for path in sizes:
    away = np.linalg.norm(got[path] - want[path]) / np.linalg.norm(want[path])
    assert error / 20 < away < error, (path, away)


def test_a_wire_s_shared_scale_is_of_one_layer():
  """Gradients of one layer 2^20 times those of the other: under one scale these would be 0."""
  spec = spec_of(PLAIN | {"optim.grad_wire": "e4m3_shared", "model.tie_embeddings": False})
  parts, ahead = gradients._parts(spec), gradients._ahead(spec)
  sizes = jax.tree.map(
    lambda leaf, p, of, a: gradients._sink(leaf, p, of, a), spec.leaves,
    params_lib.abstract(spec.declaration, spec.model.dims, spec.run.layout), parts, ahead,
  )  # fmt: skip
  rng = np.random.default_rng(0)
  terms = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), sizes)
  q = terms["layers"]["attn"]["q"]
  q[0] *= 2.0**20
  summed = jax.jit(functools.partial(gradients._summed, spec, parts=parts))(terms)
  want = q.astype(np.float64).sum(1)
  for got, exact in zip(np.asarray(summed["layers"]["attn"]["q"]), want, strict=True):
    assert 1e-3 < np.linalg.norm(got - exact) / np.linalg.norm(exact) < 5e-2


def test_the_start_line_names_the_wire_and_whether_anything_is_sent():
  told = {shape: start._wire(spec_of(PLAIN | {"optim.grad_wire": "e4m3"}, shape=shape))
          for shape in (SHAPE, None)}  # fmt: skip
  assert told[SHAPE] == ", e4m3 between devices"
  assert told[None] == ", none of them sent in e4m3: one batch shard"
  assert start._wire(spec_of(PLAIN)) == ""
