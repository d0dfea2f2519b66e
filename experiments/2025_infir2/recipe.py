"""InfiR2's recipe in twenty minutes on two CPU cores: CPT, two stages of SFT, evaluation, export.

command: make recipe    (or python experiments/2025_infir2/recipe.py; resumes where it stopped)
needs:   pip install -e ".[train,hf,data,sft,eval]", the demo's weights

Two task families. Every stage is in block FP8; the last has a BF16 twin from the same weights on
the same batches. It ends in one table, and in an exported FP8 model that answers a prompt. It is a
demonstration: with one seed and 40 questions a difference between the twins means nothing.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time


def interrupted(*_):
  """Ctrl-C: one line. While a child runs, `child` answers instead."""
  os.write(2, b"interrupted; the same command resumes\n")
  os._exit(130)


if __name__ == "__main__":
  signal.signal(signal.SIGINT, interrupted)  # imports take seconds

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from fp8jax import console as console_lib  # noqa: E402

DATA = ROOT / "assets" / "reasoning_mini"
RUNS = ROOT / "runs" / "recipe"
CONFIG = "experiments/2025_infir2/reasoning.py"
TASKS = tuple(
  f"experiments/2025_infir2/tasks/{name}.json" for name in ("chain_sum", "leg_counting")
)
SAMPLES, QUESTIONS = 160, 40
RECIPE = "block_128"
# Row of the table -> (stage, recipe, whose weights it starts from).
STAGES = {
  "CPT": ("cpt", RECIPE, ""),
  "SFT stage 1": ("stage1", RECIPE, "CPT"),
  "SFT stage 2": ("stage2", RECIPE, "SFT stage 1"),
  "SFT stage 2, bf16 twin": ("stage2", "bf16", "SFT stage 1"),
}
EVALUATED = ("before", "SFT stage 2", "SFT stage 2, bf16 twin")


def workdir(row: str) -> pathlib.Path:
  stage, recipe, _ = STAGES[row]
  return RUNS / f"{stage}-{recipe}"


def launch(*arguments: str) -> str:
  """Runs launch.py, its progress on stderr; returns its standard output.

  Raises:
    SystemExit: with the code of a run that failed or was interrupted.
  """
  command = [sys.executable, "launch.py", *arguments]
  print("$", " ".join(["python", *command[1:]]), file=sys.stderr, flush=True)
  return child(command, subprocess.PIPE)


def child(command: list, stdout: int) -> str:
  """Runs a command to its end, which Ctrl-C asks of it, too: it saves, and says so in its line.

  Returns:
    Its standard output, "" where that goes elsewhere. Raises SystemExit as `launch`.
  """
  asked = []
  before = signal.signal(signal.SIGINT, lambda *_: asked.append(1))
  with subprocess.Popen(command, cwd=ROOT, stdout=stdout, text=True) as process:
    output = process.communicate()[0] or ""
  signal.signal(signal.SIGINT, before)
  if process.returncode < 0 and asked:  # it had not begun to answer
    interrupted()
  if process.returncode or asked:
    print(output, file=sys.stderr, end="")
    sys.exit(process.returncode or 130)
  return output


def config(row: str) -> list[str]:
  """The command line of a stage."""
  stage, recipe, before = STAGES[row]
  found = [f"--config={CONFIG}:{stage},{recipe},mini", f"--workdir={workdir(row)}"]
  found.append(f"--config.data.sources.solutions.path={DATA}/{stage}.jsonl")
  return found + ([f"--config.init.workdir={workdir(before)}"] if before else [])


def train(row: str) -> dict:
  """A stage's summary, from a run that is started, goes on, or was finished before."""
  path = workdir(row) / "summary.json"
  if not path.exists():
    begin = time.perf_counter()
    launch(*config(row))
    (workdir(row) / "seconds.json").write_text(json.dumps(time.perf_counter() - begin))
  return json.loads(path.read_text())


def evaluate(row: str) -> dict:
  """{task: its summary} of a stage's weights, or of those before the first stage."""
  asked = [
    f"--config.eval.tasks={','.join(TASKS)}", f"--config.eval.questions={QUESTIONS}",
    "--config.eval.chat=True", "--config.eval.tokens=0", "--config.generate.slots=20",
    "--job=evaluate",
  ]  # fmt: skip
  if row == "before":
    launch(
      f"--config={CONFIG}:cpt,bf16,mini", f"--workdir={RUNS}/before",
      f"--config.data.sources.solutions.path={DATA}/cpt.jsonl",
      "--config.weights.hf=assets/smollm2-135m", *asked,
    )  # fmt: skip
    folder = RUNS / "before"
  else:
    launch(*config(row), *asked)
    folder = workdir(row)
  (summary,) = folder.glob("evaluation/*/summary.json")
  return json.loads(summary.read_text())["tasks"]


def export(row: str) -> pathlib.Path:
  """The folder of a stage's weights in FP8, per output channel.

  SmolLM2's sizes are no multiples of 128, so block formats hold none of its matrices.
  """
  folder = RUNS / "exported"
  if not (folder / "config.json").exists():
    launch(
      *config(row), "--job=export", "--config.export.format=compressed-tensors",
      "--config.export.strategy=channel", "--config.export.requantize=True",
      f"--out={folder}",
    )  # fmt: skip
  return folder


def answer(folder: pathlib.Path, question: str) -> str:
  """The exported model's answer to a question."""
  prompts = RUNS / "prompt.jsonl"
  prompts.write_text(json.dumps({"messages": [{"role": "user", "content": question}]}) + "\n")
  out = RUNS / "answer.jsonl"
  out.unlink(missing_ok=True)
  launch(
    f"--config={CONFIG}:cpt,bf16,mini", f"--workdir={RUNS}/answer", "--job=generate",
    f"--config.data.sources.solutions.path={DATA}/cpt.jsonl", f"--config.weights.hf={folder}",
    f"--config.generate.prompts={prompts}", f"--config.generate.out={out}",
    "--config.generate.max_new_tokens=64",
  )  # fmt: skip
  return json.loads(out.read_text().splitlines()[0])["text"]


def percent(summary: dict) -> str:
  found = (100 * summary["avg"][k] for k in ("estimate", "low", "high"))
  return "{:.0f} [{:.0f}, {:.0f}]".format(*found)


def main():
  begin = time.perf_counter()
  RUNS.mkdir(parents=True, exist_ok=True)
  if not (DATA / "counts.json").exists():
    command = [sys.executable, HERE / "reasoning_data.py", DATA, "--samples", str(SAMPLES)]
    child([*command, "--tasks", *(ROOT / task for task in TASKS)], subprocess.DEVNULL)
  scores = {"before": evaluate("before")}
  summaries = {row: train(row) for row in STAGES}
  scores |= {row: evaluate(row) for row in EVALUATED[1:]}
  folder = export("SFT stage 2")
  tasks = list(scores["before"])
  rows = [["before", "", "", "", *(percent(scores["before"][t]) for t in tasks)]]
  for row, summary in summaries.items():
    first, last = (list(summary["evaluations"].values())[i]["solutions"] for i in (0, -1))
    recipe = STAGES[row][1]
    rows.append([
      row, recipe, f"{summary['tokens']:,}",
      f"{first[recipe]['loss']:.3f} -> {last[recipe]['loss']:.3f}",
      *(percent(scores[row][t]) if row in scores else "" for t in tasks),
    ])  # fmt: skip
  columns = ["stage", "recipe", "tokens", "held-out loss", *(f"{t}, % [95 %]" for t in tasks)]
  title = f"SmolLM2-135M, {QUESTIONS} questions per task, greedy; no verdict: one seed"
  console_lib.console().print(console_lib.table(title, columns, rows))
  question = "State the final answer to the following arithmetic problem: 47 + 38 ="
  size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
  print(f"exported to {folder.relative_to(ROOT)}: {size / 2**20:.0f} MiB")
  print(f"{question}\n  {answer(folder, question)}")
  print(f"{(time.perf_counter() - begin) / 60:.1f} minutes")


if __name__ == "__main__":
  main()
