"""One layer of InfiR2's 7B, forward and backward, in each recipe, made from models, sites and
recipes: no configuration, loader or checkpoint is imported.
"""

import collections
import dataclasses
import functools
import glob
import math
import statistics
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import params
from fp8jax.compiled import hlo
from fp8jax.kernels import choose
from fp8jax.models import presets, transformer
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.ops import site_tree, stored_params, weight_operands
from fp8jax.recipe.gemm import PASSES
from fp8jax.step import quantized_once
from gpu_check import measure
from gpu_check.worker import Context, Wrong

# In the norm, against BF16. The gradients of q and k have six FP8 products in a row behind them,
# each at most 0.059 off (E5M2): 0.145.
BUDGET = 0.15
LINEARS = 7
DTYPE = jnp.dtype(jnp.bfloat16)
DRY = dataclasses.replace(
  presets.DEBUG, hidden_size=128, intermediate_size=256, num_heads=2, num_kv_heads=1, head_dim=64
)


def _with_unit_gain(cfg: ModelConfig) -> ModelConfig:
  """Weights that neither shrink nor grow what they multiply. With the model's own, the layer adds a
  fiftieth of its input, of which BF16's rounding of the sum is a sixth: nothing could be judged."""
  return dataclasses.replace(cfg, num_layers=1, init_std=cfg.hidden_size**-0.5)


MODELS = {"7b": _with_unit_gain(presets.QWEN25_7B), "dry": _with_unit_gain(DRY)}


def operands_of(mixers, weights, sites, tokens: int):
  """{key of a mixer: {name: WeightOperands}} of one layer, as a step makes them once."""
  stack = lambda tree: jax.tree.map(lambda x: x[None], tree)  # noqa: E731
  return {
    m.key: weight_operands.of_block(
      list(m.sites), stack(weights[m.key]), stack(sites[m.key]), {"B": 1, "L": tokens}, DTYPE
    )
    for m in mixers
  }


def attached(weights, made):
  """The weights with these operands, for products that are differentiated."""
  for key, stacks in quantized_once.layer(made, 0).items():
    own = {n: stored_params.Weight(w, weights[key][n], None) for n, w in stacks.items()}
    weights = weights | {key: weights[key] | own}
  return weights


def build(
  recipe: str, tokens: int, model: ModelConfig, device: choose.Device, once: bool = False
):  # fmt: skip
  """(function, abstract (weights, x, g, operands), sites): -> (what the layer adds, dx, dw).

  Args:
    once: whether the operands of weights come from outside, as memory.weight_operands="per_step"
      has them; else they are {}.
  """
  declaration = transformer.layer_params(model)
  sites = site_tree.build_sites(
    declaration,
    model.dims,
    ((".*", recipe),),
    backends=site_tree.Backends(device=device, tokens=tokens),
  )
  attention = "cudnn" if device.platform == "gpu" else "xla"
  run = ComputeConfig(dtype=DTYPE, attention=attention)

  def layer(weights, x, sites):
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    batch = {"tokens_BL": positions, "positions_BL": positions}
    context = transformer.layer_context(batch, model, run)
    return transformer.layer(x, (weights, sites), context, model, run)[0]

  def forward_and_backward(weights, x, g, made, sites):
    y, pull = jax.vjp(lambda weights, x: layer(attached(weights, made), x, sites), weights, x)
    weights, dx = pull(g)
    # Every recipe hands the residual stream and its gradient on: they are taken out.
    return y - x, dx - g, params.flatten(weights)

  x = jax.ShapeDtypeStruct((1, tokens, model.hidden_size), DTYPE)
  weights, mixers = params.abstract(declaration, model.dims), transformer.mixers(model)
  make = lambda w: operands_of(mixers, w, sites, tokens)  # noqa: E731
  made = jax.eval_shape(make, weights) if once else {}
  return forward_and_backward, (weights, x, x, made), sites


def _operands(model: ModelConfig, tokens: int):
  declaration = transformer.layer_params(model)
  weights = params.init(jax.random.key(0), declaration, model.dims)
  x, g = (jax.random.normal(k, (1, tokens, model.hidden_size), jnp.bfloat16)
          for k in jax.random.split(jax.random.key(1)))  # fmt: skip
  return weights, x, g


def run(
  context: Context, recipe: str, tokens: int, model: str, once: bool = False
) -> dict[str, Any]:  # fmt: skip
  """{"ms", "tflops", "products", "errors", and what of_events finds}; with `once` (see build)
  "operands_ms", which a step pays once for all its microbatches.

  Raises:
    Wrong: a product of a narrow recipe is not FP8, or a result is further from BF16 than FP8
      explains.
  """
  cfg, device = MODELS[model], choose.current_device()
  function, _, sites = build(recipe, tokens, cfg, device, once)
  make = jax.jit(
    lambda w: operands_of(transformer.mixers(cfg), w, sites, tokens),
    compiler_options=measure.options(),
  )
  arguments = _operands(cfg, tokens)
  arguments = (*arguments, make(arguments[0]) if once else {})
  compiled, text = _compile(function, arguments, sites, device)
  found = {"products": products(text, device.platform, recipe)}
  if recipe != "bf16":
    found["errors"] = _errors(compiled(*arguments, sites), tokens, cfg, device, arguments[:3])
  call = functools.partial(compiled, *arguments, sites)
  rounds = measure.wall_times(context, call, 1)
  found |= {"ms": statistics.median(rounds), "spread_ms": max(rounds) - min(rounds)}
  if once:
    found["operands_ms"] = statistics.median(
      measure.wall_times(context, lambda: make(arguments[0]), 1)
    )
  found |= {"how": "wall clock", "tflops": flops(cfg, tokens) / found["ms"] / 1e9}
  if device.platform == "gpu":
    found |= _by_kernel(compiled, arguments, sites)
  return found


def _compile(function, arguments, sites, device):
  """(executable, the text that products are read from)."""
  lowered = jax.jit(function, compiler_options=measure.options()).lower(*arguments, sites)
  compiled = lowered.compile()
  on_cpu = device.platform == "cpu"
  return compiled, lowered.as_text("hlo", debug_info=True) if on_cpu else compiled.as_text()


def products(text: str, platform: str, recipe: str) -> dict[str, int]:
  """{"fp8", "wide"}: executions of the products of sites.

  Raises:
    Wrong: a narrow recipe multiplies wide, or the products of block_128 are not three per linear.
  """
  found = [p for p in hlo.gemms(text, platform) if p.key.product in PASSES]
  counts = {"fp8": sum(p.times for p in found if p.is_fp8)}
  counts["wide"] = sum(p.times for p in found if not p.is_fp8)
  if recipe == "bf16":
    return counts
  wide = [f"{p.key} {p.text} by {p.kernel}" for p in found if not p.is_fp8]
  if wide or not counts["fp8"]:
    raise Wrong(f"{recipe}: {len(wide)} products are not FP8, the first {wide[:1]}")
  if platform == "gpu" and recipe == "block_128" and counts["fp8"] != LINEARS * len(PASSES):
    raise Wrong(f"{recipe}: {counts['fp8']} FP8 products, expected {LINEARS * len(PASSES)}")
  return counts


def _errors(got, tokens: int, cfg: ModelConfig, device, arguments) -> dict[str, float]:
  """Distance to BF16 of the output, the input's gradient and each weight's, in the norm."""
  function, _, sites = build("bf16", tokens, cfg, device)
  arguments = (*arguments, {})
  compiled, _ = _compile(function, arguments, sites, device)
  names = lambda results: {"y": results[0], "dx": results[1], **results[2]}  # noqa: E731
  got, want = names(got), names(compiled(*arguments, sites))
  norm = lambda x: float(jnp.linalg.norm(x.astype(jnp.float32).reshape(-1)))  # noqa: E731
  errors = {k: norm(got[k].astype(jnp.float32) - x.astype(jnp.float32)) / norm(x)
            for k, x in want.items()}  # fmt: skip
  if wrong := {k: round(e, 3) for k, e in errors.items() if not e <= BUDGET}:
    raise Wrong(f"{wrong} away from BF16 in the norm, at most {BUDGET} expected: not timed")
  return {k: round(e, 4) for k, e in errors.items()}


def flops(cfg: ModelConfig, tokens: int) -> float:
  """Of a layer, by the algorithm: three products per weight, attention's causal half."""
  heads = 2 * cfg.hidden_size * cfg.head_dim * (cfg.num_heads + cfg.num_kv_heads)
  weights = heads + 3 * cfg.hidden_size * cfg.intermediate_size
  return 6.0 * weights * tokens + 6.0 * tokens**2 * cfg.num_heads * cfg.head_dim


def _by_kernel(compiled, arguments, sites) -> dict[str, Any]:
  """Milliseconds by kernel, the longest; nothing if the profiler fails."""
  try:
    with tempfile.TemporaryDirectory() as folder:
      with jax.profiler.trace(folder):
        jax.block_until_ready(compiled(*arguments, sites))
      (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
      return of_trace(path)
  except Exception as e:  # the wall clock remains
    return {"profile_failed": f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"}


def of_trace(path: str) -> dict[str, Any]:
  """of_events of an .xplane.pb."""
  return of_events(_events(jax.profiler.ProfileData.from_file(path)))


def _events(profile) -> list[tuple[str, float, float]]:
  """(name, start, duration in ns) of what the streams of the GPU ran, copies of memory included."""
  return [
    (event.name, event.start_ns, event.duration_ns)
    for plane in profile.planes if "GPU" in plane.name
    for line in plane.lines if "Stream" in line.name
    for event in line.events
  ]  # fmt: skip


def of_events(events) -> dict[str, Any]:
  """{"busy_ms", "span_ms", "launches", "kernels_ms"} of one call; span less busy is between them.

  Raises:
    ValueError: there are none.
  """
  if not events:
    raise ValueError("the profile has no events of a GPU's stream")
  total, count = collections.Counter(), collections.Counter()
  for name, _, duration in events:
    total[name[:60]] += duration / 1e6
    count[name[:60]] += 1
  start = min(begin for _, begin, _ in events)
  return {
    "busy_ms": math.fsum(total.values()), "launches": len(events),
    "span_ms": (max(begin + duration for _, begin, duration in events) - start) / 1e6,
    "kernels_ms": {f"{n} x{count[n]}": round(ms, 3) for n, ms in total.most_common(40)},
  }  # fmt: skip
