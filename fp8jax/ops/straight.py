"""How the gradients of x and w pass the rounding of the forward product's operands.

Straight through, a gradient of what was multiplied is that of the tensor. A recipe may instead
multiply it elementwise, by a slope or a mask (`Recipe.estimate_w`, `estimate_x`), and where its
backward products stay in the space that the forward operands were rotated into, it is rotated back
here: mask first (arXiv:2505.14669, algorithm 1).
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.formats import Format
from fp8jax.ops import collectives, operands, prologue
from fp8jax.ops.gemm_spec import GemmSpec, Role
from fp8jax.ops.quantizer import Quantizer
from fp8jax.ops.site import ScalingInputs
from fp8jax.ops.stored_params import Parts
from fp8jax.quantization import hadamard, quantize, rounding, scaled_matrix
from fp8jax.recipe.estimators import Estimator, SlopeAlone, TrustMask
from fp8jax.recipe.quant import CURRENT, Quant


def is_needed(spec: GemmSpec, role: Role) -> bool:
  """Whether the gradient of the tensor of X_FWD or W_FWD is anything but straight through."""
  return _estimator(spec, role) is not None or spec.rotates_back(role)


def _estimator(spec: GemmSpec, role: Role) -> Estimator | None:
  return spec.recipe.estimate_x if role.tensor == "x" else spec.recipe.estimate_w


def _staircase(spec: GemmSpec, role: Role) -> Quant:
  """That of the forward operand, or of the estimator where no product rounds."""
  estimator = _estimator(spec, role)
  return estimator.quant if isinstance(estimator, SlopeAlone) else cast(Quant, spec.quant(role))


def axes_of_terms(spec: GemmSpec, parts: Parts | None) -> tuple[str, ...]:
  """The mesh axes whose devices keep their terms of a weight's gradient: those of its Parts, or
  none where the product does not split its tokens so."""
  axes = parts.axes if parts else ()
  return axes if {*axes} <= {*spec.layout.act_axes_of(spec.letters.tokens)} else ()


def cotangent(spec: GemmSpec, role: Role, t, d, inputs: ScalingInputs, dtype, later=()):
  """The gradient of x or w from that of what the forward product multiplied.

  Args:
    role: X_FWD or W_FWD.
    t: x [acts], an array or a Prologue, or w [at rest].
    d: like t; with `later` terms of it, [terms, ...]: masks and rotations are linear.
    dtype: of the result.
    later: mesh axes of the terms.

  Raises:
    ValueError: a shard of w holds no whole tiles or blocks of the forward operand.
  """
  if not is_needed(spec, role):
    return d
  t = prologue.value(t)
  (letters, free, contracted), layout = spec.letters_of(role), spec.layout
  axes_of = layout.act_axes if role.tensor == "x" or layout.is_manual else layout.weight_axes
  amax_axes = tuple(tuple(a for c in group for a in axes_of(c)) for group in (free, contracted))
  quantizer = Quantizer.of(spec, role, inputs)
  quant = _staircase(spec, role)

  def local(t, d):
    batch, sizes = spec.letters.batch, dict(zip(letters, t.shape))
    place = layout, spec.rows_rotation(role)
    if role.tensor == "w" and not collectives.tiles_fit(sizes, free, contracted, quant, *place):
      raise ValueError(
        f"recipe {spec.recipe.name!r} estimates the gradient of {spec.name!r} by scales of "
        f"{quant.tile}, and a shard {t.shape} holds no whole tiles or rotated blocks; take a "
        f"smaller {layout.smaller([a for of in amax_axes for a in of])}"
      )
    matrix, contraction = operands.flatten(t, letters, free, contracted, batch)
    gradient, _ = operands.flatten(d[0] if later else d, letters, free, contracted, batch)
    one = functools.partial(
      _finished, spec, role, quantizer, contraction=contraction, amax_axes=amax_axes
    )
    result = (jax.vmap(one) if batch else one)(matrix, gradient)
    order = batch + (contracted + free if contraction == 0 else free + contracted)
    result = result.reshape([sizes[c] for c in order])
    result = jnp.transpose(result, [order.index(c) for c in letters]).astype(dtype)
    return result[None] if later else result

  of_t = layout.act_spec(letters) if role.tensor == "x" else layout.weight_spec(letters)
  of_d = jax.sharding.PartitionSpec(later, *of_t) if later else of_t
  return collectives.on_mesh(local, layout, (of_t, of_d), of_d)(t, d)


def _finished(spec, role, quantizer: Quantizer, matrix, gradient, *, contraction, amax_axes):
  """One matrix of gradients, masked and rotated back."""
  quant, estimator = _staircase(spec, role), _estimator(spec, role)
  gradient = gradient.astype(jnp.float32)
  if estimator is not None:
    made = quantize.quantize(
      matrix, quant, contraction=contraction, amax_axes=amax_axes, key=quantizer.key,
      amax=None if quant.source == CURRENT else quantizer.amax, signs_key=quantizer.signs_key,
      tensor_amax=quantizer.joint_amax,
    )  # fmt: skip
    scale = made.scale
    for axis in (0, 1):
      scale = scaled_matrix.expand(scale, axis, made.tile[axis], made.shape[axis])
    wide = matrix.astype(jnp.float32)
    wide = quantize.without_outliers(wide, quant, contraction, amax_axes)
    if quant.rotation:
      wide = hadamard.rotate(wide, quant.rotation, contraction, quantizer.signs_key)
    values = wide * (1.0 / (scale if contraction else scale.T))
    gradient = gradient * _slope(values, quant.format, estimator)
  if quant.rotation and spec.rotates_back(role):
    key = quantizer.signs_key
    gradient = hadamard.rotate(gradient, quant.rotation, contraction, key, inverse=True)
  return gradient


def _slope(values, format: Format, estimator: Estimator):
  """float32: the derivative of rounding `values` to the grid, as the estimator has it."""
  magnitude = jnp.abs(values)
  # A tile's largest is the format's but for the rounding of its scale; beyond it nothing moves.
  is_held = magnitude <= np.float32(format.max * (1 + 2.0**-16))
  if isinstance(estimator, TrustMask):
    return is_held.astype(jnp.float32)
  _, inverse = rounding.step(jnp.minimum(magnitude, np.float32(format.max)), format)
  steps = jnp.minimum(magnitude, np.float32(format.max)) * inverse
  place = jnp.abs(2.0 * (steps - jnp.floor(steps)) - 1.0)
  power = np.float32(1 / estimator.power)
  slope = jnp.minimum(power * place ** (power - 1), np.float32(estimator.largest))
  return jnp.where(is_held, slope, 0.0)
