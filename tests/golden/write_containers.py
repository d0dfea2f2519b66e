"""Matrices as compressed-tensors stores them, by its own compressors: tests/golden/containers.npz.

Not a test: it needs torch and compressed-tensors, which fp8jax never imports.

  python3.11 tests/golden/write_containers.py
      (pip install torch==2.13.0 compressed-tensors==0.20.0)

Of each preset scheme: the weight, its scales by the package's own rule, the tensors of the
compressed state, the dequantized weight, activations that it rounds ("x" -> "inputs NAME"; "normed"
-> "normed NAME" of E4M3 with scales that are no powers of two), and what the package writes into
config.json. FP8 tensors are bytes.
"""

import json
import pathlib

import compressed_tensors
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import (
  calculate_qparams,
  compute_dynamic_scales_and_zp,
  generate_gparam,
)

PRESETS = (
  "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "INT8", "W4A16", "W8A16", "W4AFP8", "MXFP8", "MXFP8A16",
  "MXFP4", "MXFP4A16", "NVFP4", "NVFP4A16",
)  # fmt: skip
SHAPE, ROWS, STEP = (256, 384), 4, 64  # of blocks every STEPth row is kept, else the first ROWS


def weight() -> torch.Tensor:
  """Uneven tiles; a row, and a group of it, of zeros."""
  rng = np.random.default_rng(0)
  w = rng.normal(size=SHAPE) * np.exp(rng.normal(size=(SHAPE[0], SHAPE[1] // 16)).repeat(16, 1))
  w[1, :128] = 0
  return torch.from_numpy(w.astype(np.float32) * 0.05)


def scales(w, args, global_scale):
  rows, cols = w.shape
  tile = {"tensor": (rows, cols), "channel": (1, cols), "block": (128, 128)}.get(args.strategy)
  high, wide = tile or (1, args.group_size)
  tiles = w.reshape(rows // high, high, cols // wide, wide)
  low, top = tiles.amin((1, 3)), tiles.amax((1, 3))
  found, _ = calculate_qparams(low, top, args, global_scale=global_scale)
  return found.reshape(-1) if args.strategy == "tensor" else found


INPUT_SCALE = 1 / 64  # of a tensor's static scale; some activations are beyond it


def activations() -> torch.Tensor:
  """[1, tokens, in], a token of zeros, one of small numbers, some outliers."""
  rng = np.random.default_rng(1)
  x = rng.normal(size=(1, 6, SHAPE[1])) * np.exp(rng.normal(size=SHAPE[1]))
  x[:, 1], x[:, 2] = 0, x[:, 2] * 1e-5
  return torch.from_numpy(x.astype(np.float32))


def normed() -> torch.Tensor:
  """[1, tokens, in] of bfloat16 times a factor per token, as of a norm with gain 1: after division
  by the largest magnitude some lie between two codes."""
  x = np.random.default_rng(2).standard_normal((12, SHAPE[1])).astype(np.float32)
  x = torch.from_numpy(x).to(torch.bfloat16).float()
  return (x * torch.rsqrt((x * x).mean(-1, keepdim=True)))[None]


def rounded(args, x: torch.Tensor) -> torch.Tensor:
  """The activations as a quantized module of the package rounds them."""
  whole = generate_gparam(x.min(), x.max()) if args.strategy == "tensor_group" else None
  if args.dynamic:
    scale, zero = compute_dynamic_scales_and_zp(x, args, None, global_scale=whole)
  else:
    scale, zero = torch.tensor([INPUT_SCALE]), torch.tensor([0.0])
  return fake_quantize(x, scale, zero, args, global_scale=whole)[0]


def as_numpy(x: torch.Tensor) -> np.ndarray:
  x = x.detach()
  return x.view(torch.uint8).numpy() if x.dtype == torch.float8_e4m3fn else x.numpy()


def main():
  path, arrays, configs = pathlib.Path(__file__).parent / "containers.npz", {}, {}
  arrays["weight"], arrays["x"] = weight()[:ROWS].numpy(), activations()[0].numpy()
  arrays["normed"] = normed()[0].numpy()
  arrays["input_scale"] = np.float32(INPUT_SCALE)
  for name in PRESETS:
    scheme = preset_name_to_scheme(name, ["Linear"])
    is_block = scheme.weights.strategy == "block"
    if args := scheme.input_activations:
      arrays[f"inputs {name}"] = rounded(args, activations()).numpy()
      if name in ("FP8_DYNAMIC", "FP8_BLOCK", "W4AFP8"):
        arrays[f"normed {name}"] = rounded(args, normed()).numpy()
      if name == "INT8":
        args = args.model_copy(update={"strategy": "tensor", "dynamic": False})
        arrays["inputs INT8_STATIC"] = rounded(args, activations()).numpy()
    whole = weight() if is_block else weight()[:ROWS]
    state = {"weight": whole}
    if scheme.weights.strategy == "tensor_group":
      state["weight_global_scale"] = generate_gparam(whole.min(), whole.max())
    state["weight_scale"] = scales(whole, scheme.weights, state.get("weight_global_scale"))
    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    made = compressor.compress(state, scheme)
    back = compressor.decompress(dict(made), scheme)["weight"].float()
    if is_block:
      made["weight"], back = made["weight"][::STEP], back[::STEP]
    arrays |= {f"{name}.{key}": as_numpy(x) for key, x in made.items()}
    arrays[f"{name}.back"] = back.numpy()
    config = QuantizationConfig(
      config_groups={"group_0": scheme}, format=scheme.format, ignore=["lm_head"],
      quantization_status="compressed",
    )  # fmt: skip
    configs[name] = json.loads(config.model_dump_json())
  np.savez_compressed(path, **arrays)
  path.with_suffix(".json").write_text(json.dumps({
    "versions": {"compressed-tensors": compressed_tensors.__version__, "torch": torch.__version__},
    "configs": configs,
  }, indent=1) + "\n")  # fmt: skip
  print(path.stat().st_size, "bytes")


if __name__ == "__main__":
  main()
