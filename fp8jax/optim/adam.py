"""Adam and Lion whose moments are kept narrow, as Optax transformations.

Source: Kingma & Ba 2015 (arXiv:1412.6980), Chen et al. 2023 (arXiv:2302.06675). Moments are read,
moved and used in float32; what is kept of them is rounded afterwards, so that this step's update
does not see its own rounding (as in COAT, FP8-LM and torchao).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax.optim.moments import Moments, problems
from fp8jax.quant import packed
from fp8jax.recipe import WHOLE, Quant, Rounding


def is_large(params):
  """Default `narrow`: matrices of 4096 numbers and more (torchao's and bitsandbytes' rule)."""
  return jax.tree.map(lambda p: p.ndim >= 2 and p.size >= 4096, params)


def scale_by_adam(
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  eps_root: float = 0.0,
  *,
  mu: Quant | None = None,
  nu: Quant | None = None,
  narrow: Any | Callable[[Any], Any] = is_large,
  lead: Any | Callable[[Any], Any] = 0,
  seed: int = 0,
) -> optax.GradientTransformation:
  """`optax.scale_by_adam` with moments kept as `mu` and `nu` say.

  Args:
    b1, b2, eps, eps_root: as in Optax.
    mu, nu: see `moments.PRESETS`; None keeps float32, and both None is Optax's own.
    narrow: tree of bools like the parameters, or a function that makes one: which of them have
      narrow moments. The others keep float32.
    lead: tree of ints, one int for all, or a function: so many first axes number tensors that get
      scales of their own where a scale is the tensor's (layers of a stack).
    seed: of stochastic rounding; what is drawn depends on it, the step and the place in the tree.

  Raises:
    ValueError: moments that would not train: see `moments.problems`.
  """
  _refuse(Moments(mu, nu), b2)
  if mu is None and nu is None:
    return optax.scale_by_adam(b1, b2, eps, eps_root)

  def init(params):
    zeros = optax.tree.zeros_like(params)
    return optax.ScaleByAdamState(
      jnp.zeros([], jnp.int32), _fresh(zeros, mu, narrow, lead), _fresh(zeros, nu, narrow, lead)
    )

  def update(updates, state, params=None):
    del params
    count = optax.safe_increment(state.count)

    def one(g, mu, nu, key):
      mu_key, nu_key = jax.random.split(key)
      m = optax.tree.update_moment(g, _wide(mu), b1, 1)
      v = optax.tree.update_moment_per_elem_norm(g, _wide(nu), b2, 2)
      m_hat = optax.tree.bias_correction(m, b1, count)
      v_hat = optax.tree.bias_correction(v, b2, count)
      step = m_hat / (jnp.sqrt(v_hat + eps_root) + eps)
      return step, _kept(m, mu, mu_key), _kept(v, nu, nu_key)

    updates, mu, nu = _each(one, updates, (state.mu, state.nu), lead, seed, count)
    return updates, optax.ScaleByAdamState(count, mu, nu)

  return optax.GradientTransformation(init, update)


def scale_by_lion(
  b1: float = 0.9,
  b2: float = 0.99,
  *,
  mu: Quant | None = None,
  narrow: Any | Callable[[Any], Any] = is_large,
  lead: Any | Callable[[Any], Any] = 0,
  seed: int = 0,
) -> optax.GradientTransformation:
  """`optax.scale_by_lion` with its momentum kept as `mu` says; see `scale_by_adam`."""
  _refuse(Moments(mu), b2)
  if mu is None:
    return optax.scale_by_lion(b1, b2)

  def init(params):
    fresh = _fresh(optax.tree.zeros_like(params), mu, narrow, lead)
    return optax.ScaleByLionState(jnp.zeros([], jnp.int32), fresh)

  def update(updates, state, params=None):
    del params
    count = optax.safe_increment(state.count)

    def one(g, mu, key):
      m = _wide(mu)
      step = jnp.sign((1.0 - b1) * g + b1 * m)
      return step, _kept(optax.tree.update_moment(g, m, b2, 1), mu, key)

    updates, mu = _each(one, updates, (state.mu,), lead, seed, count)
    return updates, optax.ScaleByLionState(count, mu)

  return optax.GradientTransformation(init, update)


def _refuse(moments: Moments, b2: float):
  found = problems(moments, b2)
  if found:
    raise ValueError("; ".join(found))


def _fresh(zeros, quant: Quant | None, narrow, lead):
  """Zeros, kept as they will be."""
  # No leaves: optax.tree_map_params asks with a placeholder where a state keeps parameters.
  if quant is None or not jax.tree.leaves(zeros):
    return zeros
  chosen = narrow(zeros) if callable(narrow) else narrow

  def one(zero, is_narrow, lead):
    key = jax.random.key(0) if quant.rounding is Rounding.STOCHASTIC else None
    return packed.pack(zero, quant, lead=lead, key=key) if is_narrow else zero

  return jax.tree.map(one, zeros, chosen, _leads(lead, zeros))


def _leads(lead, tree):
  leads = lead(tree) if callable(lead) else lead
  return jax.tree.map(lambda _: leads, tree) if isinstance(leads, int) else leads


def _wide(kept):
  return kept.unpack() if isinstance(kept, packed.Packed) else kept


def _kept(wide, before, key):
  """Like `before`, with these values."""
  return before.repack(wide, key) if isinstance(before, packed.Packed) else wide


def _each(one, updates, states, lead, seed: int, count):
  """(updates, *states) of `one`(update, *states, key) on every leaf, keys being each leaf's own.

  Layers of a stack with narrow states go one after the other, in place: float32 moments exist of
  one layer at a time.
  """
  leaves, structure = jax.tree.flatten(updates)
  leads = structure.flatten_up_to(_leads(lead, updates))
  kept = [structure.flatten_up_to(state) for state in states]
  key = jax.random.fold_in(jax.random.key(seed), count)
  found = []
  for place, (leaf, depth, *mine) in enumerate(zip(leaves, leads, *kept)):
    own = jax.random.fold_in(key, place)
    is_loop = depth == 1 and all(_is_stack(x) for x in mine)
    found.append(_layer_by_layer(one, leaf, mine, own) if is_loop else one(leaf, *mine, own))
  return tuple(structure.unflatten(trees) for trees in zip(*found))


def _is_stack(kept) -> bool:
  """Whether no scale is shared between layers of a stack."""
  if not isinstance(kept, packed.Packed):
    return False
  group = kept.quant.tile[1]
  return group == WHOLE or packed.group_axes(kept.shape, group) > 0


def _layer_by_layer(one, update, states, key):
  wide = jnp.promote_types(update.dtype, jnp.float32)

  def body(i, carry):
    mine = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), carry)
    new = one(*mine, jax.random.fold_in(key, i))
    return jax.tree.map(
      lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), i, 0), carry, new
    )

  carry = (update.astype(wide), *states)
  return jax.lax.fori_loop(0, update.shape[0], body, carry)
