"""The training state: carried from step to step and stored in checkpoints."""

import dataclasses
import functools
from collections.abc import Callable
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
  """A jitted step, called and lowered with its run's random key and learning rate.

  As arguments, not constants, they leave seeds and schedules one program, which is compiled once;
  a decay by the schedule (optim.decay_by) is part of it.

  Attributes:
    jitted: of (state, batch, sites, *, rate, key).
    rate_of: of schedule.py.
    key: uint32 [2], a NumPy array: every process has the same.
    teacher: of distillation.py, or its shapes for `lower`; None is no argument.
  """

  jitted: Any
  rate_of: Callable[..., jax.Array]
  key: np.ndarray
  teacher: Any = None

  def given(self, state, rate_scale=None) -> dict[str, Any]:
    """The keyword arguments of `jitted` for a state, or for its shapes."""
    if isinstance(state.step, jax.Array):
      rate = self.rate_of(state.step, rate_scale)
    else:
      rate = jax.ShapeDtypeStruct((), np.float32, sharding=state.step.sharding)
    more = {} if self.teacher is None else {"teacher": self.teacher}
    return {"rate": rate, "key": self._beside(state)} | more

  @functools.cached_property
  def _placed(self) -> dict[Any, jax.Array]:
    """The key by the sharding that it was placed in."""
    return {}

  def __call__(self, state, *args, rate_scale=None):
    """Takes a step; rate_scale is a factor on the learning rate."""
    return self.jitted(state, *args, **self.given(state, rate_scale))

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
    return self.jitted.lower(state, *args, **self.given(state))

  def trace(self, state, *args):
    return self.jitted.trace(state, *args, **self.given(state))
