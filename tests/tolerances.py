"""Error budgets by format. The only place with an rtol; they may only shrink.

`difference` is DeepGEMM's scalar measure, 1 - 2<x, y> / (|x|^2 + |y|^2): about half the squared
relative error.
"""

import numpy as np

from fp8jax.kernels.gemm import tile_config

# GEMM of normally distributed operands against float64, per format of the wider-error operand.
GEMM_DIFFERENCE = {
  "bf16": 1e-12, "e4m3": 8e-4, "e5m2": 2.5e-3, "e2m1": 1.5e-2, "e2m1_stochastic": 3e-2
}  # fmt: skip
# Error of one quantised element beyond its format's half step, relative: what float32 loses in
# x * (1 / scale), two roundings, against the smallest half step, E3M4's 2^-6 of the element.
QUANTIZE_SLACK = 2.0**-16
# float32 accumulation of up to 2^12 products against float64, relative to the largest result: of
# XLA:CPU and of interpreted kernels, which add up float32 exactly as it says.
FLOAT32_SUM = 2e-6
# The same on Hopper's tensor cores, relative to the sum of the products' magnitudes.
TENSOR_CORE_SUM = tile_config.SUM_ERROR
# The same training on different meshes, relative: loss and gradient norm of a step from the same
# state, mean loss and single losses of a run of twenty (see step/train_step_test.py).
MESH_LOSS = 1e-5
MESH_GRADIENT = {"bf16": 1e-5, "block_128": 1e-3}
MESH_MEAN = {"bf16": 1e-5, "block_128": 2e-5}
MESH_STEP = {"bf16": 1e-5, "block_128": 1.5e-4}
# One step taken in two ways (see step/invariance_test.py), relative: loss, worst parameter's
# gradient by norm, amaxes; in multiples of what weights nudged by 1e-7 change where
# rounding is chaotic.
SAME_SCALES = (1e-6, 1e-5, 1e-5)
NOISE = 4
# No more than this in any recipe: a gradient or an amax that is missing, doubled or of the other
# sign is off by 1 or more. Of gradients 0.66 was measured (nvfp4_sr_rht in 8 microbatches, each
# rounded with chances of its own), of their norms 0.03, of amaxes 0.52 in the same step.
CHAOTIC = (np.inf, 0.8, 0.6)
CHAOTIC_NORM = 0.25
# Sums of the same FP8 products in another order (see recipe/golden_products_test.py), of the
# result's norm.
GOLDEN_PRODUCT = 1e-6
# Of steps recomputed or unrolled where XLA lays an operand out otherwise: the order of a sum.
KEPT_LAID_OUT = (0, 1.2e-7, 0)
# Logits against transformers, both in float32, absolute.
LOGITS_TINY = 1e-4
LOGITS_SMOLLM2 = 5e-4


def difference(x, y) -> float:
  x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
  return float(1 - 2 * np.sum(x * y) / np.sum(x * x + y * y))
