"""Four arms of SmolLM2-135M with four seeds on one GPU: 16 runs side by side.

command: python launch.py --sweep=experiments/2026_hopper/continued.py --parallel=16

Fixed before the first run: arms, seeds, steps, and what is compared. A seed draws the order of the
windows; with it, every arm trains on the same batches.
"""

from fp8jax.sweeps.spec import Sweep

SWEEP = Sweep(
  config="experiments/2026_hopper/arms.py",
  arms=("bf16", "bf16_one_ulp", "block_128", "block_128_8bit"),
  seeds=(0, 1, 2, 3),
)
