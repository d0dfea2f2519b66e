"""InfiR2's reinforcement learning of the 7B model in block FP8, two stages (arXiv:2509.22536).

what:      GRPO with DAPO's settings on dapo-math-17k, 128 questions x 16 completions a step
           (InfiXAI/InfiR2 scripts/RL); what training computes has their values, mesh and memory are
           ours (theirs: 4 x 8 GPUs, TP 4, CP 2, SGLang on 4 GPUs per engine)
command:   train configs/sft_7b.py; put the tokenizer of Qwen/Qwen2.5-7B-Instruct in
           assets/Qwen2.5-7B-Instruct, dapo-math-17k as JSONL ("question", "answer") in
           assets/dapo-math-17k.jsonl and AIME 2024 in assets/benchmarks; then
           python launch.py --config=configs/rl_7b.py:stage1
           python launch.py --config=configs/rl_7b.py:stage2
hardware:  8 x H200 (not yet run); needs the extras "eval" and "attention"
expected:  41.4 GiB per GPU in the step of stage 1 and 39.6 GiB while it draws, 44.8 and 46.6 GiB in
           stage 2 (--job=memory); rewards and speed: not yet measured
arms:      stage1 (completions of 8k tokens) or stage2 (16k, temperature 1.1), and after a comma a
           recipe. Stage 1 begins with the second stage of configs/sft_7b.py in the same recipe,
           stage 2 with stage 1. A recipe alone, or nothing, is stage 1 in a folder of its own

Where the sources disagree, or we differ:
  training          docs/RL.md of their repository has it in BF16 beside a rollout in FP8 with E8M0
                    scales; its scripts since 2025-10-22 have both in blocks with float32 scales.
                    Here as the scripts; the other is stage1,bf16 with rl.rollout="block_128_pow2"
  scales            powers of two in their CPT and SFT; here float32, as in the RL scripts
  steps             10,240: the scripts' number of rollouts, which docs/RL.md calls responses
  mean of the loss  dapo's, over the tokens of a step; their scripts do not ask slime for that, and
                    we have not read what it does then
  temperature       1.0 in stage 1, 1.1 in stage 2 (scripts); the paper names none
  rollout           by SGLang in the same FP8 format, corrected by truncated importance sampling;
                    here by the sampler of this code, corrected alike
  questions         theirs oversample threefold and drop groups of equal rewards; here such groups
                    make way in up to eight rounds
  length of prompts no source gives it; 1,024 tokens here
  KL, entropy       0 in the scripts
  reward            "deepscaler" in theirs; here math-verify
  evaluation        AIME 2024 every 20 steps, 16 samples of 30k tokens, top-p 0.7 in theirs; here of
                    the tokens that fit, at top-p 1
"""

from configs import base, cpt_7b

JOB = "rl"
TOKENS = {"stage1": 8192, "stage2": 16384}  # of a completion
PROMPT = 1024
ARMS = ("stage1", "stage1,bf16", "stage2", "stage2,bf16")


def get_config(arm=""):
  first, _, rest = arm.partition(",")
  stage, recipe = (first, rest) if first in TOKENS else ("stage1", arm)
  c = cpt_7b.get_config(recipe or "block_128")  # model, mesh and memory
  c.init.hf, c.init.weights_only = "", True
  before = "sft_7b_stage2" if stage == "stage1" else "rl_7b_stage1"
  c.init.workdir = "_".join(filter(None, (f"runs/{before}", recipe.replace(",", "_"))))
  c.data.sources = {"main": base.source("pydoc")}  # not read
  c.data.tokenizer = "assets/Qwen2.5-7B-Instruct"  # and its chat template
  c.rl.tasks = "assets/dapo-math-17k.jsonl"
  c.rl.loss, c.rl.prompts, c.rl.samples = "dapo", 128, 16
  c.rl.temperature = {"stage1": 1.0, "stage2": 1.1}[stage]
  c.rl.max_new_tokens, c.generate.slots = TOKENS[stage], 128
  c.generate.max_length = PROMPT + TOKENS[stage]
  c.eval.tasks = f"aime24(samples=16, temperature=1.0, max_new_tokens={TOKENS[stage]})"
  c.eval.chat, c.eval.every, c.eval.tokens = True, 20, 0
  c.steps, c.global_batch, c.seq_len = 10_240, 2048, PROMPT + TOKENS[stage]
  c.grad_accum_steps = 256  # one completion per GPU in flight
  c.data.cross_document = False
  c.optim.schedule, c.optim.warmup_steps, c.optim.decay_steps = "wsd", 0, 0
  c.optim.peak_lr, c.optim.min_lr = 1e-6, 1e-6
  c.optim.b1, c.optim.b2, c.optim.weight_decay = 0.9, 0.98, 0.1
  c.checkpoint.every = 20
  return c
