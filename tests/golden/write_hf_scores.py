"""Writes hf_scores.npz: scores that transformers gives uneven texts, padded on the right.

Runs in an environment of its own, which fp8jax never imports (see write_hf_logits.py):
  oracle/bin/python tests/golden/write_hf_scores.py
The models are those of hf/, whose decoder is read, with a random head of one label.
"""

import pathlib
import platform

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
NAMES, PAD, LENGTHS, LENGTH = ("llama", "qwen2_tied"), 95, (1, 7, 24, 13), 24


def main():
  torch.manual_seed(0)
  arrays = {"versions": f"python {platform.python_version()}, torch {torch.__version__}, "
                        f"transformers {transformers.__version__}"}  # fmt: skip
  tokens = torch.randint(0, PAD, (len(LENGTHS), LENGTH))
  tokens = torch.where(torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None], tokens, PAD)
  for name in NAMES:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
      HERE / "hf" / name, num_labels=1, pad_token_id=PAD, dtype=torch.float32
    ).eval()
    torch.nn.init.normal_(model.score.weight, std=0.2)
    with torch.no_grad():
      scores = model(tokens, attention_mask=(tokens != PAD).long()).logits[:, 0]
    arrays |= {f"{name}/head": model.score.weight.numpy(force=True), f"{name}/scores": scores}
  arrays |= {"tokens": tokens, "lengths": LENGTHS}
  np.savez_compressed(HERE / "hf_scores.npz", **{k: np.asarray(x) for k, x in arrays.items()})


if __name__ == "__main__":
  main()
