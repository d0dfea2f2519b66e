"""Distillation in the step: one loss, however the batch is split, placed and ordered."""

import harness
import jax
import numpy as np
import pytest

from fp8jax import params as params_lib
from fp8jax.step import distillation, train_step

_OWN = {"distill.weight": 1.0, "distill.temperature": 2.0, "init.workdir": "of the teacher"}


def _gradients(spec, student, batch, teacher):
  """(loss, gradients, Aux) on the host."""
  layout = spec.run.layout
  if layout.mesh is not None:
    places = params_lib.shardings(spec.declaration, layout)
    student = jax.device_put(student, places)
    teacher = teacher and jax.device_put(teacher, places)
  run = jax.jit(lambda p, b, t: train_step.gradients(spec, p, spec.sites(), b, teacher=t))
  loss, gradient, _, aux = jax.device_get(run(student, batch, teacher))
  trained = {k: g for k, g in params_lib.flatten(gradient).items() if np.size(g)}
  return loss, trained, aux


def _two(spec):
  """Different parameters, of a student and its teacher."""
  return harness.init_params(spec.model, 0), harness.init_params(spec.model, 1)


def _assert_close(got, want, rtol=1e-5):
  np.testing.assert_allclose(got[0], want[0], rtol=rtol)
  for path, exact in want[1].items():
    scale = np.abs(exact).max()
    np.testing.assert_allclose(got[1][path], exact, rtol=0, atol=rtol * scale, err_msg=path)


def test_a_student_like_its_teacher_has_loss_and_gradient_zero_and_microbatches_are_one_step(rng):
  spec = harness.one_layer_spec(**_OWN)
  student, teacher = _two(spec)
  batch = harness.weighted_batch(rng)
  loss, gradient, aux = _gradients(spec, student, batch, student)
  assert loss == aux.sums["distill"][1] == 0 < aux.sums["distill"][0]
  assert max(np.abs(g).max() for g in gradient.values()) < 1e-7
  whole = _gradients(spec, student, batch, teacher)
  assert whole[0] > 1e-3
  # Layers recomputed: their gradients are added in place.
  own = {**_OWN, "memory.remat_policy": "full", "grad_accum_steps": 2}
  halves = harness.one_layer_spec(**own)
  split = {k: x.reshape(2, -1, *x.shape[1:]) for k, x in batch.items()}
  _assert_close(_gradients(halves, student, split, teacher), whole)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 4)])
def test_eight_devices_distil_as_one(shape, tied):
  changes = {**_OWN, "model.tie_embeddings": tied, "distill.weight": 0.75, "memory.loss_chunk": 48}
  one, many = (
    harness.tiny_spec(harness.tiny_config("bf16", **changes), of) for of in (None, shape)
  )
  student, teacher = _two(one)
  batch = {**harness.host_batches()[0]}
  batch["weights_BL"] = np.random.default_rng(2).random((8, 128), np.float32).round()
  want = _gradients(one, student, batch, teacher)
  places = jax.tree.map(lambda p: p.sharding, distillation.abstract(many))
  assert any(not x.is_fully_replicated for x in jax.tree.leaves(places))
  _assert_close(_gradients(many, student, batch, teacher), want, rtol=2e-5)
  placed = jax.device_put(teacher, places)
  assert distillation.identity(placed) == distillation.identity(teacher)


@pytest.mark.slow
def test_layers_that_move_in_the_backward_pass_are_distilled_alike(rng):
  batch, steps = harness.weighted_batch(rng), []
  for changes in ({}, {"optim.in_backward": True, "memory.remat_policy": "full"}):
    spec = harness.one_layer_spec(**_OWN, **changes, **{"optim.grad_clip_norm": 0.0})
    student, teacher = _two(spec)
    state = train_step.make_state(spec, student)
    steps.append(train_step.make_step(spec, teacher)(state, batch, spec.sites()))
  (usual, want), (layerwise, got) = steps
  assert got["distill/kl"] * 4 == pytest.approx(float(got["loss"]), rel=1e-6)
  np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-6)
  for a, b in zip(jax.tree.leaves(layerwise.params), jax.tree.leaves(usual.params), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["bf16", "block_fp8"])
def test_a_frozen_base_is_the_teacher_of_its_adapters(rng, base):
  """It is no argument of the step, and says what the same weights say that are one."""
  own = {"model.lora.rank": 4, "model.lora.base": base, "distill.weight": 1.0,
         "init.workdir": "of the base"}  # fmt: skip
  spec = harness.one_layer_spec(**own)
  assert distillation.abstract(spec) == distillation.BASE
  student = harness.random_adapters(train_step.make_state(spec).params)
  batch = harness.weighted_batch(rng)
  flat = params_lib.flatten(student)
  frozen = params_lib.unflatten({k: p for k, p in flat.items() if "lora" not in k})
  teacher = jax.tree.map(lambda x: x, distillation.take(spec, frozen))
  got, want = (_gradients(spec, student, batch, t) for t in (distillation.BASE, teacher))
  assert got[0] > 1e-5
  _assert_close(got, want)
