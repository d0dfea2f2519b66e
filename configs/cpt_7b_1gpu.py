"""All of Qwen2.5-7B continued in block FP8 on one 80 GB GPU, 8,192 tokens at a time.

what:      cpt_7b's model, recipe and optimizer; masters in BF16 with a 16-bit remainder (a float32,
           losslessly), BF16 gradients rounded by chance, COAT's moments: 8.1 bytes per parameter
           instead of 16
command:   as for configs/cpt_7b.py, then
           python launch.py --config=configs/cpt_7b_1gpu.py
           (memory.gpu_fraction: by itself JAX takes three quarters of the GPU, 55.9 GiB)
hardware:  1 x H100 with 80 GB (compiled for it without a GPU, not yet run)
expected:  62.4 GiB of its 74.5, by --job=memory --config.memory.target=h100:1; loss and speed: not
           yet measured
"""

from configs import cpt_7b


def get_config(arm=""):
  c = cpt_7b.get_config(arm)
  c.optim.master, c.optim.gradients, c.optim.moments = "bf16_remainder", "bf16_sr", "coat"
  # A sum of microbatches would be a second set of gradients.
  c.batch, c.length, c.accumulation = 1, 8_192, 1
  c.eval.batch, c.eval.tokens = 1, 100 * 8_192
  c.mesh.data, c.mesh.fsdp = 1, 1
  c.memory.gpu_fraction = 0.95
  return c
