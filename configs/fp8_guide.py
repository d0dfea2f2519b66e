"""The defaults of a general guide to FP8 training, as a configuration.

what:      scales per tensor from an amax history, dynamic loss scale, alarms at 1 % out of range,
           and policies that refresh scales, widen margins, go to 16 bits and roll back
command:   python launch.py --config=configs/fp8_guide.py
hardware:  any CPU; model and text of configs/debug.py on one device, also of a larger machine
expected:  held-out loss 5.166 -> 2.583 in 60 steps, no action; under a minute. Drills of the
           policies are in experiments/guide/control.md

The preset itself is in configs/base.py: a configuration takes it as its arm,
`--config=configs/smollm2_cpt.py:guide`, or with another recipe, `:guide,block_128`. Lines of the
file itself, such as its rates and warm-up, hold. Where layers move in the backward pass
(optim.in_backward, configs/cpt_7b_1gpu_32k.py) it is refused: nothing can be skipped or undone.

The guide is a text of advice without code or experiments. It contradicts itself or the hardware in
places, and leaves others open; there this configuration does something else:

the guide says                        here, and why
------------------------------------  -------------------------------------------------------------
an overflow doubles the loss scale    halves it (loss_scale.kind="dynamic"): twice the scale
                                      overflows twice as far, and the guide's Spanish text halves
base learning rates of 0.05 to 0.2    peak_lr 3e-4, from the guide's other range, 1e-5 to 5e-4,
                                      which is that of AdamW; nobody measured the first here
min_lr near 1e-4                      1e-5, the end of that range: from 3e-4 the rate would
                                      hardly decay otherwise
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
  c = debug.get_config(f"guide,{arm}" if arm else "guide")
  c.optim.warmup_fraction = 0.07  # 6 to 8 % of the steps
  return c
