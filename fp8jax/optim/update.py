"""The optimizer step, parameter by parameter and in place.

Optax returns float32 updates of all parameters at once, and low-precision moments and masters would
exist in float32 for as long: 8 bytes and more per parameter beside 6. Here each parameter is
updated alone, and a large one in chunks of its first axis (layers of a stack, rows of a matrix), so
that float32 copies of one chunk exist. The kernel (fused_adamw.py) has no float32 copy in memory.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax import params as params_lib
from fp8jax.axes import Layout
from fp8jax.optim import fused_adamw, gradients, sparsity, storage
from fp8jax.optim.optimizers import ParamOptimizer
from fp8jax.quantization import quantized_tensor, stored_matrix
from fp8jax.quantization.bf16_remainder import SplitFloat32
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.quantization.stored_matrix import StoredMatrix

# Elements of a chunk at most: 64 MiB in float32.
_CHUNK = 2**24


@dataclasses.dataclass(frozen=True)
class UpdateArgs:
  """Arguments of every parameter's update.

  Attributes:
    step: int32 scalar, number of steps taken.
    rate: learning rate.
    factor: multiplies gradients: clipping. Both are scalars, or arrays [N] over a stack of layers.
    is_applied: bool scalar; False leaves parameters and states unchanged.
  """

  step: Any
  rate: Any
  factor: Any = 1.0
  is_applied: Any = True


class StepResult(NamedTuple):
  """A step of a model.

  Attributes:
    loss: mean over tokens.
    norm: global norm of the gradient.
    is_finite: bool scalar, whether loss, gradient and all observations of sites are finite.
    params, opt: of State.
    squares: float32 [2]: sums of squares of the updates and of the parameters before them.
    tensor_stats: {site: its observations}.
    grad_autoscale: State.grad_autoscale.
    values: further metrics.
  """

  loss: Any
  norm: Any
  is_finite: Any
  params: Any
  opt: Any
  squares: Any
  tensor_stats: dict[str, Any]
  grad_autoscale: dict[str, Any]
  values: dict[str, Any]


def clip_factor(norm, clip: float):
  """Factor that brings a gradient of this global norm to at most `clip`; 1 if clip is 0."""
  return jnp.where(norm < clip, 1.0, clip / norm) if clip else 1.0


def init(leaf: ParamOptimizer, param):
  """(state of its transformation, stored master) of a float32 parameter."""
  if leaf.is_frozen:
    master = storage.store_frozen(param, leaf.master, inputs=leaf.inputs, lead=leaf.lead)
  else:
    key = jax.random.key(leaf.seed)
    if leaf.sparse is not None:
      param = sparsity.kept(param, param, leaf.sparse)
    master = storage.store_master(param, leaf.master, lead=leaf.lead, key=key)
  return leaf.transformation.init(param), master


def abstract(leaf: ParamOptimizer, param):
  """`init` of shapes, with shardings if the parameter has one."""
  return placed(jax.eval_shape(functools.partial(init, leaf), param), param)


def placed(tree, param):
  """The shapes of a tree stored for `param`, sharded like it; counters are replicated."""
  mesh = getattr(param.sharding, "mesh", None)

  def one(x):
    if gradients.is_leaf(x):
      return jax.tree.map(at, x, quantized_tensor.shardings(x, param.sharding))
    if isinstance(x, StoredMatrix):
      return jax.tree.map(at, x, stored_matrix.shardings(x, param.sharding))
    if x.shape == param.shape:
      return at(x, param.sharding)
    return at(x, NamedSharding(mesh, PartitionSpec()) if mesh is not None else None)

  def at(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  is_stored = lambda x: gradients.is_leaf(x) or isinstance(x, StoredMatrix)  # noqa: E731
  return jax.tree.map(one, tree, is_leaf=is_stored)


def with_backends(leaves, params, device, wanted: str, why_not: str = ""):
  """The tree of leaves, each with the backend of its update.

  Args:
    params: shapes and shardings of the float32 parameters.
    wanted: one of fused_adamw.CHOICES.
    why_not: of fused_adamw.excluded.

  Raises:
    ValueError: a kernel named by the user cannot update a large parameter; says which and why.
  """
  if wanted == "xla":
    return leaves

  def one(leaf, param):
    state, master = abstract(leaf, param)
    return fused_adamw.choose(leaf, master, state, device, wanted, why_not)

  chosen = jax.tree.map(one, leaves, params)
  fused_adamw.check(jax.tree.leaves(chosen), wanted)
  return chosen


def update_params(
  leaves, declaration, layout: Layout, g, state, master, args: UpdateArgs, *, piece=0, own=None,
  by_layer=False,
) -> tuple[Any, Any, Any]:  # fmt: skip
  """`update_param` of all parameters of a tree.

  Args:
    own: {path: groups.Own} of parameters whose rate or clipping is their own.

  Returns:
    (state, master, squares): trees, and sums over them; where `by_layer`, {parameter: squares}, of
    a stack of layers those of each.
  """

  def one(leaf, p, g, state, master):
    may_chunk, args_ = not layout.weight_axes(p.letters[0]), args
    if own and leaf.path in own:
      its = own[leaf.path]
      args_ = dataclasses.replace(args, rate=args.rate * its.rate, factor=args.factor * its.clip)
    is_split = by_layer and p.letters.startswith("N")
    return update_param(
      leaf, g, state, master, args_, may_chunk=may_chunk, piece=piece, by_layer=is_split
    )

  updated = jax.tree.map(one, leaves, declaration, g, state, master)
  state, master, squares = (select(updated, declaration, i) for i in range(3))
  if by_layer:
    return state, master, params_lib.flatten(squares)
  return state, master, sum(jax.tree.leaves(squares))


def total(squares):
  """The sums [2] of all parameters' squares of `update_params` by layer."""
  return sum(x.reshape(-1, 2).sum(0) for x in squares.values())


def select(tree, like, which: int):
  """A tree of tuples as the tree of their elements `which`."""
  structure = jax.tree.structure(like)
  return structure.unflatten([leaf[which] for leaf in structure.flatten_up_to(tree)])


def update_param(
  leaf: ParamOptimizer, g, state, master, args: UpdateArgs, *, may_chunk: bool = True, piece=0,
  by_layer: bool = False,
):  # fmt: skip
  """The update of one parameter.

  Args:
    g: its gradient, float32 or QuantizedTensor.
    state: of its transformation.
    master: float32, QuantizedTensor or SplitFloat32.
    may_chunk: whether its first axis lies on one device.
    piece: number of the layer, if these are one layer's part: random bits depend on it.

  Returns:
    (state, master, float32 [2]: sums of squares of the update and of the parameter before it; where
    `by_layer`, [N, 2] of the first axis).
  """
  if leaf.is_frozen:
    return state, master, jnp.zeros(2, jnp.float32)
  if leaf.backend != "xla":
    return fused_adamw.apply(leaf, g, state, master, args)
  # The rounding of the state has another key.
  key = jax.random.fold_in(jax.random.key(leaf.seed + 1), args.step)

  scalars = (jnp.asarray(args.rate), jnp.asarray(args.factor))

  def one(g, old, piece, scalars=scalars):
    state, master = old
    # A scalar, or [N] as [N, 1, …] of as many axes.
    ones = (1,) * (len(g.shape) - 1)
    rate, factor = (x.reshape(*x.shape, *ones) if x.ndim else x for x in scalars)
    value = master.unpack() if isinstance(master, QuantizedTensor | SplitFloat32) else master
    g = gradients.dequantize(g) * factor
    update, state = leaf.transformation.update(g, state, value, piece=piece)
    applied = None if leaf.apply is None else leaf.apply(value, update, rate)
    change = -rate * jnp.asarray(update) if applied is None else applied - value
    if leaf.decay is not None:
      change = change - leaf.decay(args.step) * value
    if leaf.sparse is not None:
      applied = sparsity.kept(value + change if applied is None else applied, value, leaf.sparse)
      change = applied - value
    axes = tuple(range(1, value.ndim)) if by_layer else None
    squares = jnp.stack([jnp.sum(jnp.square(x), axis=axes) for x in (change, value)], axis=-1)
    updated = optax.apply_updates(value, change) if applied is None else applied
    new = (
      state,
      storage.store_master(
        updated, leaf.master, lead=leaf.lead, key=jax.random.fold_in(key, piece)
      ),
    )
    return jax.tree.map(functools.partial(jnp.where, args.is_applied), new, old), squares

  chunks = _num_chunks(g, (state, master)) if may_chunk else 1
  if chunks == 1:
    (state, master), squares = one(g, (state, master), piece)
  else:
    (state, master), squares = _in_chunks(one, g, (state, master), chunks, scalars, by_layer)
  return state, master, squares


def _in_chunks(one, g, before, chunks: int, scalars, by_layer: bool):
  size = g.shape[0] // chunks

  def body(i, carry):
    updated, squares = carry
    # Every chunk starts from the counters before the step.
    old = slice_layer(with_scalars_of(updated, before), i * size, size)
    of_chunk = slice_layer(scalars, i * size, size)
    new, more = one(slice_layer(g, i * size, size), old, i, of_chunk)
    # Without a barrier XLA fuses all of it into the CPU's in-place update, on one thread: three
    # times as slow.
    new = jax.lax.platform_dependent(new, cpu=jax.lax.optimization_barrier, default=lambda new: new)
    squares = update_layer(squares, more, i * size) if by_layer else squares + more
    return update_layer(updated, new, i * size), squares

  nothing = jnp.zeros((g.shape[0], 2) if by_layer else 2, jnp.float32)
  return jax.lax.fori_loop(0, chunks, body, (before, nothing))


def slice_layer(tree, start, size: int):
  """`size` entries of every array's first axis; scalars as they are."""
  return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size) if x.ndim else x, tree)


def update_layer(tree, part, start):
  """The inverse of `slice_layer`."""

  def one(x, y):
    return jax.lax.dynamic_update_slice_in_dim(x, y, start, 0) if x.ndim else y

  return jax.tree.map(one, tree, part)


def with_scalars_of(tree, before):
  """The tree with the scalars of another one."""
  return jax.tree.map(lambda x, old: x if x.ndim else old, tree, before)


def _num_chunks(g, stored) -> int:
  """Chunks of the first axis: the fewest with at most _CHUNK elements each.

  1 if nothing is quantized (XLA then updates element by element in place), and if entries of the
  first axis share a scale that is written.
  """
  quantized = [
    x for x in jax.tree.leaves((g, stored), is_leaf=gradients.is_leaf) if gradients.is_leaf(x)
  ]
  shares = (x for x in quantized if not x.is_stack)
  if not quantized or any(x is not g or x.scale.ndim for x in shares):
    return 1
  rows = g.shape[0]
  least = -(-math.prod(g.shape) // _CHUNK)
  return next((n for n in range(least, rows + 1) if rows % n == 0), rows)
