"""x -> FP8 along its rows, along its columns, or both, reading x once. For Hopper.

A linear layer multiplies its input twice, contracting its features (forward) and its tokens (weight
gradient), and the matrix unit wants the contraction last each time. Of x [R, C] this kernel writes

  along=1   data [R, C], one scale per 1x128 of a row: lines [C / 128, R]
  along=0   data [C, R], one scale per 1x128 of a column: lines [R / 128, C]

or, for weights, one scale per 128x128 either way. Lines are how the GEMM reads scales: neighbours
along the rows of an operand lie side by side. Where one scale serves all of x it is given: the
amax of a tensor is another pass over x, XLA's, or a delayed one. A site that observes x, or a
result that is never written, gets its amax from this pass too.

One program of one warpgroup takes a tile of 128x128: TMA brings it into shared memory, where what
is still to be computed is computed in place (prologues.py); it is read from there twice, as it lies
and transposed (ldmatrix.trans turns 16-bit elements on the way into registers), 64 rows at a time;
amax, scale, clip and round happen in registers as in quant/quantize; TMA stores data and scales.
Zeros beyond the edge never raise an amax.

Sizes: R and C are anything. TMA clips what sticks out of a matrix, in whole swizzled tiles: eight
rows, 128 bytes (FP8 also 64). Operands of other sizes are copied with zeros around them, results
are allocated larger and cut. Lines are vectors, of which TMA clips only the end of the last one: a
line has room for whole tiles, or its last tile would overwrite the line after it.
The reciprocal of a scale is the hardware's, within an ulp of float32's: powers of two are exact, of
other scales the odd element that lies on a rounding boundary may fall on its other side.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.formats import E4M3, E5M2, Format
from fp8jax.kernels import smem
from fp8jax.kernels.quantize import prologues
from fp8jax.kernels.smem import ROWS, padded, swizzled
from fp8jax.quantization import quantize, scaled_matrix, tensor_stats
from fp8jax.recipe.quant import AMAX, CURRENT, WHOLE, Quant, Rounding, Scale

TILE = 128
_FP8_COLUMNS = 64  # what the contraction of a result is padded to
_ROWS = 64  # of what is in registers at one time
_WGMMA = plgpu.Layout.WGMMA
_TENSOR = (WHOLE, WHOLE)
# Per program. Two share the instruction cache and 65,536 registers with those of a second program.
WARPGROUPS = 2
# Of each of several matrices that a warpgroup computes with at one time: 32, the width of a swizzled
# tile, take fewer than the 128 registers that two programs of two warpgroups leave a thread.
COLUMNS = 32
# Which casts clip first: "always", those with a "given" scale, "never". See `_cast`.
CLIPS = "given"
# exp is the hardware's 2^x of a product: of magnitude x within x * 2^-23, of which BF16 keeps 2^-9.
APPROX = True
_ZERO = np.int32(-(2**31) + 0xFFFFFF)  # what a magnitude of 0 is in `_amax`


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
  program = _Program(producer, outputs, [tile] * producer.matrices, factors, (), shapes)
  if (need := smem.needed(jax.tree.leaves(program.buffers()))) <= smem.BYTES:
    return None
  return f"{producer.name} of {dtype} needs {need} bytes of shared memory; there are {smem.BYTES}"


def quantize_matrix(
  x, quants: Mapping[int, Quant], amax=None, over: tuple[str, ...] = (), watched: bool = False
) -> tuple[dict[int, scaled_matrix.ScaledMatrix], jax.Array | None]:
  """(x in each of `quants`, its amax).

  Args:
    x: [R, C], bfloat16 or float32.
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
  """(Scaled by axis for every result, amaxes); `given` holds scales by (result, axis)."""
  rows, columns = matrices[0].shape
  matrices = [_fitted(x) for x in matrices]
  outputs, shapes = _outputs(quants, rows, columns, given, watched)
  # Every tile reads whole ones.
  factors = [jnp.pad(f.astype(jnp.float32), (0, -f.shape[0] % TILE)) for f in factors]
  operands = (*matrices, *factors, *given.values())

  def quantize_fp8(*refs):
    parts, at = [], 0
    for size in (len(matrices), len(factors), len(given), len(shapes)):
      parts.append(refs[at : at + size])
      at += size
    program = _Program(producer, outputs, *parts)
    memory = program.buffers(), program.barriers()
    pl.run_scoped(program.run, *memory, collective_axes="wg")

  run = plgpu.kernel(
    quantize_fp8,
    out_type=tuple(shapes),
    grid=(pl.cdiv(rows, TILE), pl.cdiv(columns, TILE)),
    grid_names=("i", "j"),
    num_threads=WARPGROUPS,
    thread_name="wg",
    compiler_params=plgpu.CompilerParams(approx_math=APPROX),
  )
  made, results, amaxes = iter(run(*operands)), [{} for _ in quants], []
  for out in outputs:
    free, depth = (rows, columns) if out.along == 1 else (columns, rows)
    data, quant = next(made)[:free, :depth], out.quant
    if out.given is not None:
      scale = given[out.result, out.along].reshape(1, 1)
    else:
      lines = next(made)
      scale = lines[:, :free:TILE] if out.is_tiled else lines[:, :free]
    results[out.result][out.along] = scaled_matrix.ScaledMatrix(data, scale.T, quant.tile)
    if out.is_watched:
      amaxes.append(tensor_stats.amax(next(made)[:, :free]))
  return results, amaxes


def _outputs(quants, rows: int, columns: int, given, watched: bool):
  """(_Output of every operand, what is written: data, scales and amaxes of each)."""
  outputs, shapes = [], []
  for n, of_result in enumerate(quants):
    for along, quant in of_result.items():
      free, depth = (rows, columns) if along == 1 else (columns, rows)
      number = list(given).index((n, along)) if (n, along) in given else None
      # One orientation of a result has seen all of it.
      outputs.append(_Output(n, along, quant, number, watched and along == next(iter(of_result))))
      whole = padded(free, ROWS), padded(depth, _FP8_COLUMNS)
      shapes.append(jax.ShapeDtypeStruct(whole, quant.format.dtype))
      lines = (pl.cdiv(depth, TILE), padded(free, TILE))
      shapes += [jax.ShapeDtypeStruct(lines, jnp.float32)] * outputs[-1].num_lines
  return tuple(outputs), shapes


def _fitted(x):
  """The matrix with zeros up to sizes that TMA moves."""
  pads = [(0, padded(n, unit) - n) for n, unit in zip(x.shape, (ROWS, 128 // x.dtype.itemsize))]
  return jnp.pad(x, pads)


def _tensor_scale(x, quant: Quant, amax, over):
  """float32 [1]: the one scale of x."""
  if quant.source != CURRENT:
    return quantize.given_scale(amax, quant).reshape(1)
  amax = jnp.max(jnp.where(jnp.isnan(x), 0, jnp.abs(x))).astype(jnp.float32)
  amax = lax.pmax(amax, over) if over else amax
  return _scale(amax, quant).reshape(1)


@dataclasses.dataclass(frozen=True)
class _Output:
  """One operand.

  Attributes:
    given: number of the scale that it is handed, None if it finds its own.
    is_watched: whether amaxes leave as scales do, one per 128 elements.
  """

  result: int
  along: int
  quant: Quant
  given: int | None = None
  is_watched: bool = False

  @property
  def num_lines(self) -> int:
    """Of float32 [contraction / 128, rows] that it writes: scales, amaxes."""
    return (self.given is None) + self.is_watched

  @property
  def is_tiled(self) -> bool:
    return self.quant.tile[0] == TILE


@dataclasses.dataclass(frozen=True)
class _Program:
  """One tile of everything."""

  producer: prologues.Producer
  outputs: tuple[_Output, ...]
  matrices: Sequence[Any]
  factors: Sequence[Any]
  given: Sequence[Any]
  refs: Sequence[Any]

  @property
  def groups(self) -> list[list[tuple[_Output, Any, list[Any]]]]:
    """(output, its data, its scales and amaxes), by result."""
    found, refs = [[] for _ in range(self.producer.results)], iter(self.refs)
    for out in self.outputs:
      found[out.result].append((out, next(refs), [next(refs) for _ in range(out.num_lines)]))
    return found

  def buffers(self) -> tuple:
    """(Tiles of matrices, factors, lines of outputs by result, data of outputs, amaxes).

    Data lie where those of the result before lay, and the first ones where the last matrix was if
    no result takes its place: this is room for a second program.
    """
    tiles = [swizzled((TILE, TILE), x.dtype, self.columns) for x in self.matrices]
    line = plgpu.SMEM((TILE,), jnp.float32)
    lines = [[[line for _ in lines] for *_, lines in group] for group in self.groups]
    data = [
      [swizzled((TILE, TILE), ref.dtype, ref.shape[1]) for _, ref, _ in group]
      for group in self.groups
    ]
    spare = [tiles.pop()] if len(tiles) > len(data) else []
    return tiles, [line] * len(self.factors), lines, plgpu.RefUnion(*spare, *data), line

  def barriers(self):
    """Of TMA, and of warpgroups if there are several."""
    barriers = [plgpu.Barrier(num_arrivals=len(self.matrices) + len(self.factors))]
    if self.warpgroups > 1:
      barriers.append(plgpu.Barrier(num_arrivals=self.warpgroups))
    return barriers

  @property
  def columns(self) -> int:
    """Of a matrix that are in registers at one time."""
    return COLUMNS if self.producer.matrices > 1 else 64

  @property
  def warpgroups(self) -> int:
    return WARPGROUPS

  @property
  def share(self) -> int:
    """Rows of a tile, or of its transpose, of one warpgroup."""
    return TILE // self.warpgroups

  def first(self):
    """Of this warpgroup's rows."""
    return lax.axis_index("wg") * self.share if self.warpgroups > 1 else 0

  def halves(self):
    """Slices of this warpgroup's rows, as many as registers hold at one time."""
    return [pl.ds(self.first() + start, _ROWS) for start in range(0, self.share, _ROWS)]

  def meet(self, barriers):
    """What any warpgroup wrote to shared memory is there for all."""
    plgpu.commit_smem()
    for barrier in barriers:
      plgpu.barrier_arrive(barrier)
      plgpu.barrier_wait(barrier)

  def run(self, buffers, barriers):
    (tiles, factors, lines, overlay, amaxes), (loaded, *barriers) = buffers, barriers
    at = len(self.matrices) - len(tiles)
    tiles, data = [*tiles, *overlay[:at]], overlay[at:]
    if self.warpgroups > 1:
      pl.when(lax.axis_index("wg") == 0)(lambda: self.fetch(tiles, factors, loaded))
    else:
      self.fetch(tiles, factors, loaded)
    plgpu.barrier_wait(loaded)
    if self.producer != prologues.IDENTITY:
      self.produce(tiles, factors)
      self.meet(barriers)
    for n, group in enumerate(self.groups):
      of_tile = None
      if n:  # the memory of the last result's data is free
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.meet(barriers)
      if any(out.is_tiled for out, *_ in group):
        of_tile = self.amax_of_tile(tiles[n], amaxes, barriers)
      for (out, *refs), *buffers in zip(group, data[n], lines[n]):
        self.quantize(tiles[n], out, of_tile, *buffers)
        plgpu.commit_smem()
        self.store(out, buffers, refs)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  def places(self):
    """Rows and columns of the matrices where this tile is."""
    return [lax.axis_index(name) * TILE for name in ("i", "j")]

  def fetch(self, tiles, factors, barrier):
    places = [pl.ds(start, TILE) for start in self.places()]
    for x, tile in zip(self.matrices, tiles):
      plgpu.copy_gmem_to_smem(x.at[places[0], places[1]], tile, barrier)
    for axis, x, line in zip(self.producer.factors, self.factors, factors):
      plgpu.copy_gmem_to_smem(x.at[places[axis]], line, barrier)

  def quantize(self, tile, out: _Output, of_tile, data, lines):
    """This warpgroup's rows of one operand, and their scales and amaxes."""
    # Scales come first, amaxes last.
    view = tile if out.along == 1 else tile.transpose((1, 0))
    for at in self.halves():
      x = plgpu.load(view.at[at], layout=_WGMMA).astype(jnp.float32)
      if out.given is not None:
        inverse = 1.0 / self.given[out.given][0]
      else:
        lines[0][at] = scale = _scale(of_tile if out.is_tiled else _amax(x), out.quant)
        inverse = lax.broadcast_in_dim(1.0 / scale, x.shape, [0])
      data[at] = _cast(x * inverse, out.quant.format, out.given is not None)
      if out.is_watched:
        lines[-1][at] = _amax_or_nan(x)

  def store(self, out: _Output, buffers, refs):
    """Starts the copies of this warpgroup's rows."""
    (data, lines), (data_ref, line_refs) = buffers, refs
    free, depth = self.places() if out.along == 1 else self.places()[::-1]
    line = lax.axis_index("j" if out.along == 1 else "i")
    at, free = pl.ds(self.first(), self.share), pl.ds(free + self.first(), self.share)
    plgpu.copy_smem_to_gmem(data.at[at], data_ref.at[free, pl.ds(depth, TILE)])
    for values, ref in zip(lines, line_refs):
      plgpu.copy_smem_to_gmem(values.at[at], ref.at[line, free])

  def produce(self, tiles, factors):
    """Result n takes the place of matrix n."""
    per_half = TILE // self.columns

    def piece(n, _):
      at = pl.ds(self.first() + n // per_half * _ROWS, _ROWS)
      columns = pl.ds(n % per_half * self.columns, self.columns)
      operands = [plgpu.load(t.at[at, columns], layout=_WGMMA).astype(jnp.float32) for t in tiles]
      for axis, line in zip(self.producer.factors, factors):
        # Per row: as many as there are rows here, one for every column; or otherwise.
        line, layout = (line.at[at], 1) if axis == 0 else (line.at[columns], 0)
        factor = plgpu.load(line, layout=_WGMMA.reduce(layout))
        operands.append(lax.broadcast_in_dim(factor, (_ROWS, self.columns), [axis]))
      for tile, result in zip(tiles, self.producer.function(*operands)):
        tile[at, columns] = result.astype(tile.dtype)

    num = self.share // _ROWS * per_half
    lax.fori_loop(0, num, piece, None)  # unrolled it would not stay in the instruction cache

  def amax_of_tile(self, x_smem, amaxes, barriers):
    """float32 [64], every element the amax of all 128x128."""
    for at in self.halves():
      amaxes[at] = _amax(plgpu.load(x_smem.at[at], layout=_WGMMA).astype(jnp.float32))
    self.meet(barriers)
    # Back as a row of 128, 64 times, of which every thread knows how to take the maximum.
    row = plgpu.load(amaxes, layout=_WGMMA.reduce(0))
    return jnp.max(lax.broadcast_in_dim(row, (_ROWS, TILE), [1]), axis=1)


def _amax(x):
  """float32 [rows], to which NaN does not count.

  Magnitudes are in the order of their bits, NaN above infinity. Twice the bits has no sign, and
  from _ZERO on it is NaN alone that overflows, to below _ZERO: a maximum of integers passes over
  it, at a third of the instructions of a comparison, a selection and a maximum of floats.
  """
  keys = lax.bitcast_convert_type(x, jnp.int32) * 2 + _ZERO
  # No smaller than that of 0, as all of NaN would be.
  most = jnp.maximum(jnp.max(keys, axis=1), _ZERO)
  return lax.bitcast_convert_type(lax.shift_right_logical(most - _ZERO, 1), jnp.float32)


def _amax_or_nan(x):
  """float32 [rows]: from which tensor_stats.amax of all of them is computed."""
  bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
  return lax.bitcast_convert_type(jnp.max(bits, axis=1), jnp.float32)


def _cast(x, format: Format, is_given: bool):
  """quantize.cast, or the conversion alone where the hardware's saturates as that does: it is
  cvt.rn.satfinite, to which infinities are too large and NaN is NaN (PTX ISA, cvt)."""
  if CLIPS == "always" or (CLIPS == "given" and is_given) or _is_interpreted():
    return quantize.cast(x, format)
  return x.astype(format.dtype)


def _is_interpreted() -> bool:
  """Whether kernels run on a CPU, where a conversion does not saturate."""
  # Of plgpu.force_gpu_interpret_mode, which nothing public tells; it is part of jit's key.
  return config.pallas_tpu_interpret_mode_context_manager.value is not None


def _scale(amax, quant: Quant):
  return quantize.amax_to_scale(amax, quant.format, quant.scale)
