"""Supervised fine-tuning of SmolLM2-135M-Instruct in block FP8, two stages, on a CPU.

what:      a stage on sums with their working, 4 samples a step, then one of two turns each, from
           the first one's weights
command:   make run fetches the model (assets/smollm2-135m); then
           python experiments/sft_demo/prepare_data.py assets/sft_demo
           python launch.py --config=configs/sft_smollm2.py:stage1 --job=preview
           python launch.py --config=configs/sft_smollm2.py:stage1
           python launch.py --config=configs/sft_smollm2.py:stage2
hardware:  two CPU cores, 4 GB of memory; one device, also of a larger machine
expected:  held-out loss 1.940 -> 0.033 in stage 1, 0.124 -> 0.030 in stage 2; 21 and 19 steps, two
           minutes each
arms:      stage1 or stage2, and after a comma a recipe, as configs/sft_7b.py
"""

from configs import base

ARMS = ("stage1", "stage1,bf16", "stage2", "stage2,bf16")


def get_config(arm=""):
  first, _, rest = arm.partition(",")
  stage, recipe = (first, rest) if first in ("stage1", "stage2") else ("stage1", arm)
  c = base.get_config(recipe)
  c.init.hf = "assets/smollm2-135m"
  c.model.preset = "smollm2_135m"
  if stage == "stage2":
    before = ("runs/sft_smollm2_stage1", recipe.replace(",", "_"))
    c.init.workdir = "_".join(filter(None, before))
    c.init.weights_only = True
  c.data.sources = {"main": base.source("jsonl", f"assets/sft_demo/{stage}.jsonl", chat="messages")}
  c.data.samples_per_step, c.data.epochs, c.data.on_long = 4, 1.0, "error"
  c.global_batch, c.seq_len = {"stage1": 2, "stage2": 4}[stage], 160
  c.steps = 20
  c.optim.schedule, c.optim.warmup_fraction = "cosine", 0.05
  c.optim.peak_lr, c.optim.min_lr = 5e-5, 5e-6
  c.optim.weight_decay = 0.0
  c.eval.tokens, c.eval.batch = 640, 2
  c.mesh.fsdp = 1
  c.checkpoint.every, c.checkpoint.keep = 10, 2 if c.precision.policy else 1  # roll_back needs two
  return c
