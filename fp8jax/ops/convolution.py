"""Convolutions as products: patches of the input (im2col) times the kernel as a matrix.

Patches are the kernel's size times the input (divided by strides): a 3x3 convolution reads and
saves 9 times the elements, in the format of the recipe, which for FP8 is 2.25 times the bytes of
float32 input.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.ops import dots
from fp8jax.ops.site import Site
from fp8jax.recipe.gemm import Recipe


def conv_general_dilated(
  lhs, rhs, window_strides: Sequence[int], padding: str | Sequence[tuple[int, int]],
  lhs_dilation: Sequence[int] | None = None, rhs_dilation: Sequence[int] | None = None,
  dimension_numbers=None, feature_group_count: int = 1, batch_group_count: int = 1, *,
  recipe: str | Recipe | Site, out_dtype=None, key=None,
) -> jax.Array:  # fmt: skip
  """`jax.lax.conv_general_dilated` of an activation and a kernel; see `dots.dot`.

  Args:
    lhs, rhs: activation and kernel, with dimensions as dimension_numbers says.
    window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers: as in JAX.
    feature_group_count: groups are batch dimensions of the product, each with scales of its own.
    batch_group_count: 1.
    recipe, key: as in `dots.dot`.
    out_dtype: dtype of the result; default lhs's.

  Raises:
    ValueError: batch_group_count, padding by name of a dilated input, features that groups do not
      divide, and as `dots.dot`.
  """
  if batch_group_count != 1:
    raise ValueError(f"{batch_group_count=}: a product has no batch groups; leave it 1")
  # (batch, features, space...), (outputs, inputs, space...)
  of_lhs, of_rhs, of_out = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
  x = jnp.transpose(lhs, (of_lhs[0], *of_lhs[2:], of_lhs[1]))
  w = jnp.transpose(rhs, (*of_rhs[2:], of_rhs[1], of_rhs[0]))
  *window, inputs, outputs = w.shape
  groups, ones = feature_group_count, (1,) * len(window)
  if x.shape[-1] != groups * inputs or outputs % groups:
    raise ValueError(
      f"{feature_group_count=}: {x.shape[-1]} features, a kernel of {inputs} inputs and "
      f"{outputs} outputs; groups times inputs are the features, and groups divide the outputs"
    )
  between, apart = tuple(lhs_dilation or ones), tuple(rhs_dilation or ones)
  if isinstance(padding, str):
    if between != ones:
      raise ValueError(f"{padding=} with lhs_dilation={between}: give pairs of numbers, as for JAX")
    reach = [(k - 1) * d + 1 for k, d in zip(window, apart)]
    padding = lax.padtype_to_pads(x.shape[1:-1], reach, window_strides, padding)
  pads = [(0, 0, 0), *((*p, d - 1) for p, d in zip(padding, between)), (0, 0, 0)]
  reach = [(k - 1) * d + 1 for k, d in zip(window, apart)]
  there = [lo + n + (n - 1) * inner + hi for n, (lo, hi, inner) in zip(x.shape[1:-1], pads[1:-1])]
  if any(r > n for r, n in zip(reach, there)):
    raise ValueError(f"windows of {reach} elements do not fit into a padded input of {there}")
  patches = _patches(x, tuple(pads), tuple(window), tuple(window_strides), apart)
  n, *space = patches.shape[:-2]
  size = math.prod(window)
  patches = patches.reshape(-1, size, groups, inputs)
  if groups == 1:
    rows = patches.reshape(-1, size * inputs)
    y = dots.dot("BD,DF->BF", rows, w.reshape(-1, outputs), recipe, key=key, out_dtype=out_dtype)
  else:
    rows = jnp.transpose(patches, (2, 0, 1, 3)).reshape(groups, -1, size * inputs)
    kernel = w.reshape(size * inputs, groups, -1).transpose(1, 0, 2)
    y = dots.dot("GBD,GDF->GBF", rows, kernel, recipe, key=key, out_dtype=out_dtype)
    y = jnp.transpose(y, (1, 0, 2))
  y = y.reshape(n, *space, outputs)
  # Its axes are batch, space..., features.
  order = (of_out[0], *of_out[2:], of_out[1])
  return jnp.transpose(y, [order.index(i) for i in range(y.ndim)])


def _patches(x, pads, window, strides, dilation):
  """[N, space..., C] to [N, positions..., elements of the window, C], the order of a kernel.

  lax.conv_general_dilated_patches multiplies by ones and zeros, which makes NaN of a neighbour's
  infinity.
  """

  def take(x):
    x = lax.pad(x, jnp.zeros((), x.dtype), pads)
    reach = [(k - 1) * d for k, d in zip(window, dilation)]
    parts = []
    for place in itertools.product(*map(range, window)):
      start = [p * d for p, d in zip(place, dilation)]
      stop = [s + n - r for s, n, r in zip(start, x.shape[1:-1], reach)]
      parts.append(lax.slice(x, (0, *start, 0), (x.shape[0], *stop, x.shape[-1]), (1, *strides, 1)))
    return jnp.stack(parts, axis=-2)

  @jax.custom_vjp
  def taken(x):
    return take(x)

  def backward(_, g):
    # An element is in many patches: the sum of its gradients is float32, as in a convolution.
    (dx,) = jax.linear_transpose(take, jax.ShapeDtypeStruct(x.shape, jnp.float32))(
      g.astype(jnp.float32)
    )
    return (dx.astype(x.dtype),)

  taken.defvjp(lambda x: (take(x), None), backward)
  return taken(x)
