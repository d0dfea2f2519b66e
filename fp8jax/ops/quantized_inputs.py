"""Operands made of activations and gradients, ahead of the GEMMs that take them.

Two GEMMs of a linear layer take the same activation, one along its features, one along its tokens,
and several linear layers may share an input. An operand is made here once if a kernel makes both
from one reading (kernels/quantize), or if several GEMMs take the same one. The kernel also computes
an activation that is a prologue (fused/prologue.py). Any other operand is made by its GEMM.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import jax

from fp8jax.kernels.quantize import mosaic_sm90
from fp8jax.ops import collectives, operands
from fp8jax.ops.fused.prologue import Prologue
from fp8jax.ops.gemm_spec import GemmSpec, Role, ScalingInputs
from fp8jax.ops.operands import Operand
from fp8jax.quantization import scaled_matrix, tensor_stats
from fp8jax.recipe.quant import WHOLE, Quant

Roles = tuple[Role, ...]


class OperandProvider:
  """Makes the operands of several GEMMs from one activation, equal ones once.

  Attributes:
    amax: float32 [1] of the activation once a quantizer has found it, else None.
  """

  def __init__(self, source, *, wants_amax: bool = False):
    """
    Args:
      source: an array or a Prologue.
      wants_amax: whether a quantizer that reads the activation finds its amax too.
    """
    self.amax: Any = None
    self._source, self._wants_amax = source, wants_amax
    self._made: dict[str, tuple] = {}

  def operands(self, spec: GemmSpec, n: int, inputs: ScalingInputs, roles: Roles) -> tuple:
    """Dot n's operand of x in each role: a ScaledMatrix if a kernel makes them all, else x."""
    key = operand_key(spec, n, roles)
    if key not in self._made:
      wants_amax = self._wants_amax and self.amax is None
      if isinstance(self._source, Prologue):
        (made,), amaxes = run_prologue((spec,), self._source, roles, wants_amax)
        amax = amaxes[0] if amaxes else None
      else:
        made, amax = quantize_both_orientations(spec, self._source, inputs, roles, wants_amax)
      self._made[key] = made
      self.amax = amax if self.amax is None else self.amax
    return self._made[key]


def operand_key(spec: GemmSpec, n: int, roles: Roles) -> str:
  """Names dot n's operands in these roles. Operands with the same name are equal."""
  # Scales that are not current differ from site to site, and so do random bits.
  own = f" of {n}" if spec.recipe.is_stateful or spec.recipe.is_random else ""
  made = [f"{role.name} {spec.quant(role)} by {spec.backend(role.gemm)}" for role in roles]
  return f"{spec.letters.batch} {spec.letters.contracted} {made}{own}"


def quantize_both_orientations(
  spec: GemmSpec, t, inputs: ScalingInputs, roles: Roles, wants_amax: bool
):
  """One tensor, x or g, in each role: ScaledMatrix if one kernel makes all of them, else t.

  Returns:
    (the operands, float32 [1] amax of t if it is wanted and the kernel finds it, else None).
  """
  view = _matrix_view(spec, t.dtype, roles)
  if view is None:
    return (t,) * len(roles), None
  letters = spec.letters_of(roles[0].tensor)

  def local(t, inputs):
    # A tensor's scales that are not current come from one amax in every GEMM.
    amax, over = spec.quantizer(roles[0], inputs).amax, spec.layout.act_axes_of(letters)
    with jax.named_scope("quantize"):
      t = t.reshape(view.shape)
      made, stats = mosaic_sm90.quantize_matrix(t, view.quants, amax, over, wants_amax)
    if stats is not None:
      stats = tensor_stats.over_mesh(stats[None], () if spec.layout.is_manual else tuple(over))
    return tuple(made[view.axis_of[role]] for role in roles), stats

  in_specs = (spec.layout.act_spec(letters), jax.sharding.PartitionSpec())
  out_specs = tuple(quantized_spec(spec, role) for role in roles), jax.sharding.PartitionSpec()
  return collectives.on_mesh(local, spec.layout, in_specs, out_specs)(t, inputs)


def can_fuse_prologue(specs: Sequence[GemmSpec], t: Prologue, roles: Roles) -> bool:
  """Whether the quantizer makes every operand of t from the sources of t.

  Args:
    specs: of all dots that take t; one per result where t has several results.
    roles: in which they take it.
  """
  matrices, factors = t.operand_shapes()
  if any((m.shape, m.dtype) != (t.shape, t.dtype) for m in matrices):
    return False
  tensor, quants = roles[0].tensor, []
  for spec in specs:
    view = _matrix_view(spec, t.dtype, roles)
    if view is None or spec.x_dtype != t.dtype:
      return False
    quants.append(view.quants)
    if spec.letters_of(tensor) != specs[0].letters_of(tensor):
      return False
    # The scale of a whole tensor would have to be known before: that of a site's history is one.
    if any(WHOLE in quant.tile for quant in view.quants.values()):
      return False
    parts = (t.shape[: view.cut], t.shape[view.cut :])
    if any(f.shape != parts[axis] for axis, f in zip(t.producer.factors, factors, strict=True)):
      return False
  return mosaic_sm90.too_large(t.producer, t.dtype, quants) is None


def can_fuse_input(specs: Sequence[GemmSpec], x: Prologue) -> bool:
  """Whether the quantizer computes x for every operand of it, forward and backward."""

  def one(spec):
    both = (Role.X_FWD, Role.X_WGRAD)
    readings = (both,) if spec.saves_operand else ((Role.X_FWD,), (Role.X_WGRAD,))
    return all(can_fuse_prologue((spec,), x, roles) for roles in readings)

  return all(map(one, specs))


def materialize_unless_fused(specs: Sequence[GemmSpec], x):
  """x, or the array that it computes if not every GEMM computes it in its quantizer."""
  return x.value() if isinstance(x, Prologue) and not can_fuse_input(specs, x) else x


def fused_or_array(specs: Sequence[GemmSpec], x):
  """x as `forward_with_residuals` takes it: a Prologue that is fused or compressed, or an array."""
  if isinstance(x, Prologue) and x.save is not None:
    return x
  return materialize_unless_fused(specs, x)


def run_prologue(specs: Sequence[GemmSpec], t: Prologue, roles: Roles, wants_amax: bool):
  """Quantizes the results of t as it computes them; `can_fuse_prologue` is true.

  Returns:
    For every spec, which takes the result of its number, a ScaledMatrix in each role; and, if
    wanted, the float32 [1] amax of every result.
  """
  spec, layout = specs[0], specs[0].layout
  letters = spec.letters_of(roles[0].tensor)
  views = [cast(_MatrixView, _matrix_view(s, t.dtype, roles)) for s in specs]
  shape, axis_of, cut = views[0].shape, views[0].axis_of, views[0].cut

  def local(matrices, factors):
    matrices, factors = [m.reshape(shape) for m in matrices], [f.reshape(-1) for f in factors]
    quants = [view.quants for view in views]
    with jax.named_scope("quantize"):
      made, stats = mosaic_sm90.quantize_produced(t.producer, matrices, factors, quants, wants_amax)
    over = () if layout.is_manual else tuple(layout.act_axes_of(letters))
    stats = tuple(tensor_stats.over_mesh(amax[None], over) for amax in stats)
    return tuple(tuple(result[axis_of[role]] for role in roles) for result in made), stats

  matrices, factors = t.producer_operands()
  parts = (letters[:cut], letters[cut:])
  factor_specs = tuple(layout.act_spec(parts[axis]) for axis in t.producer.factors)
  in_specs = ((layout.act_spec(letters),) * len(matrices), factor_specs)
  made = tuple(tuple(quantized_spec(s, role) for role in roles) for s in specs)
  stats = (jax.sharding.PartitionSpec(),) * (t.producer.results if wants_amax else 0)
  run = collectives.on_mesh(local, layout, in_specs, (made, stats))
  return run(tuple(matrices), tuple(factors))


@dataclasses.dataclass(frozen=True)
class _MatrixView:
  """A tensor as one matrix that several GEMMs take.

  Attributes:
    shape: on one device.
    cut: number of letters of its rows.
    axis_of: role -> axis that its GEMM contracts.
    quants: axis -> Quant.
  """

  shape: tuple[int, ...]
  cut: int
  axis_of: dict[Role, int]
  quants: dict[int, Quant]


def _matrix_view(spec: GemmSpec, dtype, roles: Roles) -> _MatrixView | None:
  """A tensor as one matrix that a kernel quantizes for all roles.

  None if it is no such matrix (letters of the contraction lie apart or differ, or there is a
  batch), or if there is no kernel for it.
  """
  letters, sizes = spec.letters_of(roles[0].tensor), spec.local_sizes()
  splits, axis_of = set(), {}
  for role in roles:
    contracted = spec.contracted(role.gemm)
    axis_of[role] = 0 if letters.startswith(contracted) else 1
    cut = len(contracted) if axis_of[role] == 0 else len(letters) - len(contracted)
    splits.add(cut)
    if letters[cut:] != contracted and letters[:cut] != contracted:
      return None
  if spec.letters.batch or len(splits) > 1 or len(set(axis_of.values())) < len(roles):
    return None
  (cut,) = splits
  shape = tuple(math.prod(sizes[c] for c in part) for part in (letters[:cut], letters[cut:]))
  quants = {}
  for role in roles:
    quantizer = operands.Quantizer(spec.quant(role), backend=spec.backend(role.gemm))
    if not quantizer.has_kernel(jax.ShapeDtypeStruct(shape, dtype), axis_of[role]):
      return None
    quants[axis_of[role]] = quantizer.quant
  return _MatrixView(shape, cut, axis_of, quants)


def as_matrix(spec: GemmSpec, role: Role, t, inputs: ScalingInputs) -> Operand:
  """x or g as its GEMM takes it, on one device; t is the tensor or its ScaledMatrix."""
  batch, letters = spec.letters.batch, spec.letters_of(role.tensor)
  contracted = spec.contracted(role.gemm)
  if isinstance(t, scaled_matrix.ScaledMatrix):
    free = "".join(c for c in letters if c not in contracted and c not in batch)
    return Operand(t, free, batch, spec.local_sizes())
  quantizer = spec.quantizer(role, inputs)
  return operands.activation(t, letters, contracted, batch, quantizer, spec.x_dtype, spec.layout)


def quantize_now(spec: GemmSpec, role: Role, t, inputs: ScalingInputs):
  """t as a ScaledMatrix [batch?, rows, contraction], if it is none yet: the form of a residual."""
  if isinstance(t, scaled_matrix.ScaledMatrix):
    return t

  def local(t, inputs):
    return as_matrix(spec, role, t, inputs).value

  in_specs = (partition_spec(spec, role, t), jax.sharding.PartitionSpec())
  run = collectives.on_mesh(local, spec.layout, in_specs, quantized_spec(spec, role))
  return run(t, inputs)


def partition_spec(spec: GemmSpec, role: Role, t):
  """PartitionSpec of x or g, or of its ScaledMatrix."""
  if isinstance(t, scaled_matrix.ScaledMatrix):
    return quantized_spec(spec, role)
  return spec.layout.act_spec(spec.letters_of(role.tensor))


def quantized_spec(spec: GemmSpec, role: Role):
  """PartitionSpec of the ScaledMatrix in this role."""
  batch, letters = spec.letters.batch, spec.letters_of(role.tensor)
  contracted = spec.contracted(role.gemm)
  quant = cast(Quant, spec.quant(role))  # there is a ScaledMatrix, so it is quantized
  free = "".join(c for c in letters if c not in contracted and c not in batch)
  return operands.specs(free, contracted, batch, quant, spec.layout)
