"""Optax transformations whose moments are stored quantized.

Moments are dequantized, updated and used in float32 by the transformation itself, then quantized
again: an update does not see the rounding of its own step (as in COAT, FP8-LM and torchao).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
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
  for name, value in (("eps", eps), ("eps_root", eps_root)):
    if not isinstance(value, core.Tracer) and not 0 <= value < math.inf:
      raise ValueError(f"{name} is {value}; it must be finite and not negative")
  adam = optax.scale_by_adam(b1, b2, eps, eps_root)
  return stored(adam, _moments(moment_format), {"mu": b1, "nu": b2}, mask=mask, seed=seed)


def stored(
  transformation: optax.GradientTransformation, moments: Moments, decays: Mapping[str, Any], *,
  mask: StorageMask = StorageMask(), seed: int = 0,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
  """A transformation whose moments are stored in these formats; itself where all are float32.

  Args:
    transformation: its state is a NamedTuple with "count" and the moments.
    decays: {moment that it keeps, a field of Moments: its decay rate per step}.
    mask, seed: see `scale_by_adam`.
  """
  formats = {name: getattr(moments, name) for name in decays}
  _refuse(formats, decays)
  if not any(formats.values()):
    return optax.with_extra_args_support(transformation)

  def init(params):
    state: Any = transformation.init(params)
    zeros = {k: _quantized_zeros(getattr(state, k), q, mask) for k, q in formats.items()}
    return state._replace(**zeros)

  def update(updates, state: Any, params=None, *, piece=0, **_):
    count = optax.safe_increment(state.count)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), piece)

    def one(place: int, g, param, *old):
      wide = state._replace(**dict(zip(formats, map(_dequantize, old))))
      step, new = transformation.update(g, wide, param)
      own = jax.random.fold_in(key, place)
      keys = jax.random.split(own, len(old)) if len(old) > 1 else [own]
      moments = (getattr(new, name) for name in formats)
      return step, *map(_requantize, moments, old, keys)

    leaves, structure = jax.tree.flatten(updates)
    trees = (params, *(getattr(state, name) for name in formats))
    columns = ([None] * len(leaves) if t is None else structure.flatten_up_to(t) for t in trees)
    moved = [one(place, *row) for place, row in enumerate(zip(leaves, *columns, strict=True))]
    updates, *moments = (structure.unflatten(column) for column in zip(*moved))
    return updates, state._replace(count=count, **dict(zip(formats, moments)))

  return optax.GradientTransformationExtraArgs(init, update)


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


def _refuse(formats: Mapping[str, Quant | None], decays: Mapping[str, Any]):
  for name, quant in formats.items():
    if quant is not None and not isinstance(quant, Quant):
      raise TypeError(
        f"moment_format.{name} is {quant!r}, expected a Quant or None; a preset's name gives both: "
        'moment_format="coat"'
      )
  # A tracer has no value yet.
  known = {k: d for k, d in decays.items() if not isinstance(d, core.Tracer)}
  for decay in known.values():
    if not 0 <= decay < 1:
      raise ValueError(f"a decay rate (b1, b2) is {decay}; it must be in [0, 1)")
  problems = storage.moment_problems(Moments(**formats), known.get("mu"), known.get("nu"))
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
