"""All of Qwen2.5-1.5B continued in block FP8 on one 80 GB GPU, at InfiR2's length.

what:      cpt_1p5b's model, recipe and optimizer (float32 masters, moments and gradients); a step
           is 8 sequences of 32,768 tokens, one at a time: 1/16 of InfiR2's tokens, 10.5B in 40,000
           steps. Peak rate 2.5e-5 (1e-4 / sqrt(16)), min 2.5e-6, warm-up and decay 5,000 steps
           each, clip 1.0: the rule of configs/cpt_7b_1gpu.py
command:   as for configs/cpt_1p5b.py, then
           python launch.py --config=configs/cpt_1p5b_1gpu.py
hardware:  1 x H100 with 80 GB (compiled for it without a GPU, not yet run)
expected:  33.8 GiB of the 55.9 that JAX takes by itself, by --job=memory
           --topology=h100:1; loss and speed: not yet measured
"""

from configs import cpt_1p5b, cpt_7b_1gpu


def get_config(arm="", name="cpt_1p5b_1gpu"):
  c = cpt_1p5b.get_config(arm, name)
  c.global_batch, c.grad_accum_steps = 8, 8
  c.eval.batch, c.eval.tokens = 1, 25 * 32_768
  c.mesh.data, c.mesh.fsdp = 1, 1
  cpt_7b_1gpu.for_batch(c)
  return c
