"""A parameter moved by the kernel is the parameter moved by Optax, alone and on a mesh.

The kernel to the bit, and its definition against Optax: kernels/adamw_kernel_test.py. Here the
walk: what it hands over, where, and what comes back.
"""

import dataclasses
import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8jax.config import resolve
from fp8jax.kernels import choose
from fp8jax.kernels.choose import Device
from fp8jax.models import presets
from fp8jax.ops import stored_params
from fp8jax.optim import optimizers, update
from fp8jax.params import Param
from fp8jax.quantization import quantized_tensor
from fp8jax.step import train_step

HOPPER = Device("gpu", 90)
OPTIM = optimizers.OptimizerConfig(
  optimizer="adam", moment_format="coat", master_format="bf16_remainder", grad_format="bf16_sr",
  schedule="constant",
  peak_lr=1e-3, min_lr=1e-4, warmup_steps=1, decay_steps=2, steps=10,
  b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0,
)  # fmt: skip
LETTERS = {"stack": "NDF", "matrix": "VD"}


def _leaf(name, shape, sharding=None, wanted="mosaic_sm90"):
  leaf = optimizers.leaves(OPTIM, {name: Param(LETTERS[name])})[name]
  param = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
  return update.with_backends({name: leaf}, {name: param}, HOPPER, wanted)[name]


def _before(rng, leaf, shape):
  """(gradient, state, kept) of a step that is not the first."""
  param, *found = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
  pack = jax.jit(lambda g: quantized_tensor.pack(g, leaf.gradient, key=jax.random.key(0)))
  first, second = (pack(1e-3 * g) for g in found)
  state, kept, _ = _move(
    _by_optax(leaf), first, *jax.jit(update.init, static_argnums=0)(leaf, param)
  )
  return second, state, kept


@functools.partial(jax.jit, static_argnums=0)
def _move(leaf, g, state, kept, is_applied=True):
  return update.update_param(leaf, g, state, kept, update.UpdateArgs(1, 0.02, 0.5, is_applied))


def _by_optax(leaf):
  return dataclasses.replace(leaf, backend="xla", sharding=None)


def _assert_as_by_optax(leaf, before, found):
  """One step: masters to float32's precision, codes all but a few, and sums of what was moved."""
  state, kept, squares = found
  want, want_kept, _ = _move(_by_optax(leaf), *before)
  assert jax.tree.structure((state, kept)) == jax.tree.structure((want, want_kept))
  assert state[0].count == want[0].count == 2
  new, old = (np.float64(x.unpack()) for x in (kept, before[2]))
  np.testing.assert_allclose(new, np.float64(want_kept.unpack()), rtol=0, atol=1e-6)
  assert np.abs(new - old).min() > 0
  for name in ("mu", "nu"):
    x, y = getattr(state[0], name), getattr(want[0], name)
    np.testing.assert_array_equal(x.power, y.power)
    np.testing.assert_allclose(x.scale, y.scale, rtol=tolerances.FLOAT32_SUM)
    # Codes, as the integers that their bits are, may be the next ones.
    distance = np.abs(*(a - b for a, b in [[np.int32(z.data.view(jnp.int8)) for z in (x, y)]]))
    assert distance.max() <= 1 and np.mean(distance) < 1e-3, name
  # float32 masters forget some of an update of a hundredth of them.
  want = [np.sum((new - old) ** 2), np.sum(old**2)]
  np.testing.assert_allclose(squares, want, rtol=1e-5)


@pytest.mark.parametrize("name, shape", [
  # A stack of layers on every device: below.
  pytest.param("stack", (3, 24, 128), marks=pytest.mark.slow), ("matrix", (24, 256)),
])  # fmt: skip
def test_a_kernels_step_is_optaxs(rng, interpreted_on_mesh, name, shape):
  leaf = _leaf(name, shape)
  before = _before(rng, leaf, shape)
  _assert_as_by_optax(leaf, before, _move(leaf, *before))


def test_a_step_that_is_not_applied_counts_nothing(rng, interpreted_on_mesh):
  leaf = _leaf("matrix", (8, 256))
  g, *state = _before(rng, leaf, (8, 256))
  nan = dataclasses.replace(g, data=g.data * np.nan)
  *same, squares = _move(leaf, nan, *state, is_applied=False)
  jax.tree.map(np.testing.assert_array_equal, same, state)
  want = np.sum(np.float64(state[1].unpack()) ** 2)
  np.testing.assert_allclose(squares, [0, want], rtol=tolerances.FLOAT32_SUM)


@pytest.mark.parametrize(
  "spec", [PartitionSpec(None, "fsdp", "tensor"), PartitionSpec(None, "tensor")], ids=str
)
def test_every_device_moves_its_part(rng, interpreted_on_mesh, spec):
  """Also where two have the same part, which the sums count once."""
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
  there, shape = NamedSharding(mesh, spec), (2, 8, 256)
  leaf = _leaf("stack", shape, there)
  before = _before(rng, leaf, shape)
  param = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=there)
  places = jax.tree.map(lambda x: x.sharding, update.abstract(leaf, param))
  found = _move(leaf, *jax.device_put(before, (there, *places)))
  for x, place in zip(jax.tree.leaves(found[:2]), jax.tree.leaves(places), strict=True):
    assert x.sharding.is_equivalent_to(place, x.ndim)
  _assert_as_by_optax(leaf, before, jax.device_get(found))


def test_what_the_kernel_cannot_take_is_refused_by_name():
  mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
  along = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
  reasons = {
    "a group of 128 would lie on two devices": ((64, 256), along),
    "rows of 192 numbers": ((64, 192), None),
  }
  for reason, (shape, sharding) in reasons.items():
    with pytest.raises(ValueError, match=f"cannot move matrix: .*{reason}.*'auto'"):
      _leaf("matrix", shape, sharding)
    leaf = _leaf("matrix", shape, sharding, "auto")
    assert leaf.backend == "xla" and leaf.note
  assert _leaf("matrix", (64, 512), along).backend == "mosaic_sm90"


def test_auto_leaves_to_xla_what_the_kernel_does_not_do():
  excluded = {
    "optim.lr_multipliers: the kernel has one rate": {
      "optim.lr_multipliers": (("layers/.*", 2.0),),
    },
    "log.param_stats='params': the kernel sums over": {
      "log.param_stats": "params", "log.tensor_stats_every": 10,
    },
    "": {},
  }  # fmt: skip
  for reason, changes in excluded.items():
    spec = harness.debug_plan(device=HOPPER, **changes)
    leaves = [x for x in jax.tree.leaves(spec.leaves) if x.is_large]
    backend = "xla" if reason else "mosaic_sm90"
    taken = [x for x in leaves if x.backend == backend]
    assert len(taken) == len(leaves) if reason else taken
    assert all(x.note.startswith(reason) for x in leaves if reason)


@pytest.mark.slow
def test_a_train_steps_state_is_that_of_xla(interpreted_on_mesh, monkeypatch):
  """Two steps of a model, the GPU's plan on a CPU: metrics and all that is kept."""
  monkeypatch.setitem(presets.PRESETS, "tiny", harness.TINY)
  monkeypatch.setattr(choose, "compiler_options", lambda _: None)  # those are a GPU's
  kept = {
    f"optim.{k}": getattr(OPTIM, k) for k in ("moment_format", "master_format", "grad_format")
  }
  kept |= {"kernels.attention": "xla", "precision.compute_dtype": "float32"}
  found = {}
  for name in ("xla", "mosaic_sm90"):
    c = harness.tiny_config("bf16", **kept, **{"kernels.optimizer": name})
    runner = harness.Runner(resolve.resolve(c, 1, HOPPER))
    state = train_step.make_state(runner.spec)
    for host in harness.host_batches()[:2]:
      state, values = runner.step(state, host)
    found[name] = values, stored_params.dequantize_tree((state.params, state.opt))
  (want, wanted), (got, state) = found["xla"], found["mosaic_sm90"]
  for key in want:
    assert got[key] == pytest.approx(want[key], rel=tolerances.FLOAT32_SUM), key
  assert jax.tree.structure(state) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(wanted)):
    assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y)
