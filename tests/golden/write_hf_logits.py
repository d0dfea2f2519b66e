"""Writes hf/: tiny random models as transformers saves them, and the logits transformers gives.

Runs in an environment of its own, which fp8jax never imports:
  python3.11 -m venv oracle && oracle/bin/pip install torch==2.13.0 transformers==5.23.0
  oracle/bin/python tests/golden/write_hf_logits.py [FOLDER OF SMOLLM2-135M]

With a folder, also smollm2.npz: logits of the real model, all of them at a few positions.
"""

import json
import pathlib
import platform
import sys

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
TINY = dict(
  hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
  num_key_value_heads=2, vocab_size=96, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
ROPE = {
  "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
  "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
  "llama3": {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500000.0,
  },
  "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
           "rope_theta": 1000000.0},
}  # fmt: skip
MODELS = {
  "llama": (transformers.LlamaConfig, TINY | dict(rms_norm_eps=1e-5)),
  "llama_tied": (transformers.LlamaConfig, TINY | dict(tie_word_embeddings=True, head_dim=16)),
  "qwen2": (transformers.Qwen2Config, TINY),
  "qwen3": (transformers.Qwen3Config, TINY | dict(head_dim=16)),
  "llama_linear": (transformers.LlamaConfig, TINY | dict(rope_parameters=ROPE["linear"])),
  "llama_dynamic": (
    transformers.LlamaConfig,
    TINY | dict(rope_parameters=ROPE["dynamic"], max_position_embeddings=24),
  ),
  "llama_llama3": (transformers.LlamaConfig, TINY | dict(rope_parameters=ROPE["llama3"])),
  "qwen2_yarn": (transformers.Qwen2Config, TINY | dict(rope_parameters=ROPE["yarn"])),
}
LENGTH = 48


def main():
  provenance = {
    "script": "tests/golden/write_hf_logits.py",
    "python": platform.python_version(),
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "machine": platform.machine(),
  }
  for seed, (name, (config, values)) in enumerate(MODELS.items()):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(**values)).float().eval()
    # Norms and biases start at one and zero: make them matter.
    with torch.no_grad():
      for key, p in model.named_parameters():
        if "norm" in key or "bias" in key:
          p.add_(0.3 * torch.randn_like(p))
    folder = HERE / "hf" / name
    model.save_pretrained(folder, max_shard_size="30KB" if name == "qwen3" else "5GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, values["vocab_size"], (2, LENGTH))
    with torch.no_grad():
      logits = model(tokens).logits
    np.savez_compressed(folder / "logits.npz", tokens=tokens.numpy(), logits=logits.numpy())
  (HERE / "hf" / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")

  if len(sys.argv) > 1:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
    text = (HERE.parents[1] / "LICENSE").read_text()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
      logits = model(torch.tensor([ids[:256]])).logits[0].numpy()
    positions = np.array([0, 1, 17, 100, 255])
    np.savez_compressed(
      HERE / "smollm2.npz",
      ids=np.array(ids, np.int32),
      argmax=logits.argmax(-1).astype(np.int32),
      logsumexp=torch.logsumexp(torch.tensor(logits), -1).numpy(),
      positions=positions,
      logits=logits[positions],
    )


if __name__ == "__main__":
  main()
