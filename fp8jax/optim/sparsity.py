"""2:4 sparsity: at most two of every four weights that follow each other in the contraction.

The mask is no state: it is that of the weights before an update. Of dense weights it keeps the two
largest magnitudes; weights that have it already keep their zeros, so that a run goes on from its
checkpoint, and QAT from a folder, in one mask. A weight that an update makes exactly 0 gives its
place to the first one of its four that is 0. Gradients pass the forward product as they do
elsewhere.

Source: magnitude pruning of Mishra et al. 2021 (arXiv:2104.08378 §4), with one mask for all of
training; torchao 2507.16099 trains so before it serves.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from fp8jax import params as params_lib
from fp8jax.params import Param

NONE, TWO_OF_FOUR = CHOICES = ("none", "2:4")


def kept(x, magnitudes_of, axis: int):
  """x where a 2:4 mask of another array of its shape is; else 0.

  Args:
    axis: of the contraction, whose extent 4 divides. Of equal magnitudes the first ones stay.
  """
  shape = x.shape
  grouped = (*shape[:axis], shape[axis] // 4, 4, *shape[axis + 1 :])
  parts = jnp.split(jnp.abs(magnitudes_of).reshape(grouped), 4, axis=axis + 1)
  ranks = [
    sum((other > one) | ((other == one) & (j < i)) for j, other in enumerate(parts) if j != i)
    for i, one in enumerate(map(jnp.asarray, parts))
  ]
  mask = jnp.concatenate([jnp.asarray(rank) < 2 for rank in ranks], axis=axis + 1)
  return jnp.where(mask.reshape(shape), x, 0.0)


def axis_of(path: str, p: Param) -> int | None:
  """The last contracted axis of a layer's linear weight; None of other parameters."""
  is_linear = path.startswith("layers/") and p.inputs and p.decay
  return int(p.letters.startswith("N")) + (p.inputs or 0) - 1 if is_linear else None


def problems(declaration: Any, dims: Mapping[str, int]) -> list[str]:
  """Weights whose contraction has no whole groups of four, in words."""
  partial = {}
  for path, p in params_lib.flatten(declaration).items():
    axis = axis_of(path, p)
    if axis is not None and dims[p.letters[axis]] % 4:
      partial[path] = dims[p.letters[axis]]
  return [
    f"optim.sparsity='2:4': {path} contracts {size}, which 4 does not divide; set "
    "optim.sparsity='none', or a width of whole groups"
    for path, size in partial.items()
  ]
