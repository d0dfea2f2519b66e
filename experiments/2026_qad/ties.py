"""Weights of SmolLM2 at exact ties of E4M3, and the codes that a small update moves.

command: PYTHONPATH=. python experiments/2026_qad/ties.py
         PYTHONPATH=. python experiments/2026_qad/ties.py OUT   writes a model without ties to OUT
needs:   assets/smollm2-135m (make run fetches it); NumPy alone

A BF16 number has seven bits of mantissa, E4M3 has three: under a scale that is a power of two, one
in sixteen lies half way between two codes. Any update decides where it goes. OUT has float32
weights, uniform within half a step of BF16, so that BF16 rounds nearly all to what they were.
"""

import json
import pathlib
import shutil
import sys

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from fp8jax.models.hf import tensors

MODEL = pathlib.Path("assets/smollm2-135m")
UPDATE = np.float32(2e-5)  # Adam's first one at the rate of config.py, in random directions here


def codes(value, scale):
  return (value / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def main():
  folder, rng = tensors.Folder(str(MODEL)), np.random.default_rng(0)
  size, ties, moved = 0, 0, np.zeros(2, int)
  for name in folder.files:
    if not name.endswith("_proj.weight"):
      continue
    stored = folder.read(name)
    ties += int(((stored.view(np.uint16) & 15) == 8).sum())
    w = stored.astype(np.float32)
    after = w + UPDATE * rng.choice([-1, 1], w.shape).astype(np.float32)
    largest = np.abs(w.reshape(len(w), -1, 32)).max(-1, keepdims=True)
    groups = 2.0 ** np.ceil(np.log2(np.maximum(largest, 1e-30) / 448))
    groups = np.repeat(groups[..., 0], 32, axis=1).astype(np.float32)
    channels = (np.abs(w).max(1, keepdims=True) / 448).astype(np.float32)
    moved += [int((codes(w, s) != codes(after, s)).sum()) for s in (groups, channels)]
    size += w.size
  of_groups, of_channels = moved / size
  print(f"{ties / size:.2%} of {size:,} weights are exact ties under a power of two; an update of "
        f"{UPDATE:.0e} moves {of_groups:.2%} of the codes of MXFP8, {of_channels:.2%} of those by "
        "channel")  # fmt: skip


def write(out: pathlib.Path):
  """The model with weights of its layers' products anywhere within half a step of BF16."""
  folder, rng, found = tensors.Folder(str(MODEL)), np.random.default_rng(0), {}
  for name in folder.files:
    stored = folder.read(name)
    found[name] = stored.astype(np.float32)
    if name.endswith("_proj.weight"):
      above = (stored.view(np.uint16) + np.uint16(1)).view(ml_dtypes.bfloat16).astype(np.float32)
      step = np.abs(above - found[name])
      found[name] += rng.uniform(-0.5, 0.5, stored.shape).astype(np.float32) * step
  out.mkdir(parents=True)
  save_file(found, out / "model.safetensors")
  for file in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(MODEL / file, out / file)
  config = json.loads((MODEL / "config.json").read_text()) | {"torch_dtype": "float32"}
  (out / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
  write(pathlib.Path(sys.argv[1])) if sys.argv[1:] else main()
