"""Continued pre-training of SmolLM2-135M-Instruct on the Python language reference, in block FP8.

what:      the main job of `make run`: a real model on real text through one FP8 dot
command:   python -m fp8jax.models.hf.convert_gguf assets/smollm2-135m  (once)
           python launch.py --config=configs/smollm2_cpt.py
hardware:  two CPU cores, 4 GB of memory; one device, also of a larger machine
expected:  held-out loss 2.866 -> 2.669 in block_128, 2.848 -> 2.655 in a BF16 forward; 5 minutes
"""

from configs import base


def get_config(arm=""):
  c = base.get_config(arm)
  c.init.hf = "assets/smollm2-135m"
  c.model.preset = "smollm2_135m"
  c.data.eos = "<|endoftext|>"  # ends a document; the folder's eos_token ends a turn of a chat
  c.steps, c.global_batch, c.seq_len = 20, 2, 256
  c.optim.schedule, c.optim.warmup_steps = "cosine", 5
  c.optim.peak_lr, c.optim.min_lr = 1e-4, 1e-5
  c.eval.tokens, c.eval.batch = 4096, 4
  c.mesh.fsdp = 1
  c.checkpoint.every, c.checkpoint.keep = 10, 2 if c.precision.policy else 1  # roll_back needs two
  return c
