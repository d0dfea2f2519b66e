"""InfiR2 §4 (arXiv:2509.22536): continued pre-training in block FP8 tracks BF16.

what:      SmolLM2-135M continued on Python documentation and the Brown corpus, one arm per recipe;
           every recipe there is for 1/64 of the tokens, as arms short-RECIPE; arms paired-RECIPE
           for 1/16 of them, and arms scratch-RECIPE, 3.4M parameters from random weights on
           1,048,576 tokens of the manual, which sweeps run with several seeds
command:   bash experiments/2025_infir2/run.sh
hardware:  two CPU cores, 6 GB of memory
expected:  |loss_fp8 - loss_bf16| / loss_bf16 < 0.0025 at every evaluation (the literature's bar:
           DeepSeek-V3, arXiv:2412.19437, §3.3)
differs:   135M instead of 1.5B and 7B, 1.05M tokens instead of 160B; on CPU the compute dtype is
           float32, so that the arm named bf16 is a float32 baseline
"""

from configs import base

DATA = "assets/infir2_data"

# Each arm names the backend it was run with, and fails where that backend cannot.
LONG = {
  "bf16": "auto",
  "block_128": "reference",
  "block_128_pow2": "reference",
  "tensor_current": "xla",
}
SHORT = LONG | {
  "tensor_delayed": "xla",
  "tensor_delayed_latest": "xla",
  "e4m3_static": "xla",
  "fp8lm": "xla",
  "rowwise": "xla",
  "rowwise_gw_hp": "xla",
  "block_128_hybrid": "reference",
  "mxfp8": "reference",
  "nvfp4": "reference",
  "nvfp4_sr_rht": "reference",
}
PAIRED = ("bf16", "block_128", "block_128_pow2")
ARMS = (
  *LONG,
  *(f"short-{recipe}" for recipe in SHORT),
  *(f"{kind}-{recipe}" for kind in ("paired", "scratch") for recipe in PAIRED),
)


def get_config(arm="block_128"):
  if arm not in ARMS:
    raise ValueError(f"unknown arm {arm!r}; expected one of {', '.join(ARMS)}")
  kind, _, recipe = arm.rpartition("-")
  c = base.get_config(recipe)
  c.kernels.matmul = SHORT[recipe]
  c.precision.verify_fp8_gemms = True
  c.init.hf = "assets/smollm2-135m"
  c.model.preset = "smollm2_135m"
  c.data.eos = "<|endoftext|>"
  c.data.sources = {
    # The new domain, and a little of a distant one whose held-out part shows forgetting.
    "python_docs": base.source("text", f"{DATA}/python_docs/**/*.txt", weight=0.9),
    "brown": base.source("text", f"{DATA}/brown/*.txt", weight=0.1),
  }
  c.steps, c.global_batch, c.seq_len = 1024, 4, 256  # 1,048,576 tokens
  # Warm up, hold, cosine tail over the last 1/8, as InfiR2. Its warm-up is 1/8, too (5,000 of
  # 40,000 steps); that of the long arms here is 1/16.
  c.optim.schedule = "wsd"
  c.optim.warmup_steps, c.optim.decay_steps = 64, 128
  c.optim.peak_lr, c.optim.min_lr = 1e-4, 1e-5
  c.eval.tokens, c.eval.batch, c.eval.every = 16384, 4, 256
  c.checkpoint.every, c.checkpoint.keep = 64, 1
  c.log.every = 16
  if kind == "paired":
    c.steps = 64  # 65,536 tokens
    c.optim.warmup_steps, c.optim.decay_steps = 8, 8
    c.eval.tokens, c.eval.every = 8192, 0
    c.checkpoint.every = 16
  if kind == "short":
    c.steps, c.global_batch = 32, 2  # 16,384 tokens
    c.optim.warmup_steps, c.optim.decay_steps = 4, 8
    c.eval.tokens = 4096
  if kind == "scratch":
    _from_scratch(c)
  return c


def _from_scratch(c):
  """Random weights of 3.4M parameters whose every matrix is whole tiles of 128×128."""
  c.init.hf, c.model.preset = "", "debug"
  c.model.num_layers, c.model.hidden_size, c.model.intermediate_size = 3, 256, 768
  c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 4, 2, 64
  c.model.vocab_size = 4096
  c.data.tokenizer = f"{DATA}/bpe_4096/tokenizer.json"
  del c.data.sources["brown"]
  c.steps, c.global_batch, c.seq_len = 512, 8, 256
  c.optim.peak_lr, c.optim.min_lr = 2e-3, 2e-4
  c.optim.warmup_steps, c.optim.decay_steps = 64, 64
  c.eval.tokens, c.eval.batch, c.eval.every = 65536, 8, 0
