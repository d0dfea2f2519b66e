"""Adam and Lion with quantized moments, as Optax transformations.

Source: Kingma & Ba 2015 (arXiv:1412.6980), Chen et al. 2023 (arXiv:2302.06675). Moments are read,
moved and used in float32; the stored ones are rounded afterwards, so that this step's update
does not see its own rounding (as in COAT, FP8-LM and torchao).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import core

from fp8jax.optim.moments import Moments, problems
from fp8jax.quantization import quantized_tensor
from fp8jax.recipe.quant import Quant


def is_large(params):
  """Default `narrow`: matrices of 4096 numbers and more (torchao's and bitsandbytes' rule)."""
  return jax.tree.map(lambda p: p.ndim >= 2 and p.size >= 4096, params)


@dataclasses.dataclass(frozen=True)
class Places:
  """Which parameters have quantized moments, and their stacked axes.

  Each is a tree like the parameters, one value for all, or a function of the parameters that gives
  either.

  Attributes:
    narrow: bools; the others keep float32.
    lead: ints: so many first axes number tensors that get scales of their own where a scale is the
      tensor's (layers of a stack).
  """

  narrow: Any = is_large
  lead: Any = 0


def scale_by_adam(
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  eps_root: float = 0.0,
  *,
  mu: Quant | None = None,
  nu: Quant | None = None,
  places: Places = Places(),
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """`optax.scale_by_adam` with moments kept as `mu` and `nu` say.

  Optax's wrappers take it. Of optax.inject_hyperparams, b1 and b2 are looked at where they are
  numbers, in `init`, and not where they are traced. optax.tree_map_params needs
  is_leaf=lambda x: isinstance(x, QuantizedTensor), a moment being codes and scales.

  Args:
    b1, b2, eps, eps_root: as in Optax.
    mu, nu: see `moments.PRESETS`; None keeps float32, and both None is Optax's own.
    places: which parameters; by default matrices of 4096 numbers and more.
    seed: of stochastic rounding; what is drawn depends on it, the step and the place in the tree.

  Returns:
    A transformation whose `update` also takes piece=, an int: which part of the parameters these
    are, where they are moved a part after the other, so that what is drawn differs.

  Raises:
    ValueError: moments that would not train (see `moments.problems`), b1 or b2 outside [0, 1).
    TypeError: mu or nu is something else than a Quant, such as a preset's name.
  """
  _refuse(Moments(mu, nu), b1, b2)
  if mu is None and nu is None:
    return optax.with_extra_args_support(optax.scale_by_adam(b1, b2, eps, eps_root))

  def init(params):
    # Zeros of their own for each: a state that holds one array twice cannot be donated.
    moments = (_fresh(optax.tree.zeros_like(params), quant, places) for quant in (mu, nu))
    return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), *moments)

  def update(updates, state, params=None, *, piece=0, **_):
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

    updates, mu, nu = _each(one, updates, (state.mu, state.nu), _key(seed, count, piece))
    return updates, optax.ScaleByAdamState(count, mu, nu)

  return optax.GradientTransformationExtraArgs(init, update)


def scale_by_lion(
  b1: float = 0.9,
  b2: float = 0.99,
  *,
  mu: Quant | None = None,
  places: Places = Places(),
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """`optax.scale_by_lion` with its momentum kept as `mu` says; see `scale_by_adam`."""
  _refuse(Moments(mu), b2, b2)
  if mu is None:
    return optax.with_extra_args_support(optax.scale_by_lion(b1, b2))

  def init(params):
    fresh = _fresh(optax.tree.zeros_like(params), mu, places)
    return optax.ScaleByLionState(jnp.zeros([], jnp.int32), fresh)

  def update(updates, state, params=None, *, piece=0, **_):
    del params
    count = optax.safe_increment(state.count)

    def one(g, mu, key):
      m = _wide(mu)
      step = jnp.sign((1.0 - b1) * g + b1 * m)
      return step, _kept(optax.tree.update_moment(g, m, b2, 1), mu, key)

    updates, mu = _each(one, updates, (state.mu,), _key(seed, count, piece))
    return updates, optax.ScaleByLionState(count, mu)

  return optax.GradientTransformationExtraArgs(init, update)


def _key(seed: int, count, piece):
  return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), piece)


def _refuse(moments: Moments, mu_decay, nu_decay):
  for name, quant in (("mu", moments.mu), ("nu", moments.nu)):
    if quant is not None and not isinstance(quant, Quant):
      raise TypeError(
        f"{name}={quant!r} must be a Quant or None; a preset gives both: "
        f"moments.PRESETS[{str(quant)!r}].{name}"
      )
  # A tracer has no value yet.
  for decay in (mu_decay, nu_decay):
    if not isinstance(decay, core.Tracer) and not 0 <= decay < 1:
      raise ValueError(f"a decay rate (b1, b2) is {decay}; it must be in [0, 1)")
  known = (None if isinstance(d, core.Tracer) else d for d in (mu_decay, nu_decay))
  found = problems(moments, *known)
  if found:
    raise ValueError("; ".join(found))


def _fresh(zeros, quant: Quant | None, places: Places):
  """Zeros, kept as they will be."""
  # No leaves: optax.tree_map_params asks with a placeholder where a state keeps parameters.
  if quant is None or not jax.tree.leaves(zeros):
    return zeros

  def one(zero, is_narrow, lead):
    return quantized_tensor.zeros(zero.shape, quant, lead=lead) if is_narrow else zero

  return jax.tree.map(one, zeros, _tree_of(places.narrow, zeros), _tree_of(places.lead, zeros))


def _tree_of(choice, tree):
  """A choice per leaf: given as a tree, as a function of one, or as one for all."""
  choice = choice(tree) if callable(choice) else choice
  return jax.tree.map(lambda _: choice, tree) if isinstance(choice, int) else choice


def _wide(kept):
  return kept.unpack() if isinstance(kept, quantized_tensor.QuantizedTensor) else kept


def _kept(wide, before, key):
  """Like `before`, with these values."""
  if isinstance(before, quantized_tensor.QuantizedTensor):
    return before.repack(wide, key)
  return wide.astype(before.dtype)


def _each(one, updates, states, key):
  """(updates, *states) of `one`(update, *states, key) on every leaf, keys being each leaf's own."""
  leaves, structure = jax.tree.flatten(updates)
  kept = [structure.flatten_up_to(state) for state in states]
  found = [
    one(leaf, *mine, jax.random.fold_in(key, place))
    for place, (leaf, *mine) in enumerate(zip(leaves, *kept))
  ]
  return tuple(structure.unflatten(trees) for trees in zip(*found))
