"""The noise floor of every recipe's forward pass: SmolLM2-135M against itself one ulp away.

command: python experiments/noise_floor/noise_floor.py [RECIPE ...]   (make run fetches the weights)

Norm weights are one float32 ulp larger; KL and |change of log p| per token over 1,024 held-out
tokens of the Python documentation. Scales are current: recipes with a history or a calibration have
no scales of their own before they train. Writes results.json beside this file, recipe by recipe,
and prints the table of experiments/guide/generation.md.
"""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from configs import smollm2_cpt  # noqa: E402
from fp8jax.config import resolve  # noqa: E402
from fp8jax.data import loader  # noqa: E402
from fp8jax.evaluation import divergence  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models.hf import weights  # noqa: E402
from fp8jax.ops import scaling  # noqa: E402
from fp8jax.recipe import library  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results.json"
LENGTH, ROWS = 512, 2


def measure(recipe: str) -> dict | None:
  """The floor of a recipe; None for one whose scales are a state."""
  c = smollm2_cpt.get_config(recipe)
  c.seq_len, c.eval.batch = LENGTH, ROWS
  c.precision.calibration = ""
  spec = resolve.resolve(c, 1, choose.current_device())
  sites = spec.sites()
  if scaling.states(sites):
    return None
  params, _ = weights.load_params(c.init.hf, spec.model)
  first = next(iter(loader.heldout_batches(spec.data, "main", ROWS, 1)))
  tokens = jnp.asarray(first["tokens_BL"])
  batch = {"tokens_BL": tokens, "positions_BL": jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)}
  counts = np.ones(tokens.shape, np.float32)
  texts = [divergence.Batch(batch, first["tokens_BL"], counts)]
  return divergence.noise_floor(spec, params, sites, texts)


def table(rows: dict[str, dict]) -> str:
  lines = ["| recipe | KL, nats per token | mean change of log p, nats | same most likely token |",
           "|---|---|---|---|"]  # fmt: skip
  for name, row in rows.items():
    lines.append(f"| `{name}` | {row['kl']:.1e} | {row['dlogp']:.1e} | {row['top1']:.3f} |")
  return "\n".join(lines)


def main(names: list[str]):
  results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"recipes": {}}
  commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
  for name in names or library.RECIPES:
    if name not in results["recipes"] and (row := measure(name)):
      results["recipes"][name] = row | {"commit": commit.stdout.strip(), "jax": jax.__version__}
      RESULTS.write_text(json.dumps(results, indent=1) + "\n")
      print(name, row, flush=True)
  print(table(results["recipes"]))


if __name__ == "__main__":
  main(sys.argv[1:])
