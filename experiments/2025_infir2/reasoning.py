"""InfiR2's whole recipe on SmolLM2-135M: continued pre-training, two stages of fine-tuning.

what:      CPT on the Python manual and worked solutions, then SFT on conversations of reasoning-gym
           families, stage 2 on other questions of them; every stage in every recipe
command:   python experiments/2025_infir2/reasoning_runs.py   (arms and seeds, one after the other)
           python experiments/2025_infir2/recipe.py           (the miniature)
hardware:  two CPU cores, 6 GB of memory
arms:      cpt, stage1, stage2, and after a comma a recipe (block_128 without one); "mini" as a
           third part is a third of the tokens, for `make recipe`
differs:   135M parameters instead of 1.5B and 7B, 40,000 tokens per stage at most, 8 samples a step
           instead of 64; a float32 baseline on a CPU
"""

from configs import base

DATA = "assets/reasoning"
STAGES = ("cpt", "stage1", "stage2")
# Before a stage: the one whose weights it starts from.
BEFORE = {"stage1": "cpt", "stage2": "stage1"}


def workdir(stage: str, recipe: str, size: str = "", seed: int = 0) -> str:
  """Folder of a stage's run."""
  return "runs/2025_infir2/" + "-".join(filter(None, ("reasoning", stage, recipe, size, str(seed))))


def get_config(arm="stage1"):
  stage, recipe, size = (arm.split(",") + ["", ""])[:3]
  recipe = recipe or "block_128"
  if stage not in STAGES or size not in ("", "mini"):
    raise ValueError(f"unknown arm {arm!r}; expected STAGE[,RECIPE[,mini]], STAGE of {STAGES}")
  c = base.get_config(recipe)
  c.model.preset = "smollm2_135m"
  c.optim.schedule, c.optim.weight_decay = "cosine", 0.0
  c.optim.peak_lr, c.optim.min_lr = 2e-4, 2e-5
  c.optim.warmup_fraction = 0.05
  c.mesh.fsdp = 1
  c.seq_len, c.global_batch, c.eval.batch = 512, 2, 2
  c.eval.tokens = 2048
  c.checkpoint.every, c.checkpoint.keep = 0, 1
  if stage == "cpt":
    c.init.hf = "assets/smollm2-135m"
    c.data.eos = "<|endoftext|>"
    c.data.sources = {
      "manual": base.source("pydoc", weight=0.5),
      "solutions": base.source("jsonl", f"{DATA}/cpt.jsonl", weight=0.5),
    }
    c.optim.peak_lr, c.optim.min_lr = 1e-4, 1e-5
    c.steps = 12 if size else 39  # 1,024 tokens each
    return c
  c.init.workdir, c.init.weights_only = workdir(BEFORE[stage], recipe, size), True
  c.data.tokenizer = "assets/smollm2-135m"
  c.data.sources = {"solutions": base.source("jsonl", f"{DATA}/{stage}.jsonl", chat="messages")}
  c.data.on_long = "error"
  c.data.samples_per_step = 8
  c.steps = 16 if size else 39  # 1,024 positions each, about 800 of them tokens
  return c
