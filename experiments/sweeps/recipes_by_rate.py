"""Three recipes, three learning rates, two seeds of the debug model: 18 runs.

command:   python launch.py --sweep=experiments/sweeps/recipes_by_rate.py
hardware:  any; one trial per GPU, or one per core
expected:  under five minutes on two quiet cores; 3e-3 is the best rate of every recipe
"""

from fp8jax.sweeps.spec import Grid, Sweep

SWEEP = Sweep(
  config="configs/debug.py",
  arms=("bf16", "tensor_current", "block_128"),
  axes=(Grid({"optim.peak_lr": (1e-3, 3e-3, 1e-2)}),),
  seeds=(0, 1),
  fixed={"steps": 30, "log.tensorboard": False, "log.tensor_stats_every": 0},
)
