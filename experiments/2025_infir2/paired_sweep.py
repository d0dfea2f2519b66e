"""SmolLM2-135M continued on 64 batches of 1,024 tokens, three recipes with three seeds.

command: python launch.py --sweep=experiments/2025_infir2/paired_sweep.py --parallel=1

A seed draws the order of the windows, and the random weights of scratch_sweep.py; with it, every
recipe trains on the same batches. The comparison at the end is that of `--job=compare`: paired
differences in percent of bf16's loss with Student's interval over the seeds. Three quantities were
fixed with the design: training (after the warm-up), rounding and weights. Served and the last
quarter of training were added after the runs, and so was the interval corrected for the number of
rows.
"""

from fp8jax.sweeps.spec import Sweep

SWEEP = Sweep(
  config="experiments/2025_infir2/config.py",
  arms=("paired-bf16", "paired-block_128", "paired-block_128_pow2"),
  seeds=(0, 1, 2),
)
