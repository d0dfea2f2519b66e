"""Writes mx_blocks.npz: blocks that torchao makes narrow, in OCP MX and in NVFP4.

Runs in an environment of its own, which fp8jax never imports:
  python3.11 -m venv oracle && oracle/bin/pip install torch==2.13.0 torchao==0.18.0
  oracle/bin/python tests/golden/write_mx_blocks.py

Arrays: `x` [blocks, 32] float32; per format and mode `e4m3_floor_codes` [blocks, 32] uint8 (four
bits of them for e2m1) and `e4m3_floor_scale` [blocks] uint8, biased exponents. Per NVFP4 tensor
`nvfp4_exact_x` [rows, columns], `_codes`, `_scale` [rows, columns / 16] uint8 E4M3 and `_tensor`, a
float32. In "exact" the amax is 2688 * 2^-5, so that torchao's order of operations and fp8jax's
give the same factor of the tensor; in "random" it is what it happens to be.
"""

import json
import pathlib
import platform
import subprocess

import numpy as np
import torch
import torchao
from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor

HERE = pathlib.Path(__file__).resolve().parent
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
MODES = ("floor", "rceil", "even")
SIGNIFICANDS = (1, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875)


def amaxes() -> np.ndarray:
  """float32 around the numbers at which some rule changes its mind, small and large."""
  exponents = [-126, -118, -100, -20, -9, -6, -1, 0, 1, 2, 3, 9, 13, 16, 40, 100, 126, 127]
  centre = [np.ldexp(np.float32(s), e) for s in SIGNIFICANDS for e in exponents]
  centre = np.asarray(centre, np.float32)
  up, down = np.nextafter(centre, np.float32(np.inf)), np.nextafter(centre, np.float32(0))
  extra = [np.finfo(np.float32).max, 2.0**-126, 2.0**-130, 1e-45, 0]
  return np.concatenate([centre, up, down, np.asarray(extra, np.float32)])


def blocks(rng) -> np.ndarray:
  """[blocks, 32]: hard amaxes over elements spread around and below them, then plain ones."""
  amax = amaxes()
  # Few mantissa bits, so that most elements are ties of some format; they also compress well.
  shape = (len(amax), 32)
  fractions = np.ldexp(
    rng.integers(-64, 65, shape).astype(np.float64), rng.integers(-18, -5, shape)
  )
  x = amax[:, None].astype(np.float64) * fractions
  x[np.abs(x) < 2.0**-126] = 0  # XLA:CPU flushes subnormal elements, torch does not
  column = rng.integers(0, 32, len(amax))
  x[np.arange(len(amax)), column] = np.where(rng.random(len(amax)) < 0.5, amax, -amax)
  plain = rng.standard_normal((96, 32)) * np.exp(6 * rng.standard_normal((96, 1)))
  lone = np.zeros((4, 32))
  lone[:, 5] = [3e38, -1e-30, 2.0**100, -0.0]
  return np.concatenate([x, plain, lone]).astype(np.float32)


def unpack(codes: torch.Tensor) -> np.ndarray:
  """Two four-bit codes per byte, the first in the low half."""
  packed = codes.view(torch.uint8).numpy()
  return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def nvfp4_tensors(rng) -> dict[str, np.ndarray]:
  x = rng.standard_normal((48, 64)) * np.exp(rng.standard_normal((48, 64)))
  x[:, ::16] *= np.exp(2 * rng.standard_normal((48, 4)))
  x[3, :16], x[4, 16:32] = 0, x[4, 16:32] * 1e-6
  exact = np.clip(x, -80, 80)
  exact[7, 7] = 84.0
  small = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.5])
  exact[:16, :16] = small * np.ldexp(1, np.arange(-10, 6))[:, None] / 4  # ties
  made = {"exact": exact, "random": x, "large": x * 1e20, "small": x * 1e-20}
  return {name: array.astype(np.float32) for name, array in made.items()}


def main():
  rng = np.random.default_rng(0)
  commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True)
  provenance = {
    "script": "tests/golden/write_mx_blocks.py",
    "commit": commit.stdout.strip(),
    "python": platform.python_version(),
    "numpy": np.__version__,
    "torch": torch.__version__,
    "torchao": torchao.__version__,
    "machine": platform.machine(),
  }
  arrays = {"provenance": np.asarray(json.dumps(provenance)), "x": blocks(rng)}
  x = torch.from_numpy(arrays["x"])
  for fmt, dtype in DTYPES.items():
    for mode in MODES:
      rule = mx_tensor.ScaleCalculationMode[mode.upper()]
      scale, codes = mx_tensor.to_mx(x.clone(), dtype, 32, rule)
      codes = unpack(codes) if fmt == "e2m1" else codes.view(torch.uint8).numpy()
      arrays[f"{fmt}_{mode}_codes"] = codes
      arrays[f"{fmt}_{mode}_scale"] = scale.view(torch.uint8).numpy().reshape(-1)
  for name, array in nvfp4_tensors(rng).items():
    x = torch.from_numpy(array)
    tensor = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    scale, codes = nvfp4_tensor.nvfp4_quantize(x, 16, tensor)
    arrays[f"nvfp4_{name}_x"] = array
    arrays[f"nvfp4_{name}_codes"] = unpack(codes)
    arrays[f"nvfp4_{name}_scale"] = scale.view(torch.uint8).numpy()
    arrays[f"nvfp4_{name}_tensor"] = tensor.numpy()
  path = HERE / "mx_blocks.npz"
  np.savez_compressed(path, **arrays)
  print(path, path.stat().st_size, {k: v.shape for k, v in arrays.items()})


if __name__ == "__main__":
  main()
