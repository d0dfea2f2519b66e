"""Activations and gradients as operands, made ahead of the products that take them.

Two products of a linear layer take the same activation, one along its features, one along its
tokens, and several linear layers may share an input. Where a kernel makes both operands from one
reading (kernels/quantize), or one operand serves several products, it is made here, once.
"""

import dataclasses
import math
from typing import Any, cast

import jax

from fp8jax.kernels.quantize import mosaic_sm90
from fp8jax.ops import collectives, operands
from fp8jax.ops.operands import Matrix
from fp8jax.ops.plan import Inputs, Plan
from fp8jax.quant import scaled
from fp8jax.recipe import Quant


@dataclasses.dataclass(frozen=True)
class Shared:
  """An activation that several products take: what they need alike is made once."""

  tensor: int
  value: Any
  made: dict[str, Any] = dataclasses.field(default_factory=dict)

  def name(self, plan: Plan, n: int, products: tuple[int, ...]) -> str:
    """Of what product `n` needs: those that need the same give the same."""
    recipe, letters = plan.recipe, plan.letters
    # Scales that are not current differ from site to site, random bits too.
    own = f" of {n}" if recipe.is_stateful or recipe.is_random else ""
    quants = [f"{plan.quant(self.tensor, p)} by {plan.backends[p]}" for p in products]
    return f"{letters.batch} {letters.contracted} {products} {quants}{own}"

  def operands(self, plan: Plan, n: int, inputs: Inputs, products: tuple[int, ...]):
    """See `one_reading`."""
    name = self.name(plan, n, products)
    if name not in self.made:
      self.made[name] = one_reading(plan, self.tensor, self.value, inputs, products)
    return self.made[name]


def one_reading(plan: Plan, tensor: int, t, inputs: Inputs, products: tuple[int, ...]):
  """Tensor 0 or 2 (x, g) for each of some products: a Scaled where one kernel makes all, else t."""
  matrix = _matrix(plan, tensor, t, products)
  if matrix is None:
    return (t,) * len(products)
  shape, axis_of = matrix
  quants, letters = {}, plan.of(tensor)
  for p in products:
    narrow = plan.narrow(inputs, tensor, p)
    if narrow.quant is None or not narrow.has_kernel(shape, axis_of[p]):
      return (t,) * len(products)
    quants[axis_of[p]] = narrow.quant

  def local(t, inputs):
    # Scales that are not current come from one amax, whatever the product.
    amax, over = plan.narrow(inputs, tensor, products[0]).amax, plan.layout.act_axes_of(letters)
    with jax.named_scope("quantize"):
      made = mosaic_sm90.quantize_matrix(t.reshape(shape.shape), quants, amax, over)
    return tuple(made[axis_of[p]] for p in products)

  specs = (plan.layout.act_spec(letters), jax.sharding.PartitionSpec())
  made = tuple(spec_of_narrow(plan, tensor, p) for p in products)
  return collectives.on_mesh(local, plan.layout, specs, made)(t, inputs)


def _matrix(plan: Plan, tensor: int, t, products: tuple[int, ...]):
  """(shape on one device, product -> axis that it contracts) of t as one matrix for all products.

  None where it is none: letters of the contraction lie apart or differ, or there is a batch.
  """
  letters, sizes = plan.of(tensor), plan.local_sizes()
  splits, axis_of = set(), {}
  for p in products:
    contracted = plan.contracted(p)
    axis_of[p] = 0 if letters.startswith(contracted) else 1
    cut = len(contracted) if axis_of[p] == 0 else len(letters) - len(contracted)
    splits.add(cut)
    if letters[cut:] != contracted and letters[:cut] != contracted:
      return None
  if plan.letters.batch or len(splits) > 1 or len(set(axis_of.values())) < len(products):
    return None
  (cut,) = splits
  shape = [math.prod(sizes[c] for c in part) for part in (letters[:cut], letters[cut:])]
  return jax.ShapeDtypeStruct(shape, t.dtype), axis_of


def as_matrix(plan: Plan, tensor: int, t, which: int, inputs: Inputs) -> Matrix:
  """x or g as product `which` takes it, on one device."""
  batch, letters, contracted = plan.letters.batch, plan.of(tensor), plan.contracted(which)
  if isinstance(t, scaled.Scaled):
    free = "".join(c for c in letters if c not in contracted and c not in batch)
    return Matrix(t, free, batch, plan.local_sizes())
  narrow = plan.narrow(inputs, tensor, which)
  return operands.activation(t, letters, contracted, batch, narrow, plan.x_dtype, plan.layout)


def spec(plan: Plan, tensor: int, t, which: int):
  """Where x or g lies, or what was made of it for a product."""
  if isinstance(t, scaled.Scaled):
    return spec_of_narrow(plan, tensor, which)
  return plan.layout.act_spec(plan.of(tensor))


def spec_of_narrow(plan: Plan, tensor: int, which: int):
  """Where a Scaled that product `which` takes lies."""
  batch, letters, contracted = plan.letters.batch, plan.of(tensor), plan.contracted(which)
  quant = cast(Quant, plan.quant(tensor, which))  # it was made narrow
  free = "".join(c for c in letters if c not in contracted and c not in batch)
  return operands.specs(free, contracted, batch, quant, plan.layout)
