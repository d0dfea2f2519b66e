"""3.4M parameters from random weights on 512 batches of 2,048 tokens; see paired_sweep.py.

command: python launch.py --sweep=experiments/2025_infir2/scratch_sweep.py --parallel=1
"""

from fp8jax.sweeps.spec import Sweep

SWEEP = Sweep(
  config="experiments/2025_infir2/config.py",
  arms=("scratch-bf16", "scratch-block_128", "scratch-block_128_pow2"),
  seeds=(0, 1, 2, 3, 4),
)
