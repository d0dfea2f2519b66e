"""Random keys of a step: whatever a traced step draws, none of its keys draws twice.

Every draw is recorded while the step runs: once per microbatch, layer, chunk and batch entry.
"""

import collections
import dataclasses
from types import SimpleNamespace

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fp8jax
from fp8jax.optim import update
from fp8jax.quantization import rounding
from fp8jax.step import train_step
from fp8jax.step.state import StepFn


class Draws:
  """The random keys of `rounding.stochastic`, as (key, shape), in a list."""

  def __init__(self, monkeypatch):
    self.all, self._may_draw = [], False
    draw, bits = rounding.stochastic, jax.random.bits

    def recorded(x, format, key, *how):
      # x makes a key that entries of a batch share one draw of each entry.
      jax.debug.callback(self._record, jax.random.key_data(key), x)
      self._may_draw = True
      drawn = draw(x, format, key, *how)
      self._may_draw = False
      return drawn

    def checked(*args, **kwargs):
      assert self._may_draw, "a draw that is not recorded: record it here, too"
      return bits(*args, **kwargs)

    monkeypatch.setattr(rounding, "stochastic", recorded)
    monkeypatch.setattr(jax.random, "bits", checked)
    for name in ("uniform", "normal", "bernoulli", "randint", "rademacher", "categorical"):
      monkeypatch.setattr(jax.random, name, checked)

  def _record(self, key, x):
    self.all.append((np.asarray(key).tobytes(), np.shape(x)))

  def repeated(self):
    """{shapes of the draws of one key: keys of which this is so}, of keys that drew twice."""
    jax.effects_barrier()
    shapes = collections.defaultdict(list)
    for key, shape in self.all:
      shapes[key].append(shape)
    return dict(collections.Counter(tuple(sorted(s)) for s in shapes.values() if len(s) > 1))


COMMON = {
  "precision.rules": (("layers/.*/mlp/down|layers/.*/attn/o", "nvfp4_sr_rht"), (".*", "bf16")),
  "model.num_layers": 2, "optim.master_format": "bf16_sr", "optim.moment_format": "bf16_sr",
}  # fmt: skip
AFTER = {**COMMON, "grad_accum_steps": 2}
ORDERS = {
  "e4m3 sums": {**AFTER, "optim.grad_format": "e4m3"},
  "bf16 sums": {**AFTER, "optim.grad_format": "bf16_sr"},
  "in the backward pass": {
    **COMMON, "optim.in_backward": True, "optim.grad_clip_norm": 0.0,
    "memory.remat_policy": "full",
  },
}  # fmt: skip


@pytest.mark.parametrize(
  "order", [pytest.param(o, marks=[pytest.mark.slow] * (o != "e4m3 sums")) for o in ORDERS]
)
def test_no_key_draws_twice_in_two_steps(rng, monkeypatch, order):
  """Operands, gradients, their sums, masters and both moments, layer by layer, chunk by chunk."""
  spec = harness.one_layer_spec(**ORDERS[order])
  state, lead = harness.make_state(spec), (2,) if "sums" in order else ()
  draws = Draws(monkeypatch)
  monkeypatch.setattr(update, "_CHUNK", 32 * 64)  # a chunk per layer
  step, batch = train_step.make_step(spec), harness.weighted_batch(rng, lead)
  for _ in range(2):
    state, values = step(state, batch, spec.sites())
  assert values["is_finite"] and not draws.repeated()
  assert step.jitted._cache_size() == 1  # the key's place makes no second program
  # Per step: two sites' gradients along two axes and the seven matrices' masters and moments, per
  # layer, at least.
  assert len(draws.all) >= 2 * 2 * (2 * 2 + 7 * 3)


def test_entries_of_a_batch_draw_their_own(rng, monkeypatch):
  draws = Draws(monkeypatch)
  one = rng.standard_normal((32, 64)).astype(np.float32)
  x, w = np.stack([one] * 3), np.stack([rng.standard_normal((64, 48)).astype(np.float32)] * 3)

  def loss(x, w):
    dims = (((2,), (1,)), ((0,), (0,)))
    y = fp8jax.dot_general(x, w, dims, recipe="nvfp4_sr_rht", key=jax.random.key(1))
    return jnp.sum(jnp.sin(y))

  dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
  assert len(draws.all) == 6 and not draws.repeated()  # g for dgrad and for wgrad, 3 entries
  for gradient in (dx, dw):
    assert np.any(gradient[0] != gradient[1]) and np.any(gradient[1] != gradient[2])


@pytest.mark.slow
def test_seeds_share_one_program_and_draw_their_own(rng):
  """The cache of compiled programs then serves every seed of a recipe with random bits. A step of
  the same seed and number draws the same again."""
  changes = {"precision.rules": harness.only_down("nvfp4_sr_rht")}
  specs = [harness.one_layer_spec(**changes, seed=seed) for seed in (1, 2)]
  state, batch = harness.make_state(specs[0]), harness.weighted_batch(rng)
  steps = [train_step.make_step(spec) for spec in specs]
  one, two = (step.lower(state, batch, spec.sites()).as_text() for step, spec in zip(steps, specs))
  assert one == two
  sites = specs[0].sites()
  norms = []
  for step, number in ((steps[0], 1), (steps[0], 1), (steps[0], 2), (steps[1], 1)):
    own = dataclasses.replace(jax.tree.map(jnp.copy, state), step=jnp.int32(number))
    norms.append(float(step(own, batch, sites)[1]["grad_norm"]))
  assert norms[0] == norms[1] and len(set(norms)) == 3


@pytest.mark.parametrize("devices", [0, 1, 4])
def test_the_key_is_no_transfer_that_nobody_asked_for(devices):
  """In the loop of training a NumPy key would be one, where the program draws from it. What is
  committed to no device (0) stays so: one program for all steps."""
  is_committed, devices = devices > 0, max(devices, 1)
  mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
  there = NamedSharding(mesh, PartitionSpec())
  where = there if devices > 1 else jax.sharding.SingleDeviceSharding(jax.devices()[0])
  state = SimpleNamespace(step=jax.device_put(jnp.int32(3), where if is_committed else None))
  draw = jax.jit(lambda state, x, *, key: x + jax.random.bits(key, x.shape))
  x = jax.device_put(jnp.zeros(4, jnp.uint32), where if is_committed else None)
  key = np.asarray([0, 7], np.uint32)
  rate_of = jax.jit(lambda step, scale: step * 0.5)
  take = StepFn(lambda state, x, *, key, rate: draw(None, x, key=key), rate_of, key)
  with jax.transfer_guard("disallow"):
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
      draw(None, x, key=key)
    found = [take(state, x) for _ in range(2)]
  assert found[0].committed == is_committed
  want = np.asarray(jax.random.bits(jnp.asarray(key), (4,)))
  np.testing.assert_array_equal(np.stack([np.asarray(f) for f in found]), np.stack([want] * 2))
