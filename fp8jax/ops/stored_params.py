"""Parameters in their storage format as a model reads them, and gradients in theirs.

A stored parameter is a float32 array, a `QuantizedTensor` (16 bits, or fewer with scales) or a
`SplitFloat32` (BF16 and a remainder). A frozen one may be a `StoredMatrix`, which GEMMs multiply as
it is. A GEMM reads its `compute_copy`. A dot makes the copy itself, so that no float32 copy is a
residual. A parameter of a layer may be an `Entry` of its stack, for quantizers that read it there.

A weight may be quantized ahead of its products, once per step (`WeightOperands`). Nothing but these
products can read it then.

In training, a parameter that is no float32 array, or whose gradient is none, is a `Weight`: the
parameter and a placeholder, zeros in the format of the gradient. The gradient is the placeholder's
cotangent. Each layer's backward pass converts it, so that float32 gradients of one layer exist at a
time. Such placeholders are never read and leave nothing in the compiled program.

Microbatches on one device: a layer's gradient may be added where it is made to the sum of those
before it, one entry of a stack (`Weight.layer`). The placeholder is that stack then, and the
gradient the stack with this one added.

Microbatches on a mesh: the gradients of all devices that hold the same weight need one sum per
step, not one per microbatch. Such a Weight's gradient has an axis more, of `Parts`, along which
every device keeps its own terms until the step adds them up.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.quantization import quantized_tensor
from fp8jax.quantization.bf16_remainder import SplitFloat32
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.quantization.scaled_matrix import Entry, ScaledMatrix
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe.quant import Quant


@dataclasses.dataclass(frozen=True)
class Parts:
  """The terms of a sum over devices that is still to be made, as a first axis of an array.

  Attributes:
    axes: of the mesh, that split it.
    count: of devices along them.
  """

  axes: tuple[str, ...]
  count: int

  def of_whole(self, x):
    """The terms of an x that is the sum already: itself and zeros."""
    return jnp.zeros((self.count, *x.shape), x.dtype).at[0].set(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightOperands:
  """A weight as the operands of its products, gathered and quantized (ops/weight_operands.py).

  Attributes:
    fwd: [produced, contracted] of the forward product, perhaps as an entry of the stack of all
      layers; None in residuals of products.
    dgrad: [contracted, produced] of the data gradient; likewise.
    stats: float32 [S], what the weight's site observes of it.
    shape: of the weight.
  """

  fwd: ScaledMatrix | Entry | None
  dgrad: ScaledMatrix | Entry
  stats: jax.Array
  shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
  """A parameter in training.

  Attributes:
    stored: the parameter: float32 array, QuantizedTensor or SplitFloat32, or an Entry of a stack of
      them; or its WeightOperands.
    placeholder: zeros like its gradient, float32 or QuantizedTensor; None in residuals. With
      `layer` float32 sums, stacked, which residuals keep.
    key: random key of the gradient's rounding, one per layer if parameters are stacked.
    autoscale: that of `quantized_tensor.pack`, or None; one per layer too.
    quant: format of the gradient; None for float32.
    is_frozen: whether it has no gradient; placeholder and key are then None.
    parts: of a float32 gradient that is summed over devices later; None for one that is the sum.
    layer: int32, number of the entry that the gradient is added to; None if it is not. Nothing may
      read such a weight twice: the sums before it would count twice.
  """

  stored: Any
  placeholder: Any
  key: Any
  autoscale: Any = None
  quant: Quant | None = dataclasses.field(default=None, metadata=dict(static=True))
  is_frozen: bool = dataclasses.field(default=False, metadata=dict(static=True))
  parts: Parts | None = dataclasses.field(default=None, metadata=dict(static=True))
  layer: Any = None

  @property
  def shape(self) -> tuple[int, ...]:
    return self.stored.shape


def is_stored(x) -> bool:
  """Whether x is one stored parameter: is_leaf of jax.tree.map."""
  return isinstance(x, QuantizedTensor | SplitFloat32 | StoredMatrix | Weight | Entry)


def is_frozen(w) -> bool:
  """Whether a parameter in training has no gradient."""
  return isinstance(w, StoredMatrix) or (isinstance(w, Weight) and w.is_frozen)


def compute_copy(w):
  """The float32 array that a GEMM reads: of a SplitFloat32 its BF16 half."""
  if isinstance(w, Weight):
    return compute_copy(w.stored)
  if isinstance(w, Entry):
    return compute_copy(w.take())
  if isinstance(w, SplitFloat32):
    return w.high.astype(jnp.float32)
  if isinstance(w, WeightOperands):
    raise TypeError(
      f"a weight {w.shape} that is quantized once per step is read outside its products; set "
      "memory.weight_operands='per_product'"
    )
  return w.unpack() if isinstance(w, QuantizedTensor | StoredMatrix) else w


def gemm_operand(w, to_kernels: bool = False) -> Any:
  """`compute_copy`, or the StoredMatrix or WeightOperands that GEMMs multiply as they are.

  Args:
    to_kernels: whether kernels alone read it. They read BF16 halves of SplitFloat32, and arrays in
      their stacks.
  """
  stored = w.stored if isinstance(w, Weight) else w
  if isinstance(stored, Entry):
    if to_kernels and isinstance(stored.stack, jax.Array | SplitFloat32):
      return Entry(gemm_operand(stored.stack, to_kernels), stored.index)
    return gemm_operand(stored.take(), to_kernels)
  if to_kernels and isinstance(stored, SplitFloat32):
    return stored.high
  is_operand = isinstance(stored, StoredMatrix | WeightOperands)
  return stored if is_operand else compute_copy(stored)


def residual_view(w):
  """A parameter as a residual: without its placeholder, unless that has the sums so far."""
  is_read = not isinstance(w, Weight) or w.layer is not None
  return w if is_read else dataclasses.replace(w, placeholder=None)


def backward_view(w):
  """The `residual_view` of a product, whose backward pass reads no operand of the forward one."""
  w = residual_view(w)
  if isinstance(w, Weight) and isinstance(w.stored, WeightOperands):
    return dataclasses.replace(w, stored=dataclasses.replace(w.stored, fwd=None))
  return w


def with_grad_placeholders(tree):
  """The inverse of `residual_view` of every parameter of a tree; they are not stacked."""

  def one(w):
    if not isinstance(w, Weight) or w.is_frozen or w.layer is not None:
      return w
    placeholder = grad_placeholder(w.stored, w.quant, 0, w.parts)
    return dataclasses.replace(w, placeholder=placeholder)

  return jax.tree.map(one, tree, is_leaf=is_stored)


def frozen(w) -> Weight:
  """A parameter in training that has no gradient."""
  return Weight(w, None, None, is_frozen=True)


def sums_of(w) -> Entry | None:
  """The sum of gradients, an entry of a stack, that a parameter's is added to; None if none is."""
  return Entry(w.placeholder, w.layer) if isinstance(w, Weight) and w.layer is not None else None


def cotangent(w, g):
  """The cotangent of a parameter from the cotangent g of its `compute_copy`, or from the terms of
  that of which it has Parts, or from the stack of `sums_of` to which g is added already; None if
  frozen."""
  if is_frozen(w):
    return None
  if not isinstance(w, Weight):
    return g
  if w.parts and g.ndim == len(w.shape):
    g = w.parts.of_whole(g)
  if (sums := sums_of(w)) is not None and g.ndim == len(w.shape):
    g = sums.plus(g)
  return Weight(None, _stored_gradient(w, g), None, None, w.quant, parts=w.parts)


def value(tree):
  """`compute_copy` of every parameter of a tree, differentiable."""
  return jax.tree.map(lambda x: _read(x) if is_stored(x) else x, tree, is_leaf=is_stored)


@jax.custom_vjp
def _read(w):
  return compute_copy(w)


_read.defvjp(lambda w: (compute_copy(w), residual_view(w)), lambda w, g: (cotangent(w, g),))


def parts_of(w) -> Parts | None:
  """Of a parameter's gradient, see Weight."""
  return w.parts if isinstance(w, Weight) else None


@jax.custom_vjp
def terms(w):
  """`compute_copy` of a parameter with Parts, once for each of them: [parts, *shape].

  The cotangents of its copies are the terms of the parameter's.
  """
  value = compute_copy(w)
  return jnp.broadcast_to(value[None], (w.parts.count, *value.shape))


terms.defvjp(lambda w: (terms(w), residual_view(w)), lambda w, g: (cotangent(w, g),))


def dequantize_tree(tree):
  """Every parameter or moment of a tree as a float32 array."""
  return jax.tree.map(
    lambda x: x.unpack() if isinstance(x, QuantizedTensor | SplitFloat32 | StoredMatrix) else x,
    tree,
    is_leaf=is_stored,
  )


def grad_placeholder(param, quant: Quant | None, lead: int, parts: Parts | None = None):
  """Zeros like the gradient of a parameter.

  Args:
    param: array, QuantizedTensor or SplitFloat32, or anything with a shape.
    quant: format of its gradient; None for float32.
    lead: number of first axes along which every entry is a tensor with scales of its own.
    parts: of a float32 gradient; their axis comes after those.
  """
  if quant is None:
    counts = (parts.count,) if parts else ()
    return jnp.zeros((*param.shape[:lead], *counts, *param.shape[lead:]), jnp.float32)
  like = jax.ShapeDtypeStruct(param.shape, jnp.float32)
  key = jax.eval_shape(jax.random.key, 0)
  packed = jax.eval_shape(
    lambda x, key: quantized_tensor.pack(x, quant, lead=lead, key=key), like, key
  )
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), packed)


def _stored_gradient(w: Weight, g):
  """g in its format: float32 or QuantizedTensor. The scale is NaN if g is not finite."""
  if w.quant is None:
    return g
  stored = quantized_tensor.pack(g, w.quant, key=w.key, autoscale=w.autoscale)
  if stored.scale is None:
    return stored
  # An infinity saturates in 8 bits and would pass for a large gradient.
  return dataclasses.replace(stored, scale=jnp.where(jnp.isfinite(g).all(), stored.scale, jnp.nan))
