"""Shared memory of Hopper's kernels."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzled(shape, dtype):
  """Shared memory that TMA and the matrix unit address alike, free of bank conflicts."""
  size = jnp.dtype(dtype).itemsize
  swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
  transforms: list[Any] = [plgpu.TilingTransform, plgpu.SwizzleTransform]  # abstract to pyright
  tiling, swizzling = transforms[0]((8, swizzle // size)), transforms[1](swizzle)
  return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))
