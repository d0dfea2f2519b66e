"""results/ -> figure.svg and the tables of README.md.

command: python experiments/2025_infir2/plot.py
"""

import json
import pathlib

import altair as alt
import vl_convert

from fp8jax.report import charts, page

HERE = pathlib.Path(__file__).parent
BASELINE = "bf16"
ARMS = (BASELINE, "block_128", "block_128_pow2", "tensor_current")
SOURCES = ("python_docs", "brown")
WINDOW = 32  # steps in a running mean of the training loss
BAR = 0.25  # %, of DeepSeek-V3 (arXiv:2412.19437, section 3.3)

WIDTH, HEIGHT = 354, 285  # pixels of a panel


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


def draw(chart, path: pathlib.Path):
  """Writes a chart as SVG, its legends below it."""
  legend = dict(orient="bottom", labelFontSize=12, columnPadding=20, symbolSize=250)
  spec = charts.spec(charts.themed(chart).configure_legend(**legend))
  page.write(str(path), vl_convert.vegalite_to_svg(spec))


def curves(runs):
  """Rows of the two panels of training: the running mean, and its difference to the baseline."""
  losses, gaps, base_train = [], [], runs[BASELINE][0]
  for arm, (train, _) in runs.items():
    for step in sorted(s for s in train if s >= WINDOW):
      row = {"arm": arm, "tokens": step * tokens_per_step(arm) / 1000}
      mean = window_mean(train, step)
      losses.append(row | {"y": mean})
      if arm != BASELINE and step in base_train:
        gaps.append(row | {"y": 100 * (mean / window_mean(base_train, step) - 1)})
  return losses, gaps


def heldout_gaps(runs):
  """Rows of the panel of held-out losses."""
  base = runs[BASELINE][1]
  return [
    {
      "arm": arm,
      "source": f"on {source}",
      "tokens": step * tokens_per_step(arm) / 1000,
      "y": 100 * (value / base[source][step] - 1),
    }
    for arm, (_, held) in runs.items()
    if arm != BASELINE
    for source in SOURCES
    for step, value in sorted(held[source].items())
    if step in base[source]
  ]


def plot(runs):
  """Three panels over tokens seen: the training loss, and differences to the baseline in %."""
  stroke = alt.Legend(symbolType="stroke", symbolStrokeWidth=2, symbolStrokeColor="grey")
  color = charts.arm_color("arm", runs, "", legend=stroke)

  def lines(rows, title, zero):
    axis, scale = alt.Axis(tickCount=6), alt.Scale(zero=True)
    x = alt.X("tokens:Q", title="thousands of tokens seen", axis=axis, scale=scale)
    y = alt.Y("y:Q", title=title, scale=alt.Scale(zero=zero, nice=True))
    chart = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y, color=color)
    return chart.mark_line(strokeWidth=1.3)

  def panel(title, *layers):
    return alt.layer(*layers).properties(title=title, width=WIDTH, height=HEIGHT)

  label = f"within {BAR} %"
  grey = alt.Fill("bar:N", title="", scale=alt.Scale(domain=[label], range=["grey"]))
  bar = alt.Chart(alt.Data(values=[{"low": -BAR, "high": BAR, "bar": label}]))
  bar = bar.mark_rect(opacity=0.12).encode(y="low:Q", y2="high:Q", fill=grey)
  zero = alt.Chart(alt.Data(values=[{"y": 0, "arm": BASELINE}])).mark_rule(strokeWidth=1.3)
  losses, gaps = curves(runs)
  dash = alt.StrokeDash("source:N", sort=[f"on {s}" for s in SOURCES], title="", legend=stroke)
  heldout = lines(heldout_gaps(runs), "%", True)
  points, heldout = heldout.mark_point(filled=True, opacity=1), heldout.encode(strokeDash=dash)
  below = bar, zero.encode(y="y:Q", color=color)
  differences = alt.hconcat(
    panel(f"training loss, difference to {BASELINE}", *below, lines(gaps, "%", True)),
    panel(f"held-out loss, difference to {BASELINE}", *below, heldout, points),
  ).resolve_scale(y="shared")
  mean = panel(f"training loss, mean of {WINDOW} steps", lines(losses, "nats per token", False))
  draw(alt.hconcat(mean, differences), HERE / "figure.svg")


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
