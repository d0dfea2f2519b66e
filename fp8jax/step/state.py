"""The training state: carried from step to step and stored in checkpoints."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import core
from jax.sharding import NamedSharding, PartitionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """A training state.

  Attributes:
    step: int32 scalar, number of steps taken.
    params: master parameters: float32 arrays, or in another format of optim/storage.py.
    opt: of every parameter, in its place, the state of its Optax transformation.
    scaling_states: {site name: ScalingState} of sites whose scales are not all current.
    loss_scale: {"scale": float32, "good_steps": int32} while it is dynamic, else {}.
    grad_autoscale: {"mu": float32} where gradients have 8 bits (see optim/gradients.py), else {}.
    skipped: int32 scalar, updates not applied because the loss or gradient was not finite.
    halted: bool scalar; once True no step changes anything, so that the state stays as it was when
      the first non-finite value appeared; but see layerwise.py, where some layers move before it.
  """

  step: jax.Array
  params: Any
  opt: Any
  scaling_states: Any
  loss_scale: dict[str, jax.Array]
  grad_autoscale: dict[str, jax.Array]
  skipped: jax.Array
  halted: jax.Array


@dataclasses.dataclass(frozen=True)
class StepFn:
  """A jitted step, called and lowered with its run's random key.

  As an argument, not a constant, the key leaves seeds one program, which is compiled once.

  Attributes:
    jitted: of (state, batch, sites, rate_scale=None, *, key).
    key: uint32 [2], a NumPy array: every process has the same.
    teacher: of distillation.py, or its shapes for `lower`; None is no argument.
  """

  jitted: Any
  key: np.ndarray
  teacher: Any = None

  @property
  def _own(self) -> dict[str, Any]:
    return {"key": self.key} | ({} if self.teacher is None else {"teacher": self.teacher})

  @functools.cached_property
  def _placed(self) -> dict[Any, jax.Array]:
    """The key by the sharding that it was placed in."""
    return {}

  def __call__(self, state, *args):
    return self.jitted(state, *args, **self._own | {"key": self._beside(state)})

  def _beside(self, state):
    """The key on the state's devices: from the host it would be a transfer that nobody asked for,
    which the loop of training refuses (jax.transfer_guard), where a recipe draws random bits.
    Committed to them where the state is: otherwise the next step's state would be, for which jit
    lowers and compiles the step again."""
    step = state.step
    if isinstance(step, core.Tracer) or not isinstance(step, jax.Array):
      return self.key  # inside another program, and of shapes, nothing is transferred
    where = step.sharding if step.committed else None
    if where not in self._placed:
      is_named = isinstance(where, NamedSharding)
      there = NamedSharding(where.mesh, PartitionSpec()) if is_named else where
      self._placed[where] = jax.device_put(self.key, there)
    return self._placed[where]

  def lower(self, state, *args):
    return self.jitted.lower(state, *args, **self._own | {"key": self._beside(state)})

  def trace(self, *args):
    return self.jitted.trace(*args, **self._own)
