"""From training to a server's folder (TorchAO, arXiv:2507.16099), in small: stages as arms.

what:      train:       200 steps in FP8, a scale per row of each product
           more:        20 steps of its weights in the same recipe, the control
           qat-RECIPE:  20 steps of its weights in a served format; with -24 in a 2:4 mask
command:   bash experiments/2025_torchao/run.sh
hardware:  any CPU
expected:  see README.md
"""

from configs import base

FORMATS = ("w4a16", "nvfp4a16", "fp8_dynamic", "int8")
ARMS = ("train", "more", *(f"qat-{recipe}" for recipe in FORMATS), "qat-w4a16-24")
STEPS = {"train": 200, "more": 20, "qat": 20}


def get_config(arm="qat-w4a16"):
  if arm not in ARMS:
    raise ValueError(f"unknown arm {arm!r}; expected one of {', '.join(ARMS)}")
  stage, _, recipe = arm.partition("-")
  c = base.get_config(recipe.removesuffix("-24") or "rowwise")
  c.model.update(
    hidden_size=128, intermediate_size=384, num_heads=2, num_kv_heads=2, head_dim=64, num_layers=3
  )
  c.steps, c.global_batch, c.seq_len = STEPS[stage], 8, 128
  c.optim.schedule, c.optim.warmup_steps = "cosine", c.steps // 10
  # QAT at a tenth of the rate, as TorchAO fine-tunes.
  c.optim.peak_lr, c.optim.min_lr = (3e-3, 3e-4) if stage == "train" else (3e-4, 3e-5)
  if arm.endswith("-24"):
    c.optim.sparsity = "2:4"
  c.eval.tokens, c.eval.batch = 8192, 8
  c.mesh.fsdp = 1
  c.checkpoint.every, c.checkpoint.keep = 0, 1
  c.log.tensorboard = c.log.report = False
  return c
