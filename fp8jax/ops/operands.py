"""Operands as matrices: from letters to [rows, contraction], quantized, gathered.

Two GEMMs of a linear layer take the same activation, one along its features, one along its tokens,
and several linear layers may share an input. An operand is made ahead of its GEMMs if a kernel
makes both from one reading (kernels/quantize), also of an activation that is a prologue, or if
several GEMMs take the same one. Its GEMM makes any other (`operand`), inside `shard_map` or on a
single device, where every size is a device's own.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.quantize import mosaic_sm90
from fp8jax.ops import collectives
from fp8jax.ops.gemm_spec import GemmSpec, Role
from fp8jax.ops.prologue import Prologue
from fp8jax.ops.quantizer import Quantizer
from fp8jax.ops.site import ScalingInputs
from fp8jax.quantization import quantize, scaled_matrix, stored_matrix, tensor_stats
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe.quant import WHOLE, Quant

Roles = tuple[Role, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
  """One operand as [batch..., rows, contraction] ready to multiply.

  Attributes:
    value: a ScaledMatrix or an array [rows, contraction], with a leading batch axis if `batch`.
    free: letters of the rows, in order.
    sizes: letter -> local size.
    amax: float32 scalar of the tensor, if it was wanted and the quantizer found it.
  """

  value: Any
  free: str
  batch: str
  sizes: dict[str, int]
  amax: Any = None


# --- an operand as its GEMM makes it -------------------------------------------------------------


def operand(
  spec: GemmSpec, role: Role, t, inputs: ScalingInputs, wants_amax: bool = False
) -> Operand:
  """x, w or g as the GEMM of a role takes it, on one device.

  A shard of a weight is quantized, then gathered; if tiles straddle, gathered first.

  Args:
    t: the tensor, or the ScaledMatrix that it is already; of a weight perhaps as an Entry.
    wants_amax: see Quantizer.
  """
  letters, free, contracted = spec.letters_of(role)
  batch, layout = spec.letters.batch, spec.layout
  if isinstance(t.stack if isinstance(t, Entry) else t, scaled_matrix.ScaledMatrix):
    return Operand(t, free, batch, spec.local_sizes())
  quantizer, dtype = Quantizer.of(spec, role, inputs, wants_amax), spec.x_dtype
  if spec.remakes(role):
    return matrix_of(spec, role, _multiplied(spec, role, t, inputs), quantizer, dtype)
  if role.tensor != "w":
    return matrix_of(spec, role, t, quantizer, dtype)
  if isinstance(t, StoredMatrix):
    if quantizer.quant is not None:
      return _stored(spec, role, t)
    t = t.unpack()
  extra = {c: collectives.extra_axes(layout, c) for c in letters}
  if not any(extra.values()):
    return matrix_of(spec, role, t, quantizer, dtype)

  matrix, contraction = flatten(t, letters, free, contracted, batch)
  sizes = dict(zip(letters, t.shape))
  quant, place = quantizer.quant, (layout, spec.rows_rotation(role))
  if quant is None or batch or not collectives.tiles_fit(sizes, free, contracted, quant, *place):
    # Without a Quant the compute dtype travels, else the master: straddling tiles need all of it.
    t = scaled_matrix.taken(t)
    t = collectives.gather_weight(t.astype(dtype) if quant is None else t, letters, layout)
    return matrix_of(spec, role, t, quantizer, dtype)

  groups = (free, contracted)
  amax_axes = tuple(tuple(a for c in group for a in layout.weight_axes(c)) for group in groups)
  made: tuple[Any, Any] = quantizer(matrix, contraction, dtype, amax_axes)
  return gathered(made[0], groups, sizes, layout, quantizer.backend, made[1])


def _multiplied(spec: GemmSpec, role: Role, t, inputs: ScalingInputs):
  """The x or w that the forward product multiplied, float32, with the letters of the tensor."""
  forward = Role.X_FWD if role.tensor == "x" else Role.W_FWD
  made, letters = operand(spec, forward, t, inputs), spec.letters_of(forward)[0]
  values = made.value
  values = jax.vmap(lambda v: v.dequantize())(values) if made.batch else values.dequantize()
  contracted = spec.letters_of(forward)[2]
  contracted = "".join(c for c in letters if c in contracted)
  whole = unflatten(values, made, Operand(None, contracted, "", made.sizes), letters)
  if role.tensor == "x" and spec.recipe.fwd.compensates:
    whole = whole + outliers(spec, t)
  return whole


def outliers(spec: GemmSpec, x):
  """float32 like x: what the Clamp of the forward operand took away, on one device."""
  letters, free, contracted = spec.letters_of(Role.X_FWD)
  if spec.letters.batch:
    raise ValueError(
      f"site {spec.name!r}: recipe {spec.recipe.name!r} compensates, which a product with batch "
      "letters does not; map over it, or take another recipe"
    )
  matrix, contraction = flatten(x.astype(jnp.float32), letters, free, contracted, "")
  amax_axes = (spec.layout.act_axes_of(free), spec.layout.act_axes_of(contracted))
  quant = cast(Quant, spec.quant(Role.X_FWD))
  rest = matrix - quantize.without_outliers(matrix, quant, contraction, amax_axes)
  return rest.reshape(x.shape)


def matrix_of(spec: GemmSpec, role: Role, t, quantizer: Quantizer, dtype) -> Operand:
  """An array, which of a weight is all that its GEMM needs, as the operand of a role."""
  letters, free, contracted = spec.letters_of(role)
  matrix, contraction = flatten(t, letters, free, contracted, spec.letters.batch)
  amax_axes = (spec.layout.act_axes_of(free), spec.layout.act_axes_of(contracted))
  value, amax = quantizer(matrix, contraction, dtype, amax_axes)
  return Operand(value, free, spec.letters.batch, dict(zip(letters, t.shape)), amax)


def flatten(x, letters: str, free: str, contracted: str, batch: str) -> tuple[Any, int]:
  """(matrix [batch?, ...], axis of its contraction 0 or 1); copies if it must.

  Args:
    x: an array, or an Entry of a stack of such, which stays one if its letters are in order.
  """
  contraction_first = batch + contracted + free
  contraction = 0 if letters == contraction_first else 1
  wanted = contraction_first if contraction == 0 else batch + free + contracted
  if letters != wanted:
    x = jnp.transpose(scaled_matrix.taken(x), [letters.index(c) for c in wanted])
  sizes = dict(zip(wanted, x.shape))
  rows, depth = (math.prod(sizes[c] for c in group) for group in (free, contracted))
  groups = (math.prod(sizes[c] for c in batch),) if batch else ()
  shape = (*groups, *((depth, rows) if contraction == 0 else (rows, depth)))
  if isinstance(x, Entry):
    return Entry(x.stack.reshape(-1, *shape), x.index), contraction
  return x.reshape(shape), contraction


def unflatten(product, a: Operand, b: Operand, out: str):
  """[batch?, M, N] -> the letters of `out`."""
  have = a.batch + a.free + b.free
  sizes = {**a.sizes, **b.sizes}
  product = product.reshape([sizes[c] for c in have])
  return jnp.transpose(product, [have.index(c) for c in out]) if have != out else product


def weight_specs(spec: GemmSpec, w, role: Role = Role.W_FWD):
  """PartitionSpecs of a weight at rest: an array, codes, a matrix that inference multiplies, or the
  operand of a role; of one of them, or of an entry of a stack."""
  if isinstance(w, Entry):
    one = weight_specs(spec, w.stack, role)
    return Entry(axes.stacked(one), jax.sharding.PartitionSpec())
  if isinstance(w, scaled_matrix.ScaledMatrix):
    return spec.quantized_spec(role)
  whole = spec.layout.weight_spec(spec.letters.w)
  if not isinstance(w, StoredMatrix):
    return whole
  if w.weight_shape is None:
    return stored_matrix.specs(w, whole)
  matrix = spec.quantized_spec(Role.W_FWD)
  return dataclasses.replace(w, data=matrix.data, scale=matrix.scale)


def _stored(spec: GemmSpec, role: Role, w: StoredMatrix) -> Operand:
  """A weight that is quantized already, its shards gathered.

  Raises:
    ValueError: the recipe quantizes weights otherwise, or devices share a tile.
  """
  (letters, free, contracted), quant = spec.letters_of(role), cast(Quant, spec.quant(role))
  rows, is_turned = spec.rows_rotation(role), role is not Role.W_FWD
  if not stored_matrix.is_compatible(quant, w.quant, rows, is_turned=is_turned):
    rotated = f" with rows rotated by {rows}" if rows else ""
    raise ValueError(
      f"a weight in codes of {w.quant} cannot be multiplied as {quant}{rotated}; give its site a "
      f"recipe whose {role.gemm} product has these codes, or 'bf16', or keep the base in BF16: "
      "model.lora.base='bf16'"
    )
  local = spec.local_sizes()  # what is quantized for inference lies like an activation
  sizes = dict(zip(letters, w.shape)) if w.weight_shape is None else {c: local[c] for c in letters}
  if not collectives.tiles_fit(sizes, free, contracted, quant, spec.layout, rows):
    raise ValueError(
      f"a shard {w.shape} of a weight in codes holds no whole tiles of {w.quant}; take a smaller "
      f"{spec.layout.smaller(spec.layout.weight_axes_of(letters))}, or model.lora.base='bf16'"
    )
  value = w.matrix(is_turned=is_turned)
  return gathered(value, (free, contracted), sizes, spec.layout, spec.backend(role.gemm))


def gathered(
  value: scaled_matrix.ScaledMatrix, groups, sizes, layout: axes.Layout, backend: str, amax=None
) -> Operand:
  """A quantized shard of a weight as the whole.

  Args:
    groups: letters of its rows and of its contraction.
    sizes: letter -> size of the shard.
  """
  extra = {c: collectives.extra_axes(layout, c) for c in sizes}
  for axis, group in enumerate(groups):
    if extra[group[0]]:
      in_shards = axis == 1 and backend in gemm_api.WITH_SHARDS
      value = collectives.gather_scaled(value, extra[group[0]], axis, in_shards)
  full = {c: n * layout.size(extra[c]) for c, n in sizes.items()}
  return Operand(value, groups[0], "", full, amax)


# --- activations and gradients, ahead of their GEMMs ---------------------------------------------


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
  letters, _, _ = spec.letters_of(roles[0])

  def local(t, inputs):
    # A tensor's scales that are not current come from one amax in every GEMM.
    amax, over = Quantizer.of(spec, roles[0], inputs).amax, spec.layout.act_axes_of(letters)
    with jax.named_scope("quantize"):
      t = t.reshape(view.shape)
      made, stats = mosaic_sm90.quantize_matrix(t, view.quants, amax, over, wants_amax)
    if stats is not None:
      stats = tensor_stats.over_mesh(stats[None], () if spec.layout.is_manual else tuple(over))
    return tuple(made[view.axis_of[role]] for role in roles), stats

  in_specs = (spec.layout.act_spec(letters), jax.sharding.PartitionSpec())
  out_specs = tuple(spec.quantized_spec(role) for role in roles), jax.sharding.PartitionSpec()
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
  quants = []
  for spec in specs:
    view = _matrix_view(spec, t.dtype, roles)
    if view is None or spec.x_dtype != t.dtype:
      return False
    quants.append(view.quants)
    if spec.letters_of(roles[0])[0] != specs[0].letters_of(roles[0])[0]:
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
  letters, _, _ = spec.letters_of(roles[0])
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
  made = tuple(tuple(s.quantized_spec(role) for role in roles) for s in specs)
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
  (letters, _, _), sizes = spec.letters_of(roles[0]), spec.local_sizes()
  splits, axis_of = set(), {}
  for role in roles:
    _, _, contracted = spec.letters_of(role)
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
    rotation = spec.rows_rotation(role)
    quantizer = Quantizer(spec.quant(role), backend=spec.backend(role.gemm), rows_rotation=rotation)
    if spec.remakes(role) or not quantizer.has_kernel(
      jax.ShapeDtypeStruct(shape, dtype), axis_of[role]
    ):
      return None
    quants[axis_of[role]] = quantizer.quant
  return _MatrixView(shape, cut, axis_of, quants)


def quantize_now(spec: GemmSpec, role: Role, t, inputs: ScalingInputs):
  """t as a ScaledMatrix [batch?, rows, contraction], if it is none yet: the form of a residual, and
  of a weight ahead of its products."""
  if isinstance(t, scaled_matrix.ScaledMatrix):
    return t

  def local(t, inputs):
    # Codes and scales take fewer bytes than the values.
    return dataclasses.replace(operand(spec, role, t, inputs).value.in_one_piece(), values=None)

  is_weight = role.tensor == "w"
  place = weight_specs(spec, t, role) if is_weight else spec.partition_spec(role, t)
  in_specs, out = (place, jax.sharding.PartitionSpec()), spec.quantized_spec(role)
  return collectives.on_mesh(local, spec.layout, in_specs, out)(t, inputs)
