"""Activations that are computed where they are read.

What a norm gives, or silu(gate) * up, is read by linear layers only. Where all of them make it
narrow in a kernel, that kernel computes it on the way (kernels/quantize/prologues.py) and nothing
wide is written; elsewhere it is computed before them, as any other activation is. Which of the two
is decided by those who read it (activations.can_produce): a model says what, never how.
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
  """function(*sources, *constants), not computed yet.

  Attributes:
    sources: arrays that it is differentiated with respect to; the first has its shape and dtype,
      which are also those of all its results if they are several.
    function: the plain function, of which `producer` is the kernel's version.
    operands: (*sources, *constants) -> (matrices, factors) that the producer takes; matrices have
      the shape of the result, factors that of its leading or of its trailing dimensions.
    constants: hashable.
    keep: how sources of the result's shape wait for the backward pass; None: as they are, or as
      what differentiation makes of the plain function.
  """

  sources: tuple[Any, ...]
  function: Callable = dataclasses.field(metadata=dict(static=True))
  producer: prologues.Producer = dataclasses.field(metadata=dict(static=True))
  operands: Callable = dataclasses.field(metadata=dict(static=True))
  constants: tuple = dataclasses.field(default=(), metadata=dict(static=True))
  keep: Quant | None = dataclasses.field(default=None, metadata=dict(static=True))

  @property
  def shape(self) -> tuple[int, ...]:
    return self.sources[0].shape

  @property
  def dtype(self):
    return self.sources[0].dtype

  def value(self):
    """The array, or a tuple of several."""
    return _plainly(self) if self.keep is None else _and_keep(self)

  def kept(self) -> "Prologue":
    """It as it waits for the backward pass, of use to `restored` alone."""
    if self.keep is None:
      return self
    sources = (residuals.keep(s, self.keep) if s.shape == self.shape else s for s in self.sources)
    return dataclasses.replace(self, sources=tuple(sources))

  def restored(self, dtype) -> "Prologue":
    """What waited, its matrices in `dtype` again."""
    sources = tuple(residuals.restored(s, dtype) for s in self.sources)
    return dataclasses.replace(self, sources=sources)

  def made_of(self):
    """What the producer takes: (matrices, factors)."""
    return self.operands(*self.sources, *self.constants)

  def shapes_made_of(self):
    """The same, without computing anything; sources may be jax.ShapeDtypeStruct."""
    return jax.eval_shape(lambda sources: self.operands(*sources, *self.constants), self.sources)

  def pull(self, g) -> "Prologue":
    """Cotangents of the sources, in their places, from that of the value."""
    _, pull = jax.vjp(lambda *sources: self.function(*sources, *self.constants), *self.sources)
    return dataclasses.replace(self, sources=pull(g))


def rms_norm(x, weight_D, eps: float, *, keep: Quant | None = None) -> Prologue:
  """basic.rms_norm, later."""
  return Prologue((x, weight_D), elementwise.rms_norm, prologues.RMS_NORM, _of_norm, (eps,), keep)


def silu_mul(gate, up, *, keep: Quant | None = None) -> Prologue:
  """basic.silu_mul, later."""
  return Prologue((gate, up), elementwise.silu_mul, prologues.SWIGLU, _matrices, keep=keep)


def silu_mul_gradients(g, gate, up) -> Prologue:
  """basic.silu_mul_gradients, later."""
  sources = (g, gate, up)
  return Prologue(sources, elementwise.silu_mul_gradients, prologues.SWIGLU_BACKWARD, _matrices)


def value(t):
  """An array of what may be one already."""
  return t.value() if isinstance(t, Prologue) else t


def _plainly(t: Prologue):
  return t.function(*t.sources, *t.constants)


_and_keep = jax.custom_vjp(_plainly)
_and_keep.defvjp(
  lambda t: (_plainly(t), t.kept()), lambda kept, g: (kept.restored(g.dtype).pull(g),)
)


@jax.named_scope("norm")
def _of_norm(x, weight_D, eps: float):
  return (x,), (prologues.rms_scale(x, eps), weight_D)


def _matrices(*sources):
  return sources, ()
