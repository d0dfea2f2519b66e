"""Known models as values; each cites the config.json it was read from."""

import dataclasses

from fp8jax.models.config import ModelConfig

# 2 layers for tests and demonstrations; no weights exist. Odd sizes on purpose: hidden 192 is
# 1.5 scale tiles.
DEBUG = ModelConfig(
  architecture="llama", vocab_size=512, hidden_size=192, intermediate_size=384, num_layers=2,
  num_heads=4, num_kv_heads=2, head_dim=32, max_positions=512, tie_embeddings=True,
)  # fmt: skip

# The same with norms of queries and keys (Qwen3's architecture).
DEBUG_QK_NORM = dataclasses.replace(DEBUG, architecture="qwen3", qk_norm=True)

# HuggingFaceTB/SmolLM2-135M(-Instruct)/config.json.
SMOLLM2_135M = ModelConfig(
  architecture="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30,
  num_heads=9, num_kv_heads=3, head_dim=64, max_positions=8192, rope_theta=1e5, norm_eps=1e-5,
  tie_embeddings=True,
)  # fmt: skip

# Qwen/Qwen2.5-1.5B/config.json with InfiR2's training values (InfiXAI/InfiR2 scripts/CPT,
# arXiv:2509.22536): vocabulary padded to 152064, context 32768, init std 0.008.
QWEN25_1P5B = ModelConfig(
  architecture="qwen2", vocab_size=152064, hidden_size=1536, intermediate_size=8960, num_layers=28,
  num_heads=12, num_kv_heads=2, head_dim=128, max_positions=32768, rope_theta=1e6, norm_eps=1e-6,
  qkv_bias=True, tie_embeddings=True, init_std=0.008,
)  # fmt: skip

# Qwen/Qwen2.5-7B/config.json, as above.
QWEN25_7B = ModelConfig(
  architecture="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28,
  num_heads=28, num_kv_heads=4, head_dim=128, max_positions=32768, rope_theta=1e6, norm_eps=1e-6,
  qkv_bias=True, init_std=0.008,
)  # fmt: skip

PRESETS = {
  "debug": DEBUG,
  "debug_qk_norm": DEBUG_QK_NORM,
  "smollm2_135m": SMOLLM2_135M,
  "qwen25_1p5b": QWEN25_1P5B,
  "qwen25_7b": QWEN25_7B,
}
