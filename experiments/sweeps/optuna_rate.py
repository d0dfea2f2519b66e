"""Optuna's TPE looks for the learning rate and weight decay of the debug model, per recipe.

command:   python launch.py --sweep=experiments/sweeps/optuna_rate.py --parallel=2
hardware:  any
expected:  a table of 2 x 12 points; the study is runs/optuna_rate/optuna.journal
"""

from fp8jax.sweeps.spec import LogUniform, Optuna, Sweep, Uniform

SWEEP = Sweep(
  config="configs/debug.py",
  arms=("bf16", "block_128"),
  fixed={"steps": 30, "log.tensorboard": False, "log.tensor_stats_every": 0},
  search=Optuna(
    {"optim.peak_lr": LogUniform(3e-4, 3e-2), "optim.weight_decay": Uniform(0.0, 0.2)}, count=12
  ),
)
