"""Error of FlashAttention-3's E4M3 forward pass by scales, rotation and P: results.json, error.svg.

command: JAX_PLATFORMS=cpu python experiments/2024_flash_attention_3/error_table.py

Two sources of Q, K and V: the entries of the paper's Table 3, N(0, 1) + N(0, 100) Bernoulli(0.001)
each, beside float64; and SmolLM2-135M on 1,024 held-out tokens of the Python documentation, beside
attention in float32 (`make run` fetches the weights). Prints the table of README.md. Two CPU cores
take about five minutes.
"""

import dataclasses
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import vl_convert  # noqa: E402

from configs import smollm2_cpt  # noqa: E402
from fp8jax.config import resolve  # noqa: E402
from fp8jax.data import loader  # noqa: E402
from fp8jax.evaluation import divergence  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models.hf import weights  # noqa: E402
from fp8jax.ops.attention import attention  # noqa: E402
from fp8jax.recipe import attention as attentions  # noqa: E402
from fp8jax.recipe.quant import WHOLE  # noqa: E402
from fp8jax.report import charts, page  # noqa: E402
from fp8jax.run import provenance  # noqa: E402

HERE = pathlib.Path(__file__).parent
SEEDS, LENGTH, HEAD = range(3), 2048, 128
# Queries that see at least three quarters of the keys: the paper's are not causal, these are.
LAST = LENGTH // 4
ROWS, TOKENS = 2, 512


def arms() -> dict[str, attentions.Attention]:
  """{name: value}: named ones, and each of their differences alone."""
  block, tensor = attentions.FA3, attentions.FA3_TENSOR
  made = [
    tensor, dataclasses.replace(tensor, name="tensor, P as it is", p_scale=1.0),
    attentions.FA3_UNROTATED,
    dataclasses.replace(attentions.FA3_UNROTATED, name="block, P x 256", p_scale=2.0**-8),
    dataclasses.replace(tensor, name="tensor, P x 256, rotated", rotation=WHOLE),
    dataclasses.replace(tensor, name="tensor, P as it is, rotated", rotation=WHOLE, p_scale=1.0),
    block, dataclasses.replace(block, name="block, P x 256, rotated", p_scale=2.0**-8),
    attentions.SAGE_FWD,
  ]  # fmt: skip
  return {a.name: a for a in made}


def draw(seed: int):
  """q, k and v [1, L, 1, K] of the paper's distribution."""
  rng, shape = np.random.default_rng(seed), (1, LENGTH, 1, HEAD)

  def one():
    outliers = rng.normal(0, 10, shape) * (rng.random(shape) < 0.001)
    return (rng.standard_normal(shape) + outliers).astype(np.float32)

  return one(), one(), one()


def exact(q, k, v):
  """float64 [LAST, K]: the last queries' attention."""
  q, k, v = (x[0, :, 0].astype(np.float64) for x in (q, k, v))
  scores = q[-LAST:] @ k.T / np.sqrt(HEAD)
  seen = np.tri(LAST, LENGTH, LENGTH - LAST, dtype=bool)
  p = np.exp(np.where(seen, scores - scores.max(), -np.inf))
  return p / p.sum(1, keepdims=True) @ v


def rmse() -> dict[str, list[float]]:
  """{arm: by seed}, and of unquantized products in bfloat16."""
  found: dict[str, list[float]] = {}
  for name, recipe in {"bfloat16": None, **arms()}.items():
    dtype = jnp.bfloat16 if recipe is None else jnp.float32
    run = jax.jit(lambda *x, recipe=recipe: attention(*x, None, "xla", recipe=recipe))
    found[name] = []
    for seed in SEEDS:
      q, k, v = draw(seed)
      out = np.asarray(run(*(jnp.asarray(x, dtype) for x in (q, k, v))), np.float64)
      found[name].append(float(np.sqrt(np.mean((out[0, -LAST:, 0] - exact(q, k, v)) ** 2))))
    print(name, found[name], flush=True)
  return found


def divergences() -> dict[str, dict[str, float]]:
  """{arm: of SmolLM2-135M's predictions from those with attention in float32}."""
  c = smollm2_cpt.get_config("bf16")
  c.seq_len, c.eval.batch, c.precision.compute_dtype = TOKENS, ROWS, "float32"
  spec = resolve.resolve(c, 1, choose.current_device())
  params, _ = weights.load_params(c.init.hf, spec.model)
  first = next(iter(loader.heldout_batches(spec.data, "main", ROWS, 1)))
  tokens = jnp.asarray(first["tokens_BL"])
  batch = {"tokens_BL": tokens, "positions_BL": jnp.broadcast_to(jnp.arange(TOKENS), tokens.shape)}
  counts = np.ones(tokens.shape, np.float32)
  texts = [divergence.Batch(batch, first["tokens_BL"], counts)]

  def logits(recipe):
    run = dataclasses.replace(spec.run, attention_recipe=recipe)
    one = dataclasses.replace(spec, run=run)
    return list(divergence.forward(one, one.sites(), texts)(params))

  wide, found = logits(None), {}
  for name, recipe in arms().items():
    found[name] = divergence.compared(spec, texts, wide, logits(recipe))
    print(name, found[name], flush=True)
  return found


def tables(results) -> str:
  lines = ["| value | RMSE: mean | of each seed | KL, nats per token | same most likely token |",
           "|---|---|---|---|---|"]  # fmt: skip
  for name in ("bfloat16", *arms()):
    errors, of_model = results["rmse"][name], results["divergence"].get(name)
    cells = f"{of_model['kl']:.1e} | {of_model['top1']:.3f}" if of_model else "- | -"
    seeds = ", ".join(f"{e:.2e}" for e in errors)
    lines.append(f"| {name} | {np.mean(errors):.2e} | {seeds} | {cells} |")
  return "\n".join(lines)


def figure(results) -> alt.LayerChart:
  """A dot per seed and a tick at the mean, value by value."""
  rows = [dict(value=n, rmse=e) for n, errors in results["rmse"].items() for e in errors]
  base = alt.Chart(alt.Data(values=rows)).encode(
    y=alt.Y("value:N", sort=list(results["rmse"]), title=None, axis=alt.Axis(labelLimit=260))
  )
  title = "RMSE against float64, 3 seeds and their mean"
  dots = base.mark_circle(opacity=0.6).encode(x=alt.X("rmse:Q", title=title))
  means = base.mark_tick(thickness=2, color="#333333").encode(x="mean(rmse):Q")
  return alt.layer(dots, means).properties(width=420, height=240)


def main():
  results = {
    "rmse": rmse(), "divergence": divergences(), "length": LENGTH, "head": HEAD,
    "tokens": ROWS * TOKENS, "provenance": provenance.provenance({}, "none", 0),
  }  # fmt: skip
  (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
  page.write(str(HERE / "error.svg"), vl_convert.vegalite_to_svg(charts.spec(figure(results))))
  print(tables(results))


if __name__ == "__main__":
  main()
