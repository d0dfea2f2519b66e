"""Result (a): the whole recipe in three recipes and three seeds, evaluated on reasoning questions.

command: python experiments/2025_infir2/reasoning_runs.py pilot         (once, before the others)
         python experiments/2025_infir2/reasoning_runs.py [ARM-SEED ...]    (resumable)
         python experiments/2025_infir2/reasoning_runs.py --table       (of the runs that are done)
needs:   pip install -e ".[train,hf,data,sft,eval]", the demo's weights

Design, fixed before the first run. Arms `bf16`, `block_128`, `block_128_pow2`; seeds 0, 1, 2, which
draw the order of the data. A run is CPT, stage 1 and stage 2 of reasoning.py, all in its own
recipe, and a greedy evaluation on the questions of tasks/, which training never saw. With a seed,
every arm trains on the same batches.

The pilot is `bf16` with seed 100 on the first 60 questions of every family in tasks/. It fixes the
families of the comparison: those of which the weights before training answer less than 30 % and
the tuned ones more than 60 %. Training uses all families all the same. The rule of parity is that
of parity.py. A first pilot, results/reasoning_pilot_0.json, had a third family, gcd, fewer samples
of each, and 20, 50 and 30 steps: only leg_counting passed. So it did in the second, whose chain_sum
reached 55 %. The questions of leg_counting became 500 then (200 before), for the power of three
families.
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys

import altair as alt

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import parity  # noqa: E402
import plot  # noqa: E402
import reasoning  # noqa: E402

from fp8jax.evaluation import store  # noqa: E402
from fp8jax.report import charts  # noqa: E402
from fp8jax.sweeps import run as sweep  # noqa: E402

CONFIG = "experiments/2025_infir2/reasoning.py"
ARMS, SEEDS = ("bf16", "block_128", "block_128_pow2"), (0, 1, 2)
PILOT, PILOT_SEED, PILOT_QUESTIONS = HERE / "results" / "reasoning_pilot.json", 100, 60
BASE_BELOW, TUNED_ABOVE = 0.30, 0.60
STAGES = HERE / "results" / "reasoning_stages"


def families() -> dict[str, int]:
  """{family: number of test questions} of the task files."""
  paths = sorted((HERE / "tasks").glob("*.json"))
  return {path.stem: json.loads(path.read_text())["items"] for path in paths}


def chosen(found: dict[str, dict[str, float]]) -> list[str]:
  """Families of the comparison. Args: {"before" or "tuned": {family: share of right answers}}."""
  return [
    name
    for name, share in sorted(found["before"].items())
    if share < BASE_BELOW and found["tuned"][name] > TUNED_ABOVE
  ]


def prepare():
  """Draws the training data of these families, once."""
  counts = ROOT / reasoning.DATA / "counts.json"
  drawn = json.loads(counts.read_text())["test"] if counts.exists() else {}
  if {name: one["items"] for name, one in drawn.items()} != families():
    command = [sys.executable, str(HERE / "reasoning_data.py"), reasoning.DATA]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def evaluate(arm: str, workdir: str, names: list[str], *changes: str):
  """Evaluates the last checkpoint of a workdir, unless it has been."""
  try:
    store.newest(str(ROOT / workdir))
  except FileNotFoundError:
    tasks = ",".join(f"experiments/2025_infir2/tasks/{name}.json" for name in names)
    command = [
      sys.executable, "launch.py", f"--config={CONFIG}:{arm}", f"--workdir={workdir}",
      "--job=evaluate", f"--config.eval.tasks={tasks}", "--config.eval.chat=True",
      "--config.eval.tokens=0", "--config.generate.slots=100", *changes,
    ]  # fmt: skip
    if code := subprocess.run(command, cwd=ROOT).returncode:
      sys.exit(code)


def train(recipe: str, seed: int) -> dict[str, dict]:
  """{stage: its record}, of runs that are started, go on, or were finished before."""
  found = {}
  for stage in reasoning.STAGES:
    changes: dict = {"seed": seed}
    if stage in reasoning.BEFORE:
      changes["init.workdir"] = reasoning.workdir(reasoning.BEFORE[stage], recipe, "", seed)
    workdir = reasoning.workdir(stage, recipe, "", seed)
    done = sweep.one(f"{CONFIG}:{stage},{recipe}", str(ROOT / workdir), changes, str(ROOT))
    summary = json.loads((ROOT / workdir / "summary.json").read_text())
    found[stage] = {
      "train": done.curves["loss"].values.tolist(),
      "heldout_before": done.evaluation(0),
      "heldout_after": done.evaluation(-1),
      "tokens": summary["tokens"],
      "seconds": summary["seconds"],
      "data_fingerprint": done.provenance["data_fingerprint"],
      "commit": done.provenance["commit"],
      "dirty": done.provenance["dirty"],
    }
  return found


def shares(workdir: str) -> dict[str, float]:
  """{family: share of right answers} of a workdir's evaluation."""
  scores = store.read_scores(store.newest(str(ROOT / workdir)))
  return {name: float(one.scores_IJ.mean()) for name, one in scores.items()}


def pilot():
  """Runs the pilot, writes its results, and prints the families that it fixes."""
  prepare()
  before, questions = (
    "runs/2025_infir2/reasoning-before",
    f"--config.eval.questions={PILOT_QUESTIONS}",
  )
  weights = "--config.weights.hf=assets/smollm2-135m"
  evaluate("cpt,bf16", before, list(families()), questions, weights)
  stages = train("bf16", PILOT_SEED)
  tuned = reasoning.workdir("stage2", "bf16", "", PILOT_SEED)
  evaluate("stage2,bf16", tuned, list(families()), questions)
  found = {"before": shares(before), "tuned": shares(tuned)}
  record = found | {"questions": PILOT_QUESTIONS, "families": chosen(found), "stages": stages}
  PILOT.write_text(json.dumps(record) + "\n")
  print(json.dumps(found | {"families": chosen(found)}, indent=1))


def measure(arm: str, seed: int):
  """Runs an arm with a seed, and writes its verdicts and the records of its stages."""
  prepare()
  names = json.loads(PILOT.read_text())["families"]
  stages = train(arm, seed)
  tuned = reasoning.workdir("stage2", arm, "", seed)
  evaluate(f"stage2,{arm}", tuned, names)
  parity.collect(str(ROOT / tuned), arm, seed)
  # Of the largest process, KiB on Linux; of a resumed run that of its last part.
  peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
  STAGES.mkdir(parents=True, exist_ok=True)
  (STAGES / f"{arm}-{seed}.json").write_text(
    json.dumps({"peak_gib": peak, "stages": stages}) + "\n"
  )


def read() -> dict[tuple[str, int], dict]:
  """{(arm, seed): record} of the runs that are done."""
  found = {}
  for path in sorted(STAGES.glob("*.json")):
    arm, _, seed = path.stem.rpartition("-")
    found[arm, int(seed)] = json.loads(path.read_text())
  return found


def check(runs: dict[tuple[str, int], dict]):
  """Raises: ValueError: two arms of a seed read different batches."""
  prints: dict = {}
  for (arm, seed), run in runs.items():
    for stage, record in run["stages"].items():
      mine = record["data_fingerprint"]
      if prints.setdefault((seed, stage), mine) != mine:
        raise ValueError(f"{arm}-{seed} read other data in {stage} than another arm; rerun both")


def costs(runs: dict[tuple[str, int], dict]) -> str:
  """A table in Markdown: losses, seconds per step and memory by arm, the means over seeds."""
  rows = []
  for arm in (a for a in ARMS if any(a == name for name, _ in runs)):
    mine = [run for (name, _), run in runs.items() if name == arm]
    peak = max(run["peak_gib"] for run in mine)
    for stage in reasoning.STAGES:
      records = [run["stages"][stage] for run in mine]
      before, after = (
        statistics.mean(r[f"heldout_{when}"]["solutions"]["bf16"] for r in records)
        for when in ("before", "after")
      )
      seconds = statistics.mean(r["seconds"]["step"] / len(r["train"]) for r in records)
      numbers = (f"{records[0]['tokens']:,}", f"{before:.4f} -> {after:.4f}", f"{seconds:.1f}")
      rows.append([f"`{arm}`", stage, *numbers, f"{peak:.1f}"])
  heads = ["arm", "stage", "tokens", "held out in `bf16`", "seconds a step", "peak, GiB"]
  return parity.markdown(heads, rows)


def figure(runs: dict[tuple[str, int], dict]):
  """reasoning.svg: the training loss of every stage, all seeds."""
  color = charts.arm_color("arm", [arm for arm, _ in runs], "")
  panels = []
  for stage in reasoning.STAGES:
    rows = [
      {"arm": arm, "seed": seed, "step": step, "loss": loss}
      for (arm, seed), run in runs.items()
      for step, loss in enumerate(run["stages"][stage]["train"], 1)
    ]
    title = None if panels else "training loss, every seed"
    chart = alt.Chart(alt.Data(values=rows)).mark_line(strokeWidth=0.9).encode(
      x=alt.X("step:Q", title="step"),
      y=alt.Y("loss:Q", title=title, scale=alt.Scale(type="log", nice=False)),
      color=color, detail="seed:N",
    )  # fmt: skip
    panels.append(chart.properties(title=stage, width=298, height=243))
  plot.draw(alt.hconcat(*panels), HERE / "reasoning.svg")


def main(arguments: list[str]):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--table", action="store_true", help="run nothing")
  parser.add_argument("runs", nargs="*", metavar="ARM-SEED", help="these alone, or pilot")
  asked = parser.parse_args(arguments)
  every = [f"{arm}-{seed}" for seed in SEEDS for arm in ARMS]
  names = [] if asked.table else asked.runs or every
  if unknown := set(names) - {"pilot", *every}:
    sys.exit(f"error: unknown runs {sorted(unknown)}; expected pilot or some of {every}")
  if names == ["pilot"]:
    return pilot()
  if names and not (PILOT.exists() and json.loads(PILOT.read_text())["families"]):
    sys.exit(f"error: {PILOT} fixes no families; run the pilot first: reasoning_runs.py pilot")
  if len(names) == 1:
    measure(names[0].rpartition("-")[0], int(names[0].rpartition("-")[2]))
  else:
    for name in names:  # a process each, whose children's memory is the run's
      if code := subprocess.run([sys.executable, __file__, name], cwd=ROOT).returncode:
        sys.exit(code)
  runs = read()
  check(runs)
  if runs:
    figure(runs)
    print(parity.table("bf16"), costs(runs), sep="\n\n")


if __name__ == "__main__":
  main(sys.argv[1:])
