"""Quantization-aware training and distillation (arXiv:2601.20088) of SmolLM2-135M, arm by format.

what:      100 steps of 512 tokens by the cross entropy of the text (qat) or by KL to the
           unquantized model (qad), from the released weights unless init.hf names GPTQ's folder;
           20 steps in an arm short-METHOD-RECIPE
command:   bash experiments/2026_qad/run.sh
hardware:  two CPU cores, 6 GB of memory; emulated products
expected:  see README.md
"""

from configs import base
from fp8jax.recipe.served import SERVED

METHODS = {"qat": 0.0, "qad": 1.0}
LONG = ("w4a16_g64", "nvfp4a16")
# Activations by calibrated scales.
STATIC = ("fp8", "fp8_channel_static", "fp8_gaudi2", "int8_static")
# SmolLM2's widths hold no whole groups of 128.
SHORT = (
  "fp8_dynamic", "fp8_240_dynamic", "w8a16", "int8", "w4afp8_g64", "mxfp8_ste", "mxfp4a16",
  "mxfp4_ste", "nvfp4_ste", "nvfp4a16_4or6", "nvfp4_ste_4or6", *STATIC,
)  # fmt: skip
ARMS = tuple(f"{method}-{recipe}" for recipe in LONG for method in METHODS)
DATA, MODEL = "assets/corpora", "assets/smollm2-135m"


def get_config(arm="qad-w4a16_g64"):
  is_short = arm.startswith("short-")
  method, _, recipe = arm.removeprefix("short-").partition("-")
  if arm not in ARMS and not (is_short and method in METHODS and recipe in SHORT):
    raise ValueError(
      f"unknown arm {arm!r}; expected one of {', '.join(ARMS)}, or short-METHOD-RECIPE"
    )
  c = base.get_config()
  c.precision.rules = (("head", "bf16"), ("layers/.*", recipe))
  if SERVED[recipe].fwd.multiplies_codes:
    c.kernels.matmul = "dequantized"  # the reference's codes, sums in float32: half the time
  c.init.hf, c.model.preset = MODEL, "smollm2_135m"
  c.distill.weight = METHODS[method]
  c.distill.teacher = MODEL if c.distill.weight else ""
  c.data.eos = "<|endoftext|>"
  c.data.sources = {
    # The domain that is trained on, and a little of one whose held-out part shows forgetting.
    "python_docs": base.source("text", f"{DATA}/python_docs/**/*.txt", weight=0.9),
    "brown": base.source("text", f"{DATA}/brown/*.txt", weight=0.1),
  }
  c.steps, c.global_batch, c.seq_len = 20 if is_short else 100, 2, 256
  c.optim.schedule, c.optim.warmup_steps = "cosine", c.steps // 10
  c.optim.peak_lr, c.optim.min_lr = 2e-5, 2e-6
  c.optim.weight_decay = 0.0
  c.eval.tokens, c.eval.batch, c.eval.precisions = 4096, 2, ("recipe",)
  c.mesh.fsdp = 1
  c.checkpoint.every, c.checkpoint.keep = 25, 1
  c.log.tensorboard = c.log.report = False
  return c
