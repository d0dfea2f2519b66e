"""All of Qwen2.5-7B continued in block FP8 on one 80 GB GPU, 8,192 tokens at a time.

what:      cpt_7b's model, recipe and optimizer; masters in BF16 with a 16-bit remainder (a float32,
           losslessly), BF16 gradients rounded stochastically, COAT's moments: 8.1 bytes per
           parameter instead of 16. A step has 1/512 of the tokens (see `for_batch`): 328M in
           40,000 steps, peak rate 4.4e-6 (1e-4 / sqrt(512)), min 4.4e-7, warm-up and decay 5,000
           steps each, clip 1.0
command:   as for configs/cpt_7b.py, then
           python launch.py --config=configs/cpt_7b_1gpu.py
           (memory.gpu_fraction: by itself JAX takes three quarters of the GPU, 55.9 GiB)
hardware:  1 x H100 with 80 GB
expected:  820 ms per step, 9,990 tokens/s, on an H100 from random weights; 65.4 GiB of its 74.5
           with XLA's AdamW, which takes 994 ms (experiments/gpu_check/results); loss: not yet
           measured
"""

import math

from configs import cpt_7b


def for_batch(c):
  """Learning rates for c's tokens per step instead of InfiR2's 4,194,304.

  The square root rule for Adam (Malladi et al. 2022, arXiv:2205.10343): batch / k, rate / sqrt(k).
  Its other half, 1 - b1 and 1 - b2 divided by k, is not followed: at b2 = 0.9999 a second moment
  falls by 1e-4 per step at most, less than half a step of E4M3, and in 8 bits would not fall.

  Warm-up and decay stay 1/8 of the run each, as InfiR2's. Clipping stays at 1.0: the gradient of a
  small batch is mostly noise, whose norm grows with 1 / sqrt(tokens) (McCandlish et al. 2018,
  arXiv:1812.06162), so that it acts on many steps here where it acts on few there. Adam
  divides by the size of past gradients, so that this only keeps one batch from outweighing others.
  """
  scale = math.sqrt(c.global_batch * c.seq_len / (128 * 32_768))
  c.optim.peak_lr, c.optim.min_lr = 1e-4 * scale, 1e-5 * scale


def get_config(arm="", name="cpt_7b_1gpu"):
  c = cpt_7b.get_config(arm, name)
  c.optim.master_format, c.optim.grad_format, c.optim.moment_format = (
    "bf16_remainder",
    "bf16_sr",
    "coat",
  )
  # A sum of microbatches would be a second set of gradients.
  c.global_batch, c.seq_len, c.grad_accum_steps = 1, 8_192, 1
  c.eval.batch, c.eval.tokens = 1, 100 * 8_192
  c.mesh.data, c.mesh.fsdp = 1, 1
  for_batch(c)  # 4.4e-6, not 1e-4
  c.memory.gpu_fraction = 0.95
  return c
