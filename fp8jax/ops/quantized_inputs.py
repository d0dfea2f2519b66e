"""Activations and gradients as operands, made ahead of the products that take them.

Two products of a linear layer take the same activation, one along its features, one along its
tokens, and several linear layers may share an input. Where a kernel makes both operands from one
reading (kernels/quantize), or one operand serves several products, it is made here, once; and where
the activation is not computed yet (fused/prologue.py), computed there.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import jax

from fp8jax.kernels.quantize import mosaic_sm90
from fp8jax.ops import collectives, operands
from fp8jax.ops.fused.prologue import Prologue
from fp8jax.ops.gemm_spec import GemmSpec, ScalingInputs
from fp8jax.ops.operands import Operand
from fp8jax.quantization import scaled_matrix, tensor_stats
from fp8jax.recipe.quant import WHOLE, Quant


@dataclasses.dataclass(frozen=True)
class InputCache:
  """An activation that several products take: what they need alike is made once.

  Attributes:
    value: an array, or one of `later`.
    is_watched: whether its amax is wanted too, where what makes it narrow can find it.
    seen: that, once anything was made.
  """

  tensor: int
  value: Any
  is_watched: bool = False
  made: dict[str, Any] = dataclasses.field(default_factory=dict)
  seen: list[jax.Array] = dataclasses.field(default_factory=list)

  @property
  def amax(self) -> Any:
    """float32 [1], or None if it is not known."""
    return self.seen[0] if self.seen else None

  def name(self, plan: GemmSpec, n: int, products: tuple[int, ...]) -> str:
    """Of what product `n` needs: those that need the same give the same."""
    recipe, letters = plan.recipe, plan.letters
    # Scales that are not current differ from site to site, random bits too.
    own = f" of {n}" if recipe.is_stateful or recipe.is_random else ""
    quants = [f"{plan.quant(self.tensor, p)} by {plan.backends[p]}" for p in products]
    return f"{letters.batch} {letters.contracted} {products} {quants}{own}"

  def operands(self, plan: GemmSpec, n: int, inputs: ScalingInputs, products: tuple[int, ...]):
    """For each of some products: see `one_reading` and `produce`."""
    name = self.name(plan, n, products)
    if name in self.made:
      return self.made[name]
    is_first = self.is_watched and not self.seen
    if isinstance(self.value, Prologue):
      (self.made[name],), amax = run_prologue((plan,), self.tensor, self.value, products, is_first)
      self.seen.extend(amax)
    else:
      made = quantize_both_orientations(plan, self.tensor, self.value, inputs, products, is_first)
      self.made[name], amax = made
      self.seen.extend([] if amax is None else [amax])
    return self.made[name]


def quantize_both_orientations(
  plan: GemmSpec, tensor: int, t, inputs: ScalingInputs, products: tuple[int, ...], is_watched: bool
):
  """Tensor 0 or 2 (x, g) for each product: a ScaledMatrix where one kernel makes all, else t.

  Returns:
    (those, the float32 [1] amax of t if it is watched and the kernel found it, else None).
  """
  matrix = _matrix(plan, tensor, t.dtype, products)
  if matrix is None:
    return (t,) * len(products), None
  letters = plan.of(tensor)

  def local(t, inputs):
    # Scales that are not current come from one amax, whatever the product.
    amax, over = plan.narrow(inputs, tensor, products[0]).amax, plan.layout.act_axes_of(letters)
    with jax.named_scope("quantize"):
      t = t.reshape(matrix.shape)
      made, seen = mosaic_sm90.quantize_matrix(t, matrix.quants, amax, over, is_watched)
    if seen is not None:
      seen = tensor_stats.over_mesh(seen[None], () if plan.layout.is_manual else tuple(over))
    return tuple(made[matrix.axis_of[p]] for p in products), seen

  specs = (plan.layout.act_spec(letters), jax.sharding.PartitionSpec())
  made = tuple(spec_of_narrow(plan, tensor, p) for p in products), jax.sharding.PartitionSpec()
  return collectives.on_mesh(local, plan.layout, specs, made)(t, inputs)


def can_fuse_prologue(
  plans: Sequence[GemmSpec], tensor: int, t: Prologue, products: tuple[int, ...]
) -> bool:
  """Whether every operand that these dots make of t can be made from its sources.

  Args:
    plans: of all dots that take t; where t has several results, one for each.
    products: that take tensor 0 or 2 (x, g).
  """
  matrices, factors = t.shapes_made_of()
  if any((m.shape, m.dtype) != (t.shape, t.dtype) for m in matrices):
    return False
  for plan in plans:
    matrix = _matrix(plan, tensor, t.dtype, products)
    if matrix is None or plan.of(tensor) != plans[0].of(tensor) or plan.x_dtype != t.dtype:
      return False
    # Of a whole tensor the scale would have to be known before; what a site remembers is such.
    if any(WHOLE in quant.tile for quant in matrix.quants.values()):
      return False
    parts = (t.shape[: matrix.cut], t.shape[matrix.cut :])
    if any(f.shape != parts[axis] for axis, f in zip(t.producer.factors, factors, strict=True)):
      return False
  return True


def run_prologue(
  plans: Sequence[GemmSpec], tensor: int, t: Prologue, products: tuple[int, ...], is_watched: bool
):
  """Results of t made narrow, nothing else of it written; `can_produce` has said yes.

  Returns:
    For every plan, whose number is that of its result, a ScaledMatrix for each of its products; and
    if it is watched, the float32 [1] amax of every result.
  """
  plan, letters, layout = plans[0], plans[0].of(tensor), plans[0].layout
  found = [cast(_AsMatrix, _matrix(p, tensor, t.dtype, products)) for p in plans]
  shape, axis_of, cut = found[0].shape, found[0].axis_of, found[0].cut

  def local(matrices, factors):
    matrices, factors = [m.reshape(shape) for m in matrices], [f.reshape(-1) for f in factors]
    quants = [f.quants for f in found]
    with jax.named_scope("quantize"):
      made, seen = mosaic_sm90.quantize_produced(t.producer, matrices, factors, quants, is_watched)
    over = () if layout.is_manual else tuple(layout.act_axes_of(letters))
    seen = tuple(tensor_stats.over_mesh(amax[None], over) for amax in seen)
    return tuple(tuple(result[axis_of[p]] for p in products) for result in made), seen

  matrices, factors = t.made_of()
  parts = (letters[:cut], letters[cut:])
  of_factors = tuple(layout.act_spec(parts[axis]) for axis in t.producer.factors)
  specs = ((layout.act_spec(letters),) * len(matrices), of_factors)
  made = tuple(tuple(spec_of_narrow(p, tensor, product) for product in products) for p in plans)
  seen = (jax.sharding.PartitionSpec(),) * (t.producer.results if is_watched else 0)
  run = collectives.on_mesh(local, plan.layout, specs, (made, seen))
  return run(tuple(matrices), tuple(factors))


@dataclasses.dataclass(frozen=True)
class _AsMatrix:
  """A tensor as one matrix for several products.

  Attributes:
    shape: on one device.
    cut: how many letters its rows have.
    axis_of: product -> axis that it contracts.
    quants: axis -> how.
  """

  shape: tuple[int, ...]
  cut: int
  axis_of: dict[int, int]
  quants: dict[int, Quant]


def _matrix(plan: GemmSpec, tensor: int, dtype, products: tuple[int, ...]) -> _AsMatrix | None:
  """A tensor as one matrix that a kernel makes narrow for all products.

  None where it is none: letters of the contraction lie apart or differ, or there is a batch, or
  no kernel for it.
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
  shape = tuple(math.prod(sizes[c] for c in part) for part in (letters[:cut], letters[cut:]))
  quants = {}
  for p in products:
    narrow = operands.Quantizer(plan.quant(tensor, p), backend=plan.backends[p])
    if not narrow.has_kernel(jax.ShapeDtypeStruct(shape, dtype), axis_of[p]):
      return None
    quants[axis_of[p]] = narrow.quant
  return _AsMatrix(shape, cut, axis_of, quants)


def as_matrix(plan: GemmSpec, tensor: int, t, which: int, inputs: ScalingInputs) -> Operand:
  """x or g as product `which` takes it, on one device."""
  batch, letters, contracted = plan.letters.batch, plan.of(tensor), plan.contracted(which)
  if isinstance(t, scaled_matrix.ScaledMatrix):
    free = "".join(c for c in letters if c not in contracted and c not in batch)
    return Operand(t, free, batch, plan.local_sizes())
  narrow = plan.narrow(inputs, tensor, which)
  return operands.activation(t, letters, contracted, batch, narrow, plan.x_dtype, plan.layout)


def spec(plan: GemmSpec, tensor: int, t, which: int):
  """Where x or g lies, or what was made of it for a product."""
  if isinstance(t, scaled_matrix.ScaledMatrix):
    return spec_of_narrow(plan, tensor, which)
  return plan.layout.act_spec(plan.of(tensor))


def spec_of_narrow(plan: GemmSpec, tensor: int, which: int):
  """Where a ScaledMatrix that product `which` takes lies."""
  batch, letters, contracted = plan.letters.batch, plan.of(tensor), plan.contracted(which)
  quant = cast(Quant, plan.quant(tensor, which))  # it was made narrow
  free = "".join(c for c in letters if c not in contracted and c not in batch)
  return operands.specs(free, contracted, batch, quant, plan.layout)
