"""GEMM shapes of the models whose kernels are compiled, and the table of what they take."""

import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "golden" / "kernel_resources.json"
# Tokens, then (in, out) of the linear layers: InfiR2 (arXiv:2509.22536) and Transformer Engine's
# docs/examples/gemm_profiling.
LAYERS = {
  "infir2_7b": (32768, [(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)]),
  "infir2_1p5b": (32768, [(1536, 2048), (1536, 1536), (1536, 17920), (8960, 1536)]),
  "te_5b": (15872, [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)]),
}
# SmolLM2-135M's, of whose K some are no multiples of 128: "smollm2/K/product".
SMOLLM2 = {
  "smollm2/576/fwd": ("fwd", 8192, 1536, 576),
  "smollm2/192/dgrad": ("dgrad", 8192, 576, 192),
  "smollm2/1600/wgrad": ("wgrad", 576, 1536, 1600),
}
# Column-parallel layers split `out`, row-parallel ones `in`; tokens are split where they are not.
ROW_PARALLEL = (1, 3)
TENSOR_PARALLEL = {"infir2_7b": (1, 2, 4), "infir2_1p5b": (1, 2, 4), "te_5b": (1,)}


def gemms() -> dict[str, tuple[str, int, int, int]]:
  """name -> (product, M, N, K) of every GEMM of every model on one device."""
  found = dict(SMOLLM2)
  for model, (tokens, layers) in LAYERS.items():
    for parallel in TENSOR_PARALLEL[model]:
      for n, (inner, outer) in enumerate(layers):
        split = (inner // parallel, outer) if n in ROW_PARALLEL else (inner, outer // parallel)
        i, o = split
        for product, size in {
          "fwd": (tokens, o, i), "dgrad": (tokens, i, o), "wgrad": (i, o, tokens)
        }.items():  # fmt: skip
          found[f"{model}/tp{parallel}/{inner}x{outer}/{product}"] = (product, *size)
  return found


def tile_name(config, product: str, out_dtype) -> str:
  """Of a configuration that tuning may choose, in the table."""
  end = "/float32" if product == "fwd" and np.dtype(out_dtype) == np.float32 else ""
  return f"tiles/{config.tile_n}/cluster{config.cluster_m}/{config.producer}/{product}{end}"
