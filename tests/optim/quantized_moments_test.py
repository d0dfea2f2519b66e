"""Narrow moments inside the train step: on meshes, through checkpoints, at a resumed run."""

import dataclasses

import harness
import jax
import numpy as np
import pytest
import tolerances

from fp8jax import params as params_lib
from fp8jax.config import resolve
from fp8jax.errors import UserError
from fp8jax.kernels.choose import Device
from fp8jax.models import presets
from fp8jax.optim import storage
from fp8jax.quantization import quantized_tensor
from fp8jax.run import checkpoint
from fp8jax.step import train_step

NARROW = [name for name in storage.MOMENTS if name != "float32"]
FIRST = ["coat", *(pytest.param(n, marks=pytest.mark.slow) for n in NARROW if n != "coat")]


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch):
  monkeypatch.setitem(presets.PRESETS, "tiny", harness.TINY)


def _runner(name, shape=None, **changes):
  changes = {"optim.moment_format": name, **changes}
  return harness.Runner(harness.tiny_spec(harness.tiny_config("bf16", **changes), shape))


def _equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
def test_checkpoint_continues_to_the_bit(tmp_path, name):
  """Four steps = two, a checkpoint, two; codes, scales and random bits included."""
  runner, hosts = _runner(name), harness.host_batches()
  want, whole = runner.run(hosts[:4])
  _, state = runner.run(hosts[:2])
  _, other = runner.run(hosts[2:3])
  state = _through_checkpoint(tmp_path, state, runner.spec)
  got, resumed = runner.run(hosts[2:4], state)
  np.testing.assert_array_equal(got, want[2:])
  _equal(resumed, whole)
  assert np.any(np.asarray(other.opt["embed"][0].mu.data) != resumed.opt["embed"][0].mu.data)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_mesh_holds_what_one_device_holds(tmp_path, name):
  """A checkpoint restored onto (1, 2, 4): placed as declared, nothing lost, and a step from it
  keeps the same moments."""
  hosts = harness.host_batches()
  rest = (
    {"optim.master_format": "bf16_remainder", "optim.grad_format": "bf16_sr"}
    if name == "coat"
    else {}
  )
  one, many = _runner(name, **rest), _runner(name, (1, 2, 4), **rest)
  _, state = one.run(hosts[:2])
  shardings = jax.tree.map(lambda x: x.sharding, train_step.abstract_state(many.spec))
  split = _through_checkpoint(tmp_path, state, many.spec)
  _equal(split, state)
  for place, found in zip(jax.tree.leaves(shardings), jax.tree.leaves(split), strict=True):
    assert found.sharding.is_equivalent_to(place, found.ndim)
  after, values = one.step(state, hosts[2])
  after_split, values_split = many.step(split, hosts[2])
  assert values_split["loss"] == pytest.approx(values["loss"], rel=tolerances.MESH_LOSS)
  for place, found in zip(jax.tree.leaves(shardings), jax.tree.leaves(after_split), strict=True):
    assert found.sharding.is_equivalent_to(place, found.ndim)
  gate = after_split.opt["layers"]["mlp"]["gate"][0].nu
  if name == "coat":  # codes and their groups: D over fsdp, F over tensor, 4 groups of F
    assert [len(x.addressable_shards[0].data.shape) for x in jax.tree.leaves(gate)] == [3, 3, 3]
    assert gate.data.addressable_shards[0].data.shape == (2, 64, 128)
    assert gate.scale.addressable_shards[0].data.shape == (2, 64, 1)
  pairs = zip(_packed(after.opt), _packed(after_split.opt), strict=True)
  for a, b in pairs:
    a, b = (np.asarray(x.unpack(), np.float64) for x in (a, b))
    # Sums in another order: a code may fall on the other side of a tie, by a step.
    assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(a)


def test_norms_keep_float32_and_layers_scales_of_their_own():
  state = train_step.abstract_state(_runner("tensor_e4m3_e5m2").spec)
  layers = state.opt["layers"]
  assert layers["attn"]["norm"].nu.dtype == np.float32
  assert layers["mlp"]["gate"][0].nu.scale.shape == (2,)  # of two layers
  assert state.opt["embed"][0].mu.scale.shape == ()


@pytest.mark.slow
def test_lion_trains():
  losses, state = _runner("coat", **{"optim.optimizer": "lion", "optim.b2": 0.99}).run(
    harness.host_batches()[:8]
  )
  assert losses[-1] < losses[0]
  assert not hasattr(state.opt["embed"][0], "nu")


def test_moments_that_would_not_train_are_refused_with_the_config():
  c = harness.tiny_config("bf16", **{"optim.moment_format": "bf16", "optim.b2": 0.999})
  with pytest.raises(resolve.ConfigError, match="optim.moment_format='bf16': nu=.*learning stop"):
    resolve.resolve(c, 1, Device("cpu"))
  with pytest.raises(resolve.ConfigError, match="optim.moment_format.*did you mean 'coat'"):
    resolve.resolve(
      harness.tiny_config("bf16", **{"optim.moment_format": "coats"}), 1, Device("cpu")
    )


def _packed(tree):
  leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, quantized_tensor.QuantizedTensor))
  return [x for x in leaves if isinstance(x, quantized_tensor.QuantizedTensor)]


def _through_checkpoint(folder, state, spec):
  """The state after two steps, saved and restored onto a spec's devices."""
  saved = checkpoint.Checkpoints(str(folder))
  saved._manager.save(2, args=_items(state))
  saved.wait()
  found = saved.restore(2, train_step.abstract_state(spec, 2))
  saved.close()
  return found


def test_a_checkpoint_of_codes_that_do_not_say_how_they_are_read_is_refused(tmp_path):
  """As earlier versions wrote them."""
  spec = harness.one_layer_spec(**{"optim.moment_format": "fp8lm"})
  state = harness.make_state(spec)
  is_packed = lambda x: isinstance(x, quantized_tensor.QuantizedTensor)  # noqa: E731
  older = jax.tree.map(
    lambda x: {"data": x.data, "scale": x.scale, "power": None} if is_packed(x) else x,
    state.opt, is_leaf=is_packed,
  )  # fmt: skip
  assert _packed(state.opt)
  with pytest.raises(UserError, match="of another version .* did not say how codes are to be read"):
    _through_checkpoint(tmp_path, dataclasses.replace(state, opt=older), spec)


def _items(state):
  """What a run saves, without a place in data."""
  ocp = checkpoint.ocp
  return ocp.args.Composite(
    params=ocp.args.PyTreeSave(state.params),
    rest=ocp.args.PyTreeSave(checkpoint._rest(state)),
  )


@pytest.mark.parametrize(
  "master, shape",
  [pytest.param("float32", None, marks=pytest.mark.slow), ("bf16_remainder", (2, 2, 2))],
  ids=str,
)
def test_given_parameters_become_the_state_and_are_used_up(master, shape):
  """One after the other, as a model in float32 beside all of its state may not fit."""
  spec = _runner("coat", shape, **{"optim.master_format": master}).spec
  wanted = train_step.make_state(spec)
  places = None if shape is None else params_lib.shardings(spec.declaration, spec.run.layout)
  init = jax.jit(
    lambda key: params_lib.init(key, spec.declaration, spec.model.dims), out_shardings=places
  )
  given = init(jax.random.key(spec.seed))
  found = train_step.make_state(spec, given)
  _equal(found, wanted)
  assert all(x.is_deleted() for x in jax.tree.leaves(given))
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert a.sharding == b.sharding
