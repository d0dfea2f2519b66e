"""What keeping optimizer states narrow does to the loss of a real model, for every preset.

  python experiments/moments/losses.py --json experiments/moments/losses.json

Every row is a run of launch.py: `make run`'s continued pre-training of SmolLM2-135M (10,240 tokens)
with its linears in BF16's place (float32 on a CPU). Finished runs are not repeated, nor are rows
forgotten that are in the file; --only picks rows.
"""

import json
import pathlib
import statistics
import sys

from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from configs import smollm2_cpt  # noqa: E402
from fp8jax.config import resolve  # noqa: E402
from fp8jax.optim import storage  # noqa: E402
from fp8jax.sweeps import run as sweep  # noqa: E402

_RUNS = flags.DEFINE_string("runs", "runs/moments", "Where runs are kept.")
_JSON = flags.DEFINE_string("json", "", "Where the table is written.")
_ONLY = flags.DEFINE_list("only", [], "Rows to run; all if empty.")

_BASE = "configs/smollm2_cpt.py:bf16"
_LOSSLESS = {
  "optim.master_format": "bf16_remainder",
  "optim.grad_format": "bf16_sr",
  "optim.moment_format": "coat",
}
# row: (config:arm, what differs from it).
ROWS = {
  **{f"float32 seed {seed}": (_BASE, {"seed": seed}) for seed in range(3)},
  **{
    f"coat seed {seed}": (_BASE, {"seed": seed, "optim.moment_format": "coat"}) for seed in range(3)
  },
  **{f"lossless seed {seed}": (_BASE, {"seed": seed, **_LOSSLESS}) for seed in range(3)},
  **{
    n: (_BASE, {"optim.moment_format": n}) for n in storage.MOMENTS if n not in ("float32", "coat")
  },
}


def row(name: str) -> dict:
  """The row's numbers, of a run that is started, or went on, or was there already."""
  source, changes = ROWS[name]
  folder = name.replace(" seed ", "_seed")
  done = sweep.one(source, str(ROOT / _RUNS.value / folder), changes, str(ROOT))
  (before,), (after,) = (done.evaluation(which).values() for which in (0, -1))
  return {
    "row": name,
    "bytes_per_parameter": _bytes(done.provenance["config"]),
    "heldout_before": before,
    "heldout_after": after,
    "train_last_10": float(done.curves["loss"].values[-10:].mean()),
    "median_step_seconds": statistics.median(done.curves["step_seconds"].values),
    "commit": done.provenance["commit"],
    "order": "shuffled" if done.provenance["config"]["data.shuffle_windows"] else "documents",
  }


def _bytes(resolved: dict) -> float:
  """Master, gradient and moments of a large matrix."""
  c = smollm2_cpt.get_config()
  c.update_from_flattened_dict({k: v for k, v in resolved.items() if k.startswith("optim.")})
  return sum(resolve.read_optim(c, c.steps).bytes_per_parameter().values())


def main(argv):
  del argv
  path = pathlib.Path(_JSON.value) if _JSON.value else None
  known = json.loads(path.read_text()) if path and path.exists() else []
  rows = {line["row"]: line for line in known}
  for name in _ONLY.value or ROWS:
    rows[name] = row(name)
    if path:
      path.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
  rows = {name: rows[name] for name in ROWS if name in rows}
  first = next(iter(rows.values()))
  print("| row | bytes per parameter | held-out loss, BF16 forward | difference | s per step |")
  print("|---|---|---|---|---|")
  for line in rows.values():
    loss = line["heldout_after"]["bf16"]
    # Rows of 2026-11-22 and before say nothing: windows were in the order of documents.
    is_same = line.get("order", "documents") == first.get("order", "documents")
    difference = f"{loss - first['heldout_after']['bf16']:+.4f}" if is_same else "other batches"
    print(
      f"| {line['row']} | {line['bytes_per_parameter']:.2f} | {loss:.4f} | "
      f"{difference} | {line['median_step_seconds']:.2f} |"
    )


if __name__ == "__main__":
  app.run(main)
