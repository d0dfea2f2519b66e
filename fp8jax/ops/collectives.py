"""Communication around a GEMM: weights gathered before it, sums and scatters after it.

Called inside `on_mesh`. A layout that is already manual moves nothing: its caller does.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from fp8jax import axes, params
from fp8jax.formats import E2M1, E4M3
from fp8jax.quantization import quantized_tensor, scaled_matrix
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import WHOLE, Hadamard, Quant, Scale


def sum_over(y, layout: axes.Layout, contracted: str):
  """y {sum over the axes that split the contracted letters} -> y."""
  over = layout.act_axes_of(contracted)
  return y if layout.is_manual or not over else jax.lax.psum(y, over)


def extra_axes(layout: axes.Layout, letter: str) -> tuple[str, ...]:
  """Axes that split a letter of a weight at rest but not in its GEMM: FSDP's."""
  if layout.is_manual:
    return ()
  extra = (a for a in layout.weight_axes(letter) if a not in layout.act_axes(letter))
  return tuple(a for a in extra if layout.size((a,)) > 1)


def gather_weight(w, letters: str, layout: axes.Layout):
  """w[at rest] -> w[as its GEMM needs it]."""
  for axis, letter in enumerate(letters):
    over = extra_axes(layout, letter)
    if over:
      w = jax.lax.all_gather(w, over, axis=axis, tiled=True)
  return w


def gather_scaled(
  x: scaled_matrix.ScaledMatrix, over: tuple[str, ...], axis: int, in_shards: bool = False
) -> scaled_matrix.ScaledMatrix:
  """Gathers a quantized matrix and its scales along one of its axes.

  The data travel as bytes: XLA may otherwise widen an FP8 collective to 16 bits, and does on CPU.

  Args:
    over: mesh axes.
    axis: 0 or 1.
    in_shards: leave the data as they arrive, one shard after the other (see ScaledMatrix). Along
      axis 1 every byte would have to move again to make one matrix of them.
  """

  def gather(x, in_shards=False):
    return jax.lax.all_gather(x, over, axis=0 if in_shards else axis, tiled=not in_shards)

  # Four bits fill no byte; every E2M1 number is an E4M3 one.
  data = x.data.astype(E4M3.dtype) if x.data.dtype == E2M1.dtype else x.data
  data = jax.lax.bitcast_convert_type(
    gather(jax.lax.bitcast_convert_type(data, jnp.uint8), in_shards), data.dtype
  ).astype(x.data.dtype)
  scale = x.scale if x.tile[axis] == WHOLE else gather(x.scale)
  return scaled_matrix.ScaledMatrix(data, scale, x.tile)


def tiles_fit(
  sizes: Mapping[str, int], free: str, contracted: str, quant: Quant, layout: axes.Layout,
  rows: Hadamard | None,
) -> bool:  # fmt: skip
  """Whether a shard of a weight holds whole scale tiles and rotated blocks, so that it can be
  quantized first.

  Args:
    sizes: letter -> size of the shard.
    free, contracted: letters of the matrix's rows and of its contraction.
    rows: how its rows are rotated.
  """
  rotations = (rows, quant.rotation)
  for group, tile, rotation in zip((free, contracted), quant.tile, rotations, strict=True):
    block = math.lcm(1 if tile == WHOLE else tile, rotation.size if rotation else 1)
    is_split = [bool(extra_axes(layout, c)) for c in group]
    if not any(is_split):
      continue
    # Only the slowest letter's shards are contiguous in the flattened axis.
    if any(is_split[1:]) or math.prod(sizes[c] for c in group) % block:
      return False
  return True


def scatter_gradient(
  dw, letters: str, contracted: str, layout: axes.Layout, later: tuple[str, ...] = ()
):
  """dw {sum over the axes of the contracted letters} -> dw[at rest].

  Args:
    later: of these axes, which split no letter of dw; the sum over them is left to the caller, and
      the result is a term of it, [1, dw at rest].
  """
  if layout.is_manual:
    return dw
  remaining = dict.fromkeys(a for a in layout.act_axes_of(contracted) if a not in later)
  for axis, letter in enumerate(letters):
    for name in extra_axes(layout, letter):
      if name in remaining:
        dw = scatter_sum(dw, name, axis, layout)
        del remaining[name]
      else:
        # Every device along `name` holds the whole sum: keep this one's part.
        part = dw.shape[axis] // layout.size((name,))
        start = jax.lax.axis_index(name) * part
        dw = jax.lax.dynamic_slice_in_dim(dw, start, part, axis=axis)
  dw = sum_of_terms(dw, tuple(remaining), layout) if remaining else dw
  return dw[None] if later else dw


def scatter_sum(x, name: str, axis: int, layout: axes.Layout):
  """x {sum over a mesh axis} -> this device's part of the sum, along an axis of x.

  In the layout's wire format every term is rounded once, and the sum of them is float32's: of n
  devices it errs by at most the format's half step of each term. (A sum on the wire, as NCCL makes
  it in 16 bits, and FP8-LM's in 8, rounds n - 1 times.)
  """
  n = layout.size((name,))
  if layout.wire is None or n == 1:
    return jax.lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
  shape = (*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :])
  parts = jnp.moveaxis(x.reshape(shape), axis, 0)  # one for each device
  mine = _swapped(parts.reshape(n, -1), name, layout.wire)
  return jnp.sum(mine, axis=0).reshape(parts.shape[1:]).astype(x.dtype)


def sum_of_terms(x, names: tuple[str, ...], layout: axes.Layout):
  """x {sum over mesh axes} -> x, the same bits on all devices.

  In the layout's wire format terms are summed as in `scatter_sum`, and the sums rounded once more.
  """
  n = layout.size(names)
  if layout.wire is None or n == 1:
    return jax.lax.psum(x, names)
  flat = jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1)
  mine = jnp.sum(_swapped(flat, names, layout.wire), axis=0)
  gather = lambda x: jax.lax.all_gather(x, names, tiled=True)  # noqa: E731
  sums = _on_wire(mine[None], layout.wire, names, gather)
  return sums.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)


def _swapped(parts, names, wire: Quant):
  """[n, size]: row i goes to device i, and row i came from it, in float32."""
  return _on_wire(parts, wire, names, lambda x: jax.lax.all_to_all(x, names, 0, 0, tiled=True))


def _on_wire(rows, wire: Quant, names, move: Callable):
  """Rows [n, size], each with scales of its own, after a collective of their codes and scales; or
  with one that all devices along `names` share, and which does not travel."""
  is_shared = wire.scale is not Scale.NONE and wire.tile[1] == WHOLE
  group = rows.shape[1] if is_shared or wire.scale is Scale.NONE else wire.tile[1]
  groups = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % group))).reshape(len(rows), -1, group)
  is_finite, amax = jnp.isfinite(groups), None
  if is_shared:
    amax = jax.lax.pmax(jnp.max(jnp.where(is_finite, jnp.abs(groups), 0.0)), names)
  packed = quantized_tensor.pack(groups, wire, amax=amax)
  # An infinity saturates, and would pass for a number.
  data = jnp.where(is_finite, packed.data, jnp.asarray(jnp.nan, packed.data.dtype))
  # As bytes or words: see gather_scaled.
  bits = jax.lax.bitcast_convert_type(data, jnp.uint8 if data.dtype.itemsize == 1 else jnp.uint16)
  data = jax.lax.bitcast_convert_type(move(bits), data.dtype)
  scale = packed.scale if packed.scale is None or is_shared else move(packed.scale)
  made = dataclasses.replace(packed, data=data, scale=scale).unpack()
  return made.reshape(len(made), -1)[:, : rows.shape[1]]


def on_mesh(local, layout: axes.Layout, in_specs, out_specs) -> Callable:
  """`local` per device on a mesh; as it is without one, or inside a manual region."""
  if layout.mesh is None or layout.is_manual:
    return local
  # Outputs are replicated by construction (explicit sums), which the checker cannot see.
  return jax.shard_map(
    local, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


def gathers_quantized(
  param: params.Param, recipe: Recipe, dims, layout: axes.Layout
) -> bool | None:
  """Whether a weight split for storage is gathered quantized; None if nothing is gathered.

  False costs two to four times the bytes: the shard holds no whole scale tiles, or rotated blocks.
  """
  contracted, produced = param.gemm_letters
  letters = contracted + produced
  if not any(extra_axes(layout, c) for c in letters):
    return None
  shard = {c: dims[c] // layout.size(layout.weight_axes(c)) for c in letters}
  rhs, rows = recipe.fwd.rhs, recipe.fwd.rotate_rows[1]
  return rhs is not None and tiles_fit(shard, produced, contracted, rhs, layout, rows)
