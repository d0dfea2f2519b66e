"""Weights of SmolLM2 at exact ties of E4M3, and the codes that a small update moves.

command: PYTHONPATH=. python experiments/2026_qad/ties.py
needs:   assets/smollm2-135m (make run fetches it); NumPy alone

A BF16 number has seven bits of mantissa, E4M3 has three: under a scale that is a power of two, one
in sixteen lies half way between two codes. Any update decides where it goes.
"""

import ml_dtypes
import numpy as np

from fp8jax.models.hf import tensors

UPDATE = np.float32(2e-5)  # Adam's first one at the rate of config.py, in random directions here


def codes(value, scale):
  return (value / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def main():
  folder, rng = tensors.Folder("assets/smollm2-135m"), np.random.default_rng(0)
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


if __name__ == "__main__":
  main()
