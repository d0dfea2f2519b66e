"""Reinforcement learning of SmolLM2-135M-Instruct in block FP8 on sums, rollout = training.

what:      60 steps of DAPO on answers that a verifier judges, two per rollout of 4 questions with 8
           completions each, after the first stage of configs/sft_smollm2.py; precision.invariant,
           so that the rollout's probabilities are training's to the bit
command:   make run fetches the model (assets/smollm2-135m); then
           python experiments/sft_demo/prepare_data.py assets/sft_demo
           python launch.py --config=configs/sft_smollm2.py:stage1
           python launch.py --config=configs/rl_smollm2.py
hardware:  two CPU cores, 5 GB of memory; one device, also of a larger machine
expected:  held-out sums right, of 48: 18 -> 31 and 23 in bf16, 20 -> 20 (33 after 40 steps) and
           16 -> 26 in block_128, seeds 0 and 1 (experiments/2026_rl); 55 minutes of a core
arms:      a recipe; it begins with stage 1 in the same one, and is not invariant ("bf16" need not
           be: sums in float32 differ by 1e-6); on a GPU without kernels.matmul and generate.weights
"""

from configs import base

JOB = "rl"
ARMS = ("bf16",)


def get_config(arm=""):
  c = base.get_config(arm)
  c.init.workdir = "_".join(filter(None, ("runs/sft_smollm2_stage1", arm)))
  c.init.weights_only = True
  c.model.preset = "smollm2_135m"
  c.data.tokenizer = "assets/smollm2-135m"  # and its chat template
  c.rl.tasks = "assets/sft_demo/learned.jsonl"
  c.rl.loss, c.rl.prompts, c.rl.samples, c.rl.updates_per_rollout = "dapo", 4, 8, 2
  c.rl.max_new_tokens, c.generate.max_length, c.generate.slots = 48, 128, 32
  c.eval.tasks = "assets/sft_demo/held_out.jsonl(max_new_tokens=48)"
  c.eval.chat, c.eval.tokens, c.eval.every = True, 0, 20
  c.steps, c.global_batch, c.seq_len = 60, 16, 96
  c.optim.warmup_steps, c.optim.decay_steps = 4, 0
  c.optim.peak_lr, c.optim.min_lr, c.optim.weight_decay = 1e-5, 1e-5, 0.0
  c.precision.invariant = not arm
  c.kernels.matmul, c.generate.weights = "dequantized", "values"  # the sooner of a CPU
  c.memory.remat_policy = "full"
  c.mesh.fsdp = 1
  c.checkpoint.every, c.checkpoint.keep = 10, 1
  c.log.every = 2
  return c
