"""Perplexity of an exported folder under transformers, on the very windows that fp8jax evaluated.

Not a test: it needs torch and transformers, which fp8jax never imports, so it runs in two halves.

  .venv/bin/python tests/golden/check_export.py windows FOLDER 'TEXT_GLOB' 50000 windows.npz
      (fp8jax's environment: held-out windows and our perplexity in float32)
  python3.11 tests/golden/check_export.py compare FOLDER windows.npz
      (pip install torch==2.13.0 transformers==5.23.0: theirs, and the difference)
"""

import pathlib
import sys

import numpy as np

LENGTH, BATCH = 256, 4


def windows(folder, pattern, tokens, path):
  sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
  from configs import base
  from fp8jax.config import resolve
  from fp8jax.data import batch_sharding, loader
  from fp8jax.kernels import choose
  from fp8jax.models.hf import weights as hf_weights
  from fp8jax.run import evaluator

  c = base.get_config("bf16")
  c.init.hf, c.model.preset, c.data.eos = folder, "hf", "<|endoftext|>"
  c.data.sources = {"main": base.source("text", pattern)}
  c.global_batch, c.seq_len, c.eval.batch, c.eval.tokens = BATCH, LENGTH, BATCH, int(tokens)
  c.precision.compute_dtype = "float32"
  spec = resolve.resolve(c, 1, choose.current_device())
  params, _ = hf_weights.load_params(folder, spec.model, spec.run.layout)
  result = evaluator.Evaluator(spec).run(params, {})["main"]["bf16"]
  spread = batch_sharding.BatchSharder(spec.run.layout, BATCH)
  count = -(-int(tokens) // (BATCH * LENGTH))
  stream = loader.heldout_batches(spec.data, "main", spread.local_rows, count, spread.shard)
  found = list(stream)
  np.savez(path, perplexity=result["perplexity"], tokens=result["tokens"],
           **{k: np.concatenate([b[k] for b in found]) for k in found[0]})  # fmt: skip
  print(f"ours: perplexity {result['perplexity']:.6f} on {result['tokens']:.0f} held-out tokens")


def compare(folder, path):
  import torch
  from transformers import AutoModelForCausalLM

  data = np.load(path)
  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  total = weight = 0.0
  for i in range(0, len(data["tokens_BL"]), BATCH):
    rows = {k: torch.from_numpy(data[k][i : i + BATCH]) for k in data.files if k.endswith("_BL")}
    segments = rows["segments_BL"]
    same = segments[:, None, :, None] == segments[:, None, None, :]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask = torch.zeros(same.shape).masked_fill(~(same & causal), torch.finfo(torch.float32).min)
    with torch.no_grad():
      logits = model(
        rows["tokens_BL"].long(), attention_mask=mask, position_ids=rows["positions_BL"].long()
      ).logits
    loss = torch.nn.functional.cross_entropy(
      logits.flatten(0, 1).double(), rows["targets_BL"].long().flatten(), reduction="none"
    )
    weights = rows["weights_BL"].flatten().double()
    total += float((loss * weights).sum())
    weight += float(weights.sum())
  theirs, ours = float(np.exp(total / weight)), float(data["perplexity"])
  print(f"transformers: perplexity {theirs:.6f} on {weight:.0f} tokens; ours {ours:.6f}")
  print(f"difference {theirs - ours:+.2e}, relative {theirs / ours - 1:+.2e}")
  if abs(theirs - ours) > 1e-3:
    sys.exit("more than 1e-3 apart")


if __name__ == "__main__":
  {"windows": windows, "compare": compare}[sys.argv[1]](*sys.argv[2:])
