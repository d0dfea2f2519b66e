"""Clipping by groups of layers and learning rates of their own, beside float64 NumPy."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8jax import axes
from fp8jax.errors import ConfigError
from fp8jax.optim import groups, optimizers, update
from fp8jax.params import Param
from fp8jax.step import train_step

OPTIM = optimizers.OptimizerConfig(
  optimizer="adam", moment_format="float32", master_format="float32", grad_format="float32",
  schedule="constant", peak_lr=1e-3, min_lr=1e-4, warmup_steps=1, decay_steps=2, steps=10,
  b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0,
  clip_groups=(("layers/0/.*", 2.0), ("layers/.*/up", 30.0), ("embed", 1e6)),
  lr_multipliers=(("layers/1/up", 0.8), (".*/norm|embed", 1.25)),
)  # fmt: skip
DECLARATION = {
  "embed": Param("VD"),
  "layers": {"up": Param("NDF"), "norm": Param("ND", decay=False)},
}
SHAPES = {"embed": (6, 8), "layers": {"up": (3, 8, 128), "norm": (3, 8)}}
RATE = 0.125


def arrays(seed):
  rng = np.random.default_rng(seed)
  shapes = SHAPES["layers"]
  made = lambda shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
  return {
    "embed": made(SHAPES["embed"]),
    "layers": {name: made(shape) for name, shape in shapes.items()},
  }


def clipped(grads):
  """{(parameter, layer): its gradient after clipping}, float64."""
  g = {(name, i): np.float64(grads["layers"][name][i]) for name in ("up", "norm") for i in range(3)}
  for members, most in (
    ([("up", 0), ("norm", 0)], 2.0),
    ([("up", 1), ("up", 2)], 30.0),
  ):
    norm = np.sqrt(sum(np.sum(g[key] ** 2) for key in members))
    for key in members:
      g[key] = g[key] * min(1.0, most / norm)
  return g


def test_groups_are_clipped_by_their_own_norms_and_rates_multiplied():
  """The moments after a step are 0.1 of the clipped gradient; steps are proportional to rates."""
  leaves, params, grads = optimizers.leaves(OPTIM, DECLARATION), arrays(0), arrays(1)
  both = jax.tree.map(update.init, leaves, params)
  opt, master = (update.select(both, DECLARATION, i) for i in (0, 1))

  @jax.jit
  def step(grads, opt, master):
    own = groups.own_args(OPTIM, DECLARATION, 3, grads)
    args = update.UpdateArgs(jnp.int32(0), RATE)
    return update.update_params(leaves, DECLARATION, axes.LOCAL, grads, opt, master, args, own=own)

  opt, moved, _ = step(grads, opt, master)
  g = clipped(grads)
  for name in ("up", "norm"):
    mu = jax.tree.leaves(opt["layers"][name])
    mu = next(x for x in mu if getattr(x, "shape", ()) == SHAPES["layers"][name])
    wanted = np.stack([0.1 * g[name, i] for i in range(3)])
    np.testing.assert_allclose(mu, wanted, rtol=1e-5)
  # Adam's first step is rate * multiplier * sign(g), whatever the gradient's size.
  multipliers = {"up": (1.0, 0.8, 1.0), "norm": (1.25,) * 3}
  for name, factors in multipliers.items():
    change = np.abs(np.asarray(moved["layers"][name], np.float64) - params["layers"][name])
    for i, factor in enumerate(factors):
      np.testing.assert_allclose(change[i], RATE * factor, rtol=2e-2)
  np.testing.assert_allclose(np.abs(moved["embed"] - params["embed"]), 1.25 * RATE, rtol=2e-2)


@pytest.mark.parametrize("clip, multipliers", [
  (0.01, (("layers/.*", 0.5), ("embed", 2.0))), (0.0, ()),
  pytest.param(0.01, (), marks=pytest.mark.slow),
  pytest.param(0.0, (("layers/.*", 0.5), ("embed", 2.0)), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_global_clipping_holds_with_and_without_rates_of_its_own(rng, clip, multipliers):
  """m after a step is 0.1 of the clipped gradient, whose norm over all parameters is the limit."""
  changes = {"optim.grad_clip_norm": clip, "optim.lr_multipliers": multipliers}
  spec, batch = harness.one_layer_spec(**changes), harness.weighted_batch(rng)
  state = train_step.make_state(spec)
  state, values = train_step.make_step(spec)(state, batch, spec.sites())
  adam = [x.mu for x in jax.tree.leaves(state.opt, is_leaf=_is_adam) if _is_adam(x)]
  norm = np.sqrt(sum(np.sum(np.float64(m) ** 2) for m in jax.tree.leaves(adam)))
  assert values["grad_norm"] > 0.1  # or nothing is clipped
  assert norm == pytest.approx(0.1 * (clip or float(values["grad_norm"])), rel=1e-4)


def test_rates_by_width_are_those_of_the_layers_matrices_and_multiply_others():
  """sqrt(base width / width), arXiv:2502.05967; embedding, head, norms and biases keep theirs."""
  declaration = {
    "embed": Param("VD"), "head": Param("DV", inputs=1), "norm": Param("D", decay=False),
    "layers": {"up": Param("NDF", inputs=1), "bias": Param("NF", decay=False)},
  }  # fmt: skip
  optim = optimizers.OptimizerConfig(base_width=64, width=512, lr_multipliers=((".*/up", 3.0),))
  own = groups.own_args(optim, declaration, 3, jax.tree.map(lambda p: np.zeros(3), declaration))
  rates = {path: float(its.rate) for path, its in own.items()}
  assert rates.pop("layers/up") == pytest.approx(3 / np.sqrt(8), rel=1e-6)
  assert set(rates.values()) == {1.0} and len(rates) == 4
  spec = harness.one_layer_spec(**{"optim.base_width": 16})
  assert spec.optim.width == spec.model.hidden_size
  refused = {"optim.base_width": 16, "kernels.optimizer": "mosaic_sm90"}
  with pytest.raises(ConfigError, match="mosaic_sm90' cannot move .*optim.base_width: the kernel"):
    harness.one_layer_spec(**refused)
  for changes in ({"optim.weight_decay": 1.0}, {"optim.optimizer": "madam", "optim.b1": 0.9}):
    with pytest.raises(ConfigError, match="optim.decay_by='schedule' (is|with)"):
      harness.one_layer_spec(**{"optim.decay_by": "schedule", **changes})


def _is_adam(x):
  return isinstance(x, optax.ScaleByAdamState)


def test_rates_by_width_of_adapters_are_refused():
  changes = {"optim.base_width": 64, "model.lora.rank": 4}
  with pytest.raises(ConfigError, match="optim.base_width=64 with model.lora.rank=4"):
    harness.tiny_spec(harness.tiny_config("bf16", **changes))


def test_patterns_that_decide_nothing_are_refused():
  named = groups.names(DECLARATION, 3)
  assert named["layers/up"] == [f"layers/{i}/up" for i in range(3)] and named["embed"] == ["embed"]
  pairs = (("layers/.*", 1.0), ("layers/1/up", 2.0))
  (problem,) = groups.problems("optim.clip_groups", pairs, named)
  assert "'layers/1/up' decides nothing" in problem
  for bad in (("embed",), ("embed", 0.0), ("(", 1.0), "embed", ("embed", "1")):
    (problem,) = groups.problems("optim.lr_multipliers", (bad,), named)
    assert "is no pair such as" in problem


def test_settings_that_exclude_groups_are_refused_together():
  with pytest.raises(ConfigError) as e:
    harness.one_layer_spec(**{
      "optim.clip_groups": (("layers/.*/mlp/.*", 1.0),), "optim.in_backward": True,
      "optim.lr_multipliers": (("layers/4/.*", 1.1),),
    })  # fmt: skip
  for text in ("set optim.grad_clip_norm=0.0", "leave one out", "decides nothing"):
    assert text in str(e.value)
