"""Claims sites, and refuses, while tracing, what would silently add observations up.

No trace shows a site closed over by a loop's body, given to two rematerialized functions, or
replicated into a `shard_map` with check_vma=False; nor that a caller averages or scales gradients.
So each product also gives the square roots of its amaxes, as the cotangent of `Site.roots`: a sum,
an average or a multiple of both has other roots, and `site.update` refuses it.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fp8jax.ops.gemm_spec import GemmSpec
from fp8jax.ops.site import ScalingInputs, Site


def refuse_dtypes(x, ws, out_dtype=None, least_bytes: int = 2):
  """Raises unless operands and result of a dot are arrays of real floating-point numbers.

  Raises:
    TypeError: no array; integers, booleans or complex numbers; fewer bytes than least_bytes, in
      which gradients would have no scale either.
  """
  if out_dtype is not None:
    dtype = jnp.dtype(out_dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
      raise TypeError(
        f"out_dtype is {dtype}, expected a floating-point dtype of 16 bits or more; for fewer, "
        "quantize the result: fp8jax.quantize(y, quant)"
      )
  for name, operand in (("x", x), *(("w", w) for w in ws)):
    if not hasattr(operand, "shape"):
      raise TypeError(
        f"{name} is a {type(operand).__name__}, expected an array; convert it with jnp.asarray"
      )
    # A parameter in several parts (stored_params.py) is floating-point by construction.
    dtype = jnp.dtype(getattr(operand, "dtype", jnp.float32))
    if not jnp.issubdtype(dtype, jnp.floating):
      raise TypeError(
        f"{name} is {dtype}, expected a floating-point dtype such as bfloat16 or float32; integers "
        "and complex numbers have no FP8 product: cast them first, or use jax.lax.dot_general"
      )
    if dtype.itemsize < least_bytes:
      raise TypeError(
        f"{name} is {dtype} without a scale, and its gradient would be, too; give numbers of 16 "
        "bits or more, which the recipe quantizes: fp8jax.dequantize(q), x.astype(jnp.bfloat16)"
      )


def refuse_key(key):
  """Raises TypeError unless `key` is a random key of JAX."""
  dtype = getattr(key, "dtype", None)
  if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32):
    raise TypeError(f"key is {key!r}, expected a random key: jax.random.key(0)")


def refuse_sums(name: str, x, tap, roots):
  """Raises if `vmap` maps over x, or devices inside `shard_map` have an x of their own each, and
  the site's tap, or its roots where it has some, are one.

  Raises:
    ValueError: the site's one observation would become a sum.
  """

  @jax.custom_batching.custom_vmap
  def both(x, own):
    del x
    return own

  @both.def_vmap
  def rule(axis_size, in_batched, x, own):
    del axis_size, x
    if any(jax.tree.leaves(in_batched[0])) and not in_batched[1]:
      raise ValueError(
        f"site {name!r} is used under vmap: the observations of its elements would be added up. "
        "Give the mapped letter to the einsum instead ('EBD,EDF->EBF'), or map over one site per "
        "element too"
      )
    return own, in_batched[1]

  for own in (tap, roots) if roots is not None else (tap,):
    both(x, own)
    if missing := sorted(_varying(x) - _varying(own)):
      raise ValueError(
        f"site {name!r} is shared by devices along {', '.join(missing)} inside shard_map: "
        "their observations would be added up. Give every device its own: stack tap and roots, "
        f"[devices, *shape], and split them with PartitionSpec({missing[0]!r})"
      )


def mark_used(specs: Sequence[GemmSpec], x, ws, sites: Sequence[Site]):
  """(x, ws, taps, inputs), ready to be differentiated. Claims the sites."""
  for site in sites:
    site.claim()
  x, ws, inputs = vary_alike(x, tuple(ws), tuple(ScalingInputs.of(s) for s in sites))
  taps = (s.tap if p.is_observable else vary_alike(s.tap, x)[0] for p, s in zip(specs, sites))
  inputs = tuple(dataclasses.replace(i, roots=s.roots) for i, s in zip(inputs, sites))
  return x, ws, tuple(taps), inputs


def of_roots(inputs: Sequence[ScalingInputs], taps):
  """Cotangents of the inputs of products: of `Site.roots`. Args: taps: cotangents of the taps."""
  return tuple(
    ScalingInputs(None, None, roots=roots(i.roots, tap))
    for i, tap in zip(inputs, taps, strict=True)
  )


def roots(of, tap):
  """float32 [3]: the cotangent of `Site.roots`; None where it is None."""
  return None if of is None else jnp.sqrt(tap[..., 0])


def vary_alike(*trees):
  """The trees, their arrays varying over every mesh axis over which any of them does.

  Inside `shard_map` (check_vma=True) the gradient of an operand that devices share is then summed
  over them, as that of `jax.lax.dot_general` is.
  """
  over = _varying(trees)

  def one(t):
    missing = tuple(sorted(over - _varying(t)))
    return jax.lax.pcast(t, missing, to="varying") if missing else t

  return jax.tree.map(one, trees)


def _varying(tree) -> frozenset[str]:
  """Mesh axes over which devices hold different arrays, in `shard_map` with check_vma=True."""
  axes = (jax.typeof(t).manual_axis_type.varying for t in jax.tree.leaves(tree))
  return frozenset().union(*axes)
