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
from fp8jax.recipe import Quant, Rounding


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
    mu, nu: see `moments.PRESETS`; None keeps float32, and with both None every number is Optax's.
    narrow: tree of bools like the parameters, or a function that makes one: which of them have
      narrow moments. The others keep float32.
    lead: tree of ints, one int for all, or a function: so many first axes number tensors that get
      scales of their own where a scale is the tensor's (layers of a stack).
    seed: of stochastic rounding; what is drawn depends on it, the step and the place in the tree.

  Raises:
    ValueError: moments that would not train: see `moments.problems`.
  """
  _refuse(Moments(mu, nu), b2)

  def init(params):
    zeros = optax.tree.zeros_like(params)
    return optax.ScaleByAdamState(
      jnp.zeros([], jnp.int32), _fresh(zeros, mu, narrow, lead), _fresh(zeros, nu, narrow, lead)
    )

  def update(updates, state, params=None):
    del params
    count = optax.safe_increment(state.count)
    first = optax.tree.update_moment(updates, _wide(state.mu), b1, 1)
    second = optax.tree.update_moment_per_elem_norm(updates, _wide(state.nu), b2, 2)
    first_hat = optax.tree.bias_correction(first, b1, count)
    second_hat = optax.tree.bias_correction(second, b2, count)
    updates = jax.tree.map(
      lambda m, v: None if m is None else m / (jnp.sqrt(v + eps_root) + eps),
      first_hat, second_hat, is_leaf=lambda x: x is None,
    )  # fmt: skip
    key = jax.random.fold_in(jax.random.key(seed), count)
    mu_key, nu_key = jax.random.split(key)
    return updates, optax.ScaleByAdamState(
      count, _kept(first, state.mu, mu_key), _kept(second, state.nu, nu_key)
    )

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

  def init(params):
    fresh = _fresh(optax.tree.zeros_like(params), mu, narrow, lead)
    return optax.ScaleByLionState(jnp.zeros([], jnp.int32), fresh)

  def update(updates, state, params=None):
    del params
    count, wide = optax.safe_increment(state.count), _wide(state.mu)
    signs = jax.tree.map(lambda g, m: jnp.sign((1.0 - b1) * g + b1 * m), updates, wide)
    moved = optax.tree.update_moment(updates, wide, b2, 1)
    key = jax.random.fold_in(jax.random.key(seed), count)
    return signs, optax.ScaleByLionState(count, _kept(moved, state.mu, key))

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
  leads = lead(zeros) if callable(lead) else lead
  if isinstance(leads, int):
    leads = jax.tree.map(lambda _: leads, zeros)

  def one(zero, is_narrow, lead):
    key = jax.random.key(0) if quant.rounding is Rounding.STOCHASTIC else None
    return packed.pack(zero, quant, lead=lead, key=key) if is_narrow else zero

  return jax.tree.map(one, zeros, chosen, leads)


def _wide(kept):
  return packed.tree_map(lambda x: x.unpack() if isinstance(x, packed.Packed) else x, kept)


def _kept(wide, before, key):
  """Like `before`, with these values; every leaf rounds by a key of its own."""
  leaves, structure = jax.tree.flatten(wide)
  places = structure.unflatten(range(len(leaves)))

  def one(x, old, place):
    if not isinstance(old, packed.Packed):
      return x.astype(old.dtype)
    return old.repack(x, jax.random.fold_in(key, place))

  return jax.tree.map(one, wide, before, places)
