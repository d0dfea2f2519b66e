"""Nemotron's loop (arXiv:2406.11704, section 3) in miniature: a model learns from its own answers.

what:      held-out sums right after fine-tuning on kept answers of the model or on solutions, and
           the share of pairs that a reward head ranks right
command:   python experiments/2026_rl/loop.py run DIR     (resumes)
           python experiments/2026_rl/loop.py table DIR   (loop.json, the table of README)
hardware:  two CPU cores, 3 GB

Per seed: random weights learn to write sums of two numbers below 100 with their working, in one of
two orders ("47+85=7+5=12,40+80=120;132"). Each of 2,000 other questions is answered eight times at
temperature 1. An answer is kept if it ends in the sum. From the same weights four arms take as many
steps: on the solutions of all questions; the same from weights one float32 ulp larger, the null
arm; on the solutions of the questions that have a kept answer, which says what is missing without
the hard ones; on the kept answers. 400 held-out questions are answered greedily. A reward head
learns pairs of a right and a wrong answer to a question and ranks those of other questions. Arms,
margin, seeds and the correction for their number were fixed before the first run.
"""

import argparse
import json
import pathlib
import random

import sums  # first: it puts the repository on the path
from sums import is_right, prompt, sets, solution

import numpy as np  # isort: skip

from fp8jax import records  # isort: skip
from fp8jax.run import provenance  # isort: skip

HERE, MARGIN, SEEDS, START, STEPS, SAMPLES = sums.HERE, sums.MARGIN, (0, 1, 2), 512, 96, 8
RANKING_STEPS = 200
RANKED = 400  # of the learned questions, those whose pairs are held out
BASELINE, NULL = "solutions", "solutions, one ulp away"
ARMS = (BASELINE, NULL, "solutions of kept questions", "kept answers")


def answers(
  workdir: pathlib.Path, asked: list[sums.Pair], path: pathlib.Path, seed: int, samples: int
):
  """Texts of every question, [question][sample]; greedy where there is one sample."""
  if not path.exists():
    prompts = path.with_suffix(".prompts.jsonl")
    prompts.write_text("".join(json.dumps({"prompt": prompt(p)}) + "\n" for p in asked))
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    c = sums.configuration("bf16", seed)
    c.generate.prompts, c.generate.out, c.generate.num_samples = str(prompts), str(part), samples
    c.generate.temperature, c.generate.seed = (0.0 if samples == 1 else 1.0), seed
    c.generate.max_new_tokens, c.generate.max_length, c.generate.slots = 40, 64, 128
    sums.call("generate", c, workdir, prompts, field="prompt")
    part.rename(path)
  found: list[list[str]] = [[""] * samples for _ in asked]
  for line in path.read_text().splitlines():
    row = json.loads(line)
    found[row["index"]][row["sample"]] = row["text"]
  return found


def texts_of(arm: str, seed: int, asked: list[sums.Pair], drawn: list[list[str]]) -> list[str]:
  rng = random.Random(1000 + seed)
  if arm == "kept answers":
    return [prompt(p) + t for p, texts in zip(asked, drawn) for t in texts if is_right(p, t)]
  known = [any(is_right(p, t) for t in texts) for p, texts in zip(asked, drawn)]
  keeps_all = arm in (BASELINE, NULL)
  return [
    prompt(p) + solution(p, rng) for p, is_known in zip(asked, known) if keeps_all or is_known
  ]


def learn(arm: str, seed: int, target: pathlib.Path, drawn) -> dict:
  name = arm.replace(", ", "-").replace(" ", "_")
  workdir, source = target / f"{name}-{seed}", target / f"{name}-{seed}.jsonl"
  _, asked, held_out = sets()
  texts = texts_of(arm, seed, asked, drawn)
  sums.write(source, texts)
  c = sums.continued("bf16", seed, target)
  c.init.nudge = arm == NULL
  c.steps, c.global_batch, c.seq_len = STEPS, 8, 256
  c.optim.peak_lr, c.optim.min_lr = 5e-4, 5e-5
  c.optim.warmup_steps, c.optim.decay_steps = 8, 24
  sums.call("train", c, workdir, source)
  greedy = answers(workdir, held_out, target / f"{name}-{seed}.held_out.jsonl", seed, 1)
  right = [int(is_right(p, t)) for p, (t,) in zip(held_out, greedy)]
  return {"arm": arm, "seed": seed, "texts": len(texts), "right": right,
          "provenance": provenance.provenance({}, "sums with their working", seed)}  # fmt: skip


def ranked(seed: int, target: pathlib.Path, drawn) -> dict:
  """A reward head of right against wrong answers: how it ranks pairs of other questions."""
  rng, by_question = random.Random(seed), []
  for p, texts in zip(sets()[1], drawn):
    right, wrong = ([t for t in dict.fromkeys(texts) if is_right(p, t) == b] for b in (True, False))
    pairs = [(prompt(p), x, y) for x, y in zip(right, wrong)]
    by_question.append(pairs)
  parts = {"learned": by_question[:-RANKED], "ranked": by_question[-RANKED:]}
  for name, questions in parts.items():
    rows = [pair for pairs in questions for pair in pairs]
    rng.shuffle(rows)
    lines = (dict(zip(("prompt", "chosen", "rejected"), row)) for row in rows)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    records.write_atomic(str(target / f"{name}-{seed}.pairs.jsonl"), text)
  c = sums.continued("bf16", seed, target)
  c.model.reward_head, c.rl.loss = True, "reward"
  c.rl.pairs = str(target / f"learned-{seed}.pairs.jsonl")
  c.rl.eval_pairs = str(target / f"ranked-{seed}.pairs.jsonl")
  c.steps, c.global_batch, c.seq_len = RANKING_STEPS, 64, 64
  c.eval.batch, c.eval.tokens = 64, 64
  c.optim.peak_lr, c.optim.min_lr = 5e-4, 5e-5
  c.optim.warmup_steps, c.optim.decay_steps = 16, 50
  summary = sums.call("rl", c, target / f"reward-{seed}", sums.examples(seed, target))
  return {"seed": seed, "evaluations": summary["evaluations"], "pairs": {
    name: sum(map(len, questions)) for name, questions in parts.items()}}  # fmt: skip


def run(target: pathlib.Path):
  target.mkdir(parents=True, exist_ok=True)
  for seed in SEEDS:
    start = sums.begun(seed, target, START)
    drawn = answers(start, sets()[1], target / f"drawn-{seed}.jsonl", seed, SAMPLES)
    held = answers(start, sets()[2], target / f"start-{seed}.held_out.jsonl", seed, 1)
    for arm in ARMS:
      path = target / f"arm-{arm}-{seed}.json"
      if not path.exists():
        row = learn(arm, seed, target, drawn)
        row["before"] = [int(is_right(p, t)) for p, (t,) in zip(sets()[2], held)]
        row["kept"] = float(
          np.mean([[is_right(p, t) for t in ts] for p, ts in zip(sets()[1], drawn)])
        )
        records.write_atomic(str(path), records.to_json(row))
    path = target / f"ranking-{seed}.json"
    if not path.exists():
      records.write_atomic(str(path), records.to_json(ranked(seed, target, drawn)))


def table(target: pathlib.Path):
  import tensors

  rows = [json.loads(p.read_text()) for p in sorted(target.glob("arm-*.json"))]
  rankings = [json.loads(p.read_text()) for p in sorted(target.glob("ranking-*.json"))]
  by = {arm: sorted((r for r in rows if r["arm"] == arm), key=lambda r: r["seed"]) for arm in ARMS}
  head = ["arm", "texts, by seed", "right before, %", "after, %", f"minus `{BASELINE}`, points",
          "verdict"]  # fmt: skip
  lines = []
  for arm, runs in by.items():
    before, after = (np.array([r[k] for r in runs], float) for k in ("before", "right"))
    cells = [arm, ", ".join(f"{r['texts']:,}" for r in runs)]
    cells += [f"{100 * x.mean():.1f}" for x in (before, after)]
    against = np.array([r["right"] for r in by[BASELINE]], float)
    cells += sums.difference(after, against, len(ARMS) - 1) if arm != BASELINE else ["", ""]
    lines.append(cells)
  text = tensors.markdown(head, lines)
  head = ["seed", "pairs learned", "pairs ranked", "right before, %", "after, %", "margin"]
  lines = []
  for row in sorted(rankings, key=lambda r: r["seed"]):
    first, last = (row["evaluations"][step]["pairs"]["bf16"] for step in ("0", str(RANKING_STEPS)))
    shares = [
      f"{100 * r['accuracy']:.1f} [{100 * r['low']:.1f}, {100 * r['high']:.1f}]"
      for r in (first, last)
    ]
    counts = [f"{row['pairs'][name]:,}" for name in ("learned", "ranked")]
    lines.append([str(row["seed"]), *counts, *shares, f"{last['margin']:.2f}"])
  text += "\n\nReward heads:\n\n" + tensors.markdown(head, lines)
  (HERE / "loop.json").write_text(json.dumps({"rows": rows, "rankings": rankings}) + "\n")
  tensors.write_table(HERE, text, "loop")


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("command", choices=("run", "table"))
  parser.add_argument("folder", type=pathlib.Path)
  args = parser.parse_args()
  run(args.folder) if args.command == "run" else table(args.folder)
