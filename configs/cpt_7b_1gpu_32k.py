"""All of Qwen2.5-7B on one 80 GB GPU at InfiR2's length, 32,768 tokens at a time.

what:      cpt_7b_1gpu, but every layer moves as soon as its gradient is there, so that gradients
           exist of one layer at a time. The global norm is then known too late to clip by: clip 0
           where cpt_7b has 1. A single large batch moves a weight by at most
           (1 - b1) / sqrt(1 - b2) = 0.45 of the learning rate (Kingma & Ba, arXiv:1412.6980 §2.1).
           A step has 1/128 of InfiR2's tokens: peak rate 8.8e-6 (1e-4 / sqrt(128)), min 8.8e-7
command:   as for configs/cpt_7b.py, then
           python launch.py --config=configs/cpt_7b_1gpu_32k.py
           (memory.gpu_fraction: by itself JAX takes three quarters of the GPU, 55.9 GiB)
hardware:  1 x H100 with 80 GB (compiled for it without a GPU, not yet run)
expected:  57.6 GiB of its 74.5, by --job=memory --topology=h100:1; loss and speed: not
           yet measured
"""

from configs import cpt_7b_1gpu


def get_config(arm="", name="cpt_7b_1gpu_32k"):
  c = cpt_7b_1gpu.get_config(arm, name)
  c.optim.in_backward, c.optim.grad_clip_norm, c.optim.grad_format = True, 0.0, "float32"
  c.seq_len = 32_768
  c.eval.tokens = 25 * 32_768
  cpt_7b_1gpu.for_batch(c)
  return c
