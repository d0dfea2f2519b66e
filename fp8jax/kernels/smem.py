"""Shared memory of Hopper's kernels."""

import math
from typing import Any

import jax.numpy as jnp

from fp8jax.kernels.mosaic import plgpu

# TMA writes shared memory from multiples of so many bytes on.
ALIGNMENT = 128
BYTES = 232448  # of a program, at most
# Mosaic begins every buffer at a multiple of _UNIT, and keeps up to _RESERVED for itself.
_UNIT, _RESERVED = 1024, 4096
# Rows of global memory in one swizzled tile: TMA moves whole ones.
ROWS = 8


def padded(size: int, unit: int) -> int:
  """The next multiple of `unit`."""
  return -(-size // unit) * unit


def needed(buffers) -> int:
  """Bytes that a program of these plgpu.SMEM takes, at most."""
  sizes = (math.prod(b.shape) * jnp.dtype(b.dtype).itemsize for b in buffers)
  return sum(padded(size, _UNIT) for size in sizes) + _RESERVED


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
