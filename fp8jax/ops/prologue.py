"""Prologues: elementwise inputs of linear layers that a quantizer can compute as it reads.

Only linear layers read the output of a norm, or silu(gate) * up. If a kernel quantizes it for all
of them, the kernel computes it too (kernels/quantize/prologues.py) and writes no BF16 array.
Otherwise it is computed before them like any activation. The linear layers decide
(operands.can_fuse_input); a model only says which function it is.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from fp8jax.kernels.quantize import prologues
from fp8jax.ops import elementwise, residuals
from fp8jax.recipe.quant import Quant


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prologue:
  """The activation function(*sources, *constants), not computed yet.

  Attributes:
    sources: arrays that it is differentiated with respect to; the first has its shape and dtype,
      which are also those of all its results if they are several.
    function: the plain function, of which `producer` is the kernel's version.
    operands: (*sources, *constants) -> (matrices, factors) that the producer takes; matrices have
      the shape of the result, factors that of its leading or of its trailing dimensions.
    constants: hashable.
    save: compresses residuals of the result's shape; None saves them as they are.
  """

  sources: tuple[Any, ...]
  function: Callable = dataclasses.field(metadata=dict(static=True))
  producer: prologues.Producer = dataclasses.field(metadata=dict(static=True))
  operands: Callable = dataclasses.field(metadata=dict(static=True))
  constants: tuple = dataclasses.field(default=(), metadata=dict(static=True))
  save: Quant | None = dataclasses.field(default=None, metadata=dict(static=True))

  @property
  def shape(self) -> tuple[int, ...]:
    return self.sources[0].shape

  @property
  def dtype(self):
    return self.sources[0].dtype

  def value(self):
    """The array, or a tuple of several. Its sources are saved for the backward pass, which computes
    it again: differentiation would save several float32 arrays of each."""
    return _value_and_compressed(self)

  def compressed(self) -> "Prologue":
    """The residual: itself with compressed sources, of use to `decompressed` alone."""
    quant = self.save
    if quant is None:
      return self
    sources = (residuals.compress(s, quant) if s.shape == self.shape else s for s in self.sources)
    return dataclasses.replace(self, sources=tuple(sources))

  def decompressed(self, dtype) -> "Prologue":
    """The inverse of `compressed`, within its rounding; matrices have `dtype`."""
    sources = tuple(residuals.decompress(s, dtype) for s in self.sources)
    return dataclasses.replace(self, sources=sources)

  def producer_operands(self):
    """(matrices, factors) that the producer takes."""
    return self.operands(*self.sources, *self.constants)

  def operand_shapes(self):
    """Shapes and dtypes of `producer_operands`; sources may be jax.ShapeDtypeStruct."""
    return jax.eval_shape(lambda sources: self.operands(*sources, *self.constants), self.sources)

  def vjp(self, g) -> "Prologue":
    """Cotangents of the sources, in their places, from the cotangent g of the value."""
    _, pull = jax.vjp(lambda *sources: self.function(*sources, *self.constants), *self.sources)
    return dataclasses.replace(self, sources=pull(g))


def rms_norm(x, weight_D, eps: float, *, save: Quant | None = None) -> Prologue:
  """elementwise.rms_norm as a prologue."""
  return Prologue(
    (x, weight_D), elementwise.rms_norm, prologues.RMS_NORM, _norm_operands, (eps,), save
  )


def silu_mul(gate, up, *, save: Quant | None = None) -> Prologue:
  """elementwise.silu_mul as a prologue."""
  return Prologue((gate, up), elementwise.silu_mul, prologues.SWIGLU, _matrices, save=save)


def silu_mul_gradients(g, gate, up) -> Prologue:
  """elementwise.silu_mul_gradients as a prologue."""
  sources = (g, gate, up)
  return Prologue(sources, elementwise.silu_mul_gradients, prologues.SWIGLU_BACKWARD, _matrices)


def value(t):
  """The array that a Prologue computes; an array as it is."""
  return t.value() if isinstance(t, Prologue) else t


def _value(t: Prologue):
  return t.function(*t.sources, *t.constants)


_value_and_compressed = jax.custom_vjp(_value)
_value_and_compressed.defvjp(
  lambda t: (_value(t), t.compressed()),
  lambda t, g: (t.decompressed(jax.tree.leaves(g)[0].dtype).vjp(g),),
)


@jax.named_scope("norm")
def _norm_operands(x, weight_D, eps: float):
  return (x,), (prologues.rms_scale(x, eps), weight_D)


def _matrices(*sources):
  return sources, ()
