"""Log-probabilities of a rollout beside those of training, as it is and invariant; and the cost.

what:      |logp(rollout) - logp(training's forward pass)| of sampled tokens of SmolLM2-135M
command:   JAX_PLATFORMS=cpu python experiments/2026_invariance/mismatch.py run DIR    (resumes)
           JAX_PLATFORMS=cpu python experiments/2026_invariance/mismatch.py bytes DIR  (resumes)
           JAX_PLATFORMS=cpu python experiments/2026_invariance/mismatch.py table DIR  (README)
needs:     assets/smollm2-135m (make run)
hardware:  two CPU cores, 4 GB

Eight prompts of uneven lengths (drawn tokens of held-out pages of the Python manual) are completed
by 32 tokens at temperature 1, three sequences at a time. Training's pass sees the same tokens,
packed by threes in rows of 256, isolated, and weights as the optimizer keeps them. Rollout and
training are separately compiled. Nothing else differs but the format of the cache, in the rows that
name one. Intervals are bootstraps over sequences at 95 % together for the rows. The cost is
CPU-seconds of a step (loss and gradients, 512 tokens, full recomputation) and of 32 decoded tokens
of three sequences, medians of three in turn; and the temporaries of the compiled step.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent / "lab")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tensors  # noqa: E402

from fp8jax import records, statistics  # noqa: E402
from fp8jax.generation import api  # noqa: E402
from fp8jax.generation.settings import Sampling  # noqa: E402
from fp8jax.models import transformer  # noqa: E402
from fp8jax.ops import site as site_lib  # noqa: E402
from fp8jax.run import provenance  # noqa: E402

RECIPES = (("bf16", "float32"), ("bf16", "bfloat16"), ("block_128", "float32"),
           ("block_128", "bfloat16"), ("rowwise", "bfloat16"), ("int8", "bfloat16"),
           ("mxfp8_ste", "bfloat16"), ("mxfp4_ste", "bfloat16"),
           ("w4a16_g64", "bfloat16"))  # fmt: skip
LENGTHS, NEW, ROW, SLOTS = (11, 57, 23, 90, 35, 8, 71, 44), 32, 256, 3
# Name -> (whether it is invariant, generate.cache_format).
ARMS = {
  "as it is": (False, "compute"), "invariant": (True, "compute"),
  "as it is, E4M3 cache": (False, "e4m3"), "as it is, rotated E4M3 cache": (False, "e4m3_rotated"),
}  # fmt: skip
CACHED = (("bf16", "float32"), ("bf16", "bfloat16"), ("block_128", "bfloat16"))


def pairs():
  """(recipe, dtype, name of the arm) of every row."""
  return [
    (*of, arm) for of in RECIPES for arm, (_, cache) in ARMS.items()
    if cache == "compute" or of in CACHED
  ]  # fmt: skip


def prompts() -> list[list[int]]:
  _, _, (batch, *_) = tensors.smollm2(length=512, sequences=1)
  tokens, at, made = np.asarray(batch["tokens_BL"][0]).tolist(), 0, []
  for size in LENGTHS:
    made.append(tokens[at : at + size])
    at += size
  return made


def packed(texts: list[list[int]]):
  """(batch of rows of three sequences each, [(row, slice)] of every text's targets)."""
  rows = -(-len(texts) // 3)
  names = ("tokens", "targets", "segments", "positions")
  batch, places = {f"{n}_BL": np.zeros((rows, ROW), np.int32) for n in names}, []
  for number, text in enumerate(texts):
    row = number // 3
    at = places[-1][1].stop if number % 3 else 0
    here = slice(at, at + len(text) - 1)
    batch["tokens_BL"][row, here], batch["targets_BL"][row, here] = text[:-1], text[1:]
    batch["segments_BL"][row, here] = number % 3 + 1
    batch["positions_BL"][row, here] = np.arange(len(text) - 1)
    places.append((row, here))
  batch["weights_BL"] = (batch["segments_BL"] > 0).astype(np.float32)
  return jax.tree.map(jnp.asarray, batch), places


def model(recipe: str, dtype: str, is_invariant: bool):
  """(spec, how it computes, sites, parameters) of an arm."""
  spec, params, _ = tensors.smollm2(
    recipe, length=ROW, sequences=2,
    **{"precision.compute_dtype": dtype, "memory.remat_policy": "full"},
  )  # fmt: skip
  run = dataclasses.replace(spec.run, is_invariant=is_invariant, dtype=jnp.dtype(dtype))
  return spec, run, site_lib.with_current_scales(spec.sites()), params


def step_of(spec, run, sites, batch):
  """Loss and gradients of the first two rows of a batch."""
  few = jax.tree.map(lambda x: x[:2], batch)
  return jax.jit(jax.value_and_grad(lambda p: transformer.loss(p, sites, few, spec.model, run)))


def temporaries(recipe: str, dtype: str, is_invariant: bool) -> int:
  """Bytes of the compiled step beside its arguments and results."""
  *of_step, params = model(recipe, dtype, is_invariant)
  batch, _ = packed([[0] * (length + NEW) for length in LENGTHS])
  memory = step_of(*of_step, batch).lower(params).compile().memory_analysis()
  return memory.temp_size_in_bytes


def of_arm(recipe: str, dtype: str, is_invariant: bool, cache: str) -> dict:
  """{"differences": of every sequence its tokens', "step", "decode": CPU-seconds}."""
  spec, run, sites, params = model(recipe, dtype, is_invariant)
  tokenizer = spec.data.tokenizer
  generator = api.Generator(
    params, sites, spec.model, run, tokenizer, [10**6], slots=SLOTS, max_length=128,
    cache_format=cache,
  )  # fmt: skip
  drawn, asked = Sampling(temperature=1.0, max_new_tokens=NEW), prompts()
  completions = [one for (one,) in generator.generate(asked, drawn)]
  texts = [[*p, *c.tokens] for p, c in zip(asked, completions, strict=True)]

  @jax.jit
  def log_probs(params, batch):
    h_BLD = transformer.hidden(params, sites, batch, spec.model, run)
    return transformer.log_probs(h_BLD, params, sites, batch["targets_BL"], spec.model, run)[0]

  batch, places = packed(texts)
  logp_BL = np.asarray(log_probs(params, batch), np.float64)
  differences = [
    (logp_BL[row, here][-NEW:] - np.array(c.logp)).tolist()
    for (row, here), c in zip(places, completions, strict=True)
  ]
  step = step_of(spec, run, sites, batch)
  short = Sampling(temperature=1.0, max_new_tokens=NEW)
  return {
    "differences": differences,
    "step": _cpu(lambda: jax.block_until_ready(step(params))),
    "decode": _cpu(lambda: generator.generate(asked[:SLOTS], short)),
  }


def _cpu(function) -> float:
  function()
  seconds = []
  for _ in range(3):
    began = time.process_time()
    function()
    seconds.append(time.process_time() - began)
  return float(np.median(seconds))


def run(target: pathlib.Path):
  target.mkdir(parents=True, exist_ok=True)
  for recipe, dtype, arm in pairs():
    path = target / f"{recipe}-{dtype}-{arm}.json"
    if path.exists():
      continue
    row = {"recipe": recipe, "dtype": dtype, "arm": arm, **of_arm(recipe, dtype, *ARMS[arm])}
    row["provenance"] = provenance.provenance({}, "assets named in the script", 0)
    records.write_atomic(str(path), records.to_json(row))
    worst = max(abs(d) for of in row["differences"] for d in of)
    print(f"{recipe}, {dtype}, {arm}: at most {worst:.3g} nats", flush=True)


def bytes_(target: pathlib.Path):
  target.mkdir(parents=True, exist_ok=True)
  for recipe, dtype, arm in pairs():
    path = target / f"{recipe}-{dtype}-{arm}.bytes.json"
    is_invariant, cache = ARMS[arm]
    if path.exists() or cache != "compute":  # a step has no cache
      continue
    row = {"recipe": recipe, "dtype": dtype, "arm": arm}
    row["temporaries"] = temporaries(recipe, dtype, is_invariant)
    row["provenance"] = provenance.provenance({}, "assets named in the script", 0)
    records.write_atomic(str(path), records.to_json(row))
    print(f"{recipe}, {dtype}, {arm}: {row['temporaries'] / 2**20:,.0f} MiB", flush=True)


def table(target: pathlib.Path):
  every = [json.loads(p.read_text()) for p in sorted(target.glob("*.json"))]
  rows, sizes = ([r for r in every if key in r] for key in ("differences", "temporaries"))
  by_arm, sizes_by_arm = (
    {(r["recipe"], r["dtype"], r["arm"]): r for r in of} for of in (rows, sizes)
  )
  head = ["recipe", "computed in", "pass", "mean abs. difference, nats", "largest", "tokens apart",
          "CPU-s of a step", "its temporaries, MiB", "CPU-s of 96 decoded tokens"]  # fmt: skip
  lines = []
  for recipe, dtype, arm in pairs():
    if (recipe, dtype, arm) not in by_arm:
      continue
    row, size = by_arm[recipe, dtype, arm], sizes_by_arm.get((recipe, dtype, arm))
    each = np.abs(np.array(row["differences"]))
    i = statistics.bootstrap(each.sum(1), np.full(len(each), NEW), count=len(pairs()))
    lines.append([
      f"`{recipe}`", dtype, arm, f"{i.estimate:.2g} [{i.low:.2g}, {i.high:.2g}]",
      f"{each.max():.2g}", f"{100 * (each > 0).mean():.0f} %", f"{row['step']:.1f}",
      f"{size['temporaries'] / 2**20:,.0f}" if size else "", f"{row['decode']:.1f}",
    ])  # fmt: skip
  (HERE / "results.json").write_text(json.dumps({"rows": rows, "bytes": sizes}) + "\n")
  tensors.write_table(HERE, tensors.markdown(head, lines))


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("command", choices=("run", "bytes", "table"))
  parser.add_argument("folder", type=pathlib.Path)
  args = parser.parse_args()
  {"run": run, "bytes": bytes_, "table": table}[args.command](args.folder)
