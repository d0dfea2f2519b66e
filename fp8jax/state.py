"""What training carries from step to step, and what a checkpoint holds."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """A training state.

  Attributes:
    step: int32 scalar, number of steps taken.
    params: float32 master parameters.
    opt: optimizer state.
    skipped: int32 scalar, updates not applied because the loss or gradient was not finite.
    halted: bool scalar; once True no step changes anything, so that the state stays as it was when
      the first non-finite value appeared.
  """

  step: jax.Array
  params: Any
  opt: Any
  skipped: jax.Array
  halted: jax.Array
