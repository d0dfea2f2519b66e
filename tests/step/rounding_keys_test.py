"""Random keys of a step: none is used twice, and every step has its own."""

import dataclasses
import types

import harness
import jax
import jax.numpy as jnp

from fp8jax.optim import adam, storage
from fp8jax.optim import update as update_lib
from fp8jax.step import train_step


def test_stochastic_rounding_draws_anew_in_every_step(rng):
  plan, batch = (
    harness.one_layer_plan(**{"precision.rules": harness.only_down("nvfp4_sr_rht")}),
    harness.weighted_batch(rng),
  )
  step, norms = train_step.make_step(plan), []
  for number in (1, 1, 2):
    state = dataclasses.replace(train_step.make_state(plan), step=jnp.int32(number))
    norms.append(float(step(state, batch, plan.sites())[1]["grad_norm"]))
  assert norms[0] == norms[1] != norms[2]


def test_rounding_of_gradients_draws_anew_in_every_microbatch_and_step():
  leaf = types.SimpleNamespace(gradient="any", seed=0, lead=0, is_frozen=False)
  keys = [
    train_step._weight(leaf, jnp.ones(4), None, step=step, micro=micro, grad_autoscale=None).key  # noqa: SLF001
    for step in (0, 1)
    for micro in (0, 1)
  ]
  assert len({jax.random.key_data(key).tobytes() for key in keys}) == 4


def test_no_two_roundings_of_a_parameter_draw_the_same_bits(monkeypatch):
  """Gradient, master and moments: three keys in every step, or their errors would be the same."""
  plan = harness.one_layer_plan(**{
    "optim.moment_format": "coat", "optim.master_format": "bf16_sr", "optim.grad_format": "bf16_sr",
  })  # fmt: skip
  leaf, keys = plan.leaves["layers"]["mlp"]["down"], []
  leaf = dataclasses.replace(leaf, lead=0)  # a single key for the gradient
  keep, key_of = storage.store_master, adam._key  # noqa: SLF001
  monkeypatch.setattr(
    storage, "store_master", lambda *a, **k: keys.append(k["key"]) or keep(*a, **k)
  )
  monkeypatch.setattr(adam, "_key", lambda *a: keys.append(key_of(*a)) or keys[-1])
  param = jnp.ones((1, 64, 32))
  state, kept = update_lib.init(leaf, param)
  keys.clear()
  for step in (0, 1):
    weight = train_step._weight(leaf, kept, None, step=step, micro=0, grad_autoscale=None)  # noqa: SLF001
    keys.append(weight.key)
    state, kept, _ = update_lib.update_param(
      leaf, param, state, kept, update_lib.UpdateArgs(step, 1e-3)
    )
  assert len(keys) == len({jax.random.key_data(key).tobytes() for key in keys}) == 6
