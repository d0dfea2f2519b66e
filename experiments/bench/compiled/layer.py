"""One layer of the 7B alone, compiled for an H200 that is not there: launches and bytes.

command: python experiments/bench/compiled/layer.py    results/layer-jax-VERSION.json

8,192 tokens forward and backward, nothing computed again, no loop around it: what a microbatch
takes without sums and stacks, counted as run.py does. "mlp" is its feed-forward half. "once" has
the operands of its weights made before (memory.weight_operands="per_step"), whose making is not
counted: a step makes them once for all microbatches (run.py counts it).
"""

import run as bench  # first: it finds the library

bench.sys.path.insert(0, str(bench.ROOT / "experiments"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from gpu_check import layer  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from fp8jax import params  # noqa: E402
from fp8jax.compiled import aot  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models import transformer  # noqa: E402
from fp8jax.models.config import ComputeConfig  # noqa: E402
from fp8jax.ops import site_tree  # noqa: E402

MODEL, TOKENS, DTYPE = layer.MODELS["7b"], 8192, layer.DTYPE
ARMS = {
  f"{recipe}, {part}" + ", once" * once: (recipe, part, once)
  for part in ("layer", "mlp")
  for recipe, once in (("bf16", False), ("block_128_pow2", False), ("block_128_pow2", True))
}


def build(recipe: str, part: str, once: bool):
  """(function, abstract arguments): -> (what the block adds, dx, dw)."""
  mixers = [m for m in transformer.mixers(MODEL) if part in ("layer", m.key)]
  declaration = transformer.layer_params(MODEL)
  backends = site_tree.Backends(device=choose.Device("gpu", aot.CAPABILITY["h200"]), tokens=TOKENS)
  sites = site_tree.build_sites(declaration, MODEL.dims, ((".*", recipe),), backends=backends)
  run = ComputeConfig(dtype=DTYPE, attention="cudnn")

  def block(weights, x, sites):
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    batch = {"tokens_BL": positions, "positions_BL": positions}
    context = transformer.layer_context(batch, MODEL, run)
    for mixer in mixers:
      x, _ = mixer.apply(weights[mixer.key], sites[mixer.key], x, context, MODEL, run)
    return x

  def forward_and_backward(weights, x, g, sites, made):
    y, pull = jax.vjp(lambda w, x: block(layer.attached(w, made), x, sites), weights, x)
    dw, dx = pull(g)
    # The residual stream and its gradient are handed on: they are taken out.
    return y - x, dx - g, params.flatten(dw)

  x = jax.ShapeDtypeStruct((1, TOKENS, MODEL.hidden_size), DTYPE)
  declared = params.abstract(declaration, MODEL.dims)
  weights = {m.key: declared[m.key] for m in mixers}
  make = lambda w: layer.operands_of(mixers, w, sites, TOKENS)  # noqa: E731
  made = jax.eval_shape(make, weights) if once else {}
  return forward_and_backward, (weights, x, x, sites, made)


def measure(recipe: str, part: str, once: bool) -> dict:
  """{"launches", "bytes", "quantizations", "by_kind"} of a program."""
  function, arguments = build(recipe, part, once)
  devices = aot.devices_of("h200", 1)
  arguments = aot.put(arguments, SingleDeviceSharding(devices[0]))
  text = jax.jit(function).lower(*arguments).compile().as_text()
  by_kind = bench.count(text, 0)["step"]
  return {n: sum(k[n] for k in by_kind.values()) for n in bench.NOTHING} | {"by_kind": by_kind}


if __name__ == "__main__":
  bench.record("layer", ARMS, measure)
