"""Writes hf/: tiny random models as transformers saves them, and the logits transformers gives.

Runs in an environment of its own, which fp8jax never imports:
  python3.11 -m venv oracle && oracle/bin/pip install torch==2.13.0 transformers==5.23.0
  oracle/bin/python tests/golden/write_hf_logits.py [FOLDER OF SMOLLM2-135M]

Beside them rope.json: the frequencies that transformers takes from spellings of config.json.
With a folder, also smollm2.npz: logits of the real model, all of them at a few positions.
"""

import json
import pathlib
import platform
import sys

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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
  "yarn_own": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
               "rope_theta": 5000.0, "attention_factor": 1.3, "beta_fast": 3.0, "beta_slow": 0.5},
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
  "qwen2_tied": (transformers.Qwen2Config, TINY | dict(tie_word_embeddings=True)),
  "qwen3_tied": (
    transformers.Qwen3Config,
    TINY | dict(head_dim=16, tie_word_embeddings=True, rope_parameters=ROPE["yarn_own"]),
  ),
  "mistral": (
    transformers.MistralConfig, TINY | dict(sliding_window=None, head_dim=16, rms_norm_eps=1e-5)
  ),
}  # fmt: skip
LENGTH = 48
LLAMA3 = {k: v for k, v in ROPE["llama3"].items() if k != "rope_theta"}
NTK, ORIGINAL = {"rope_type": "dynamic", "factor": 2.0}, {"original_max_position_embeddings": 16}
WITHOUT_ORIGINAL = {k: v for k, v in LLAMA3.items() if not k.startswith("original")}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
# Keys of config.json that say how positions turn.
SPELLINGS = {
  "none": {},
  "theta outside": {"rope_theta": 5e5},
  "theta inside and outside": {"rope_theta": 5e5, "rope_parameters": DEFAULT},
  "old": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
  "old beside new": {"rope_scaling": YARN, "rope_parameters": DEFAULT},
  "old beside new of another theta": {
    "rope_scaling": YARN, "rope_parameters": {**DEFAULT, "rope_theta": 1e6}},
  "old beside new, theta outside": {
    "rope_scaling": YARN, "rope_theta": 1e6, "rope_parameters": {**DEFAULT, "rope_theta": 1e6}},
  "old of type default beside new": {
    "rope_scaling": {"rope_type": "default"}, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
  "old empty beside new": {"rope_scaling": {}, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
  "dynamic with an original length": {"rope_scaling": NTK | ORIGINAL},
  "linear with an original length": {"rope_scaling": NTK | ORIGINAL | {"rope_type": "linear"}},
  "default with a factor": {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
  "llama3 without an original length": {"rope_theta": 5e5, "rope_scaling": WITHOUT_ORIGINAL},
  "llama3, original length outside": {
    "rope_theta": 5e5, "rope_scaling": WITHOUT_ORIGINAL, "original_max_position_embeddings": 8},
  "llama3, two original lengths": {
    "rope_theta": 5e5, "rope_scaling": LLAMA3, "original_max_position_embeddings": 8},
  "llama3 without a band": {
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}},
  "two types": {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
  "yarn, attention_factor null": {"rope_scaling": {**YARN, "attention_factor": None}},
  "half of the channels": {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
  "half of the channels, outside": {"rope_scaling": YARN, "partial_rotary_factor": 0.5},
}  # fmt: skip


def frequencies(keys):
  """What transformers reads from a Llama's config.json with these keys, at LENGTH positions."""
  values = json.loads(json.dumps(TINY | {"head_dim": 16} | keys))
  try:
    rope = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(values))
    rope(torch.zeros(1, LENGTH, 1), torch.arange(LENGTH)[None])
  except Exception as e:
    return {"refused": type(e).__name__}
  return {"inverse_period": rope.inv_freq.tolist(), "scaling": float(rope.attention_scaling)}


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
  read = {name: {"keys": keys, **frequencies(keys)} for name, keys in SPELLINGS.items()}
  (HERE / "hf" / "rope.json").write_text(json.dumps(read, indent=1) + "\n")
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
