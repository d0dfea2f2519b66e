"""The experiment for 1/64 of its tokens with every recipe -> results/every_recipe.json, a table.

command: python experiments/2025_infir2/every_recipe.py [RECIPE ...]
         (all of them if none is named; finished runs are not repeated)
"""

import json
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import config  # noqa: E402

from fp8jax.sweeps import run as sweep  # noqa: E402

RESULTS = HERE / "results" / "every_recipe.json"


def row(recipe: str) -> dict:
  root = HERE.parents[1]
  workdir = str(root / f"runs/2025_infir2/short-{recipe}")
  done = sweep.one(f"experiments/2025_infir2/config.py:short-{recipe}", workdir, {}, str(root))
  return {
    "heldout_before": done.evaluation(0),
    "heldout_after": done.evaluation(-1),
    "train_last_16": float(done.curves["loss"].values[-16:].mean()),
    "step_seconds": statistics.median(done.curves["step_seconds"].values),
    "commit": done.provenance["commit"],
    "data_fingerprint": done.provenance["data_fingerprint"],
  }


def table(rows: dict) -> str:
  """Held-out loss in the recipe's own forward pass and in BF16's, beside `bf16`."""
  base = rows["bf16"]
  heads = [
    f"{source}, {'own' if own else 'in `bf16`'}, {when}"
    for source in base["heldout_after"]
    for own, when in ((True, "step 0"), (True, "after"), (False, "after"))
  ]
  lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
  for recipe, found in rows.items():
    cells = []
    # Rows of 2026-11-22 and before have no fingerprint: all of them in the order of documents.
    is_same = found.get("data_fingerprint") == base.get("data_fingerprint")
    for source in base["heldout_after"]:
      for when, precision in (("before", recipe), ("after", recipe), ("after", "bf16")):
        value, reference = (r[f"heldout_{when}"][source] for r in (found, base))
        gap = f"{100 * (value[precision] / reference['bf16'] - 1):+.2f} %"
        cells.append(f"{value[precision]:.4f} ({gap if is_same else 'other batches'})")
    lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
  return "\n".join(lines)


def main():
  rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  for recipe in sys.argv[1:] or config.SHORT:
    rows[recipe] = row(recipe)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
  rows = {recipe: rows[recipe] for recipe in config.SHORT if recipe in rows}
  print(table(rows))


if __name__ == "__main__":
  main()
