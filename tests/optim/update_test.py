"""Every parameter moved on its own and by pieces; optim/optimizers_test.py has the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8jax.ops import stored_params
from fp8jax.optim import optimizers, storage, update
from fp8jax.params import Param
from fp8jax.quantization import quantized_tensor

OPTIM = optimizers.OptimizerConfig(
  optimizer="adam", moment_format="float32", master_format="float32", grad_format="float32",
  schedule="constant",
  peak_lr=1e-3, min_lr=1e-4, warmup_steps=1, decay_steps=2, steps=10,
  b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0,
)  # fmt: skip
# A stack of layers, a matrix, one whose rows are shorter than a group, a norm.
SHAPES = {"stack": (3, 40, 128), "matrix": (96, 256), "short": (2, 100), "norm": (64,)}
DECLARATION = {
  "stack": Param("NDF"),
  "matrix": Param("VD"),
  "short": Param("VD"),
  "norm": Param("D", decay=False),
}


def _run(steps, **kept):
  leaves = optimizers.leaves(optimizers.dataclasses.replace(OPTIM, **kept), DECLARATION, seed=3)
  rng = np.random.default_rng(0)
  params, *grads = (
    {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()} for _ in range(5)
  )
  found = jax.jit(lambda params: jax.tree.map(update.init, leaves, params))(params)
  state = {k: v[0] for k, v in found.items()}
  kept = {k: v[1] for k, v in found.items()}

  @jax.jit
  def step(g, state, kept, now):
    moved = {k: update.update_param(leaves[k], g[k], state[k], kept[k], now) for k in g}
    return [{k: v[i] for k, v in moved.items()} for i in range(3)]

  @jax.jit
  def packed(grads, i):
    return {
      k: quantized_tensor.pack(x, leaves[k].gradient, lead=leaves[k].lead, key=jax.random.key(i))
      if leaves[k].gradient else x for k, x in grads.items()
    }  # fmt: skip

  for i in range(steps):
    state, kept, squares = step(
      packed(grads[i], i), state, kept, update.UpdateArgs(np.int32(i), 0.01 * (i + 1), 0.5)
    )
  return params, grads, (state, kept, squares), step


jax.tree_util.register_dataclass(update.UpdateArgs, ["step", "rate", "factor", "is_applied"], [])


@pytest.mark.parametrize(
  "moments,master,gradient",
  [
    pytest.param("coat", "float32", "float32", marks=pytest.mark.slow),
    pytest.param("tensor_e4m3_e5m2", "f16", "e4m3", marks=pytest.mark.slow),
    ("bf16", "bf16_remainder", "e4m3"),
  ],
)
def test_piece_by_piece_is_the_same(monkeypatch, moments, master, gradient):
  """Layers of a stack, and runs of a matrix's rows, where scales allow it."""
  kept = dict(moment_format=moments, master_format=master, grad_format=gradient)
  *_, whole, _ = _run(2, **kept)
  monkeypatch.setattr(update, "_CHUNK", 100)
  _, grads, pieces, step = _run(2, **kept)
  packed = jax.eval_shape(lambda grads: _packed(grads, gradient), grads[0])
  traced = str(jax.make_jaxpr(step)(packed, *pieces[:2], update.UpdateArgs(0, 0.1, 1.0, True)))
  # A scale of the whole matrix keeps it whole; so do groups that run on over rows of 100.
  loops = {"coat": 2, "tensor_e4m3_e5m2": 1, "bf16": 3}[moments]
  assert traced.count("while[") + traced.count("scan[") == loops
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), whole[2], pieces[2])
  # XLA may contract a product and a sum in the one program and not in the other.
  pairs = zip(
    *(jax.tree.leaves(jax.jit(stored_params.dequantize_tree)(x[:2])) for x in (whole, pieces)),
    strict=True,
  )
  for a, b in pairs:
    np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-4 * np.abs(a).max())
    assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(a)


def _packed(grads, name):
  quant = storage.GRADIENTS[name]
  return {
    k: quantized_tensor.pack(g, quant, lead=int(k == "stack"), key=jax.random.key(0))
    if quant and k != "norm" else g for k, g in grads.items()
  }  # fmt: skip


@pytest.mark.parametrize("master", [pytest.param("float32", marks=pytest.mark.slow), "bf16_sr"])
def test_a_step_that_is_not_applied_changes_nothing(master):
  _, grads, (state, kept, _), step = _run(3, moment_format="coat", master_format=master)
  nan = {k: g * np.nan for k, g in grads[0].items()}
  same = step(nan, state, kept, update.UpdateArgs(np.int32(3), 0.01, 0.5, False))
  jax.tree.map(np.testing.assert_array_equal, same[:2], [state, kept])


# The sign of Lion's momentum as an exponent: a weight keeps its sign, and 0 stays 0.
MULTIPLIED = optimizers.Optimizer(
  lambda o: optax.scale_by_lion(o.b1, o.b2), {"mu": "b2"},
  apply=lambda value, update, rate: value * jnp.exp(-rate * update),
)  # fmt: skip


@pytest.mark.parametrize(
  "master,error",
  # Initial rounding and one of each step, by at most an ulp.
  [
    ("float32", 2e-6),
    ("bf16_remainder", 2e-6),
    ("f16", 5 * 2**-10),
    pytest.param("bf16_sr", 5 * 2**-7, marks=pytest.mark.slow),
  ],
)
def test_an_optimizer_applies_its_update_in_its_own_way(monkeypatch, master, error):
  """Four steps of w exp(-rate (sign + decay w)) in float64, by stacks, rows and norms."""
  monkeypatch.setitem(optimizers.OPTIMIZERS, "multiplied", MULTIPLIED)
  params, grads, (_, kept, squares), _ = _run(4, optimizer="multiplied", master_format=master)
  ends = jax.device_get(jax.jit(stored_params.dequantize_tree)(kept))
  for name, start in params.items():
    w, m = start.astype(np.float64), np.zeros(start.shape)
    for i, g in enumerate(g[name] * 0.5 for g in grads[:4]):
      sign, m = np.sign(0.1 * g + 0.9 * m), 0.05 * g + 0.95 * m
      w, old = w * np.exp(-0.01 * (i + 1) * (sign + 0.1 * w * (name != "norm"))), w
    np.testing.assert_allclose(np.float64(ends[name]), w, rtol=error if name != "norm" else 2e-6)
    assert np.allclose(squares[name], [np.sum((w - old) ** 2), np.sum(old**2)], rtol=10 * error)
