"""The defaults of a general guide to FP8 training, as a configuration.

what:      scales per tensor from an amax history, dynamic loss scale, alarms at 1 % out of range,
           and policies that refresh scales, widen margins, go to 16 bits and roll back
command:   python launch.py --config=configs/fp8_guide.py
hardware:  any CPU; model and text of configs/debug.py on one device, also of a larger machine
expected:  not measured; the drills of the policies are in experiments/guide/control.md

The guide is a text of advice without code or experiments. It contradicts itself or the hardware in
places, and leaves others open; there this configuration does something else:

the guide says                        here, and why
------------------------------------  -------------------------------------------------------------
an overflow doubles the loss scale    halves it (loss_scale.kind="dynamic"): twice the scale
                                      overflows twice as far, and the guide's Spanish text halves
base learning rates of 0.05 to 0.2    peak_lr 3e-4, from the guide's other range, 1e-5 to 5e-4,
                                      which is that of AdamW; nobody measured the first here
accumulators of 8 bits                float32: elsewhere it asks for accumulation in high precision,
                                      and no backend of ours can sum in 8 bits
rates times 0.8 to 1.25 by layer      1 for all: it does not say which layer gets which factor;
                                      optim.lr_multipliers takes them
clip at 1.0 to 1.5, or at 1 to 5      1.0 for the global norm, which is in both ranges
E4M3 by default, E5M2 as an option    E5M2 for gradients, as Transformer Engine has it; the arm
                                      e4m3_static is E4M3 throughout, with calibrated scales
the first and last layers in 16 bits  the last alone: both would leave nothing of two layers
attention in 16 bits                  queries, keys and values are multiplied in the compute dtype,
                                      BF16 on a GPU; the linear layers around them are FP8, which it
                                      says elsewhere
a calibration stage beforehand        the arm e4m3_static reads --job=calibrate's table (amax,
                                      percentile or mean squared error); a history needs none
an optimizer in FP8                   float32 moments, since it asks for updates in high precision,
                                      too; optim.moment_format="coat" has 8 bits
"""

from configs import debug


def get_config(arm=""):
  c = debug.get_config(arm or "tensor_delayed(margin=1)")
  c.precision.last_bf16 = 1  # first_bf16 = 1, too, from three layers on
  c.loss_scale.kind = "dynamic"  # from 2^8
  c.optim.on_nonfinite = "skip"
  c.optim.schedule = "cosine"
  c.optim.warmup_fraction = 0.07  # 6 to 8 % of the steps
  c.optim.peak_lr = 3e-4
  c.optim.min_lr = 1e-5
  c.optim.weight_decay = 0.01  # .01 to .02
  c.optim.grad_clip_norm = 1.0
  c.log.tensor_stats_every = 10  # 100 in long runs
  c.log.alarms = (
    ("saturation", ">", 0.01), ("underflow", ">", 0.3), ("nonfinite", ">", 0.0),
  )  # fmt: skip
  c.precision.policy = (
    "refresh(every=2000)",  # every few thousand steps, or on a failure
    "refresh(alarm='underflow')",
    "widen_margin(alarm='saturation')",
    "switch_recipe(to='bf16', alarm='any', k=3, looks=5, back_after=20)",
    "roll_back(z=6.0, window=32, skip=2)",
  )
  c.checkpoint.every = 20
  return c
