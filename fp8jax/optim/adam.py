"""Adam and Lion whose moments are kept narrow, as Optax transformations.

Source: Kingma & Ba 2015 (arXiv:1412.6980), Chen et al. 2023 (arXiv:2302.06675). Moments are read,
moved and used in float32; what is kept of them is rounded afterwards, so that this step's update
does not see its own rounding (as in COAT, FP8-LM and torchao).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax.optim.moments import Moments, problems
from fp8jax.quant import packed
from fp8jax.recipe import Quant, Rounding

# Numbers that are moved at once where the first axis is walked: 64 MiB in float32.
_PIECE = 2**24


def is_large(params):
  """Default `narrow`: matrices of 4096 numbers and more (torchao's and bitsandbytes' rule)."""
  return jax.tree.map(lambda p: p.ndim >= 2 and p.size >= 4096, params)


@dataclasses.dataclass(frozen=True)
class Places:
  """Which parameters have narrow moments, and how these lie. Each a tree like the parameters, one
  value for all, or a function of the parameters that gives either.

  Attributes:
    narrow: bools; the others keep float32.
    lead: ints: so many first axes number tensors that get scales of their own where a scale is the
      tensor's (layers of a stack).
    walk: bools: which are moved a piece of the first axis after the other, in place, so that
      float32 moments exist of a piece only. Not for an axis that is split over devices.
  """

  narrow: Any = is_large
  lead: Any = 0
  walk: Any = False


def scale_by_adam(
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  eps_root: float = 0.0,
  *,
  mu: Quant | None = None,
  nu: Quant | None = None,
  places: Places = Places(),
  clip: float = 0.0,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """`optax.scale_by_adam` with moments kept as `mu` and `nu` say.

  Args:
    b1, b2, eps, eps_root: as in Optax.
    mu, nu: see `moments.PRESETS`; None keeps float32, and both None is Optax's own.
    places: which parameters; by default matrices of 4096 numbers and more.
    clip: scales gradients down to this global norm as they are read, 0 for not. What
      optax.clip_by_global_norm does, without another copy of them.
    seed: of stochastic rounding; what is drawn depends on it, the step and the place in the tree.

  Returns:
    A transformation whose `update` also takes is_applied=: False leaves its state as it is.

  Raises:
    ValueError: moments that would not train: see `moments.problems`.
  """
  _refuse(Moments(mu, nu), b2)
  if mu is None and nu is None:
    return _float32(clip, optax.scale_by_adam(b1, b2, eps, eps_root))

  def init(params):
    zeros = optax.tree.zeros_like(params)
    return optax.ScaleByAdamState(
      jnp.zeros([], jnp.int32), _fresh(zeros, mu, places), _fresh(zeros, nu, places)
    )

  def update(updates, state, params=None, *, is_applied=True, **_):
    del params
    count = optax.safe_increment(state.count)
    factor = _clip_factor(updates, clip)

    def one(g, mu, nu, key):
      g = (g * factor).astype(g.dtype)
      mu_key, nu_key = jax.random.split(key)
      m = optax.tree.update_moment(g, _wide(mu), b1, 1)
      v = optax.tree.update_moment_per_elem_norm(g, _wide(nu), b2, 2)
      m_hat = optax.tree.bias_correction(m, b1, count)
      v_hat = optax.tree.bias_correction(v, b2, count)
      step = m_hat / (jnp.sqrt(v_hat + eps_root) + eps)
      return step, _kept(m, mu, mu_key), _kept(v, nu, nu_key)

    updates, mu, nu = _each(one, updates, (state.mu, state.nu), places, seed, count, is_applied)
    count = jnp.where(is_applied, count, state.count)
    return updates, optax.ScaleByAdamState(count, mu, nu)

  return optax.GradientTransformationExtraArgs(init, update)


def scale_by_lion(
  b1: float = 0.9,
  b2: float = 0.99,
  *,
  mu: Quant | None = None,
  places: Places = Places(),
  clip: float = 0.0,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """`optax.scale_by_lion` with its momentum kept as `mu` says; see `scale_by_adam`."""
  _refuse(Moments(mu), b2)
  if mu is None:
    return _float32(clip, optax.scale_by_lion(b1, b2))

  def init(params):
    fresh = _fresh(optax.tree.zeros_like(params), mu, places)
    return optax.ScaleByLionState(jnp.zeros([], jnp.int32), fresh)

  def update(updates, state, params=None, *, is_applied=True, **_):
    del params
    count = optax.safe_increment(state.count)
    factor = _clip_factor(updates, clip)

    def one(g, mu, key):
      g, m = (g * factor).astype(g.dtype), _wide(mu)
      step = jnp.sign((1.0 - b1) * g + b1 * m)
      return step, _kept(optax.tree.update_moment(g, m, b2, 1), mu, key)

    updates, mu = _each(one, updates, (state.mu,), places, seed, count, is_applied)
    count = jnp.where(is_applied, count, state.count)
    return updates, optax.ScaleByLionState(count, mu)

  return optax.GradientTransformationExtraArgs(init, update)


def _float32(clip: float, transformation):
  """Optax's, with what ours do besides."""
  clipping = optax.clip_by_global_norm(clip) if clip else optax.identity()

  def update(updates, state, params=None, *, is_applied=True, **_):
    updates, _ = clipping.update(updates, optax.EmptyState(), params)
    updates, new = transformation.update(updates, state, params)
    if is_applied is not True:
      new = jax.tree.map(functools.partial(jnp.where, is_applied), new, state)
    return updates, new

  return optax.GradientTransformationExtraArgs(transformation.init, update)


def _clip_factor(updates, clip: float):
  if not clip:
    return 1.0
  norm = optax.tree.norm(updates)
  return jnp.where(norm < clip, 1.0, clip / norm)


def _refuse(moments: Moments, b2: float):
  found = problems(moments, b2)
  if found:
    raise ValueError("; ".join(found))


def _fresh(zeros, quant: Quant | None, places: Places):
  """Zeros, kept as they will be."""
  # No leaves: optax.tree_map_params asks with a placeholder where a state keeps parameters.
  if quant is None or not jax.tree.leaves(zeros):
    return zeros

  def one(zero, is_narrow, lead):
    key = jax.random.key(0) if quant.rounding is Rounding.STOCHASTIC else None
    return packed.pack(zero, quant, lead=lead, key=key) if is_narrow else zero

  return jax.tree.map(one, zeros, _tree_of(places.narrow, zeros), _tree_of(places.lead, zeros))


def _tree_of(choice, tree):
  """A choice per leaf: given as a tree, as a function of one, or as one for all."""
  choice = choice(tree) if callable(choice) else choice
  return jax.tree.map(lambda _: choice, tree) if isinstance(choice, int) else choice


def _wide(kept):
  return kept.unpack() if isinstance(kept, packed.Packed) else kept


def _kept(wide, before, key):
  """Like `before`, with these values."""
  if isinstance(before, packed.Packed):
    return before.repack(wide, key)
  return wide.astype(before.dtype)


def _each(one, updates, states, places: Places, seed: int, count, is_applied):
  """(updates, *states) of `one`(update, *states, key) on every leaf, keys being each leaf's own."""

  def applied(update, *states, key):
    update, *new = one(update, *states, key)
    if is_applied is not True:
      new = jax.tree.map(functools.partial(jnp.where, is_applied), new, list(states))
    return update, *new

  leaves, structure = jax.tree.flatten(updates)
  walks = structure.flatten_up_to(_tree_of(places.walk, updates))
  kept = [structure.flatten_up_to(state) for state in states]
  key = jax.random.fold_in(jax.random.key(seed), count)
  found = []
  for place, (leaf, may_walk, *mine) in enumerate(zip(leaves, walks, *kept)):
    own = jax.random.fold_in(key, place)
    pieces = _pieces(leaf.shape, mine) if may_walk else 1
    move = functools.partial(applied, key=own)
    found.append(_piecewise(applied, leaf, mine, own, pieces) if pieces > 1 else move(leaf, *mine))
  return tuple(structure.unflatten(trees) for trees in zip(*found))


def _pieces(shape: tuple[int, ...], states) -> int:
  """Into how many the first axis is cut: the fewest of at most _PIECE numbers each."""
  if not all(isinstance(kept, packed.Packed) and kept.is_stack for kept in states):
    return 1
  least = -(-math.prod(shape) // _PIECE)
  return next((n for n in range(least, shape[0] + 1) if shape[0] % n == 0), shape[0])


def _piecewise(one, update, states, key, pieces: int):
  size = update.shape[0] // pieces

  def body(i, carry):
    mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size), carry)
    new = one(*mine, key=jax.random.fold_in(key, i))
    return jax.tree.map(
      lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), i * size, 0),
      carry, new,
    )  # fmt: skip

  wide = update.astype(jnp.promote_types(update.dtype, jnp.float32))
  return jax.lax.fori_loop(0, pieces, body, (wide, *states))
