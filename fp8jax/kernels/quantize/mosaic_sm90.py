"""x -> FP8 along its rows, along its columns, or both, reading x once. For Hopper.

A linear layer multiplies its input twice, contracting its features (forward) and its tokens (weight
gradient), and the matrix unit wants the contraction last each time. Of x [R, C] this kernel writes

  along=1   data [R, C], one scale per 1x128 of a row: lines [C / 128, R]
  along=0   data [C, R], one scale per 1x128 of a column: lines [R / 128, C]

or, for weights, one scale per 128x128 either way. Lines are how the GEMM reads scales: neighbours
along the rows of an operand lie side by side. Where one scale serves all of x it is given: the
amax of a tensor is another pass over x, XLA's, or a delayed one. A site that observes x, or a
result that is never written, gets its amax from this pass too. A layer of a stack is read where it
lies: its number is one more coordinate for TMA.

One program takes a tile of 128x128 (tile_program.py). Zeros beyond the edge never raise an amax.

Sizes: R and C are anything. TMA clips what sticks out of a matrix, in whole swizzled tiles: eight
rows, 128 bytes (FP8 also 64). Operands of other sizes are copied with zeros around them, results
are allocated larger and cut. Lines are vectors, of which TMA clips only the end of the last one: a
line has room for whole tiles, or its last tile would overwrite the line after it.
The reciprocal of a scale is the hardware's, within an ulp of float32's: powers of two are exact, of
other scales the odd element that lies on a rounding boundary may fall on its other side.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.formats import E4M3, E5M2
from fp8jax.kernels import smem
from fp8jax.kernels.mosaic import pl, plgpu
from fp8jax.kernels.quantize import prologues, tile_program
from fp8jax.kernels.quantize.tile_program import TILE, Output, Program
from fp8jax.kernels.smem import ROWS, padded
from fp8jax.quantization import quantize, scaled_matrix, tensor_stats
from fp8jax.quantization.scaled_matrix import Entry
from fp8jax.recipe.quant import AMAX, CURRENT, WHOLE, Quant, Rounding, Scale

_FP8_COLUMNS = 64  # what the contraction of a result is padded to
_TENSOR = (WHOLE, WHOLE)


def supports(x, quant: Quant, along: int) -> str | None:
  """Whether x can be quantized for a GEMM that contracts axis `along`, or why not."""
  if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float32):
    return f"takes a bfloat16 or float32 matrix, not {x.dtype}{list(x.shape)}"
  if quant.format not in (E4M3, E5M2) or quant.tile not in ((1, TILE), (TILE, TILE), _TENSOR):
    return f"writes 8-bit numbers in tiles of 1x128, 128x128 and the whole tensor, not {quant}"
  if quant.rounding is not Rounding.NEAREST or quant.transform or quant.clip != AMAX:
    return f"rounds to nearest, clips and transforms nothing, not {quant}"
  if quant.source != CURRENT and quant.tile != _TENSOR:
    return f"takes the scales of tiles from x, not {quant}"
  if quant.scale not in (Scale.F32, Scale.POW2):
    return f"scales are F32 or POW2, not {quant.scale}"
  return None


def too_large(
  producer: prologues.Producer, dtype, quants: Sequence[Mapping[int, Quant]], watched: bool = True
) -> str | None:
  """Why a prologue of matrices of this dtype has no room in shared memory, or None."""
  tile = jax.ShapeDtypeStruct((TILE, TILE), dtype)
  outputs, shapes = _outputs(quants, TILE, TILE, {}, watched)
  factors = [tile] * len(producer.factors)
  program = Program(producer, outputs, [tile] * producer.matrices, factors, (), shapes)
  if (need := smem.needed(jax.tree.leaves(program.buffers()))) <= smem.BYTES:
    return None
  return f"{producer.name} of {dtype} needs {need} bytes of shared memory; there are {smem.BYTES}"


def quantize_matrix(
  x, quants: Mapping[int, Quant], amax=None, over: tuple[str, ...] = (), watched: bool = False
) -> tuple[dict[int, scaled_matrix.ScaledMatrix], jax.Array | None]:
  """(x in each of `quants`, its amax).

  Args:
    x: [R, C], bfloat16 or float32; or such an Entry of a stack.
    quants: axis that the GEMM contracts (0 or 1) -> how; both axes at once cost one pass.
    amax: float32 scalar that scales of the whole tensor come from if they are not current.
    over: mesh axes over which x is split, inside `shard_map`: current scales of the whole tensor
      are those of all of it.
    watched: whether its amax is found as well, in the same pass.

  Returns:
    axis -> ScaledMatrix [rows, contraction]: [R, C] for 1, [C, R] for 0; and if x is watched, its
    float32 scalar amax (tensor_stats.amax), else None.

  Raises:
    ValueError: `supports` says no.
  """
  given = {}
  for along, quant in quants.items():
    if reason := supports(x, quant, along):
      raise ValueError(reason)
    if quant.tile == _TENSOR:
      given[0, along] = _tensor_scale(x, quant, amax, over)
  (made,), amaxes = _call(prologues.IDENTITY, (x,), (), (quants,), given, watched)
  return made, amaxes[0] if watched else None


def quantize_stack(
  x, quants: Mapping[int, Quant]
) -> tuple[dict[int, scaled_matrix.ScaledMatrix], jax.Array]:
  """(Every matrix of a stack in each of `quants`, stacked; their amaxes): one kernel.

  A loop over `quantize_matrix` would copy its results into their stack.

  Args:
    x: [L, R, C], bfloat16 or float32.
    quants: as of `quantize_matrix`; scales of tiles only.

  Returns:
    axis -> ScaledMatrix of stacks, [L, R, C] for 1, [L, C, R] for 0; float32 [L].

  Raises:
    ValueError: `supports` says no, or a matrix would have one scale.
  """
  one = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
  for along, quant in quants.items():
    if reason := supports(one, quant, along):
      raise ValueError(reason)
    if quant.tile == _TENSOR:
      raise ValueError(f"a stack is quantized in tiles, not with one scale per matrix, as {quant}")
  (made,), (amax,) = _call(prologues.IDENTITY, (x,), (), (quants,), {}, True)
  return made, amax


def quantize_produced(
  producer: prologues.Producer, matrices: Sequence[jax.Array], factors: Sequence[jax.Array],
  quants: Sequence[Mapping[int, Quant]], watched: bool = False,
) -> tuple[list[dict[int, scaled_matrix.ScaledMatrix]], list[jax.Array]]:  # fmt: skip
  """(quantized results of a prologue, their amaxes); the results themselves are never written.

  Args:
    producer: what to compute.
    matrices: [R, C] each, of one dtype, to which results are rounded before quantization.
    factors: float32 [R] or [C].
    quants: for every result what `quantize_matrix` takes; scales of tiles only, because one of a
      whole tensor would have to be known before.
    watched: whether amaxes are found as well: float32 scalars as observe.amax has them, of what is
      here; otherwise there are none.

  Raises:
    ValueError: `supports` says no, or operands are not the producer's.
  """
  given = (len(matrices), len(factors), len(quants))
  expected = (producer.matrices, len(producer.factors), producer.results)
  if given != expected or len({(m.shape, m.dtype) for m in matrices}) > 1:
    raise ValueError(
      f"{producer.name} got {[(m.dtype, m.shape) for m in matrices]}, {len(factors)} factors and "
      f"{len(quants)} results; expected {expected}, all matrices alike"
    )
  for along, quant in (item for of_result in quants for item in of_result.items()):
    if reason := supports(matrices[0], quant, along):
      raise ValueError(reason)
    if quant.tile == _TENSOR:
      raise ValueError(f"{producer.name} makes scales of tiles, not one of the tensor, as {quant}")
  if reason := too_large(producer, matrices[0].dtype, quants, watched):
    raise ValueError(reason)
  return _call(producer, tuple(matrices), tuple(factors), tuple(quants), {}, watched)


def _call(producer: prologues.Producer, matrices, factors, quants, given, watched=False):
  """(Scaled by axis for every result, amaxes); `given` holds scales by (result, axis).

  Of one matrix, or of all in a stack [L, R, C].
  """
  *layers, rows, columns = matrices[0].shape
  matrices, layer = [_fitted(x) for x in matrices], []
  if isinstance(entry := matrices[0], Entry):  # the identity's, which has one matrix
    matrices, layer = [entry.stack], [jnp.asarray(entry.index, jnp.int32).reshape(1)]
  outputs, shapes = _outputs(quants, rows, columns, given, watched)
  # Every tile reads whole ones.
  factors = [jnp.pad(f.astype(jnp.float32), (0, -f.shape[0] % TILE)) for f in factors]
  operands = (*matrices, *factors, *given.values(), *layer)

  def quantize_fp8(*refs):
    parts, at = [], 0
    for size in (len(matrices), len(factors), len(given), len(layer), len(shapes)):
      parts.append(refs[at : at + size])
      at += size
    sources, of_factors, of_scales, number, results = parts
    if layer:
      sources = [sources[0].at[number[0][0]]]
    elif layers:
      at = lax.axis_index("layer")
      sources, results = ([ref.at[at] for ref in refs] for refs in (sources, results))
    program = Program(producer, outputs, sources, of_factors, of_scales, results)
    memory = program.buffers(), program.barriers()
    pl.run_scoped(program.run, *memory, collective_axes="wg")

  run = plgpu.kernel(
    quantize_fp8,
    out_type=tuple(jax.ShapeDtypeStruct((*layers, *x.shape), x.dtype) for x in shapes),
    grid=(*layers, pl.cdiv(rows, TILE), pl.cdiv(columns, TILE)),
    grid_names=(*["layer"] * len(layers), "i", "j"),
    num_threads=tile_program.WARPGROUPS,
    thread_name="wg",
    compiler_params=plgpu.CompilerParams(approx_math=tile_program.APPROX),
  )
  made, results, amaxes = iter(run(*operands)), [{} for _ in quants], []
  for out in outputs:
    free, depth = (rows, columns) if out.along == 1 else (columns, rows)
    data, quant = next(made)[..., :free, :depth], out.quant
    if out.given is not None:
      scale = given[out.result, out.along].reshape(1, 1)
    else:
      lines = next(made)
      scale = lines[..., :free:TILE] if out.is_tiled else lines[..., :free]
    scale = jnp.swapaxes(scale, -1, -2)
    results[out.result][out.along] = scaled_matrix.ScaledMatrix(data, scale, quant.tile)
    if out.is_watched:
      amax = tensor_stats.amax_of_magnitudes
      amaxes.append((jax.vmap(amax) if layers else amax)(next(made)[..., :free]))
  return results, amaxes


def _outputs(quants, rows: int, columns: int, given, watched: bool):
  """(Output of every operand, what is written: data, scales and amaxes of each)."""
  outputs, shapes = [], []
  for n, of_result in enumerate(quants):
    for along, quant in of_result.items():
      free, depth = (rows, columns) if along == 1 else (columns, rows)
      number = list(given).index((n, along)) if (n, along) in given else None
      # One orientation of a result has seen all of it.
      outputs.append(Output(n, along, quant, number, watched and along == next(iter(of_result))))
      whole = padded(free, ROWS), padded(depth, _FP8_COLUMNS)
      shapes.append(jax.ShapeDtypeStruct(whole, quant.format.dtype))
      lines = (pl.cdiv(depth, TILE), padded(free, TILE))
      shapes += [jax.ShapeDtypeStruct(lines, jnp.float32)] * outputs[-1].num_lines
  return tuple(outputs), shapes


def is_moved(x) -> bool:
  """Whether TMA moves a matrix, an Entry or a stack as it is."""
  return not any(map(any, _pads(x)))


def _pads(x) -> list[tuple[int, int]]:
  sizes = zip(x.shape[-2:], (ROWS, 128 // x.dtype.itemsize))
  return [(0, padded(n, unit) - n) for n, unit in sizes]


def _fitted(x) -> Any:
  """The matrix with zeros up to sizes that TMA moves; a layer of other sizes leaves its stack."""
  pads = _pads(x)
  if not isinstance(x, Entry):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + pads)
  return x if is_moved(x) else jnp.pad(x.take(), pads)


def _tensor_scale(x, quant: Quant, amax, over):
  """float32 [1]: the one scale of x."""
  if quant.source != CURRENT:
    return quantize.given_scale(amax, quant).reshape(1)
  x = scaled_matrix.taken(x)
  amax = jnp.max(jnp.where(jnp.isnan(x), 0, jnp.abs(x))).astype(jnp.float32)
  amax = lax.pmax(amax, over) if over else amax
  return quantize.amax_to_scale(amax, quant.format, quant.scale).reshape(1)
