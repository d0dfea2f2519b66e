"""A step of every parameter, in place: gradient, master and moments of a piece at a time.

Optax returns an update in float32 for every parameter at once, and quantized state would exist in
float32 for as long: 8 bytes and more per parameter beside 6. Here each parameter is updated on its
own, and a large one by pieces of its first axis (layers of a stack, rows of a matrix), so that
float32 copies exist of a piece only. A kernel (fused_adamw.py) needs no such copies.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.axes import Layout
from fp8jax.optim import fused_adamw, gradients, masters
from fp8jax.optim.factory import ParamOptimizer
from fp8jax.quantization import quantized_tensor
from fp8jax.quantization.bf16_remainder import SplitFloat32
from fp8jax.quantization.quantized_tensor import QuantizedTensor

# Elements of a piece of a parameter that is updated by pieces: 64 MiB in float32.
_PIECE = 2**24


@dataclasses.dataclass(frozen=True)
class UpdateArgs:
  """Arguments of the step that all parameters share.

  Attributes:
    step: int32 scalar, number of steps taken.
    rate: learning rate.
    factor: of gradients, for clipping.
    is_applied: bool scalar; False leaves parameters and state as they are.
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
    is_finite: bool scalar, whether loss, gradient and all tensor statistics are finite.
    params, opt: of State.
    squares: float32 [2]: sums of squares of the updates and of the parameters before them.
    seen: {site: its tensor statistics}.
    room: State.room.
    values: further metrics.
  """

  loss: Any
  norm: Any
  is_finite: Any
  params: Any
  opt: Any
  squares: Any
  seen: dict[str, Any]
  room: dict[str, Any]
  values: dict[str, Any]


def clip_factor(norm, clip: float):
  """The factor on gradients of this global norm that makes it at most `clip`; 0 turns clipping
  off."""
  return jnp.where(norm < clip, 1.0, clip / norm) if clip else 1.0


def init(leaf: ParamOptimizer, param):
  """(state of its transformation, master) of a float32 parameter."""
  kept = masters.keep(param, leaf.master, lead=leaf.lead, key=jax.random.key(leaf.seed))
  return leaf.transformation.init(param), kept


def abstract(leaf: ParamOptimizer, param):
  """`init` of shapes, with shardings if the parameter has one."""
  return placed(jax.eval_shape(functools.partial(init, leaf), param), param)


def placed(made, param):
  """`made`, shapes of a parameter's state, with its sharding; counters are replicated."""
  mesh = getattr(param.sharding, "mesh", None)

  def one(x):
    if _is_packed(x):
      return jax.tree.map(at, x, quantized_tensor.shardings(x, param.sharding))
    if x.shape == param.shape:
      return at(x, param.sharding)
    return at(x, NamedSharding(mesh, PartitionSpec()) if mesh is not None else None)

  def at(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(one, made, is_leaf=_is_packed)


def with_backends(leaves, params, device, wanted: str):
  """The tree of leaves, each with the backend that updates it.

  Args:
    params: the parameters in float32: shapes, and where they lie.
    device: a kernels.choose.Device.
    wanted: one of fused_adamw.CHOICES.

  Raises:
    ValueError: a kernel asked for by name cannot move a large parameter; says which, and why.
  """
  if wanted == "xla":
    return leaves

  def one(leaf, param):
    state, kept = abstract(leaf, param)
    return fused_adamw.choose(leaf, kept, state, device, wanted)

  chosen = jax.tree.map(one, leaves, params)
  fused_adamw.check(jax.tree.leaves(chosen), wanted)
  return chosen


def move_all(leaves, declaration, layout: Layout, g, state, kept, now: UpdateArgs, *, piece=0):
  """`move` of all parameters of a tree.

  Returns:
    (state, kept, squares): trees, and sums over them.
  """

  def one(leaf, p, g, state, kept):
    may_walk = not layout.weight_axes(p.letters[0])
    return move(leaf, g, state, kept, now, may_walk=may_walk, piece=piece)

  moved = jax.tree.map(one, leaves, declaration, g, state, kept)
  state, kept, squares = (select(moved, declaration, i) for i in range(3))
  return state, kept, sum(jax.tree.leaves(squares))


def select(tree, like, which: int):
  """Of a tree of tuples one of each."""
  structure = jax.tree.structure(like)
  return structure.unflatten([found[which] for found in structure.flatten_up_to(tree)])


def move(leaf: ParamOptimizer, g, state, kept, now: UpdateArgs, *, may_walk: bool = True, piece=0):
  """One parameter's step.

  Args:
    g: its gradient, float32 or QuantizedTensor.
    state: of its transformation.
    kept: its master: float32, QuantizedTensor or SplitFloat32.
    may_walk: whether its first axis lies on one device.
    piece: number of the layer, where these are one layer's part of a parameter: random bits
      differ by piece.

  Returns:
    (state, kept, float32 [2]: sums of squares of the update and of the parameter before it).
  """
  if leaf.backend != "xla":
    return fused_adamw.move(leaf, g, state, kept, now)
  # Another key than that of the state's own rounding.
  key = jax.random.fold_in(jax.random.key(leaf.seed + 1), now.step)

  def one(g, old, piece):
    state, kept = old
    wide = kept.unpack() if isinstance(kept, QuantizedTensor | SplitFloat32) else kept
    g = gradients.wide(g) * now.factor
    update, state = leaf.transformation.update(g, state, wide, piece=piece)
    update = -jnp.asarray(now.rate) * jnp.asarray(update)
    squares = jnp.stack([jnp.sum(jnp.square(update)), jnp.sum(jnp.square(wide))])
    fresh = optax.apply_updates(wide, update)
    own = jax.random.fold_in(key, piece)
    new = (state, masters.keep(fresh, leaf.master, lead=leaf.lead, key=own))
    return jax.tree.map(functools.partial(jnp.where, now.is_applied), new, old), squares

  pieces = _pieces(g, (state, kept)) if may_walk else 1
  if pieces == 1:
    (state, kept), squares = one(g, (state, kept), piece)
  else:
    (state, kept), squares = _walk(one, g, (state, kept), pieces)
  return state, kept, squares


def _walk(one, g, before, pieces: int):
  size = g.shape[0] // pieces

  def body(i, carry):
    moved, squares = carry
    # Every piece starts from the counters before the step.
    old = slice_layer(with_scalars_of(moved, before), i * size, size)
    new, more = one(slice_layer(g, i * size, size), old, i)
    # XLA would compute all of it inside the CPU's in-place update, on one thread: 3 times as long.
    new = jax.lax.platform_dependent(new, cpu=jax.lax.optimization_barrier, default=lambda new: new)
    return update_layer(moved, new, i * size), squares + more

  return jax.lax.fori_loop(0, pieces, body, (before, jnp.zeros(2, jnp.float32)))


def slice_layer(tree, start, size: int):
  """`size` entries of every array's first axis, and all scalars: counters, scales of the whole."""
  return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size) if x.ndim else x, tree)


def update_layer(tree, part, start):
  """The inverse of `slice_layer`."""

  def one(x, y):
    return jax.lax.dynamic_update_slice_in_dim(x, y, start, 0) if x.ndim else y

  return jax.tree.map(one, tree, part)


def with_scalars_of(tree, before):
  """The tree with the scalars of another one."""
  return jax.tree.map(lambda x, old: x if x.ndim else old, tree, before)


def _pieces(g, kept) -> int:
  """Number of pieces of the first axis: the fewest of at most _PIECE elements each.

  1 where nothing is quantized (XLA then updates in place, element by element), and where a written
  tensor shares a scale along the first axis.
  """
  narrow = [x for x in jax.tree.leaves((g, kept), is_leaf=_is_packed) if _is_packed(x)]
  shares = (x for x in narrow if not x.is_stack)
  if not narrow or any(x is not g or x.scale.ndim for x in shares):
    return 1
  rows = g.shape[0]
  least = -(-math.prod(g.shape) // _PIECE)
  return next((n for n in range(least, rows + 1) if rows % n == 0), rows)


def _is_packed(x) -> bool:
  return isinstance(x, QuantizedTensor)
