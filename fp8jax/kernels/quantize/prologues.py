"""Prologues: elementwise functions of matrices, with a factor per row or per column, computed
inside the quantizer. A BF16 matrix that nobody else reads is then never written.

A tile is computed in float32, rounded to the matrices' dtype as if it had been written and read
(that is what the operations of ops/elementwise.py return), and then quantized.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Producer:
  """A function of float32 tiles.

  Attributes:
    matrices: how many [R, C] it takes.
    factors: 0 for a factor per row [R], 1 for one per column [C], in the order it takes them.
    results: how many matrices it gives.
    function: (*matrices, *factors) -> results; factors are broadcast over the tile. It maps zeros
      to zeros: tiles that stick out are filled with them.
  """

  name: str
  matrices: int
  factors: tuple[int, ...]
  results: int
  function: Callable


def _sigmoid(x):
  return 1.0 / (1.0 + jnp.exp(-x))


def _swiglu(gate, up):
  return (gate * _sigmoid(gate) * up,)


def _swiglu_backward(g, gate, up):
  s = _sigmoid(gate)
  return g * up * (s * (1.0 + gate * (1.0 - s))), g * (gate * s)


# basic.rms_norm; factors: the reciprocal of every row's root mean square, the weight.
RMS_NORM = Producer("rms_norm", 1, (0, 1), 1, lambda x, scale, weight: (x * scale * weight,))
# basic.silu_mul of gate and up.
SWIGLU = Producer("swiglu", 2, (), 1, _swiglu)
# Gradients of gate and up from that of silu_mul, gate and up.
SWIGLU_BACKWARD = Producer("swiglu_backward", 3, (), 2, _swiglu_backward)
# The matrix itself.
IDENTITY = Producer("identity", 1, (), 1, lambda x: (x,))


def rms_scale(x, eps: float):
  """float32 [R]: RMS_NORM's factor per row of x [R, C]."""
  x32 = x.astype(jnp.float32)
  return jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1) + eps)
