"""The small operations of a decoder, each computed in float32 and returned in the input's dtype.

Their names are scopes of the compiled program, by which a profile tells where time went.
"""

import jax
import jax.numpy as jnp


@jax.named_scope("norm")
def rms_norm(x, weight_D, eps: float):
  """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""
  x32 = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
  return (x32 * scale * weight_D).astype(x.dtype)


def add_bias(x, bias):
  """x + bias; the bias's gradient is summed in float32."""
  return (x.astype(jnp.float32) + bias).astype(x.dtype)


@jax.named_scope("swiglu")
def silu_mul(gate, up):
  """silu(gate) * up (Shazeer 2020, arXiv:2002.05202 §2)."""
  return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


@jax.named_scope("swiglu")
def silu_mul_gradients(g, gate, up):
  """Gradients of gate and up from that of silu_mul."""
  return jax.vjp(silu_mul, gate, up)[1](g)


@jax.named_scope("rope")
def rotate(x_BLHK, cos_BLK, sin_BLK):
  """Rotary position embedding, halves layout: pairs are (i, i + K/2).

  Args:
    x_BLHK: queries or keys.
    cos_BLK: float32, cosine of each channel's angle, K/2 angles repeated twice.
    sin_BLK: the same for the sine.
  """
  first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([-second, first], axis=-1)
  x32_BLHK = x_BLHK.astype(jnp.float32) * cos_BLK[:, :, None] + turned * sin_BLK[:, :, None]
  return x32_BLHK.astype(x_BLHK.dtype)


@jax.custom_vjp
def scale_fwd(x, factor):
  """x * factor, whose gradient does not have the factor."""
  return (x * factor).astype(x.dtype)


@jax.custom_vjp
def scale_bwd(x, factor):
  """x, whose gradient is multiplied by the factor."""
  del factor
  return x


scale_fwd.defvjp(lambda x, factor: (scale_fwd(x, factor), None), lambda _, g: (g, None))
scale_bwd.defvjp(lambda x, factor: (x, factor), lambda c, g: ((g * c).astype(g.dtype), None))
