"""Smooth-SwiGLU: the feed-forward layer with its linear branch brought to 1 before quantization.

Source: Fishman et al. 2024 (arXiv:2409.12517) §4.3. Late in a long training the gate and up
weights of a channel align; the channel then grows with the square of its input, and a scale from
past steps mispredicts it. Here |up| / s <= 1 enters the product, s being up's largest magnitude

  per channel  down_F[s * w] of silu(gate) * (up / s): the paper's; s multiplies rows of down's
               weight before it is quantized, and can be folded into the weights for good (`fold`)
  per token    s * down of silu(gate) * (up / s): what the paper's code does

The factor that grows linearly, silu(gate), stays, and s goes elsewhere: per channel into the range
of down's weight, per token into that of the gradient that down takes. s is a power of two, so that
without quantization both are plain SwiGLU to the bit, forward and backward, and a constant for
differentiation: the layer does not depend on it. Per channel it is taken over all tokens of a
microbatch, on all devices, so that tokens share it as they share the scale of a tensor.

s is known only when all of up is: these forms write up a second time, divided by it, and the
gradients of gate and up, which `swiglu_mlp` computes inside the quantizer.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fp8jax.ops import dots, prologue, stored_params
from fp8jax.recipe.quant import Quant

# The smallest amax that is brought to 1. An up that is 0 everywhere would divide by it, and rows of
# down's weight times less than this would lose their gradients beside others.
EPSILON = np.float32(2.0**-24)
# Of the largest power of two whose reciprocal is normal, biased.
_MAX_EXPONENT = 253


def per_channel(eqns, x, ws, sites, name: str, save: Quant | None = None):
  """`swiglu_mlp` with one s per channel, folded into down's weight.

  Args and result are those of `swiglu_mlp`; gate and up end with the letter that down contracts,
  which is the first of its weight. Of down's weight a delayed or static scale would know other s:
  its scale is current here, whatever the recipe says.
  """
  gate, up = _gate_up(eqns, x, ws, sites, name)
  s_F = channel_scales(up)
  h = prologue.silu_mul(gate, _times(up, 1 / s_F), save=save)
  down = stored_params.value(ws[2])
  w = down * s_F.reshape(-1, *(1,) * (down.ndim - 1))
  site = dataclasses.replace(sites[2], recipe=sites[2].recipe.with_current_scales("w"))
  return dots.dot(eqns[2], h, w, site)


def per_token(eqns, x, ws, sites, name: str, save: Quant | None = None):
  """`swiglu_mlp` with one s per token, taken back after down. It cannot be folded into weights."""
  gate, up = _gate_up(eqns, x, ws, sites, name)
  s = _power_of_two(jnp.max(_magnitude(up), axis=-1, keepdims=True))
  h = prologue.silu_mul(gate, _times(up, 1 / s), save=save)
  return _times(dots.dot(eqns[2], h, ws[2], sites[2]), s)


def channel_scales(up):
  """float32 [F], powers of two: s of up [..., F]."""
  return _power_of_two(jnp.max(_magnitude(up), axis=tuple(range(up.ndim - 1))))


@jax.jit
def fold(p, s_F):
  """The parameters of the plain SwiGLU that multiplies what `per_channel` does at these s.

  Exact, for powers of two: without quantization nothing changes, with it up / s is what is made
  quantized. Leading dimensions, if there are any, are alike: [N, D, F], [N, F, D] and [N, F].
  """
  return {**p, "up": p["up"] / s_F[..., None, :], "down": p["down"] * s_F[..., :, None]}


def alignment(p):
  """{"down": float32 [...]}: the largest |cosine| over channels between the weights [..., D, F] of
  gate and up, which make what down reads."""
  gate_DF, up_DF = (stored_params.compute_copy(p[name]) for name in ("gate", "up"))
  squares = jnp.sum(gate_DF * gate_DF, axis=-2) * jnp.sum(up_DF * up_DF, axis=-2)
  cosine = jnp.sum(gate_DF * up_DF, axis=-2) * jax.lax.rsqrt(jnp.where(squares > 0, squares, 1.0))
  return {"down": jnp.max(jnp.abs(cosine), axis=-1)}


def _gate_up(eqns, x, ws, sites, name: str):
  gate_up = dots.dots(eqns[:2], x, ws[:2], sites[:2])
  return (checkpoint_name(y, name) for y in gate_up)


def _magnitude(x):
  # Whether a maximum passes NaN on depends on the backend; x still holds it.
  return jnp.where(jnp.isnan(x), 0.0, jnp.abs(x)).astype(jnp.float32)


def _power_of_two(amax):
  """The smallest not below amax and EPSILON, by its bits."""
  amax = jax.lax.stop_gradient(jnp.maximum(amax, EPSILON))
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  biased = jnp.minimum((bits + (2**23 - 1)) >> 23, _MAX_EXPONENT)
  return jax.lax.bitcast_convert_type(biased << 23, jnp.float32)


@jax.named_scope("swiglu")
def _times(x, factor):
  return (x.astype(jnp.float32) * factor).astype(x.dtype)
