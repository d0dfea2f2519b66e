"""results/ -> figure.svg and the tables of README.md.

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
BAR = 0.25  # %, of DeepSeek-V3 (arXiv:2412.19437, section 3.3)

# The same in every panel: colour is the arm, line style is the source. Okabe and Ito's colours.
COLORS = dict(zip(ARMS, ("black", "#0072B2", "#009E73", "#D55E00")))
STYLES = dict(zip(SOURCES, ("-", "--")))


def fingerprint(arm):
  """Of the data that an arm was trained on; None without results."""
  path = HERE / "results" / arm / "provenance.json"
  return json.loads(path.read_text())["data_fingerprint"] if path.exists() else None


def tokens_per_step(arm):
  """As its configuration says."""
  path = HERE / "results" / arm / "provenance.json"
  changed = json.loads(path.read_text())["config"]
  return changed["global_batch"] * changed["seq_len"]


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
  """Three panels over tokens seen: the training loss, and differences to the baseline in %."""
  figure, (losses, gaps, heldout) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
  gaps.sharey(heldout)
  base_train, base_heldout = runs[BASELINE]
  for arm, (train, held) in runs.items():
    k_tokens, color = tokens_per_step(arm) / 1000, COLORS[arm]
    steps = [s for s in sorted(train) if s >= WINDOW]
    smooth = [window_mean(train, s) for s in steps]
    losses.plot([s * k_tokens for s in steps], smooth, color=color, linewidth=1.2, label=arm)
    if arm == BASELINE:
      continue
    both = [s for s in steps if s in base_train]
    gap_of = [100 * (window_mean(train, s) / window_mean(base_train, s) - 1) for s in both]
    gaps.plot([s * k_tokens for s in both], gap_of, color=color, linewidth=1.2)
    for source, style in STYLES.items():
      points = [
        (s * k_tokens, 100 * (value / base_heldout[source][s] - 1))
        for s, value in sorted(held[source].items())
        if s in base_heldout[source]
      ]
      heldout.plot(*zip(*points), style, marker="o", color=color, linewidth=1.2, markersize=4)
  losses.set(title=f"training loss, mean of {WINDOW} steps", ylabel="nats per token")
  gaps.set(title=f"training loss, difference to {BASELINE}", ylabel="%")
  heldout.set(title=f"held-out loss, difference to {BASELINE}")
  for axes in (gaps, heldout):
    axes.axhline(0, color=COLORS[BASELINE], linewidth=1.2)
    axes.axhspan(-BAR, BAR, alpha=0.12, color="grey", linewidth=0)
  heldout.plot([], [], color=COLORS[BASELINE], label=BASELINE)
  for arm in runs:
    if arm != BASELINE:
      heldout.plot([], [], color=COLORS[arm], label=arm)
  for source, style in STYLES.items():
    heldout.plot([], [], style, color="grey", label=f"on {source}")
  heldout.fill_between([], [], [], alpha=0.12, color="grey", label=f"within {BAR} %")
  for axes in (losses, gaps, heldout):
    axes.set(xlabel="thousands of tokens seen")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
  figure.legend(*heldout.get_legend_handles_labels(), loc="outside lower center", ncols=7)
  # No date and no random ids, so that the same results are the same file.
  plt.rcParams["svg.hashsalt"] = "2025_infir2"
  figure.savefig(HERE / "figure.svg", metadata={"Date": None})


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
