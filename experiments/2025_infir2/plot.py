"""results/ -> figure.png and the tables of README.md.

command: python experiments/2025_infir2/plot.py
"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
BASELINE = "bf16"
ARMS = (BASELINE, "block_128", "block_128_pow2", "tensor_current")
SOURCES = ("python_docs", "brown")
WINDOW = 32  # steps in a running mean of the training loss


def fingerprint(arm):
  """Of the data that an arm was trained on; None without results."""
  path = HERE / "results" / arm / "provenance.json"
  return json.loads(path.read_text())["data_fingerprint"] if path.exists() else None


def read(arm):
  """({step: train loss}, {source: {step: held-out loss in the arm's own recipe}})."""
  path = HERE / "results" / arm / "metrics.jsonl"
  train, heldout = {}, {source: {} for source in SOURCES}
  for line in path.read_text().splitlines() if path.exists() else ():
    row = json.loads(line)
    if "loss" in row:
      train[row["step"]] = row["loss"]
    for source in SOURCES:
      if (value := row.get(f"heldout/{source}/{arm}/loss")) is not None:
        heldout[source][row["step"]] = value
  return train, heldout


def window_mean(train, step):
  """Mean training loss of the WINDOW steps that end with `step`."""
  return sum(train[s] for s in range(step - WINDOW + 1, step + 1)) / WINDOW


def gap(value, base):
  return f"{value:.4f} ({100 * (value / base - 1):+.3f} %)"


def print_tables(runs):
  base_train, base_heldout = runs[BASELINE]
  for source in SOURCES:
    print(f"\nheld-out loss on {source}, in the arm's own precision (relative to {BASELINE})\n")
    steps = sorted(set().union(*(held[source] for _, held in runs.values())))
    print("| arm | " + " | ".join(f"step {s}" for s in steps) + " |")
    print("|---" * (len(steps) + 1) + "|")
    for arm, (_, held) in runs.items():
      cells = []
      for step in steps:
        value, base = held[source].get(step), base_heldout[source].get(step)
        cells.append("" if value is None or base is None else gap(value, base))
      print(f"| {arm} | " + " | ".join(cells) + " |")
  lasts = sorted({max(train) for arm, (train, _) in runs.items() if arm != BASELINE})
  print(f"\ntraining loss, mean of the {WINDOW} steps up to the last one of an arm\n")
  print("| arm | steps done | " + " | ".join(f"step {s}" for s in lasts) + " |")
  print("|---" * (len(lasts) + 2) + "|")
  for arm, (train, _) in runs.items():
    bases = {s: window_mean(base_train, s) for s in lasts if s <= min(max(train), max(base_train))}
    cells = [gap(window_mean(train, s), bases[s]) if s in bases else "" for s in lasts]
    print(f"| {arm} | {max(train)} | " + " | ".join(cells) + " |")


def plot(runs):
  figure, (left, right, below) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
  base_train = runs[BASELINE][0]
  for arm, (train, held) in runs.items():
    steps = [s for s in sorted(train) if s >= WINDOW]
    smooth = [window_mean(train, s) for s in steps]
    left.plot(steps, smooth, label=arm, linewidth=1)
    for source, style in zip(SOURCES, ("o-", "s--")):
      points = sorted(held[source].items())
      right.plot(*zip(*points), style, label=f"{arm}, {source}", linewidth=1, markersize=4)
    if arm != BASELINE:
      both = [s for s in steps if s in base_train]
      gaps = [100 * (window_mean(train, s) / window_mean(base_train, s) - 1) for s in both]
      below.plot(both, gaps, label=arm, linewidth=1)
  left.set(title=f"training loss, mean of {WINDOW} steps", xlabel="step", ylabel="nats per token")
  right.set(title="held-out loss", xlabel="step", ylabel="nats per token")
  below.set(title=f"training loss relative to {BASELINE}", xlabel="step", ylabel="%")
  below.axhspan(-0.25, 0.25, alpha=0.1, color="grey", label="the literature's bar")
  for axes in (left, right, below):
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
  figure.savefig(HERE / "figure.png", dpi=110)


def main():
  runs = {}
  for arm in ARMS:
    if fingerprint(arm) == fingerprint(BASELINE):
      runs[arm] = read(arm)
    else:
      print(f"{arm}: other batches than {BASELINE}'s, or no results; left out")
  if fingerprint(BASELINE) is None:
    raise SystemExit(f"no results of the {BASELINE} arm under {HERE / 'results'}; run run.sh first")
  print_tables(runs)
  plot(runs)


if __name__ == "__main__":
  main()
