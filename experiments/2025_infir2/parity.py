"""Accuracy on verifiable reasoning, arm against arm: intervals, and parity by non-inferiority.

command: python experiments/2025_infir2/parity.py collect WORKDIR ARM SEED   (an evaluated run)
         python experiments/2025_infir2/parity.py table [--baseline bf16]    (of all collected)

`collect` takes the newest evaluation of a run (--job=evaluate --config.eval.tasks=...) and writes
its verdicts to results/reasoning/ARM-SEED.json. `table` pairs an arm with the baseline by seed and
item. The rule was fixed before the runs, in the task files: parity, where the lower end of the 95 %
interval of arm - baseline, bootstrapped over seeds and items, lies above -2 points; "worse", where
the upper end lies below it; otherwise no verdict, with the items that would be needed.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from fp8jax import statistics  # noqa: E402
from fp8jax.evaluation import report, run, store  # noqa: E402

RESULTS = HERE / "results" / "reasoning"
ALL = "all"


def collect(workdir: str, arm: str, seed: int, results: pathlib.Path = RESULTS):
  """Writes ARM-SEED.json of a workdir's newest evaluation."""
  folder = store.newest(workdir)
  summary = json.loads((pathlib.Path(folder) / store.SUMMARY).read_text())
  scores = store.read_scores(folder)
  found = {
    "arm": arm,
    "seed": seed,
    "settings": summary["settings"],
    **{k: summary["provenance"][k] for k in ("commit", "dirty", "time", "devices")},
    "tasks": {
      name: {
        "fingerprint": one.fingerprint,
        "margin": one.margin,
        "items": list(one.items),
        "correct": one.scores_IJ.astype(int).tolist(),
        "mean_tokens": summary["tasks"].get(name, {}).get("mean_tokens"),
      }
      for name, one in scores.items()
    },
  }
  results.mkdir(parents=True, exist_ok=True)
  (results / f"{arm}-{seed}.json").write_text(json.dumps(found) + "\n")
  for name, one in scores.items():
    print(f"{arm}-{seed} {name}: {100 * one.scores_IJ.mean():.1f} % of {len(one.items)} items")


def read(results: pathlib.Path = RESULTS) -> dict[tuple[str, int], dict[str, store.Scores]]:
  """{(arm, seed): {task: scores}}, the task "all" among them: all items of the tasks."""
  found = {}
  for path in sorted(results.glob("*.json")):
    one = json.loads(path.read_text())
    by_task = {
      name: store.Scores(
        name,
        t["fingerprint"],
        t["margin"],
        tuple(t["items"]),
        np.array(t["correct"], float),
        one["settings"],
      )
      for name, t in one["tasks"].items()
    }
    parts = [by_task[name] for name in sorted(by_task)]
    if len(parts) > 1:
      by_task[ALL] = store.Scores(
        ALL, " ".join(p.fingerprint for p in parts), min(p.margin for p in parts),
        tuple(f"{p.task} {i}" for p in parts for i in p.items),
        np.concatenate([p.scores_IJ.mean(1, keepdims=True) for p in parts]),
      )  # fmt: skip
    found[one["arm"], one["seed"]] = by_task
  return found


def accuracies(runs) -> list[list[str]]:
  """Rows of arm, task, accuracy over seeds with its interval over items, and by seed."""
  rows = []
  arms = sorted({arm for arm, _ in runs})
  for name in dict.fromkeys(name for by_task in runs.values() for name in by_task):
    for arm in arms:
      mine = [by_task[name].scores_IJ for (a, _), by_task in sorted(runs.items())
              if a == arm and name in by_task]  # fmt: skip
      if not mine:
        continue
      interval = statistics.interval(np.concatenate(mine, axis=1))
      shown = report.percent({k: getattr(interval, k) for k in ("estimate", "low", "high")})
      by_seed = ", ".join(f"{100 * scores.mean():.1f}" for scores in mine)
      rows.append([name, f"`{arm}`", shown, by_seed])
  return rows


def verdicts(runs, baseline: str) -> list[list[str]]:
  """Rows of the paired comparison of every arm with the baseline, on the seeds that both have."""
  rows = []
  for arm in sorted({arm for arm, _ in runs} - {baseline}):
    seeds = sorted(s for a, s in runs if a == arm and (baseline, s) in runs)
    if not seeds:
      continue
    compared = run.compare([runs[arm, s] for s in seeds], [runs[baseline, s] for s in seeds])
    for (name, c), row in zip(compared.items(), report.compared_rows(compared)):
      by_seed = ", ".join(f"{d:+.1f}" for d in c.by_seed)
      rows.append([name, f"`{arm}` - `{baseline}`", row[1], by_seed, row[3], row[4]])
  return rows


def markdown(heads: list[str], rows: list[list[str]]) -> str:
  lines = [heads, ["---"] * len(heads), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(baseline: str, results: pathlib.Path = RESULTS) -> str:
  """Both tables in Markdown."""
  runs = read(results)
  return "\n\n".join((
    markdown(["task", "arm", "accuracy, % [95 %]", "by seed"], accuracies(runs)),
    markdown(
      ["task", "arms", "difference, points [95 %]", "by seed", "seeds x items", "verdict"],
      verdicts(runs, baseline),
    ),
  ))  # fmt: skip


def main(arguments: list[str]):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  commands = parser.add_subparsers(dest="command", required=True)
  one = commands.add_parser("collect")
  one.add_argument("workdir")
  one.add_argument("arm")
  one.add_argument("seed", type=int)
  commands.add_parser("table").add_argument("--baseline", default="bf16")
  asked = parser.parse_args(arguments)
  if asked.command == "collect":
    collect(asked.workdir, asked.arm, asked.seed)
  else:
    print(table(asked.baseline))


if __name__ == "__main__":
  main(sys.argv[1:])
