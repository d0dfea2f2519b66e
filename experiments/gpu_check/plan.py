"""What gpu_check runs: stages of families of lines, as values. Nothing here imports jax.

A family is one subprocess. A line is one measurement; its values are arguments of the family's
module. Families of SIDE_BY_SIDE stages run several at a time, all others alone.
"""

import dataclasses
import functools
from typing import Any

STAGES = (
  "environment",
  "ceilings",
  "correctness",
  "run",
  "gemm",
  "elementwise",
  "rivals",
  "layer",
  "train",
)
MINUTES = 26.0  # that the seconds below add up to; gpu_check.py names families for fifteen
PARALLEL = 8  # families at one time, of stages where no time is measured
SIDE_BY_SIDE = ("correctness", "run")
RESERVE = 15.0  # seconds for the report


@dataclasses.dataclass(frozen=True)
class Family:
  """One subprocess.

  Attributes:
    name: of the family and of its log.
    stage: one of STAGES.
    module: its `run(context, **values)` measures one line.
    seconds: the share of MINUTES that it may take.
    lines: name -> values, in the order of their worth.
  """

  name: str
  stage: str
  module: str
  seconds: float
  lines: dict[str, dict[str, Any]]

  @property
  def wall_seconds(self) -> float:
    """Of the plan's time, families that run side by side divided."""
    return self.seconds / (PARALLEL if self.stage in SIDE_BY_SIDE else 1)


# --- shapes --------------------------------------------------------------------------------------

# M, N, K: more tiles than a Hopper has multiprocessors and more steps than the ring has slots; then
# with partial last tiles along M and N.
FULL, PARTIAL = (2304, 1792, 1024), (2200, 1728, 1024)
# One tile for some programs and none for others, part of the last 128 of K, of M and N.
FEW = ((2048, 128, 192), (2048, 64, 192), (520, 320, 1088), (16384, 192, 192))
# Eight busy clusters of 66; one tile, whose cluster has a second program without rows.
IDLE = ((456, 448, 384), (128, 128, 256))
DRY_SHAPES = ((136, 192, 256),)
INLINE, WARPGROUP = {"producer": "inline", "stages": 4}, {"producer": "warpgroup", "stages": 4}
# DeepGEMM's README: forward. A weight gradient of the same model. (M, N, K)
P3, P2 = (4096, 7168, 16384), (7168, 2048, 4096)
SMALL_K = (8192, 17920, 1536)  # InfiR2's 1.5B, gate and up
LAYER_7B = (8192, 37888, 3584)  # gate and up
ACTIVATION, WEIGHT, MATRIX_7B = (15872, 4096), (18944, 3584), (8192, 18944)


def _products(family: str, shapes, ways) -> dict[str, dict[str, Any]]:
  """Lines of one family of GEMMs. Args: ways: (label, product, config or None)."""
  return {
    f"correctness/{family}/{label}/{'x'.join(map(str, shape))}": {
      "product": product, "shape": shape, "config": config
    }
    for shape in shapes
    for label, product, config in ways
  }  # fmt: skip


def _gemm_families(is_dry: bool) -> dict[str, dict[str, Any]]:
  shapes = DRY_SHAPES if is_dry else (PARTIAL, FULL)
  both = lambda config: [(p, p, config) for p in ("fwd", "wgrad")]  # noqa: E731

  def tile(n, stages):
    config = {"tile_n": n, "stages": stages, "producer": "inline"}
    return [
      (f"{product}/cluster{c}", product, {**config, "cluster_m": c})
      for c in (1, 2)
      for product in ("fwd", "wgrad")
    ]

  found = {
    "gemm_default": _products("gemm_default", shapes, both(None)),
    "gemm_cluster1": _products("gemm_cluster1", shapes, [
      ("fwd", "fwd", {**WARPGROUP, "cluster_m": 1}), ("wgrad", "wgrad", {**INLINE, "cluster_m": 1}),
    ]),
    "gemm_cluster2": _products("gemm_cluster2", shapes, [
      ("fwd", "fwd", {**WARPGROUP, "cluster_m": 2}), ("wgrad", "wgrad", {**INLINE, "cluster_m": 2}),
    ]),
    "gemm_cluster2_idle": _products("gemm_cluster2_idle", DRY_SHAPES if is_dry else IDLE, [
      ("fwd", "fwd", {**WARPGROUP, "stages": 3, "cluster_m": 2}),
      ("wgrad", "wgrad", {**INLINE, "stages": 3, "cluster_m": 2}),
    ]),
    "gemm_few": _products("gemm_few", DRY_SHAPES if is_dry else FEW, both(None)),
    "gemm_tile112": _products("gemm_tile112", shapes[:1], tile(112, 4)),
    "gemm_tile160": _products("gemm_tile160", shapes[:1], tile(160, 4)),
    # A tile of several of B's blocks, by the warp that copies.
    "gemm_blocks": _products("gemm_blocks", shapes[:1], [
      (f"{n}/cluster{c}", "fwd", {**WARPGROUP, "tile_n": n, "cluster_m": c})
      for n in (160, 192) for c in (1, 2)
    ] + [
      (f"{n}/wgrad/{how['producer']}", "wgrad", {**how, "tile_n": n, "stages": s, "cluster_m": 2})
      for n, s, how in ((160, 3, WARPGROUP), (192, 4, WARPGROUP), (192, 4, INLINE))
    ]),
    # Each product with the producer that it does not have by default.
    "gemm_producers": _products("gemm_producers", shapes[:1], [
      ("fwd/inline", "fwd", INLINE), ("wgrad/warpgroup", "wgrad", WARPGROUP),
      ("fwd/inline/cluster2", "fwd", {**INLINE, "cluster_m": 2}),
      ("wgrad/warpgroup/cluster2", "wgrad", {**WARPGROUP, "cluster_m": 2}),
    ]),
    "gemm_add_to": _products("gemm_add_to", shapes[:1], [
      *both(None), ("wgrad/cluster2", "wgrad", {**INLINE, "cluster_m": 2}),
      ("wgrad/warpgroup", "wgrad", {**WARPGROUP, "tile_n": 160, "stages": 3}),
      ("wgrad/192", "wgrad", {**INLINE, "tile_n": 192, "cluster_m": 2}),
    ]),
    # A layer of a stack: B of the forward product, the sum of the weight gradient.
    "gemm_layers": _products("gemm_layers", shapes[:1], [
      *both(None), ("fwd/cluster1", "fwd", {**WARPGROUP, "cluster_m": 1}),
      ("wgrad/cluster1", "wgrad", {**INLINE, "cluster_m": 1}),
    ]),
    # M is the number of tokens here, N and K an expert's sizes.
    "gemm_groups": _products("gemm_groups", [(300, 192, 256)] if is_dry else [(2000, 1536, 1024)], [
      ("fwd", "fwd", None), ("wgrad", "wgrad", None),
    ]),
  }  # fmt: skip
  for name, kind in (("gemm_add_to", "adds"), ("gemm_groups", "groups"), ("gemm_layers", "layers")):
    found[name] = {line: values | {"kind": kind} for line, values in found[name].items()}
  return found


def _quantizer_families(is_dry: bool) -> dict[str, dict[str, Any]]:
  """(rows, columns): along=1 wants columns % 128, along=0 rows % 128; the other axis is partial."""
  table = {
    "quantize_rows": [("full", (2048, 1536), [1], "x"), ("watched", (2048, 1536), [1], "x")],
    "quantize_both": [("full", (2176, 1536), [1, 0], "x"), ("watched", (2176, 1536), [1, 0], "x"),
                      ("gradient", (2176, 1536), [1, 0], "g")],
    "quantize_weight": [("full", (1536, 2048), [0, 1], "w"),
                        ("watched", (1536, 2048), [0, 1], "w")],
    "quantize_layers": [("forward", (1544, 2048), [0], "w"),
                        ("watched", (1544, 2048), [0, 1], "w"),
                        ("at_once", (1544, 2048), [0, 1], "w")],
    # Lines of scales whose last 128 are partial.
    "quantize_partial_lines": [("rows", (8200, 1536), [1], "x"), ("columns", (2048, 576), [0], "x"),
                               ("few_columns", (2048, 192), [0], "x")],
  }  # fmt: skip
  small = {"rows": (136, 128), "columns": (128, 192), "few_columns": (128, 192),
           "forward": (136, 128)}  # fmt: skip
  return {
    family: {
      f"correctness/{family}/{label}": {
        "shape": small.get(label, (128, 128)) if is_dry else shape,
        "alongs": alongs, "tensor": tensor, "watched": label in ("watched", "at_once"),
        "layers": family == "quantize_layers", "at_once": label == "at_once",
      }
      for label, shape, alongs, tensor in cases
    }
    for family, cases in table.items()
  }  # fmt: skip


PRODUCERS = ("rms_norm", "swiglu", "swiglu_backward")
# Moments (storage.MOMENTS), whether the master is split, the gradient's dtype.
ADAM = {
  "coat": ("coat", False, "bfloat16"),
  "coat_pair": ("coat", True, "bfloat16"),
  "sqrt_v": ("sqrt_v", False, "bfloat16"),
  "e4m3_256": ("e4m3_256", False, "bfloat16"),
  "float32": ("float32", False, "float32"),
}


def _adam(shape) -> dict[str, dict[str, Any]]:
  return {
    kind: {"preset": preset, "is_pair": is_pair, "dtype": dtype, "shape": shape}
    for kind, (preset, is_pair, dtype) in ADAM.items()
  }


def _correctness(is_dry: bool) -> list[Family]:
  found = [
    Family(name, "correctness", "gpu_check.check_gemm", 32, lines)
    for name, lines in _gemm_families(is_dry).items()
  ]
  found += [
    Family(name, "correctness", "gpu_check.check_quantize", 24, lines)
    for name, lines in _quantizer_families(is_dry).items()
  ]
  casts = {
    f"correctness/casts/{format}_{scale}": {"shape": (256, 256), "format": format, "scale": scale}
    for format in ("e4m3", "e5m2")
    for scale in ("given", "tiles")
  }
  found.append(Family("casts", "correctness", "gpu_check.check_cast", 24, casts))
  shape = (128, 128) if is_dry else (2176, 1536)
  lines = {f"correctness/prologues/{n}": {"producer": n, "shape": shape} for n in PRODUCERS}
  found.append(Family("prologues", "correctness", "gpu_check.check_quantize", 24, lines))
  lines = {
    f"correctness/adam/{kind}": values
    for kind, values in _adam((24, 256) if is_dry else (5000, 1024)).items()
  }
  return [*found, Family("adam", "correctness", "gpu_check.check_adam", 44, lines)]


# --- speed ---------------------------------------------------------------------------------------


def _tile(tile_n=128, cluster_m=2, stages=4, raster=8, producer="inline", tile_m=128):
  return {"tile_m": tile_m, "tile_n": tile_n, "stages": stages, "raster": raster,
          "cluster_m": cluster_m, "producer": producer}  # fmt: skip


P3_CONFIGS = {
  "default": None,
  "128x128_cluster2": _tile(stages=5, producer="warpgroup"),
  "128x192_cluster2": _tile(192, producer="warpgroup"),
  "128x128_cluster1": _tile(cluster_m=1, stages=5, producer="warpgroup"),
  "128x160_cluster2_warpgroup": _tile(160, producer="warpgroup"),
  "128x128_cluster2_inline": _tile(stages=5),
  "128x160_cluster2_inline": _tile(160),
}
P2_CONFIGS = {
  "default": None,
  "128x128_cluster2_warpgroup": _tile(producer="warpgroup"),
  "128x128_cluster2_inline": _tile(),
  "128x160_cluster2_warpgroup": _tile(160, stages=3, producer="warpgroup"),
  "128x192_cluster2_warpgroup": _tile(192, producer="warpgroup"),
  "128x160_cluster2_inline": _tile(160, stages=5, raster=6),
}
# The products of the 7B at 8,192 tokens, M, N, K. What they are cut into by default, and what the
# default has to beat. The data gradient of up is the forward product of down, and the reverse.
_DEFAULT = {"default": None}
MLP_7B = {
  "7b_up_wgrad": ("wgrad", (3584, 18944, 8192), _DEFAULT | {"128x128_cluster2_inline": _tile()}),
  "7b_up_fwd": ("fwd", (8192, 18944, 3584), _DEFAULT | {
    "128x128_cluster2": _tile(stages=5, raster=5, producer="warpgroup")}),
  "7b_down_wgrad": ("wgrad", (18944, 3584, 8192), _DEFAULT),
  "7b_down_fwd": ("fwd", (8192, 3584, 18944), _DEFAULT),
}  # fmt: skip
ATTENTION_7B = {
  "7b_q_fwd": ("fwd", (8192, 3584, 3584), _DEFAULT),
  "7b_q_wgrad": ("wgrad", (3584, 3584, 8192), _DEFAULT),
  "7b_k_fwd": ("fwd", (8192, 512, 3584), _DEFAULT),
  "7b_k_dgrad": ("fwd", (8192, 3584, 512), _DEFAULT),
  "7b_k_wgrad": ("wgrad", (3584, 512, 8192), _DEFAULT),
}
WAYS = ("layers", "copied", "")  # where a product finds its layer: programs.gemm's kinds


def _gemms(name: str, product: str, shape, configs, is_dry: bool) -> dict[str, dict[str, Any]]:
  """Lines of one product. Args: configs: label -> fields of a Config, or None."""
  shape = DRY_SHAPES[0] if is_dry else shape
  configs = dict(list(configs.items())[: 2 if is_dry else None])
  return {
    f"gemm/{name}/{label}": {"product": product, "shape": shape, "config": config}
    for label, config in configs.items()
  }


def _of_7b(is_dry: bool) -> list[Family]:
  """Products by default tiles, and a layer in its stack beside the copy that this replaces."""

  def lines(shapes):
    return {line: values for name, (product, shape, configs) in shapes.items()
            for line, values in _gemms(name, product, shape, configs, is_dry).items()}  # fmt: skip

  stack = {
    f"stack/{product}/{way or 'alone'}": {
      "product": product, "kind": way,
      "shape": DRY_SHAPES[0] if is_dry else MLP_7B[f"7b_up_{product}"][1],
    }
    for product in ("wgrad", "fwd") for way in WAYS
  }  # fmt: skip
  return [
    Family("gemm_7b_mlp", "gemm", "gpu_check.time_gemm", 45, lines(MLP_7B)),
    Family("gemm_7b_attention", "gemm", "gpu_check.time_gemm", 40, lines(ATTENTION_7B)),
    Family("gemm_stack", "gemm", "gpu_check.time_stack", 50, stack),
  ]


def _speed(is_dry: bool) -> list[Family]:
  gemms = functools.partial(_gemms, is_dry=is_dry)
  p2 = gemms("p2", "wgrad", P2, P2_CONFIGS)
  p2 |= gemms("small_k", "fwd", SMALL_K, _DEFAULT)
  activation, weight, matrix = (
    (128, 128) if is_dry else shape for shape in (ACTIVATION, WEIGHT, MATRIX_7B)
  )
  quantize = {
    label: {"shape": shape, "alongs": alongs, "tensor": tensor, "watched": watched}
    for label, shape, alongs, tensor, watched in (
      ("both", activation, [1, 0], "x", False), ("both_watched", activation, [1, 0], "x", True),
      ("weight", weight, [0, 1], "w", False), ("rows", activation, [1], "x", False),
    )
  }  # fmt: skip
  adam = _adam((24, 256) if is_dry else WEIGHT)
  prologue = {n: {"producer": n, "shape": matrix} for n in reversed(PRODUCERS)}
  return [
    Family("gemm_p3", "gemm", "gpu_check.time_gemm", 40, gemms("p3", "fwd", P3, P3_CONFIGS)),
    Family("gemm_p2", "gemm", "gpu_check.time_gemm", 58, p2),
    *_of_7b(is_dry),
    Family("quantize", "elementwise", "gpu_check.time_elementwise", 25,
           {f"quantize/{k}": {"kind": "quantize", **v} for k, v in quantize.items()}),
    Family("prologues_speed", "elementwise", "gpu_check.time_elementwise", 25,
           {f"prologue/{k}": {"kind": "prologue", **v} for k, v in prologue.items()}),
    Family("adam_speed", "elementwise", "gpu_check.time_elementwise", 30,
           {f"adam/{k}": {"kind": "adam", **v} for k, v in adam.items()}),
  ]  # fmt: skip


RIVALS = ("deep_gemm", "torch_bf16", "torch_tensor", "torch_rowwise", "torch_block")
RIVAL_SHAPES = {
  "p3": ("fwd", P3), "p2": ("wgrad", P2), "layer_7b": ("fwd", LAYER_7B),
  "small_k": ("fwd", SMALL_K),
}  # fmt: skip


def _rivals(is_dry: bool) -> list[Family]:
  return [
    Family(f"rival_{name}", "rivals", "gpu_check.time_rivals", 6 if name == "deep_gemm" else 20, {
      f"rival/{name}/{label}": {
        "rival": name, "product": product, "shape": DRY_SHAPES[0] if is_dry else shape
      }
      for label, (product, shape) in RIVAL_SHAPES.items()
    })
    for name in RIVALS
  ]  # fmt: skip


def _layer(is_dry: bool) -> Family:
  tokens = 128 if is_dry else 8192
  of = {"tokens": tokens, "model": "dry" if is_dry else "7b"}
  arms = {"bf16": {}, "block_128": {}, "block_128_once": {"once": True}, "tensor_current": {}}
  return Family("layer", "layer", "gpu_check.layer", 105, {
    f"layer/{arm}": {"recipe": arm.removesuffix("_once"), **of, **more}
    for arm, more in arms.items() if not is_dry or arm != "tensor_current"
  })  # fmt: skip


# Every way to multiply that a Hopper has, and each kernel of ours that a recipe does not choose.
RUNS = (
  "block_128", "bf16", "block_128_pow2", "tensor_current", "tensor_delayed", "fp8lm",
  "e4m3_static", "rowwise",
)  # fmt: skip
EIGHT_BIT = (
  "optim.moment_format=coat", "optim.master_format=bf16_remainder", "optim.grad_format=bf16_sr",
  "kernels.optimizer=auto", "memory.save_gemm_inputs=quantized",
)  # fmt: skip


def _runs(is_dry: bool) -> list[Family]:
  lines = {recipe: {"recipe": recipe} for recipe in (RUNS[:1] if is_dry else RUNS)}
  if not is_dry:
    lines["8bit"] = {"recipe": "block_128", "changes": EIGHT_BIT}
  return [Family(f"run_{name}", "run", "gpu_check.run", 80, {f"run/{name}": values})
          for name, values in lines.items()]  # fmt: skip


# Name -> arm, steps, seconds (blocks compile for 100), GiB that it takes. A step of microbatches is
# four times as long. State 43.1 GiB, sums 28.4, what a layer needs 8, weights' codes 12.2.
TRAINED = {
  "block_128_pow2": ("7b,block_128_pow2", 15, 130, 66),
  "bf16": ("7b,bf16", 15, 60, 66),
  "block_128_pow2_adamw": ("7b_adamw,block_128_pow2", 15, 130, 66),
  "block_128_pow2_micro": ("7b_micro,block_128_pow2", 11, 175, 80),
  "block_128_pow2_once": ("7b_once,block_128_pow2", 11, 175, 92),
  "bf16_micro": ("7b_micro,bf16", 11, 105, 80),
}


def _train(is_dry: bool) -> list[Family]:
  if is_dry:  # no kernel is interpreted by launch.py
    return [Family("train", "train", "gpu_check.train", 60, {
      "train/debug/bf16": {"config": "configs/debug.py:bf16", "steps": 14}
    })]  # fmt: skip
  config = "experiments/2026_hopper/arms.py"
  return [Family(f"train_{name}", "train", "gpu_check.train", seconds, {
    f"train/7b/{name}": {"config": f"{config}:{arm}", "steps": steps, "gib": gib}
  }) for name, (arm, steps, seconds, gib) in TRAINED.items()]  # fmt: skip


def families(is_dry: bool = False) -> list[Family]:
  """Everything, in order."""
  size = 256 if is_dry else 8192
  shape = DRY_SHAPES[0] if is_dry else PARTIAL
  ceilings = {f"ceiling/{kind}": {"kind": kind, "size": size}
              for kind in ("memcpy", "copy", "bf16", "fp8_fast", "fp8_precise")}  # fmt: skip
  return [
    Family("environment", "environment", "gpu_check.environment", 12, {
      "environment/versions": {"part": "versions"},
      "environment/setmaxnreg": {"part": "setmaxnreg", "shape": shape},
    }),
    Family("cupti", "environment", "gpu_check.environment", 10, {
      "environment/cupti": {"part": "cupti"},
    }),
    Family("ceilings", "ceilings", "gpu_check.ceilings", 25, ceilings),
    *_correctness(is_dry),
    *_runs(is_dry),
    *_speed(is_dry),
    *_rivals(is_dry),
    _layer(is_dry),
    *_train(is_dry),
  ]  # fmt: skip
