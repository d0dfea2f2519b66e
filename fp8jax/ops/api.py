"""A matrix in the precision of a Quant, and back: the public functions beside dots.py's."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from fp8jax.ops import derivative, site_checks
from fp8jax.quantization import quantize as quantize_lib
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.quant import Hadamard, Quant, Scale


def quantize(x, quant: Quant, *, axis: int = -1, amax=None, key=None) -> ScaledMatrix:
  """A matrix in a low-bit format under scales: x = data * scale, up to rounding.

  Args:
    x: [m, n], floating-point. `dot` reads a tensor of higher rank as the matrix of its contracted
      letters and of all others.
    quant: format, tile, scale, rounding and transform.
    axis: the axis that the GEMM contracts, 0 or 1, -1 being the last. The second extent of
      quant.tile, and a Hadamard transform, lie along it.
    amax: float32 scalar >= 0, the largest magnitude that the scale is made from, in x's units; for
      a delayed or static quant.source, and for no other.
    key: random key, for stochastic rounding and the fresh signs of a Hadamard transform.

  Returns:
    ScaledMatrix, a pytree: data [m, n] in quant.format, scale float32 [tiles along m, tiles along
    n], and the tile as it lies in x. With a Hadamard transform it is that of the rotated x.

  Raises:
    ValueError: x is no matrix or is empty, axis is neither 0 nor 1, quant is not for a GEMM
      operand, or amax or key is missing or unwanted.
    TypeError: x is no floating-point array, quant is no Quant, or x is differentiated.

  Source: OCP OFP8 v1.0, saturating conversion; fp8jax/quantization/quantize.py cites the scales'.

  Example:
    >>> import jax.numpy as jnp, fp8jax
    >>> q = fp8jax.quantize(jnp.ones((4, 256)), fp8jax.Quant(fp8jax.E4M3, tile=(1, 128)))
    >>> q.data.dtype.name, q.data.shape, q.scale.shape
    ('float8_e4m3fn', (4, 256), (4, 2))
  """
  if not isinstance(quant, Quant):
    raise TypeError(f"quant is {quant!r}, expected a Quant, e.g. Quant(E4M3, tile=(1, 128))")
  site_checks.refuse_dtypes(x, (), least_bytes=1)
  if len(x.shape) != 2 or 0 in x.shape:
    raise ValueError(
      f"x has shape {tuple(x.shape)}, expected a matrix with elements; give all axes but the "
      "contracted one as one: x.reshape(-1, x.shape[-1])"
    )
  if axis not in (-2, -1, 0, 1):
    raise ValueError(f"axis={axis}, expected 0 or 1, or -1 or -2 from the end: x is a matrix")
  is_rotation = quant.transform is None or isinstance(quant.transform, Hadamard)
  if quant.scale is Scale.NONE or quant.keeps_nonzero or not is_rotation:
    raise ValueError(
      f"{quant} is for storage: it has no scale, or data * scale is not the value; leave scale, "
      "transform and keeps_nonzero out, or use fp8jax.quantization.quantized_tensor.pack"
    )
  is_fresh = quant.rotation is not None and quant.rotation.signs == "fresh"
  _check(quant, amax, key, is_fresh)
  x = derivative.refused(
    jnp.asarray(x), "x is differentiated through fp8jax.quantize, and rounding has no derivative; "
    "give it jax.lax.stop_gradient(x), or use fp8jax.dot, whose gradient passes straight through",
  )  # fmt: skip
  # Signs and roundings are drawn apart.
  key, signs_key = jax.random.split(key) if is_fresh and key is not None else (key, None)
  quantized = quantize_lib.quantize(
    x, quant, contraction=axis % 2, amax=amax, key=key, signs_key=signs_key
  )
  return quantized if axis % 2 else quantized.T


def _check(quant: Quant, amax, key, is_fresh: bool):
  """Raises for a key that is none or that nothing draws from, and for an amax that is none."""
  if key is not None:
    site_checks.refuse_key(key)
    if not (quant.rounds_randomly or is_fresh):
      raise ValueError(f"key={key!r} with {quant}, which draws nothing; leave it out")
  if amax is not None:
    amax = jnp.asarray(amax, jnp.float32)
    if amax.size != 1 or not isinstance(amax, core.Tracer) and amax.ravel()[0] < 0:
      raise ValueError(f"amax={amax}, expected one number >= 0, the largest magnitude of x")


def dequantize(q: ScaledMatrix | QuantizedTensor, dtype: Any = jnp.float32) -> jax.Array:
  """The values of a quantized tensor: data * scale, computed in float32.

  Args:
    q: what `quantize` returns; or a QuantizedTensor, e.g. a moment of `scale_by_adam`.
    dtype: of the result.

  Returns:
    An array of the quantized tensor's shape.

  Raises:
    TypeError: q is something else.

  Source: OCP MX v1.0 §5.1, value = scale * element.

  Example:
    >>> import jax.numpy as jnp, fp8jax
    >>> fp8jax.dequantize(fp8jax.quantize(jnp.array([[448.0, 101]]), fp8jax.Quant(fp8jax.E4M3)))
    Array([[448., 104.]], dtype=float32)
  """
  if isinstance(q, QuantizedTensor):
    return q.unpack().astype(dtype)
  if not isinstance(q, ScaledMatrix):
    raise TypeError(f"q is a {type(q).__name__}, expected a ScaledMatrix or a QuantizedTensor")
  return q.dequantize(dtype)
