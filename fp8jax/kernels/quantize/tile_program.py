"""A program of the quantizer: all that happens to a tile of 128x128.

TMA brings the tiles of all matrices into shared memory, where what is still to be computed is
computed in place (prologues.py). It is read from there twice, as it lies and transposed
(ldmatrix.trans turns 16-bit elements on the way into registers), 64 rows at a time; amax, scale and
rounding happen in registers as in quantization/quantize; TMA stores data and scales.

  warpgroups   Each of two computes, quantizes and stores its half of the rows, of the tile and of
               its transpose. They meet where one reads what the other wrote: after the prologue,
               for the amax of 128x128, and before memory is used again.
  memory       Data of a result lie where those of the one before lay, the first where a matrix was
               that no result replaces. So two programs share a multiprocessor: one computes while
               the other waits for TMA.
  registers    At most 128 of a thread, or the second program has none. A warpgroup computes with so
               few columns of several matrices at a time, in a loop: code that is longer than the
               instruction cache (128 KB) is fetched again for every tile.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.formats import Format
from fp8jax.kernels.mosaic import pl, plgpu
from fp8jax.kernels.quantize import prologues
from fp8jax.kernels.smem import swizzled
from fp8jax.quantization import quantize
from fp8jax.recipe.quant import Quant

TILE = 128
WARPGROUPS = 2  # 1 or 2
COLUMNS = 32  # of each of several matrices, see above; the width of a swizzled tile: 32 or 64
# Which casts clip first, see `_cast`: those with a "given" scale, "never", or "always", which an
# interpreter needs: on a CPU a conversion does not saturate.
CLIPS = "given"
# exp(x) is the hardware's 2^(x * log2(e)): off by some |x| * 2^-23, of which BF16 keeps 2^-9.
APPROX = True
_ROWS = 64  # of what is in registers at one time
_ZERO = np.int32(-(2**31) + 0xFFFFFF)  # what a magnitude of 0 is in `_amax`


@dataclasses.dataclass(frozen=True)
class Output:
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
class Program:
  """One tile of everything, as the module's docstring describes it."""

  producer: prologues.Producer
  outputs: tuple[Output, ...]
  matrices: Sequence[Any]
  factors: Sequence[Any]
  given: Sequence[Any]
  refs: Sequence[Any]

  @property
  def groups(self) -> list[list[tuple[Output, Any, list[Any]]]]:
    """(output, its data, its scales and amaxes), by result."""
    groups, refs = [[] for _ in range(self.producer.results)], iter(self.refs)
    for out in self.outputs:
      groups[out.result].append((out, next(refs), [next(refs) for _ in range(out.num_lines)]))
    return groups

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
    if WARPGROUPS > 1:
      barriers.append(plgpu.Barrier(num_arrivals=WARPGROUPS))
    return barriers

  @property
  def columns(self) -> int:
    """Of a matrix that are in registers at one time."""
    return COLUMNS if self.producer.matrices > 1 else 64

  @property
  def share(self) -> int:
    """Rows of a tile, or of its transpose, of one warpgroup."""
    return TILE // WARPGROUPS

  def first(self):
    """Of this warpgroup's rows."""
    return lax.axis_index("wg") * self.share

  def halves(self):
    """Slices of this warpgroup's rows, as many as registers hold at one time."""
    return [pl.ds(self.first() + start, _ROWS) for start in range(0, self.share, _ROWS)]

  def meet(self, barriers):
    """Waits until all warpgroups are here and see what each wrote to shared memory."""
    plgpu.commit_smem()
    for barrier in barriers:
      plgpu.barrier_arrive(barrier)
      plgpu.barrier_wait(barrier)

  def run(self, buffers, barriers):
    (tiles, factors, lines, overlay, amaxes), (loaded, *barriers) = buffers, barriers
    at = len(self.matrices) - len(tiles)
    tiles, data = [*tiles, *overlay[:at]], overlay[at:]
    pl.when(lax.axis_index("wg") == 0)(lambda: self.fetch(tiles, factors, loaded))
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

  def quantize(self, tile, out: Output, of_tile, data, lines):
    """This warpgroup's rows of one operand, and their scales and amaxes."""
    # Scales come first, amaxes last.
    view = tile if out.along == 1 else tile.transpose((1, 0))
    for at in self.halves():
      x = plgpu.load(view.at[at], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
      if out.given is not None:
        inverse = 1.0 / self.given[out.given][0]
      else:
        lines[0][at] = scale = _scale(of_tile if out.is_tiled else _amax(x), out.quant)
        inverse = lax.broadcast_in_dim(1.0 / scale, x.shape, [0])
      data[at] = _cast(x * inverse, out.quant.format, out.given is not None)
      if out.is_watched:
        lines[-1][at] = _amax_or_nan(x)

  def store(self, out: Output, buffers, refs):
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
      operands = [
        plgpu.load(t.at[at, columns], layout=plgpu.Layout.WGMMA).astype(jnp.float32) for t in tiles
      ]
      for axis, line in zip(self.producer.factors, factors):
        # Per row: as many as there are rows here, one for every column; or otherwise.
        line, layout = (line.at[at], 1) if axis == 0 else (line.at[columns], 0)
        factor = plgpu.load(line, layout=plgpu.Layout.WGMMA.reduce(layout))
        operands.append(lax.broadcast_in_dim(factor, (_ROWS, self.columns), [axis]))
      for tile, result in zip(tiles, self.producer.function(*operands)):
        tile[at, columns] = result.astype(tile.dtype)

    num = self.share // _ROWS * per_half
    lax.fori_loop(0, num, piece, None)  # unrolled it would not stay in the instruction cache

  def amax_of_tile(self, x_smem, amaxes, barriers):
    """float32 [64], every element the amax of all 128x128."""
    for at in self.halves():
      amaxes[at] = _amax(plgpu.load(x_smem.at[at], layout=plgpu.Layout.WGMMA).astype(jnp.float32))
    self.meet(barriers)
    # Back as a row of 128, 64 times, of which every thread knows how to take the maximum.
    row = plgpu.load(amaxes, layout=plgpu.Layout.WGMMA.reduce(0))
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
  """float32 [rows]: from which tensor_stats.amax_of_magnitudes of all of them is computed."""
  bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
  return lax.bitcast_convert_type(jnp.max(bits, axis=1), jnp.float32)


def _cast(x, format: Format, is_given: bool):
  """quantize.cast, or the conversion alone where the hardware's saturates as that does: it is
  cvt.rn.satfinite, to which infinities are too large and NaN is NaN (PTX ISA, cvt)."""
  if CLIPS == "always" or (CLIPS == "given" and is_given):
    return quantize.cast(x, format)
  return x.astype(format.dtype)


def _scale(amax, quant: Quant):
  return quantize.amax_to_scale(amax, quant.format, quant.scale)
