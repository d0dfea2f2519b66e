"""Tokens per second of a training step: our launcher and MaxText, the same model, one at a time.

Llama of 4 layers, hidden 256, feed-forward 768, 4 heads of 64, vocabulary 2048, tied embeddings,
AdamW; batches of 4 x 256 tokens. Nothing is recomputed in backward, except where a row says so.
"""

import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
TOKENS = 4 * 256
# A run reports the mean over all its steps until the 21st, from which every step's is recovered.
STEPS, DISCARDED = 16, 4

OURS = dict(
  steps=STEPS, global_batch=4, seq_len=256,
  **{
    "model.num_layers": 4, "model.hidden_size": 256, "model.intermediate_size": 768,
    "model.num_heads": 4, "model.num_kv_heads": 4, "model.head_dim": 64, "model.vocab_size": 2048,
    "optim.warmup_steps": 2, "optim.decay_steps": 2, "checkpoint.every": 0, "log.every": STEPS,
    "log.tensorboard": False, "eval.tokens": 1024,
  },
)  # fmt: skip
MAXTEXT = dict(
  steps=STEPS, per_device_batch_size=4, max_target_length=256, decoder_block="llama2",
  base_num_decoder_layers=4, base_emb_dim=256, base_mlp_dim=768, base_num_query_heads=4,
  base_num_kv_heads=4, head_dim=64, vocab_size=2048, logits_via_embedding=True, hardware="cpu",
  dataset_type="synthetic", attention="dot_product", skip_jax_distributed_system=True,
  enable_checkpointing=False, enable_tensorboard=False, run_name="peer", remat_policy="none",
)  # fmt: skip
# Name of the row, recipe or options, compute dtype.
RECIPES = ("bf16", "tensor_delayed", "tensor_current", "block_128")
OUR_RUNS = [(f"{r}", {"arm": r}, d) for d in ("float32", "bfloat16") for r in RECIPES]
OUR_RUNS.append(("bf16, remat full", {"arm": "bf16", "memory.remat_policy": "full"}, "bfloat16"))
QWIX = {"use_qwix_quantization": True}
MAXTEXT_RUNS = [
  ("no quantization", {}, "float32"),
  ("no quantization", {}, "bfloat16"),
  ("fp8 (flax fp8_ops)", {"quantization": "fp8"}, "bfloat16"),
  ("fp8 (qwix)", {"quantization": "fp8", **QWIX}, "bfloat16"),
  ("fp8_full (qwix)", {"quantization": "fp8_full", **QWIX}, "bfloat16"),
  ("no quantization, remat full", {"remat_policy": "full"}, "bfloat16"),
]


def run_ours(options, dtype, scratch):
  """Seconds of every step."""
  workdir = scratch / "run"
  shutil.rmtree(workdir, ignore_errors=True)
  options = dict(options)
  config = {**OURS, "precision.compute_dtype": dtype}
  arm = options.pop("arm")
  command = [sys.executable, "launch.py", f"--config=configs/debug.py:{arm}"]
  command += [f"--config.{k}={v}" for k, v in {**config, **options}.items()]
  _run([*command, f"--workdir={workdir}"], ROOT)
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  means = [line["step_seconds"] for line in lines if "step_seconds" in line]
  # means[i] is over i + 1 steps.
  totals = np.concatenate([[0.0], np.asarray(means) * np.arange(1, len(means) + 1)])
  return np.diff(totals)


def run_maxtext(options, dtype, scratch, python):
  """Seconds of every step."""
  package = next(python.parents[1].glob("lib/python*/site-packages/maxtext"))
  settings = {**MAXTEXT, "base_output_directory": scratch / "maxtext_out", "dtype": dtype}
  command = [python, "-m", "maxtext.trainers.pre_train.train", package / "configs" / "base.yml"]
  command += [f"{k}={v}" for k, v in {**settings, **options}.items()]
  text = _run(command, scratch)
  return np.asarray([float(s) for s in re.findall(r"completed step: \d+, seconds: ([\d.]+)", text)])


def _run(command, folder):
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
  done = subprocess.run(
    list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True
  )
  if done.returncode:
    raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"[-4000:])
  return done.stdout + done.stderr


def bench(scratch, maxtext_python):
  """[{by, run, compute, ...}], MaxText's left out where `maxtext_python` is None."""
  others = [] if maxtext_python is None else MAXTEXT_RUNS
  ours = [("fp8jax", *run) for run in OUR_RUNS]
  theirs = [("MaxText", *run) for run in others]
  # They take turns, so that a machine that is busy for a while is so for both.
  turns = itertools.zip_longest(ours, theirs)
  runs = [run for turn in turns for run in turn if run]
  rows = []
  for by, name, options, dtype in runs:
    if by == "fp8jax":
      seconds = run_ours(options, dtype, scratch)
    else:
      seconds = run_maxtext(options, dtype, scratch, maxtext_python)
    kept = seconds[DISCARDED:]
    rows.append({
      "by": by,
      "run": name,
      "compute": dtype,
      "tokens_per_second": round(TOKENS / float(np.median(kept))),
      "tokens_per_second_mean": round(TOKENS / float(kept.mean())),
      "seconds": [round(float(s), 4) for s in seconds],
      "load": os.getloadavg(),
    })  # fmt: skip
    print(f"  {by} {name} in {dtype}: {rows[-1]['tokens_per_second']} tokens/s", flush=True)
  return sorted(rows, key=lambda r: r["by"], reverse=True)
