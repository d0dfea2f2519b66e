"""2:4 sparsity: the weights that stay, which an optimizer moves alone, as it would without."""

import dataclasses
import itertools

import harness
import jax
import numpy as np
import pytest

from fp8jax.errors import ConfigError
from fp8jax.export import fp8 as fp8_export
from fp8jax.export import matrices
from fp8jax.models.hf.schemes import Codes, Scheme
from fp8jax.optim import optimizers, sparsity, update
from fp8jax.params import Param
from fp8jax.recipe.served import SERVED

_OPTIM = optimizers.OptimizerConfig(schedule="constant", warmup_steps=1, decay_steps=2, steps=10)
# Contracted: D; H and K, of which K has the groups; and what has no mask.
_DECLARATION = {
  "layers": {
    "up": Param("NDF", inputs=1), "o": Param("NHKD", inputs=2), "norm": Param("ND", decay=False),
  },
  "head": Param("DV", inputs=1),
}  # fmt: skip
_SHAPES = {"layers/up": (3, 8, 6), "layers/o": (3, 2, 4, 8), "layers/norm": (3, 8), "head": (8, 5)}
_AXES = {"layers/up": 1, "layers/o": 2}


def _pruned(w, axis):
  """By sorting every group; the first of equal magnitudes stay."""
  w = np.moveaxis(w, axis, -1)
  grouped = w.reshape(-1, 4)
  kept = np.zeros(grouped.shape, bool)
  np.put_along_axis(kept, np.argsort(-np.abs(grouped), -1, kind="stable")[:, :2], True, -1)
  return np.moveaxis((grouped * kept).reshape(w.shape), -1, axis)


def test_two_of_four_stay_the_first_of_equal_ones():
  groups = np.array(list(itertools.product((-2.0, 0.0, 1.0, 2.0), repeat=4)), np.float32)
  for axis, w in ((1, groups), (0, groups.T), (1, groups.reshape(8, 128, 1) + 0.0)):
    np.testing.assert_array_equal(sparsity.kept(w, w, axis), _pruned(w, axis))
  np.testing.assert_array_equal(sparsity.kept(groups + 1, groups, 1), (groups + 1) * (
    sparsity.kept(np.ones_like(groups), groups, 1)))  # fmt: skip


def test_an_optimizer_moves_the_weights_of_the_first_mask_as_it_would_without(rng):
  """Of those that a dense optimizer starts from, pruned; norms and the head are left alone."""
  params, *grads = (
    {path: rng.standard_normal(shape).astype(np.float32) for path, shape in _SHAPES.items()}
    for _ in range(4)
  )
  ends = {}
  for sparse in ("2:4", "none"):
    optim = dataclasses.replace(
      _OPTIM, sparsity=sparse, master_format="bf16_sr", moment_format="bf16"
    )
    leaves = optimizers.params_lib.flatten(optimizers.leaves(optim, _DECLARATION))
    start = {p: _pruned(w, _AXES[p]) if p in _AXES and sparse == "none" else w
             for p, w in params.items()}  # fmt: skip
    ends[sparse] = jax.device_get(_last(leaves, start, grads))
  for path, dense in ends["none"].items():
    kept = _pruned(params[path], _AXES[path]) != 0 if path in _AXES else True
    np.testing.assert_array_equal(ends["2:4"][path], dense * kept, err_msg=path)


def _last(leaves, start, grads):
  """The parameters after a step with each gradient."""

  @jax.jit
  def begin(start):
    return {path: update.init(leaves[path], start[path]) for path in leaves}

  @jax.jit
  def move(now, g, i):
    args = update.UpdateArgs(i, 0.3)  # so large that masks of magnitudes would change
    return {p: update.update_param(leaves[p], g[p], *of, args)[:2] for p, of in now.items()}

  now = begin(start)
  for i, g in enumerate(grads):
    now = move(now, g, np.int32(i))
  unpack = lambda now: {p: getattr(of[1], "unpack", lambda x=of[1]: x)() for p, of in now.items()}  # noqa: E731
  return jax.jit(unpack)(now)


def test_what_cannot_be_sparse_is_refused():
  with pytest.raises(ConfigError, match="layers/mlp/down contracts 98, which 4 does not divide"):
    harness.text_spec("bf16", **{"optim.sparsity": "2:4", "model.intermediate_size": 98})
  with pytest.raises(ConfigError, match="merged adapters fill zeros"):
    harness.text_spec("bf16", **{"optim.sparsity": "2:4", "model.lora.rank": 2})


@pytest.mark.parametrize("beyond", [False, True])
def test_a_folders_table_says_whether_codes_are_two_of_four(rng, beyond):
  w = _pruned(rng.standard_normal((4, 128)).astype(np.float32), 1)
  data = np.asarray(np.sign(w) * 3, np.int8)
  if beyond:
    data[0, :3] = 1
  quant = SERVED["w4a16"].fwd.rhs
  scheme = Scheme("pack-quantized", quant)
  made = Codes(data, np.ones((4, 1), np.float32))
  assert matrices.row(w.T, made, fp8_export.Matrix(scheme, False))["two_of_four"] is not beyond
