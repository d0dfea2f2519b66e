"""Same batches, several seeds: paired differences to bf16 with their intervals.

command: python experiments/2025_infir2/paired.py [--design=scratch] [RECIPE-SEED ...]
         (one at a time, resumable; --table instead of names: of the runs that are done)

Designs, fixed before their first run:

  paired     SmolLM2-135M continued on 64 batches of 1,024 tokens, three seeds; differences of
             training from step 9 on
  scratch    3.4M parameters from random weights on 512 batches of 2,048 tokens, five seeds;
             differences from step 65 on

A seed draws the order of the windows, and the random weights; with it, every recipe trains on the
same batches. A difference is 100 * (loss / bf16's loss - 1) with the same seed. The interval is
Student's over the seeds' means, 95 %. Three quantities were fixed with the design:

  training   loss of the FP8 forward pass, the mean of the differences after the warm-up
  rounding   held out, the FP8 forward pass against the BF16 forward pass of the same final weights
  weights    held out, the BF16 forward pass of both runs: what training in FP8 did to the weights

Two were added after the runs, and so was the interval corrected for the number n of intervals in a
table, which hold together with 95 % (Bonferroni: each with 100 - 5 / n %):

  served     held out, the FP8 forward pass of the FP8 run against the BF16 forward pass of bf16's:
             what somebody gets who trains and serves in FP8; rounding and weights together
  training, last quarter    training, of the last quarter of the steps: whether a gap grows

The bar is 0.25 % (DeepSeek-V3, arXiv:2412.19437, section 3.3): "met" where the whole interval is
within it, "missed" where the whole interval is above it, otherwise "no verdict: too short".
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from scipy import stats  # noqa: E402

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import config  # noqa: E402
import plot  # noqa: E402

from fp8jax.sweeps import run as sweep  # noqa: E402

BASELINE, BAR = "bf16", 0.25


class Design(NamedTuple):
  """A comparison of recipes, fixed before its first run.

  Attributes:
    name: kind of arm in config.py, folder in results/, stem of the figure.
    seeds: every recipe runs with each.
    warmup: steps whose training losses are not compared.
  """

  name: str
  seeds: tuple[int, ...]
  warmup: int

  @property
  def results(self) -> pathlib.Path:
    return HERE / "results" / self.name


DESIGNS = {
  design.name: design
  for design in (Design("paired", (0, 1, 2), 8), Design("scratch", (0, 1, 2, 3, 4), 64))
}


def measure(design: Design, recipe: str, seed: int) -> dict:
  """Runs an arm with a seed, or goes on with it, or reads the results of the finished run."""
  done = sweep.one(
    f"experiments/2025_infir2/config.py:{design.name}-{recipe}",
    str(HERE.parents[1] / f"runs/2025_infir2/{design.name}-{recipe}-{seed}"),
    {"seed": seed},
    str(HERE.parents[1]),
  )
  return {
    "recipe": recipe,
    "seed": seed,
    "train": done.logged("loss"),
    "heldout_before": done.heldout(0),
    "heldout_after": done.heldout(-1),
    "step_seconds": statistics.median(done.logged("step_seconds")),
    "data_fingerprint": done.provenance["data_fingerprint"],
    "commit": done.provenance["commit"],
    "time": done.provenance["time"],
  }


def percent(value: float, base: float) -> float:
  return 100 * (value / base - 1)


def training(run: dict, base: dict, warmup: int) -> float:
  """Mean difference in percent after the warm-up."""
  pairs = list(zip(run["train"], base["train"], strict=True))[warmup:]
  return statistics.mean(percent(loss, of_base) for loss, of_base in pairs)


def rounding(run: dict, source: str) -> float:
  after = run["heldout_after"][source]
  return percent(after[run["recipe"]], after[BASELINE])


def served(run: dict, base: dict, source: str) -> float:
  return percent(
    run["heldout_after"][source][run["recipe"]], base["heldout_after"][source][BASELINE]
  )


def weights(run: dict, base: dict, source: str) -> float:
  return percent(*(r["heldout_after"][source][BASELINE] for r in (run, base)))


def interval(values: list[float], count: int = 1) -> tuple[float, float]:
  """(mean, half width of Student's interval); a single value has no width.

  Args:
    values: by seed.
    count: of intervals that hold together with 95 % (Bonferroni).
  """
  mean = statistics.mean(values)
  if len(values) < 2:
    return mean, math.inf
  error = statistics.stdev(values) / math.sqrt(len(values))
  return mean, float(stats.t.ppf(1 - 0.025 / count, len(values) - 1)) * error


def verdict(mean: float, half: float) -> str:
  if -BAR < mean - half and mean + half < BAR:
    return "met"
  return "missed" if mean - half > BAR else "no verdict: too short"


def differences(
  design: Design, runs: dict[tuple[str, int], dict], recipe: str
) -> dict[str, list[float]]:
  """{quantity: its values by seed}, of the seeds that both have.

  Raises:
    ValueError: two runs of a seed read different data.
  """
  found: dict[str, list[float]] = {}
  for seed in design.seeds:
    run, base = runs.get((recipe, seed)), runs.get((BASELINE, seed))
    if run is None or base is None:
      continue
    if run["data_fingerprint"] != base["data_fingerprint"]:
      raise ValueError(f"{recipe} and {BASELINE} read different data with seed {seed}; rerun both")
    found.setdefault("training", []).append(training(run, base, design.warmup))
    late = len(run["train"]) * 3 // 4
    found.setdefault("training, last quarter", []).append(training(run, base, late))
    for source in run["heldout_after"]:
      found.setdefault(f"served, {source}", []).append(served(run, base, source))
      found.setdefault(f"rounding, {source}", []).append(rounding(run, source))
      found.setdefault(f"weights, {source}", []).append(weights(run, base, source))
  return found


def _count(design: Design, runs: dict[tuple[str, int], dict]) -> int:
  """The intervals of the table."""
  return sum(len(differences(design, runs, r)) for r in config.PAIRED if r != BASELINE)


def table(design: Design, runs: dict[tuple[str, int], dict]) -> str:
  heads = ("recipe", "quantity", "by seed, %", "mean, 95 % interval", "bar 0.25 %",
           "95 % of all intervals together", "bar 0.25 %")  # fmt: skip
  lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
  count = _count(design, runs)
  for recipe in config.PAIRED:
    found = differences(design, runs, recipe) if recipe != BASELINE else {}
    for quantity, values in found.items():
      (mean, alone), (_, together) = interval(values), interval(values, count)
      shown = f"{mean:+.3f} ± {alone:.3f}" if math.isfinite(alone) else f"{mean:+.3f}, one seed"
      by_seed = ", ".join(f"{v:+.3f}" for v in values)
      verdicts = verdict(mean, alone), f"± {together:.3f}", verdict(mean, together)
      lines.append(f"| {' | '.join((f'`{recipe}`', quantity, by_seed, shown, *verdicts))} |")
  return "\n".join(lines)


def figure(design: Design, runs: dict[tuple[str, int], dict]):
  """DESIGN.svg: every mean with its interval, every seed, and the bar."""
  recipes = [recipe for recipe in config.PAIRED if recipe != BASELINE]
  fig, axis = plt.subplots(figsize=(8, 4))
  axis.axvspan(-BAR, BAR, color="0.9", label=f"bar: {BAR} %")
  axis.axvline(0, color="black", lw=0.8)
  for i, recipe in enumerate(recipes):
    found = differences(design, runs, recipe)
    for row, values in enumerate(found.values()):
      mean, half = interval(values)
      y, color = -row + 0.2 * (0.5 - i), plot.COLORS[recipe]
      label = recipe if row == 0 else None
      axis.errorbar(mean, y, xerr=half, fmt="o", color=color, capsize=3, label=label)
      axis.plot(values, [y] * len(values), "|", color=color, ms=9)
  axis.set_yticks([-row for row in range(len(found))], list(found))
  axis.set_xlabel("loss relative to bf16 with the same seed, %: mean, 95 % interval, seeds")
  axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
  fig.tight_layout()
  fig.savefig(HERE / f"{design.name}.svg")


def read(design: Design) -> dict[tuple[str, int], dict]:
  runs = [json.loads(path.read_text()) for path in sorted(design.results.glob("*.json"))]
  return {(run["recipe"], run["seed"]): run for run in runs}


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--design", choices=DESIGNS, default="paired")
  parser.add_argument("--table", action="store_true", help="run nothing")
  parser.add_argument("runs", nargs="*", metavar="RECIPE-SEED", help="these alone")
  args = parser.parse_args()
  design = DESIGNS[args.design]
  # A seed is finished in every recipe before the next one begins.
  every = [f"{recipe}-{seed}" for seed in design.seeds for recipe in config.PAIRED]
  for name in () if args.table else args.runs or every:
    recipe, _, seed = name.rpartition("-")
    design.results.mkdir(parents=True, exist_ok=True)
    found = measure(design, recipe, int(seed))
    (design.results / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
  print(table(design, read(design)))
  figure(design, read(design))


if __name__ == "__main__":
  main()
