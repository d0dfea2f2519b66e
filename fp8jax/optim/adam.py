"""Adam and Lion with quantized moments, as Optax transformations.

Source: Kingma & Ba 2015 (arXiv:1412.6980), Chen et al. 2023 (arXiv:2302.06675). Moments are
dequantized, updated and used in float32, then quantized again: an update does not see the rounding
of its own step (as in COAT, FP8-LM and torchao).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import core

from fp8jax.errors import nearest
from fp8jax.optim import storage
from fp8jax.optim.storage import Moments
from fp8jax.quantization import quantized_tensor
from fp8jax.recipe.quant import Quant


def is_large(params):
  """Default of StorageMask.quantized: matrices of 4096 elements and more, as in torchao."""
  return jax.tree.map(lambda p: p.ndim >= 2 and p.size >= 4096, params)


@dataclasses.dataclass(frozen=True)
class StorageMask:
  """Which parameters have quantized moments, and which of their axes are stacked.

  Each field is a tree like the parameters, one value for all, or a function of the parameters that
  returns either.

  Attributes:
    quantized: bools; other moments are float32.
    lead: ints: number of first axes along which every entry is a tensor (layers of a stack) with a
      per-tensor scale of its own.
  """

  quantized: Any = is_large
  lead: Any = 0


def scale_by_adam(
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  eps_root: float = 0.0,
  *,
  moment_format: str | Moments = "float32",
  mask: StorageMask = StorageMask(),
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """`optax.scale_by_adam` with moments in the formats of `moment_format`.

  Optax's wrappers take it. Of optax.inject_hyperparams, b1 and b2 are looked at where they are
  numbers, in `init`, and not where they are traced. optax.tree_map_params needs
  is_leaf=lambda x: isinstance(x, QuantizedTensor), a moment being codes and scales.

  Args:
    b1, b2, eps, eps_root: as in Optax.
    moment_format: a name in `storage.MOMENTS`, e.g. "coat" (2.08 bytes per parameter for both); or
      a Moments(mu, nu) of two Quants, where None is float32. "float32" is Optax's own.
    mask: which parameters; by default matrices of 4096 elements and more.
    seed: of stochastic rounding; random bits depend on it, the step and the place in the tree.

  Returns:
    A transformation whose `update` also takes piece=, an int: the number of these parameters' part,
    if parts are updated one after the other. Random bits depend on it.

  Raises:
    ValueError: no such name, moments that would not train, b1 or b2 outside [0, 1), or eps or
      eps_root that is negative or not finite.
    TypeError: moment_format is neither a name nor a Moments, or its fields are no Quants.

  Source: Adam is arXiv:1412.6980; fp8jax/optim/storage.py cites the formats'.

  Example:
    >>> import jax.numpy as jnp, fp8jax
    >>> state = fp8jax.scale_by_adam(moment_format="coat").init({"w": jnp.ones((64, 128))})
    >>> state.mu["w"].data.dtype.name, state.mu["w"].scale.shape
    ('float8_e4m3fn', (64, 1))
  """
  moments = _moments(moment_format)
  _refuse(moments, b1, b2, eps=eps, eps_root=eps_root)
  if moments == Moments():
    return optax.with_extra_args_support(optax.scale_by_adam(b1, b2, eps, eps_root))

  def init(params):
    # Zeros of their own for each: a state that holds one array twice cannot be donated.
    mu = _quantized_zeros(optax.tree.zeros_like(params), moments.mu, mask)
    nu = _quantized_zeros(optax.tree.zeros_like(params), moments.nu, mask)
    return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)

  def update(updates, state, params=None, *, piece=0, **_):
    del params
    count = optax.safe_increment(state.count)
    one = functools.partial(_adam_step, count, b1, b2, eps, eps_root)
    updates, mu, nu = _each(one, updates, (state.mu, state.nu), _key(seed, count, piece))
    return updates, optax.ScaleByAdamState(count, mu, nu)

  return optax.GradientTransformationExtraArgs(init, update)


def _adam_step(count, b1, b2, eps, eps_root, g, mu, nu, key):
  """(update, mu, nu) of one parameter."""
  mu_key, nu_key = jax.random.split(key)
  m = optax.tree.update_moment(g, _dequantize(mu), b1, 1)
  v = optax.tree.update_moment_per_elem_norm(g, _dequantize(nu), b2, 2)
  m_hat = optax.tree.bias_correction(m, b1, count)
  v_hat = optax.tree.bias_correction(v, b2, count)
  step = m_hat / (jnp.sqrt(v_hat + eps_root) + eps)
  return step, _requantize(m, mu, mu_key), _requantize(v, nu, nu_key)


def scale_by_lion(
  b1: float = 0.9,
  b2: float = 0.99,
  *,
  moment_format: str | Moments = "float32",
  mask: StorageMask = StorageMask(),
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """`optax.scale_by_lion` with its momentum in the format of mu; see `scale_by_adam`."""
  mu = _moments(moment_format).mu
  _refuse(Moments(mu), b2, b2)
  if mu is None:
    return optax.with_extra_args_support(optax.scale_by_lion(b1, b2))

  def init(params):
    fresh = _quantized_zeros(optax.tree.zeros_like(params), mu, mask)
    return optax.ScaleByLionState(jnp.zeros([], jnp.int32), fresh)

  def update(updates, state, params=None, *, piece=0, **_):
    del params
    count = optax.safe_increment(state.count)

    def one(g, mu, key):
      m = _dequantize(mu)
      step = jnp.sign((1.0 - b1) * g + b1 * m)
      return step, _requantize(optax.tree.update_moment(g, m, b2, 1), mu, key)

    updates, mu = _each(one, updates, (state.mu,), _key(seed, count, piece))
    return updates, optax.ScaleByLionState(count, mu)

  return optax.GradientTransformationExtraArgs(init, update)


def _key(seed: int, count, piece):
  return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), piece)


def _moments(moment_format: str | Moments) -> Moments:
  """The formats of a name, or those given."""
  if isinstance(moment_format, str):
    if moment_format not in storage.MOMENTS:
      near = nearest(moment_format, storage.MOMENTS)
      hint = f"did you mean {near!r}?" if near else "none is like it."
      raise ValueError(f"{moment_format=} is unknown; {hint} Known: {', '.join(storage.MOMENTS)}")
    return storage.MOMENTS[moment_format]
  if not isinstance(moment_format, Moments):
    raise TypeError(f"{moment_format=} must be a name in storage.MOMENTS or a Moments(mu, nu)")
  return moment_format


def _refuse(moments: Moments, mu_decay, nu_decay, **added):
  for name, quant in (("mu", moments.mu), ("nu", moments.nu)):
    if quant is not None and not isinstance(quant, Quant):
      raise TypeError(
        f"moment_format.{name} is {quant!r}, expected a Quant or None; a preset's name gives both: "
        'moment_format="coat"'
      )
  # A tracer has no value yet.
  for decay in (mu_decay, nu_decay):
    if not isinstance(decay, core.Tracer) and not 0 <= decay < 1:
      raise ValueError(f"a decay rate (b1, b2) is {decay}; it must be in [0, 1)")
  for name, value in added.items():
    if not isinstance(value, core.Tracer) and not 0 <= value < math.inf:
      raise ValueError(f"{name} is {value}; it must be finite and not negative")
  known = (None if isinstance(d, core.Tracer) else d for d in (mu_decay, nu_decay))
  problems = storage.moment_problems(moments, *known)
  if problems:
    raise ValueError("; ".join(problems))


def _quantized_zeros(zeros, quant: Quant | None, mask: StorageMask):
  """Zeros in the format of the moment."""
  # No leaves: optax.tree_map_params passes a placeholder to find a state's parameters.
  if quant is None or not jax.tree.leaves(zeros):
    return zeros

  def one(zero, is_quantized, lead):
    return quantized_tensor.zeros(zero.shape, quant, lead=lead) if is_quantized else zero

  return jax.tree.map(one, zeros, _tree_of(mask.quantized, zeros), _tree_of(mask.lead, zeros))


def _tree_of(choice, tree):
  """A choice per leaf: given as a tree, as a function of one, or as one for all."""
  choice = choice(tree) if callable(choice) else choice
  return jax.tree.map(lambda _: choice, tree) if isinstance(choice, int) else choice


def _dequantize(x):
  return x.unpack() if isinstance(x, quantized_tensor.QuantizedTensor) else x


def _requantize(values, before, key):
  """float32 values in the format of `before`."""
  if isinstance(before, quantized_tensor.QuantizedTensor):
    return before.repack(values, key)
  return values.astype(before.dtype)


def _each(one, updates, states, key):
  """(updates, *states) of `one`(update, *states, key) on every leaf, keys being each leaf's own."""
  leaves, structure = jax.tree.flatten(updates)
  leaf_states = [structure.flatten_up_to(state) for state in states]
  results = [
    one(leaf, *leaf_state, jax.random.fold_in(key, place))
    for place, (leaf, *leaf_state) in enumerate(zip(leaves, *leaf_states))
  ]
  return tuple(structure.unflatten(trees) for trees in zip(*results))
