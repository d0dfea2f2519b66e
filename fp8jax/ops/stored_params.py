"""Parameters as a model reads them, however they are kept, and their gradients as these are kept.

A parameter is an array or a stored form of one: `QuantizedTensor` (16 bits, or fewer with scales)
or `SplitFloat32` (BF16 and a remainder). Products use its `value`. A dot computes the value itself:
no high-precision copy is a residual.

In training each node, and each parameter whose gradient is kept narrow, is paired with a sink,
zeros in the form of that gradient: the gradient is the sink's cotangent, made where a layer's
backward pass ends, so that a wide one exists of a layer only. Sinks are never read; nothing of them
is in the compiled program.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.quantization import quantized_tensor
from fp8jax.quantization.bf16_remainder import SplitFloat32
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.recipe.quant import Quant


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
  """A parameter in training.

  Attributes:
    kept: an array, QuantizedTensor or SplitFloat32.
    sink: float32 zeros, or QuantizedTensor zeros, like its gradient; None for residuals.
    key: jax random key of the gradient's rounding, of each layer where parameters are stacked.
    room: what `quantized_tensor.pack` takes under that name, or None; of each layer too.
    quant: how the gradient is kept; None for float32.
  """

  kept: Any
  sink: Any
  key: Any
  room: Any = None
  quant: Quant | None = dataclasses.field(default=None, metadata=dict(static=True))

  @property
  def shape(self) -> tuple[int, ...]:
    return self.kept.shape

  @property
  def dtype(self):
    return jnp.dtype(jnp.float32)


def is_stored(x) -> bool:
  """Whether x is one parameter, whatever it is made of: for jax.tree.map's is_leaf."""
  return isinstance(x, QuantizedTensor | SplitFloat32 | Weight)


def compute_copy(w):
  """The array that is multiplied by: float32, of BF16 and remainder the BF16."""
  if isinstance(w, Weight):
    return compute_copy(w.kept)
  if isinstance(w, SplitFloat32):
    return w.high.astype(jnp.float32)
  return w.unpack() if isinstance(w, QuantizedTensor) else w


def residual_view(w):
  """What of a parameter the backward pass needs."""
  return dataclasses.replace(w, sink=None) if isinstance(w, Weight) else w


def without_grad_placeholders(tree):
  """`waiting` of every parameter of a tree."""
  return jax.tree.map(residual_view, tree, is_leaf=is_stored)


def with_grad_placeholders(tree):
  """The tree that `without_sinks` was given, of parameters that are not stacked."""

  def one(w):
    if not isinstance(w, Weight):
      return w
    return dataclasses.replace(w, sink=grad_placeholder(w.kept, w.quant, 0))

  return jax.tree.map(one, tree, is_leaf=is_stored)


def cotangent(w, g):
  """Of a parameter, from that of what `read` gave: for a custom_vjp that was given the node."""
  if not isinstance(w, Weight):
    return g
  return Weight(None, _kept_like(w, g), None, None, w.quant)


def value(tree):
  """`read` of every parameter of a tree, to be differentiated as it is."""
  return jax.tree.map(lambda x: _read(x) if is_stored(x) else x, tree, is_leaf=is_stored)


@jax.custom_vjp
def _read(w):
  return compute_copy(w)


_read.defvjp(lambda w: (compute_copy(w), residual_view(w)), lambda w, g: (cotangent(w, g),))


def dequantize_tree(tree):
  """float32 arrays of everything that is kept."""
  return jax.tree.map(
    lambda x: x.unpack() if isinstance(x, QuantizedTensor | SplitFloat32) else x,
    tree,
    is_leaf=is_stored,
  )


def grad_placeholder(param, quant: Quant | None, lead: int):
  """Zeros like the gradient of a parameter.

  Args:
    param: array, QuantizedTensor or SplitFloat32, or anything with a shape.
    quant: how its gradient is kept; None for float32.
    lead: so many first axes number tensors with scales of their own.
  """
  if quant is None:
    return jnp.zeros(param.shape, jnp.float32)
  like = jax.ShapeDtypeStruct(param.shape, jnp.float32)
  key = jax.eval_shape(jax.random.key, 0)
  made = jax.eval_shape(
    lambda x, key: quantized_tensor.pack(x, quant, lead=lead, key=key), like, key
  )
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)


def _kept_like(w: Weight, g):
  """g as it is kept: float32, or QuantizedTensor. What is not finite stays visible."""
  if w.quant is None:
    return g
  made = quantized_tensor.pack(g, w.quant, key=w.key, room=w.room)
  if made.scale is None:
    return made
  # An infinity saturates in 8 bits and would pass for a large gradient.
  return dataclasses.replace(made, scale=jnp.where(jnp.isfinite(g).all(), made.scale, jnp.nan))
