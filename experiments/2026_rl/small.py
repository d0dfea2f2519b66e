"""Reinforcement learning of a model of 2.5 million parameters: precisions of training and rollout.

what:      held-out sums right before and after 30 steps, greedily and sampled, and |log p of
           training - of rollout|
command:   python experiments/2026_rl/small.py run DIR [ARM ...]   (resumes)
           python experiments/2026_rl/small.py table DIR           (small.json, table of README)
hardware:  two CPU cores, 3 GB

Per seed: random weights learn to write sums of two numbers below 100 with their working
("47+85=7+5=12,40+80=120;132") from examples alone, for so many steps that 30 to 70 % of the
held-out ones are right; seeds whose start is not are passed over. Every arm goes on from these
weights with the same questions: 30 steps of DAPO's objective, two per rollout of 64 questions with
8 completions each. Held-out sums are answered in the arm's own forward pass, greedily and four
times at the temperature of training. The null arm is `bf16` from weights one float32 ulp larger.
Arms, margin (5 points) and the correction for their number were fixed before the first run; batch
and rate are those of pilots with seed 0, in which `bf16` learned (README).
"""

import argparse
import json
import pathlib

import sums  # first: it puts the repository on the path

import numpy as np  # isort: skip

from configs import base  # isort: skip
from fp8jax import records  # isort: skip
from fp8jax.evaluation import store  # isort: skip
from fp8jax.jobs import dispatch  # isort: skip
from fp8jax.run import metrics_writer, provenance  # isort: skip

HERE, MARGIN, START, STEPS = sums.HERE, sums.MARGIN, 256, 30
# The first three behind the pilots' whose starts are within LEAST and MOST, found before any arm.
SEEDS, LEAST, MOST = (1, 2, 4), 0.3, 0.7
BASELINE, NULL = "bf16", "bf16, one ulp away"
# Of the held-out questions: samples and temperature.
ASKED = {"held_out": (1, 0.0), "held_out_sampled": (4, 1.0)}
# Arm -> (recipe of training, changes).
ARMS: dict[str, tuple[str, dict]] = {
  BASELINE: ("bf16", {}),
  NULL: ("bf16", {"init.nudge": True}),
  "block_128": ("block_128", {}),
  "block_128, invariant": (
    "block_128", {"precision.invariant": True, "memory.remat_policy": "full"}
  ),
  "bf16, rollout block_128, corrected": ("bf16", {"rl.rollout": "block_128"}),
  "bf16, rollout block_128, not corrected": (
    "bf16", {"rl.rollout": "block_128", "rl.most_correction": 0.0}
  ),
}  # fmt: skip


def prepare(folder: pathlib.Path):
  """Tasks: learned.json, asked in training, and those of ASKED."""
  folder.mkdir(parents=True, exist_ok=True)
  _, learned, held_out = sums.sets()
  for name, part in {"learned": learned, **dict.fromkeys(ASKED, held_out)}.items():
    rows = [
      {"question": sums.prompt(p), "answer": f".*;{sum(p)}", "verifier": "regex"} for p in part
    ]
    samples, temperature = ASKED.get(name, (1, 0.0))
    task = {"name": name, "questions": f"{name}.jsonl", "prompt": "{question}", "margin": MARGIN,
            "max_new_tokens": sums.MOST_TOKENS, "samples": samples,
            "temperature": temperature}  # fmt: skip
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.json").write_text(json.dumps(task))


def learn(arm: str, seed: int, target: pathlib.Path) -> pathlib.Path:
  recipe, changes = ARMS[arm]
  c = sums.continued(recipe, seed, target)
  c.data.sources = {"main": base.source("jsonl", str(sums.examples(seed, target)))}
  c.rl.tasks = str(target / "learned.json")
  c.eval.tasks = ",".join(str(target / f"{name}.json") for name in ASKED)
  c.rl.loss, c.rl.prompts, c.rl.samples, c.rl.updates_per_rollout = "dapo", 64, 8, 2
  c.rl.max_new_tokens, c.generate.max_length, c.generate.slots = sums.MOST_TOKENS, 32, 128
  c.steps, c.global_batch, c.seq_len, c.memory.loss_chunk = STEPS, 256, 32, 32
  c.optim.schedule, c.optim.warmup_steps, c.optim.decay_steps = "wsd", 4, 0
  c.optim.peak_lr, c.optim.min_lr, c.optim.weight_decay = 3e-4, 3e-4, 0.0
  c.optim.b2 = 0.98
  c.update_from_flattened_dict(changes)
  workdir = target / f"{arm.replace(', ', '-').replace(' ', '_')}-{seed}"
  dispatch.call("rl", c, base.get_config(), str(workdir))
  return workdir


def run(target: pathlib.Path, only: list[str]):
  prepare(target)
  for seed in SEEDS:
    sums.begun(seed, target, START)
    for arm in only or ARMS:
      path = target / f"{arm}-{seed}.json"
      if not path.exists():
        row = measured(arm, seed, learn(arm, seed, target))
        if not LEAST <= (begins := np.mean(row["right"]["0"]["held_out"])) <= MOST:
          raise SystemExit(
            f"seed {seed} begins at {begins:.3f}, outside of the design: take another"
          )
        records.write_atomic(str(path), records.to_json(row))


def measured(arm: str, seed: int, workdir: pathlib.Path) -> dict:
  """A run's numbers: of every held-out sum how often it is right, before and after; metrics."""
  right = {}
  for step in (0, STEPS):
    scores = store.read_scores(str(workdir / store.FOLDER / f"training_step_{step}"))
    right[str(step)] = {name: scores[name].scores_IJ.mean(1).tolist() for name in ASKED}
  rows = [row for _, row in metrics_writer.rows(str(workdir / "metrics.jsonl"))]
  kept = {}
  for name in ("rl/reward", "rl/mismatch", "rl/truncated", "rl/clipped", "rl/length", "rl/entropy",
               "grad_norm"):  # fmt: skip
    kept[name] = [float(row[name]) for row in rows if name in row]
  summary = json.loads((workdir / "summary.json").read_text())
  made = provenance.provenance({}, "sums below 100", seed)
  return {"arm": arm, "seed": seed, "right": right, "metrics": kept,
          "seconds": summary["seconds"], "provenance": made}  # fmt: skip


def table(target: pathlib.Path):
  import tensors

  paths = (target / f"{arm}-{seed}.json" for arm in ARMS for seed in SEEDS)
  rows = [json.loads(path.read_text()) for path in paths if path.exists()]
  by = {arm: sorted((r for r in rows if r["arm"] == arm), key=lambda r: r["seed"]) for arm in ARMS}
  count = (len(ARMS) - 1) * len(ASKED)
  head = ["arm", "seeds"]
  for name in ("greedily", "sampled"):
    head += [f"right {name}, % before", "after", f"minus `{BASELINE}`, points", "verdict"]
  head += ["mean abs. difference of log p, nats", "largest of a step", "cut, % of tokens",
           "clipped, %"]  # fmt: skip
  lines = []
  for arm, runs in by.items():
    if not runs:
      continue
    cells = [arm, str(len(runs))]
    for name in ASKED:
      before, after = (np.array([r["right"][s][name] for r in runs]) for s in ("0", str(STEPS)))
      cells += [sums.share(before), sums.share(after)]
      against = np.array([r["right"][str(STEPS)][name] for r in by[BASELINE]])
      cells += sums.difference(after, against, count) if arm != BASELINE else ["", ""]
    each = {k: [np.mean(r["metrics"][k]) for r in runs] for k in runs[0]["metrics"]}
    most = max(max(r["metrics"]["rl/mismatch"]) for r in runs)
    cells += [f"{np.mean(each['rl/mismatch']):.2g}", f"{most:.2g}"]
    cells += [f"{100 * np.mean(each[k]):.2g}" for k in ("rl/truncated", "rl/clipped")]
    lines.append(cells)
  (HERE / "small.json").write_text(json.dumps({"rows": rows}) + "\n")
  tensors.write_table(HERE, tensors.markdown(head, lines))


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("command", choices=("run", "table"))
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("arms", nargs="*", help=f"of {', '.join(ARMS)}; all")
  args = parser.parse_args()
  run(args.folder, args.arms) if args.command == "run" else table(args.folder)
