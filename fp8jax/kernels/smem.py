"""Shared memory of Hopper's kernels."""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

# TMA writes shared memory from multiples of so many bytes on.
ALIGNMENT = 128
# Rows of global memory in one swizzled tile: TMA moves whole ones.
ROWS = 8


def padded(size: int, unit: int) -> int:
  """The next multiple of `unit`."""
  return -(-size // unit) * unit


def swizzled(shape, dtype, extent: int = 0):
  """Shared memory that TMA and the matrix unit address alike, free of bank conflicts.

  Args:
    shape, dtype: of the buffer; TMA reads or writes tiles of its last two axes.
    extent: size of the last axis in global memory, 0 for a multiple of any tile. Mosaic moves whole
      swizzled tiles only, so that the tile narrows to one that divides the extent.
  """
  size = jnp.dtype(dtype).itemsize
  swizzle = plgpu.find_swizzle(math.gcd(shape[-1], extent) * size * 8)
  transforms: list[Any] = [plgpu.TilingTransform, plgpu.SwizzleTransform]  # abstract to pyright
  tiling, swizzling = transforms[0]((8, swizzle // size)), transforms[1](swizzle)
  return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))
