"""InfiR2's supervised fine-tuning of the 7B model in block FP8, two stages (arXiv:2509.22536).

what:      5 epochs of InfiAlign-SFT-72k, then of InfiAlign-SFT-165k, 64 samples a step (InfiXAI/
           InfiR2 scripts/SFT); training computes with their values on a mesh of ours (theirs: TP 4
           on 2 x 8 GPUs)
command:   train configs/cpt_7b.py (for an arm with a recipe :RECIPE of it); put the tokenizer of
           Qwen/Qwen2.5-7B-Instruct in assets/Qwen2.5-7B-Instruct and the data in
           assets/InfiAlign-SFT-{72k,165k}/*.jsonl, then
           python launch.py --config=configs/sft_7b.py:stage1
           python launch.py --config=configs/sft_7b.py:stage2
           other data: --config.data.sources.main.{kind,path,chat,field}; other weights:
           --config.init.workdir=DIR, or --config.init.workdir= --config.init.weights_only=False
           and --config.init.hf=FOLDER
hardware:  8 x H200 (not yet run); needs the extra "attention", which isolates samples at 32k
expected:  not yet measured
arms:      stage1 or stage2, and after a comma a recipe: "stage1", "stage1,bf16", "stage2",
           "stage2,bf16". Stage 1 starts from continued pre-training in the same recipe, stage 2
           from stage 1. A recipe alone, or nothing, is stage 1 in a folder of its own
           (runs/sft_7b_bf16, runs/sft_7b), which stage 2 is told by --config.init.workdir

The sources disagree; the scripts are followed:
  peak and last learning rate   2e-5 -> 2e-6 in the script, 1e-5 -> 1e-6 on the model card
  weight decay                  0 in the script, 0.05 on the model cards (7B and 1.5B)
No source gives the length of the samples. 32 windows hold 64 samples of 16k tokens. At its
start the run prints how many windows the fullest step needs. It stops if the config has fewer.
"""

from configs import base, cpt_7b

# Samples as the names of the data sets count them.
SAMPLES = {"stage1": 72_000, "stage2": 165_000}
ARMS = ("stage1", "stage1,bf16", "stage2", "stage2,bf16")


def get_config(arm="", name="sft_7b", cpt=cpt_7b, cpt_name="cpt_7b"):
  """The configuration.

  Args:
    arm: see the head of the file.
    name, cpt, cpt_name: of the file, and of the one whose weights stage 1 starts from.
  """
  first, _, rest = arm.partition(",")
  stage, recipe = (first, rest) if first in SAMPLES else ("stage1", arm)
  c = cpt.get_config(recipe)  # model, recipe, mesh and memory
  c.init.hf, c.init.weights_only = "", True
  c.data.tokenizer = "assets/Qwen2.5-7B-Instruct"  # and its chat template
  before = cpt_name if stage == "stage1" else f"{name}_stage1"
  # As launch.py names the workdir of an arm.
  c.init.workdir = "_".join(filter(None, (f"runs/{before}", recipe.replace(",", "_"))))
  size = "72k" if stage == "stage1" else "165k"
  c.data.sources = {
    "main": base.source("jsonl", f"assets/InfiAlign-SFT-{size}/*.jsonl", chat="messages")
  }
  c.data.samples_per_step, c.data.epochs = 64, 5.0
  c.steps = SAMPLES[stage] * 5 // 64  # what --job=memory plans with; the run counts its samples
  c.global_batch, c.grad_accum_steps = 32, 4  # windows, one per GPU in flight
  c.data.on_long = "skip"  # a sample beyond the context
  c.data.cross_document = False
  c.data.heldout_fraction, c.eval.tokens, c.eval.every = 0.0, 0, 0  # all samples are trained on
  c.optim.schedule, c.optim.warmup_fraction = "cosine", 0.05
  c.optim.peak_lr, c.optim.min_lr = 2e-5, 2e-6
  c.optim.weight_decay = 0.0
  return c
