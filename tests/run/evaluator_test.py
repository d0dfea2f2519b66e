"""Held-out losses: the forward passes that are evaluated."""

import dataclasses

import harness
import jax.numpy as jnp
import pytest

from fp8jax.ops import scaling as scaling_lib
from fp8jax.run import evaluator as evaluator_lib


def test_evaluation_uses_the_scales_of_training():
  """With static scales so large that all codes are 0, layers are those whose weights are 0."""
  spec = harness.one_layer_spec("e4m3_static")
  params = harness.init_params(spec.model)
  scaling_states = {
    name: dataclasses.replace(m, amax_3=jnp.full_like(m.amax_3, 2.0**40))
    for name, m in scaling_lib.states(spec.sites()).items()
  }
  mlp, attn = params["layers"]["mlp"], params["layers"]["attn"]
  without = {
    **params,
    "layers": {
      **params["layers"],
      "mlp": {**mlp, **{k: 0 * mlp[k] for k in ("gate", "up", "down")}},
      "attn": {**attn, **{k: 0 * attn[k] for k in "qkvo"}},
    },
  }
  evaluator = evaluator_lib.Evaluator(spec)
  (found,) = evaluator.run(params, scaling_states).values()
  (want,) = evaluator.run(without, scaling_states).values()
  assert found["e4m3_static"]["loss"] == pytest.approx(want["bf16"]["loss"], rel=1e-6)
  assert abs(found["bf16"]["loss"] - want["bf16"]["loss"]) > 1e-4


@pytest.mark.parametrize("order", [("recipe", "bf16"), ("bf16", "recipe"), ("bf16",)])
def test_forward_passes_come_in_the_order_of_the_setting(order):
  """Policies and tasks decide by the first one."""
  spec = harness.text_spec("tensor_current", **{"eval.precisions": order})
  names = {"recipe": ("tensor_current", None), "bf16": ("bf16", "bf16")}
  assert list(evaluator_lib.precisions(spec).items()) == [names[one] for one in order]
