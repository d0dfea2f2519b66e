"""Delayed and static scaling: the amax that a scale is computed from.

Source: Transformer Engine's DelayedScaling (arXiv:2209.05433 §5). After a step the history rolls by
one, its first slot takes what the step saw, and the next scale comes from the maximum of the
history or from its latest entry. An amax of 0 or one that is not finite keeps the previous scale.
A static scale takes the first amax above 0. Assumes: amaxes are in the tensor's own units. Unlike
Transformer Engine's, an observation that is not finite enters the history as 0 ("nothing seen"): as
infinity it would hold the scale still until it left the window, a thousand steps later.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import Delayed, Source, Static

# The tensors of a linear layer: input, weight, incoming gradient.
TENSORS = ("x", "w", "g")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScalingState:
  """Amaxes of (x, w, g) of a site; layers are stacked on the first axis.

  Attributes:
    amax_3: float32 [..., 3], that scales are computed from; NaN while no batch had a finite one, 0
      where nothing but zeros was seen, which have scale 1.
    history_3H: float32 [..., 3, H], newest first.
  """

  amax_3: jax.Array
  history_3H: jax.Array


def sources(recipe: Recipe) -> tuple[Source | None, ...]:
  """Sources of the scales of (x, w, g); None for a tensor that is never quantized."""
  uses = recipe.uses()
  return tuple(uses[t][0].source if uses[t] else None for t in TENSORS)


def init(recipe: Recipe, stacked: tuple[int, ...] = ()) -> ScalingState:
  """An empty state, to be calibrated before use: every product computed with it is NaN.

  Scale 1, Transformer Engine's, would multiply: badly, and with a static scale for ever.
  """
  return ScalingState(
    jnp.full((*stacked, 3), jnp.nan, jnp.float32),
    jnp.zeros((*stacked, 3, recipe.history), jnp.float32),
  )


def is_known(amax):
  """bool [...]: whether a scale may be made from an amax; 0 says that nothing was seen so far."""
  isfinite = np.isfinite if isinstance(amax, np.ndarray) else jnp.isfinite
  return isfinite(amax) & (amax > 0)


def calibrated(recipe: Recipe, amax_3) -> ScalingState:
  """The state of a site that saw these amaxes, float32 [..., 3], once.

  Of one that is not finite it is empty, as of `init`: every product is NaN until another batch.
  """
  amax_3 = jnp.asarray(amax_3, jnp.float32)
  is_valid = jnp.isfinite(amax_3)
  older = jnp.zeros((*amax_3.shape, recipe.history - 1), jnp.float32)
  history = jnp.concatenate([jnp.where(is_valid, amax_3, 0.0)[..., None], older], axis=-1)
  return ScalingState(jnp.where(is_valid, amax_3, jnp.nan), history)


def update(state: ScalingState, amax_3, recipe: Recipe) -> ScalingState:
  """The state after a step that saw amaxes amax_3, float32 [..., 3]."""
  newest = jnp.where(is_known(amax_3), amax_3, 0.0)
  history = state.history_3H
  if any(isinstance(source, Delayed) for source in sources(recipe)):
    history = jnp.concatenate([newest[..., None], history], axis=-1)[..., : recipe.history]
  amaxes = []
  for i, source in enumerate(sources(recipe)):
    old = state.amax_3[..., i]
    if isinstance(source, Static):
      old = jnp.where(old == 0, newest[..., i], old)
    if isinstance(source, Delayed):
      window = history[..., i, : source.steps]
      new = window[..., 0] if source.reduce == "latest" else jnp.max(window, axis=-1)
      old = jnp.where(new > 0, new, old)
    amaxes.append(old)
  return ScalingState(jnp.stack(amaxes, axis=-1), history)


def filled(state: ScalingState, other: ScalingState) -> ScalingState:
  """The state, with amaxes of another of the same recipe where it has none above 0."""
  is_kept_3 = is_known(state.amax_3) | (jnp.isfinite(state.amax_3) & ~is_known(other.amax_3))
  return ScalingState(
    jnp.where(is_kept_3, state.amax_3, other.amax_3),
    jnp.where(is_kept_3[..., None], state.history_3H, other.history_3H),
  )


def resized(state: ScalingState, steps: int) -> ScalingState:
  """The state with a history of so many steps: the newest, or zeros, which say nothing, behind."""
  history = jnp.asarray(state.history_3H)[..., :steps]
  missing = [(0, 0)] * (history.ndim - 1) + [(0, steps - history.shape[-1])]
  return dataclasses.replace(state, history_3H=jnp.pad(history, missing))


# So much may roots differ: those of an average of amaxes within 1 % of each other do.
_ROUNDING = 1e-5


def are_of_one_product(amax_3, roots_3):
  """bool [...]: whether amaxes [..., 3] have these square roots, which sums, averages and multiples
  of both have not. Roots of 0 were not differentiated, and say nothing."""
  is_other = jnp.abs(jnp.sqrt(amax_3) - roots_3) > _ROUNDING * roots_3
  return ~(is_other & (roots_3 != 0) & jnp.isfinite(amax_3)).any(-1)


def unknown(state: ScalingState, where) -> ScalingState:
  """The state, NaN where bool [...] `where` is true: every product computed with it is NaN."""
  of = lambda leaf: jnp.expand_dims(where, range(where.ndim, leaf.ndim))  # noqa: E731
  return ScalingState(
    *(jnp.where(of(leaf), jnp.nan, leaf) for leaf in (state.amax_3, state.history_3H))
  )
