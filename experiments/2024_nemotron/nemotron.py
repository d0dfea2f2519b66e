"""Nemotron-4 340B (arXiv:2406.11704) as far as its bytes and FLOPs go, for --job=plan_inference.

what:      96 layers, width 18,432, 96 heads of 192, 8 of keys, vocabulary 256,000, no tied
           embeddings, contexts of 4,096 tokens (table 1)
differs:   theirs has two matrices per feed-forward layer, 18,432 x 73,728, around a squared ReLU;
           ours is SwiGLU with three of 18,432 x 49,152, which are as many parameters, bytes and
           FLOPs. Norms are RMSNorm without a bias: 3.6 million parameters of 341 billion fewer. No
           weights exist in this form; nothing is trained or generated with it
command:   python launch.py --config=experiments/2024_nemotron/nemotron.py \
             --job=plan_inference --topology=h100:8
hardware:  none; with jax[cuda13] a decoding step is compiled for the GPUs besides
expected:  fp8 fits on 8 x 80 GB, bf16 does not (README.md)
arms:      fp8_dynamic (default); block: FP8 blocks of 128 x 128 but for keys and values, whose 192
           rows per GPU hold no whole block; any other text names a recipe
"""

from configs import base

BLOCK = (("head", "bf16"), ("layers/.*/attn/[kv]", "fp8_dynamic"), ("layers/.*", "fp8_block"))


def get_config(arm=""):
  """The configuration."""
  c = base.get_config("bf16" if arm == "block" else arm or "fp8_dynamic")
  if arm == "block":
    c.precision.rules = BLOCK
  c.model.vocab_size, c.model.hidden_size, c.model.num_layers = 256_000, 18_432, 96
  c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 96, 8, 192
  c.model.intermediate_size, c.model.max_positions = 73_728 * 2 // 3, 4_096
  c.model.tie_embeddings = False
  c.plan_inference.formats = tuple(name for name in c.plan_inference.formats if name != arm)
  return c
