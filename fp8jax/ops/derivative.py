"""Refuses derivatives of rounding: none exists, and JAX would cast a cotangent to eight bits."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp


def refused(tree, message: str):
  """The tree; differentiating it raises TypeError with this message.

  Leaves that have no derivative, integers and None, are as they were.
  """
  leaves, structure = jax.tree.flatten(tree)
  smooth = [n for n, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

  @jax.custom_jvp
  def same(*arrays):
    return arrays

  @same.defjvp
  def refuse(primals, tangents):
    del primals, tangents
    raise TypeError(message)

  for n, leaf in zip(smooth, same(*(leaves[n] for n in smooth)), strict=True):
    leaves[n] = leaf
  return jax.tree.unflatten(structure, leaves)


def once(tree, sites: Iterable[tuple[str, bool]]):
  """Gradients of products that are not to be differentiated again.

  Args:
    sites: (name, whether anything is quantized) of each product; the exact ones may be.
  """
  names = [name for name, is_quantized in sites if is_quantized]
  if not names:
    return tree
  return refused(
    tree,
    f"site {names[0]!r}: its gradients are differentiated, and the rounding in them has no "
    "derivative; give products that are differentiated twice the recipe 'bf16'",
  )


def refuse_twice(tree, sites: Iterable[tuple[str, bool]]):
  """Refuses second derivatives at the operands of products, before kernels that have no rule.

  To be called by the forward half of a `jax.custom_vjp`, which JAX differentiates for these alone.

  Args:
    sites: as of `once`.
  """
  # No element of each, so that the operands themselves stay what they are to remat and to `vmap`.
  once([leaf[:0] for leaf in jax.tree.leaves(tree) if jnp.ndim(leaf)], sites)
