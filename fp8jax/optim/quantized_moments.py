"""Optax transformations whose moments are stored quantized.

Moments are dequantized, updated and used in float32 by the transformation itself, then quantized
again: an update does not see the rounding of its own step (as in COAT, FP8-LM and torchao).
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import core
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.optim import storage
from fp8jax.optim.storage import Moments
from fp8jax.quantization import quantized_tensor
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.recipe.quant import Quant, Rounding

_LARGE = 4096  # as in torchao


def is_large(params):
  """Default of StorageMask.quantized: matrices of 4096 elements and more."""
  return jax.tree.map(lambda p: p.ndim >= 2 and p.size >= _LARGE, params)


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
    moment_format: a name of `storage.moments`, e.g. "coat" (2.08 bytes per parameter for both); or
      a Moments(mu, nu) of two Quants, where None is float32, of 16-bit parameters too.
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
  adam = _in_float32(optax.scale_by_adam(b1, b2, eps, eps_root))
  return stored(adam, _moments(moment_format), {"mu": b1, "nu": b2}, mask=mask, seed=seed)


class QuantizedState(NamedTuple):
  """State of `quantized_state`.

  Attributes:
    count: int32, number of updates, of which random bits depend.
    inner_state: the transformation's own, with QuantizedTensors in place of large moments.
  """

  count: Any
  inner_state: Any


# Fields of Optax's states that have a parameter's shape: "mu" if they are signed, "nu" if they are
# magnitudes to divide by, None if rounding them is not rounding a moment.
FIELDS: dict[str, dict[str, str | None]] = {
  **dict.fromkeys(
    ("ScaleByAdamState", "ScaleByBeliefState", "ScaleByNovogradState"), {"mu": "mu", "nu": "nu"}
  ),
  **dict.fromkeys(("ScaleByRmsState", "ScaleByRmsWithCountState"), {"nu": "nu"}),
  **dict.fromkeys(("ScaleByLionState", "MuonState"), {"mu": "mu"}),
  "ScaleByAmsgradState": {"mu": "mu", "nu": "nu", "nu_max": "nu"},
  "ScaleByAdanState": {"m": "mu", "v": "mu", "n": "nu", "g": None},
  "ScaleByAdaDeltaState": {"e_g": "nu", "e_x": "nu"},
  "ScaleBySM3State": {"nu": "mu"},
  "FactoredState": {"v": "nu", "v_row": None, "v_col": None},
  "TraceState": {"trace": "mu"},
  "EmaState": {"ema": "mu"},
}
# Of transformations that leave the state of another one as it is in some steps.
_OUTSIDE = (
  "MultiStepsState", "ApplyIfFiniteState", "ConditionallyTransformState", "ConditionallyMaskState"
)  # fmt: skip


def quantized_state(
  transformation: optax.GradientTransformation, format: str | Moments = "coat", *,
  stochastic: bool = False, decays: Mapping[str, float] = MappingProxyType({}),
  fields: Mapping[str, str | None] = MappingProxyType({}), mask: StorageMask = StorageMask(),
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
  """Any Optax transformation, whose state is stored in a format between updates.

  Of every state in FIELDS (Adam's, Lion's, RMSProp's, AdaDelta's, Adafactor's, the trace of SGD and
  more, alone or in chain, masked, multi_transform or inject_hyperparams) the moments of large
  parameters become QuantizedTensors. `update` makes them float32, calls the transformation and
  quantizes them again. Counts, scalars, factored vectors and the moments of small parameters stay
  as they are, in float32. The state is a tree of arrays, for jit and checkpoints; see `shardings`.

  Args:
    transformation: with moments that it replaces in every update. optax.MultiSteps and
      apply_if_finite belong around the result.
    format: as in `scale_by_adam`; mu is the format of signed moments, nu of magnitudes.
    stochastic: whether to round stochastically whatever the format says.
    decays: factor of moments per step, {"mu": b1, "nu": b2}; needed for formats in which a moment
      that decays slowly stays where it is.
    fields: {field of a state that FIELDS lacks, or shall not decide: "mu", "nu", or None to keep it
      as it is}, e.g. {"z": None} for the parameters of schedule_free.
    mask: as in `scale_by_adam`, evaluated on each moment.
    seed: of stochastic rounding; random bits depend on it, the step and the place in the state.

  Returns:
    A transformation with a QuantizedState; `format="float32"` returns the transformation's own.

  Raises:
    ValueError: as `scale_by_adam`; and in `init`, a state with the shape of a large parameter that
      neither FIELDS nor `fields` knows, or one that is left as it is in some steps.

  Source:
    8-bit Optimizers (arXiv:2110.02861 §2) and COAT (arXiv:2410.19313 §4).

  Example:
    >>> import jax.numpy as jnp, optax, fp8jax
    >>> tx = fp8jax.quantized_state(optax.sgd(0.1, momentum=0.9), "e4m3_256")
    >>> state = tx.init({"w": jnp.ones((64, 128))})
    >>> state.inner_state[0].trace["w"].data.dtype.name, state.inner_state[0].trace["w"].nbytes
    ('float8_e4m3fn', 8320)
  """
  moments = _moments(format)
  formats = {name: getattr(moments, name) for name in ("mu", "nu")}
  for name, kind in fields.items():
    if kind not in ("mu", "nu", None):
      raise ValueError(f'fields[{name!r}]={kind!r} must be "mu" (signed), "nu" (>= 0) or None')
  if unknown := set(decays) - set(formats):
    raise ValueError(f'decays={dict(decays)} has {sorted(unknown)}; it may have "mu" and "nu"')
  if stochastic:
    rounding = Rounding.STOCHASTIC
    formats = {k: q and dataclasses.replace(q, rounding=rounding) for k, q in formats.items()}
  try:
    _refuse(formats, {"mu": 1 - 1e-9, "nu": 1 - 1e-9, **decays})
  except ValueError as e:
    raise ValueError(f"{e} (or say how fast it decays: decays={{'mu': 0.9, 'nu': 0.95}})") from None
  wide = _in_float32(transformation) if any(formats.values()) else transformation
  return _stored(wide, formats, fields, mask, seed, _packed)


def _in_float32(transformation) -> optax.GradientTransformationExtraArgs:
  """The transformation, with float32 in place of 16-bit parameters and gradients.

  Optax gives moments the parameter's dtype. A second moment in BF16 stays where it is, and one of
  squares in float16 is 0.
  """
  inner = optax.with_extra_args_support(transformation)

  def wide(tree):
    is_narrow = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4  # noqa: E731
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_narrow(x) else x, tree)

  def update(updates, state, params=None, **rest):
    made, state = inner.update(wide(updates), state, params, **rest)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), made, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: inner.init(wide(params)), update)


def stored(
  transformation: optax.GradientTransformation, moments: Moments, decays: Mapping[str, Any], *,
  mask: StorageMask = StorageMask(), seed: int = 0,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
  """`quantized_state` of a transformation that counts its steps and starts with zeros.

  The state is the transformation's own; it is itself where all formats are float32.

  Args:
    transformation: its state has one "count" and the moments.
    decays: {moment that it keeps, a field of Moments: its decay rate per step}.
    mask, seed: see `scale_by_adam`.
  """
  formats = {name: getattr(moments, name) for name in decays}
  _refuse(formats, decays)
  if not any(formats.values()):
    return optax.with_extra_args_support(transformation)
  whole = _stored(transformation, formats, {k: k for k in formats}, mask, seed, _zeros)

  def update(updates, state: Any, params=None, **rest):
    new: Any
    # Also of a chain. A parameter may have this name too.
    is_own = lambda path, _: formats.keys().isdisjoint(getattr(k, "name", "") for k in path)  # noqa: E731
    count: Any = optax.tree.get(state, "count", filtering=is_own)
    updates, new = whole.update(updates, QuantizedState(count, state), params, **rest)
    return updates, new.inner_state

  start = lambda params: cast(QuantizedState, whole.init(params)).inner_state  # noqa: E731
  return optax.GradientTransformationExtraArgs(start, update)


def shardings(state, params):
  """The tree of a state's shardings, for `out_shardings` and checkpoints.

  An array of a parameter's shape lies like it, scales with their codes; others are on every device.

  Args:
    state: arrays or shapes, of these parameters.
    params: arrays or shapes with NamedShardings, all of one mesh.
  """
  by_path = dict(jax.tree_util.tree_flatten_with_path(params)[0])
  mesh = jax.tree.leaves(params)[0].sharding.mesh

  def one(path, x):
    ends = (path[i:] for i in range(len(path) + 1))
    param = next((by_path[end] for end in ends if end in by_path), None)
    place = NamedSharding(mesh, PartitionSpec())
    if param is not None and param.shape == x.shape:
      place = param.sharding
    return quantized_tensor.shardings(x, place) if isinstance(x, QuantizedTensor) else place

  return jax.tree_util.tree_map_with_path(one, state, is_leaf=_is_quantized)


def _stored(transformation, formats, fields, mask: StorageMask, seed: int, first):
  """`quantized_state`; `first` makes a QuantizedTensor of what the transformation starts with."""
  inner = optax.with_extra_args_support(transformation)
  if not any(formats.values()):
    return inner

  def init(params):
    params = _arrays(params)
    large = {x.shape for x in jax.tree.leaves(params) if is_large(x)}

    def walk(node, where="the state"):
      name = type(node).__name__
      if name in _OUTSIDE:
        raise ValueError(
          f"{name} leaves the state inside as it is in some steps, and to store it again would "
          "change it: wrap the transformation inside, e.g. optax.MultiSteps(quantized_state(tx), 2)"
        )
      if _is_state(node):
        known, parts = {**FIELDS.get(name, {}), **fields}, {}
        for field in node._fields:
          below, part = functools.partial(walk, where=f"{name}.{field}"), getattr(node, field)
          if field in known:
            if formats.get(known[field]) and mask.quantized is is_large:
              _refuse_flat(f"{name}.{field}", part, params)
            parts[field] = _each(part, formats.get(known[field]), mask, first)
          else:
            parts[field] = jax.tree.map(below, part, is_leaf=_is_state)
        return node._replace(**parts)
      if jnp.shape(node) in large and jnp.issubdtype(node.dtype, jnp.floating):
        raise ValueError(
          f"{where} has an array of a parameter's shape, {jnp.shape(node)}, and whether it may be "
          f'rounded is not known: give fields={{"{where.rpartition(".")[2]}": ...}}, None to keep '
          'it as it is, "mu" to store it as a signed moment, "nu" as one that is divided by'
        )
      return node

    state = jax.tree.map(walk, inner.init(params), is_leaf=_is_state)
    return QuantizedState(jnp.zeros((), jnp.int32), state)

  def update(updates, state: Any, params=None, *, piece=0, **extra):
    count: Any = optax.safe_increment(state.count)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), count), piece)
    old, structure = jax.tree.flatten(state.inner_state, is_leaf=_is_quantized)
    wide = structure.unflatten([x.unpack() if _is_quantized(x) else x for x in old])
    updates, new = inner.update(updates, wide, params, **extra)
    pairs = enumerate(zip(old, structure.flatten_up_to(new), strict=True))
    kept = [
      x.repack(y, jax.random.fold_in(key, i)) if _is_quantized(x) else y for i, (x, y) in pairs
    ]
    return updates, QuantizedState(count, structure.unflatten(kept))

  return optax.GradientTransformationExtraArgs(init, update)


def _arrays(params):
  """The parameters without the variables of Flax NNX, which take apart what they hold."""
  nnx: Any = sys.modules.get("flax.nnx")
  return params if nnx is None else nnx.as_pure(params)


def _refuse_flat(where: str, part, params):
  """Raises ValueError for a moment of parameters that were joined to a vector: none is large."""
  shapes = {jnp.shape(x) for x in jax.tree.leaves(params) if x is not params}
  for x in jax.tree.leaves(part):
    if jnp.ndim(x) == 1 and jnp.size(x) >= _LARGE and jnp.shape(x) not in shapes:
      raise ValueError(
        f"{where} is a vector of {jnp.size(x)} elements, of all parameters: it would stay in "
        "float32. Give a tree, without optax.flatten, or set mask=StorageMask(quantized=True)"
      )


def _moments(moment_format: str | Moments) -> Moments:
  """The formats of a name, or those given."""
  moments = storage.moments(moment_format) if isinstance(moment_format, str) else moment_format
  if not isinstance(moments, Moments):
    raise TypeError(f"{moment_format=} must be a name of storage.moments or a Moments(mu, nu)")
  return moments


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


def _each(moment, quant: Quant | None, mask: StorageMask, first):
  """The moments of all parameters, large ones in their format."""
  # No leaves: optax.tree_map_params passes a placeholder to find a state's parameters.
  if quant is None or not jax.tree.leaves(moment):
    return moment

  def one(x, is_quantized, lead):
    return first(x, quant, lead) if is_quantized else x

  return jax.tree.map(one, moment, _tree_of(mask.quantized, moment), _tree_of(mask.lead, moment))


def _zeros(x, quant: Quant, lead: int):
  return quantized_tensor.zeros(x.shape, quant, lead=lead)


def _packed(x, quant: Quant, lead: int):
  # Behind a barrier XLA does not reduce constants, which takes minutes where a model is large.
  x = jax.lax.optimization_barrier(x)
  return quantized_tensor.pack(x, quant, lead=lead, key=jax.random.key(0))


def _tree_of(choice, tree):
  """A choice per leaf: given as a tree, as a function of one, or as one for all."""
  choice = choice(tree) if callable(choice) else choice
  if isinstance(choice, int):
    return jax.tree.map(lambda _: choice, tree)
  # Behind optax.masked some parameters have no moment.
  chosen = dict(jax.tree_util.tree_flatten_with_path(choice)[0])
  return jax.tree_util.tree_map_with_path(lambda path, _: chosen[path], tree)


def _is_quantized(x) -> bool:
  return isinstance(x, QuantizedTensor)


def _is_state(x) -> bool:
  return hasattr(x, "_fields")
