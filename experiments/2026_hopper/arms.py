"""InfiR2's continued pre-training (arXiv:2509.22536, section 4) with the kernels of a Hopper GPU.

what:      arms "7b,RECIPE": all of Qwen2.5-7B as configs/cpt_7b_1gpu.py trains it, from random
           weights, for its speed and its memory; "7b_adamw,RECIPE": the same with AdamW in our
           kernel instead of XLA's; "7b_micro,RECIPE": that with four microbatches, whose gradients
           add up in float32, on an H200; "7b_once,RECIPE": that with weights quantized once per
           step. Other arms: SmolLM2-135M continued on the Python
           manual and the Brown corpus, 128 steps of 8,192 tokens, in
             bf16             the baseline, computed in BF16
             bf16_one_ulp     the null arm: the baseline from weights one float32 ulp larger
             block_128        InfiR2's blocks
             block_128_8bit   the same with COAT's moments, BF16 masters with a remainder and BF16
                              gradients rounded stochastically, as cpt_7b_1gpu
command:   python -m fp8jax.models.hf.convert_gguf assets/smollm2-135m
           python experiments/2025_infir2/prepare_data.py assets/infir2_data
           python launch.py --sweep=experiments/2026_hopper/continued.py --parallel=16
hardware:  1 x H100 or H200
expected:  README.md beside this
"""

from configs import base, cpt_7b_1gpu

DATA = "assets/infir2_data"
BASELINE, NULL, BLOCK, SMALL = "bf16", "bf16_one_ulp", "block_128", "block_128_8bit"
ARMS = (BASELINE, NULL, BLOCK, SMALL)
_OURS = {"kernels.optimizer": "mosaic_sm90"}
_MICRO = _OURS | {"grad_accum_steps": 4, "global_batch": 4, "optim.grad_format": "float32"}
SEVEN_BILLION = {
  "7b": {"kernels.optimizer": "xla"}, "7b_adamw": _OURS, "7b_micro": _MICRO,
  "7b_once": _MICRO | {"memory.weight_operands": "per_step"},
}  # fmt: skip


def get_config(arm=BASELINE):
  kind, _, recipe = arm.partition(",")
  if kind in SEVEN_BILLION:
    c = _seven_billion(recipe)
    c.update_from_flattened_dict(SEVEN_BILLION[kind])
    return c
  if arm not in ARMS:
    expected = ", ".join((*(f"{kind},RECIPE" for kind in SEVEN_BILLION), *ARMS))
    raise ValueError(f"unknown arm {arm!r}; expected one of {expected}")
  return _continued(arm)


def _seven_billion(recipe: str):
  c = cpt_7b_1gpu.get_config(recipe)
  c.init.hf = ""
  c.data.tokenizer, c.data.sources = "bytes", {"main": base.source("pydoc")}
  c.eval.tokens = c.seq_len
  c.checkpoint.every = 0
  c.log.report = False
  return c


def _continued(arm: str):
  c = base.get_config("bf16" if arm in (BASELINE, NULL) else "block_128")
  c.init.hf, c.init.nudge = "assets/smollm2-135m", arm == NULL
  c.model.preset = "smollm2_135m"
  c.data.eos = "<|endoftext|>"
  c.data.sources = {
    "python_docs": base.source("text", f"{DATA}/python_docs/**/*.txt", weight=0.9),
    "brown": base.source("text", f"{DATA}/brown/*.txt", weight=0.1),
  }
  c.steps, c.global_batch, c.seq_len = 128, 8, 1024
  c.optim.schedule = "wsd"
  c.optim.warmup_steps, c.optim.decay_steps = 16, 16
  c.optim.peak_lr, c.optim.min_lr = 1e-4, 1e-5
  if arm == SMALL:
    c.optim.master_format, c.optim.grad_format = "bf16_remainder", "bf16_sr"
    c.optim.moment_format = "coat"
  c.mesh.fsdp = 1
  c.memory.remat_policy = "full"
  c.eval.tokens, c.eval.batch = 65_536, 8
  c.checkpoint.every = 0
  c.log.every, c.log.tensorboard, c.log.report = 10, False, False
  return c
