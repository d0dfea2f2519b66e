"""x -> FP8 along its rows, along its columns, or both, reading x once. For Hopper.

A linear layer multiplies its input twice, contracting its features (forward) and its tokens (weight
gradient), and the matrix unit wants the contraction last each time. Of x [R, C] this kernel writes

  along=1   data [R, C], one scale per 1x128 of a row: lines [C / 128, R]
  along=0   data [C, R], one scale per 1x128 of a column: lines [R / 128, C]

or, for weights, one scale per 128x128 either way. Lines are how the GEMM reads scales: neighbours
along the rows of an operand lie side by side.

One program of one warpgroup takes a tile of 128x128: TMA brings it into shared memory; it is read
from there twice, as it lies and transposed (ldmatrix.trans turns 16-bit elements on the way into
registers), 64 rows at a time; amax, scale, clip and round happen in registers as in quant/quantize;
TMA stores data and scales and clips what sticks out. Zeros beyond the edge never raise an amax.
The reciprocal of a scale is the hardware's, within an ulp of float32's: powers of two are exact, of
other scales the odd element that lies on a rounding boundary may fall on its other side.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.formats import E4M3, E5M2
from fp8jax.kernels.scaled_matmul.mosaic_sm90 import swizzled
from fp8jax.quant import quantize, scaled
from fp8jax.recipe import CURRENT, Quant, Rounding, Scale

TILE = 128
_ROWS = 64  # of what is in registers at one time
_WGMMA = plgpu.Layout.WGMMA


def supports(x, quant: Quant, along: int) -> str | None:
  """Whether x can be made narrow for a GEMM that contracts axis `along`, or why not."""
  if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float32):
    return f"takes a bfloat16 or float32 matrix, not {x.dtype}{list(x.shape)}"
  if quant.format not in (E4M3, E5M2) or quant.tile not in ((1, TILE), (TILE, TILE)):
    return f"writes 8-bit numbers in tiles of 1x128 and 128x128, not {quant}"
  if quant.source != CURRENT or quant.rounding is not Rounding.NEAREST or quant.transform:
    return f"takes scales from x and rounds to nearest, not {quant}"
  if quant.scale not in (Scale.F32, Scale.POW2):
    return f"scales are F32 or POW2, not {quant.scale}"
  rows, columns = x.shape
  if columns % 16 or (along == 0 and rows % 16):
    return f"TMA moves units of 16 bytes: {rows}x{columns} has sizes that are no multiple of 16"
  return None


def quantize_matrix(x, quants: Mapping[int, Quant]) -> dict[int, scaled.Scaled]:
  """x in each of `quants`.

  Args:
    x: [R, C], bfloat16 or float32.
    quants: axis that the GEMM contracts (0 or 1) -> how; both axes at once cost one pass.

  Returns:
    axis -> Scaled [rows, contraction]: [R, C] for 1, [C, R] for 0.

  Raises:
    ValueError: `supports` says no.
  """
  for along, quant in quants.items():
    if reason := supports(x, quant, along):
      raise ValueError(reason)
  rows, columns = x.shape
  outputs, shapes = [], []
  for along, quant in quants.items():
    free, depth = (rows, columns) if along == 1 else (columns, rows)
    outputs.append(_Output(along, quant))
    shapes.append(jax.ShapeDtypeStruct((free, depth), quant.format.dtype))
    lines = (pl.cdiv(depth, TILE), pl.cdiv(free, 4) * 4)
    shapes.append(jax.ShapeDtypeStruct(lines, jnp.float32))

  def quantize_fp8(x, *refs):
    program = _Program(x, tuple(outputs), refs)
    pl.run_scoped(program.run, *program.memory())

  run = plgpu.kernel(
    quantize_fp8,
    out_type=tuple(shapes),
    grid=(pl.cdiv(rows, TILE), pl.cdiv(columns, TILE)),
    grid_names=("i", "j"),
    compiler_params=plgpu.CompilerParams(),
  )
  made, found = run(x), {}
  for n, (along, quant) in enumerate(quants.items()):
    data, lines = made[2 * n : 2 * n + 2]
    lines = lines[:, :: quant.tile[0]] if quant.tile[0] == TILE else lines[:, : data.shape[0]]
    found[along] = scaled.Scaled(data, lines.T, quant.tile)
  return found


@dataclasses.dataclass(frozen=True)
class _Output:
  along: int
  quant: Quant

  @property
  def is_tiled(self) -> bool:
    return self.quant.tile[0] == TILE


@dataclasses.dataclass(frozen=True)
class _Program:
  """One tile of x."""

  x: Any
  outputs: tuple[_Output, ...]
  refs: tuple[Any, ...]

  def memory(self):
    """x's tile, a tile and its scales per output, amaxes of rows, the barrier of TMA."""
    results = []
    for out in self.outputs:
      results.append(swizzled((TILE, TILE), out.quant.format.dtype))
      results.append(plgpu.SMEM((TILE,), jnp.float32))
    line = plgpu.SMEM((TILE,), jnp.float32)
    return swizzled((TILE, TILE), self.x.dtype), *results, line, plgpu.Barrier()

  def run(self, x_smem, *rest):
    *results, amaxes, barrier = rest
    places = [pl.ds(lax.axis_index(name) * TILE, TILE) for name in ("i", "j")]
    plgpu.copy_gmem_to_smem(self.x.at[places[0], places[1]], x_smem, barrier)
    plgpu.barrier_wait(barrier)
    of_tile = None
    if any(out.is_tiled for out in self.outputs):
      of_tile = self.amax_of_tile(x_smem, amaxes)
    for n, out in enumerate(self.outputs):
      data, scales = results[2 * n : 2 * n + 2]
      view = x_smem if out.along == 1 else x_smem.transpose((1, 0))
      for start in range(0, TILE, _ROWS):
        at = pl.ds(start, _ROWS)
        data[at], scales[at] = self.narrow(view, at, out, of_tile)
    plgpu.commit_smem()
    for n, out in enumerate(self.outputs):
      free, depth = places if out.along == 1 else places[::-1]
      line = lax.axis_index("j" if out.along == 1 else "i")
      plgpu.copy_smem_to_gmem(results[2 * n], self.refs[2 * n].at[free, depth])
      plgpu.copy_smem_to_gmem(results[2 * n + 1], self.refs[2 * n + 1].at[line, free])
    plgpu.wait_smem_to_gmem(0)

  def narrow(self, view, at, out: _Output, of_tile):
    """(64 rows of the tile in FP8, their scales)."""
    x = plgpu.load(view.at[at], layout=_WGMMA).astype(jnp.float32)
    scale = _scale(_amax(x) if of_tile is None or not out.is_tiled else of_tile, out.quant)
    x = x * lax.broadcast_in_dim(1.0 / scale, x.shape, [0])
    return quantize.cast(x, out.quant.format), scale

  def amax_of_tile(self, x_smem, amaxes):
    """float32 [64], every element the amax of all 128x128."""
    for start in range(0, TILE, _ROWS):
      at = pl.ds(start, _ROWS)
      amaxes[at] = _amax(plgpu.load(x_smem.at[at], layout=_WGMMA).astype(jnp.float32))
    plgpu.commit_smem()
    # Back as a row of 128, 64 times, of which every thread knows how to take the maximum.
    row = plgpu.load(amaxes, layout=_WGMMA.reduce(0))
    return jnp.max(lax.broadcast_in_dim(row, (_ROWS, TILE), [1]), axis=1)


def _amax(x):
  """float32 [rows]; NaN does not count."""
  return jnp.max(jnp.where(x != x, 0.0, jnp.abs(x)), axis=1)


def _scale(amax, quant: Quant):
  return quantize.amax_to_scale(amax, quant.format, quant.scale)
