"""What keeping optimizer states narrow does to the loss of a real model, for every preset.

  python experiments/moments/losses.py --json experiments/moments/losses.json

Every row is a run of launch.py: `make run`'s continued pre-training of SmolLM2-135M (15,360 tokens)
with its linears in BF16's place (float32 on a CPU), or an experiment's arm. Finished runs are not
repeated; --only picks rows.
"""

import json
import pathlib
import statistics
import subprocess
import sys

from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from configs import smollm2_cpt  # noqa: E402
from fp8jax.optim import build, moments  # noqa: E402

_RUNS = flags.DEFINE_string("runs", "runs/moments", "Where runs are kept.")
_JSON = flags.DEFINE_string("json", "", "Where the table is written.")
_ONLY = flags.DEFINE_list("only", [], "Rows to run; all if empty.")

_BASE = "configs/smollm2_cpt.py:bf16"
_LOSSLESS = {
  "optim.master": "bf16_remainder",
  "optim.gradients": "bf16_sr",
  "optim.moments": "coat",
}
# row: (config:arm, what differs from it).
ROWS = {
  **{f"float32, seed {seed}": (_BASE, {"seed": seed}) for seed in range(3)},
  **{f"lossless, seed {seed}": (_BASE, {"seed": seed, **_LOSSLESS}) for seed in range(3)},
  **{n: (_BASE, {"optim.moments": n}) for n in moments.PRESETS if n != "float32"},
  "2024_coat:float32": ("experiments/2024_coat/config.py:float32", {}),
  "2024_coat:coat": ("experiments/2024_coat/config.py:coat", {}),
  "2023_fp8_lm:float32": ("experiments/2023_fp8_lm/config.py:float32", {}),
  "2023_fp8_lm:o1": ("experiments/2023_fp8_lm/config.py:o1", {}),
  "2023_fp8_lm:o2": ("experiments/2023_fp8_lm/config.py:o2", {}),
  "2024_trillion_token:all": ("experiments/2024_trillion_token/config.py:all", {}),
}


def run(name: str) -> dict:
  """The row's numbers, of a run that is started, or went on, or was there already."""
  source, changes = ROWS[name]
  folder = ROOT / _RUNS.value / name.replace(":", "_").replace(", ", "_").replace(" ", "")
  if not (folder / "summary.json").exists():
    overrides = [f"--config.{key}={value}" for key, value in changes.items()]
    command = [sys.executable, "launch.py", f"--config={source}", f"--workdir={folder}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True)
  summary, provenance = (
    json.loads((folder / f"{n}.json").read_text()) for n in ("summary", "provenance")
  )
  steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  seconds = [s["step_seconds"] for s in steps if "step_seconds" in s]
  first, *_, last = summary["evaluations"].values()
  resolved = provenance["config"]
  return {
    "row": name,
    "bytes_per_parameter": _bytes(resolved),
    "heldout_before": _losses(first),
    "heldout_after": _losses(last),
    "train_last_10": statistics.mean(s["loss"] for s in steps[-12:] if "loss" in s),
    "median_step_seconds": statistics.median(seconds),
    "commit": provenance["commit"],
  }


def _losses(evaluation: dict) -> dict:
  (by_precision,) = evaluation.values()
  return {precision: values["loss"] for precision, values in by_precision.items()}


def _bytes(resolved: dict) -> float:
  """Master, gradient and moments of a large matrix."""
  c = smollm2_cpt.get_config()
  c.update_from_flattened_dict({k: v for k, v in resolved.items() if k.startswith("optim.")})
  return sum(build.read(c.optim, c.steps).bytes_per_parameter().values())


def main(argv):
  del argv
  rows = [run(name) for name in _ONLY.value or ROWS]
  base = next((r for r in rows if r["row"] == "float32, seed 0"), rows[0])
  print("| row | bytes per parameter | held-out loss, BF16 forward | difference | s per step |")
  print("|---|---|---|---|---|")
  for row in rows:
    loss = row["heldout_after"]["bf16"]
    print(
      f"| {row['row']} | {row['bytes_per_parameter']:.2f} | {loss:.4f} | "
      f"{loss - base['heldout_after']['bf16']:+.4f} | {row['median_step_seconds']:.2f} |"
    )
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
  app.run(main)
