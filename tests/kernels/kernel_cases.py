"""What several tests of the Hopper kernels share: sizes and configurations."""

import jax.numpy as jnp

from fp8jax.kernels.gemm.tile_config import Config

# One program has tiles after tiles, the last of them partial.
LARGE = (456, 400, 384)
CONFIGS = [
  Config(stages=2),
  Config(tile_m=256, tile_n=64, stages=3),
  Config(tile_n=112, stages=3, producer="inline"),
  Config(tile_n=160, stages=4, producer="inline", raster=1),
  Config(tile_n=256, stages=2),
  Config(stages=3, cluster_m=2),
  Config(tile_n=192, stages=3, cluster_m=2),
  Config(tile_n=160, stages=4),
  Config(tile_m=256, stages=2),
]
# Rows and columns of the prologues' operands, which fill no tile.
PROLOGUE = (141, 271)
# Tokens, depth and columns of the grouped products.
GROUPED = (300, 128, 136)
# The gradient's dtype, whether the master is in two, shape, warpgroups; moments are the preset of
# that name. A warpgroup has more tiles than slots, and somebody a partial one.
ADAMW = {
  "coat": (jnp.bfloat16, False, (2, 56, 128), 1),
  "sqrt_v": (jnp.float32, True, (104, 4, 32), 1),
  "e4m3_256": (jnp.bfloat16, True, (56, 256), 1),
  "float32": (jnp.float32, False, (136, 32, 2), 2),
  "bf16": (jnp.bfloat16, True, (68, 2, 64), 2),
}
