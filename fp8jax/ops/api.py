"""The public functions: a product in the precision of a recipe, and a matrix in that of a Quant.

`fp8jax` exports them. They take recipes by name or by value where the inner modules take sites.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.ops import linear, site_checks
from fp8jax.ops import site as site_lib
from fp8jax.ops.site import Site
from fp8jax.quantization import quantize as quantize_lib
from fp8jax.quantization.quantized_tensor import QuantizedTensor
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import Hadamard, Quant, Scale


def dot(eqn: str, x, w, recipe: str | Recipe | Site, *, key=None, out_dtype=None) -> jax.Array:
  """Einsum of an activation and a weight; the recipe gives the precision of its three GEMMs.

  It works under jit, grad, remat, scan, vmap and shard_map. The gradients are GEMMs of the recipe
  too. Under vmap every mapped element has scales of its own. A weight without the mapped axis then
  gets the sum of the elements' gradients, as in JAX.

  Args:
    eqn: e.g. "BLD,DF->BLF" or "...D, DF -> ...F". Letters in x and w but not in y are contracted,
      letters in all three are batch dimensions. "..." stands for the remaining dimensions of x, as
      in NumPy, but nothing is broadcast.
    x: activation, floating-point; its gradient has its dtype. float32 subnormals count as 0, in w
      too, as they do in every product of JAX on a CPU.
    w: weight, usually the float32 master; its gradient has its dtype.
    recipe: a name in `RECIPES`, also with options: "rowwise(accumulate=fast)"; a Recipe; or a Site
      (`site.single`), which a recipe with delayed or static scales needs.
    key: random key of this product and step, for recipes that round stochastically; others ignore
      it. A Site has a key of its own.
    out_dtype: dtype of y; default x's.

  Returns:
    y, with the letters after "->".

  Raises:
    ValueError: the equation does not fit the shapes, the recipe is unknown, it needs a Site or a
      key, or a Site is used twice in one trace.
    TypeError: an operand is no floating-point array, out_dtype has 8 bits or is none of
      floating-point, key is no random key, or recipe is none of the three.

  Source: the named recipe's; fp8jax/recipe/library.py cites it.

  Example:
    >>> import jax.numpy as jnp, fp8jax
    >>> y = fp8jax.dot("...D, DF -> ...F", jnp.ones((2, 16)), jnp.ones((16, 4)), "block_128")
    >>> y[0].round(3)
    Array([16., 16., 16., 16.], dtype=float32)
  """
  return linear.dot(eqn, x, w, _site_of(recipe, key), out_dtype=out_dtype)


def dot_general(
  lhs, rhs, dimension_numbers, recipe: str | Recipe | Site, precision=None,
  preferred_element_type=None, *, out_sharding=None, key=None,
) -> jax.Array:  # fmt: skip
  """`jax.lax.dot_general` of an activation and a weight; see `dot`.

  Args:
    lhs: activation, any rank, floating-point.
    rhs: weight, any rank, floating-point.
    dimension_numbers: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), as in JAX.
    recipe: as in `dot`. JAX has precision in its place.
    precision, out_sharding: None; the recipe is the precision.
    preferred_element_type: dtype of the result; default lhs's.
    key: as in `dot`.

  Returns:
    Batch dimensions, then the free dimensions of lhs, then those of rhs, as in JAX.

  Raises:
    ValueError, TypeError: as `dot`; precision or out_sharding is given.

  Source: the signature is that of jax.lax.dot_general.

  Example:
    >>> import jax.numpy as jnp, fp8jax
    >>> numbers = (((1,), (0,)), ((), ()))
    >>> fp8jax.dot_general(jnp.ones((2, 16)), jnp.ones((16, 4)), numbers, "block_128").shape
    (2, 4)
  """
  return linear.fp8_dot_general(
    lhs, rhs, dimension_numbers, _site_of(recipe, key), precision, preferred_element_type,
    out_sharding=out_sharding,
  )  # fmt: skip


def quantize(x, quant: Quant, *, axis: int = -1, amax=None, key=None) -> ScaledMatrix:
  """A matrix in a low-bit format under scales: x = data * scale, up to rounding.

  Args:
    x: [m, n], floating-point. `dot` reads a tensor of higher rank as the matrix of its contracted
      letters and of all others.
    quant: format, tile, scale, rounding and transform.
    axis: the axis that the GEMM contracts, 0 or 1, -1 being the last. The second extent of
      quant.tile, and a Hadamard transform, lie along it.
    amax: float32 scalar, the largest magnitude that the scale is made from, in x's units; for a
      delayed or static quant.source, and for no other.
    key: random key, for stochastic rounding.

  Returns:
    ScaledMatrix, a pytree: data [m, n] in quant.format, scale float32 [tiles along m, tiles along
    n], and the tile as it lies in x. With a Hadamard transform it is that of the rotated x.

  Raises:
    ValueError: x is no matrix or is empty, axis is neither 0 nor 1, quant is not for a GEMM
      operand, or amax or key is missing or unwanted.
    TypeError: x is no floating-point array, or quant is no Quant.

  Source: OCP OFP8 v1.0, saturating conversion; fp8jax/quantization/quantize.py cites the scales'.

  Example:
    >>> import jax.numpy as jnp, fp8jax
    >>> q = fp8jax.quantize(jnp.ones((4, 256)), fp8jax.Quant(fp8jax.E4M3, tile=(1, 128)))
    >>> q.data.dtype.name, q.data.shape, q.scale.shape
    ('float8_e4m3fn', (4, 256), (4, 2))
  """
  if not isinstance(quant, Quant):
    raise TypeError(f"quant is {quant!r}, expected a Quant, e.g. Quant(E4M3, tile=(1, 128))")
  site_checks.refuse_dtypes(x, ())
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
  if key is not None:
    site_checks.refuse_key(key)
  quantized = quantize_lib.quantize(x, quant, contraction=axis % 2, amax=amax, key=key)
  return quantized if axis % 2 else quantized.T


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


def _site_of(recipe: str | Recipe | Site, key) -> Site:
  """The site itself, or one for a recipe that needs none."""
  if isinstance(recipe, Site):
    if key is not None:
      raise ValueError("the site has a key of its own; leave key out, or set it: site.with_keys")
    return recipe
  if isinstance(recipe, str):
    recipe = rules.recipe_by_name(recipe)
  if not isinstance(recipe, Recipe):
    raise TypeError(
      f"the fourth argument is {recipe!r}, expected a recipe's name ('block_128'), a Recipe or a "
      "Site (fp8jax.site.single('tensor_delayed'))"
    )
  if recipe.is_stateful:
    name = recipe.name
    raise ValueError(
      f"recipe {name!r} takes scales from past steps, and its name remembers none. Keep a Site: "
      f"site = fp8jax.site.single({name!r}); give it in place of the name; begin with "
      "site = fp8jax.site.calibrate(site, loss), loss being a function of the site; after every "
      "step site = fp8jax.site.update(site, jax.grad(loss)(site))"
    )
  if recipe.is_random and key is None:
    raise ValueError(
      f"recipe {recipe.name!r} rounds stochastically: give key=jax.random.key(...), another one to "
      "every product and in every step"
    )
  if recipe.is_random:
    site_checks.refuse_key(key)
  return site_lib.unobserved(recipe, key=key if recipe.is_random else None)
