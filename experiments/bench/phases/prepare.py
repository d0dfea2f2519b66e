"""Tokens per second of --job=prepare: of this commit, in turns with another commit.

command: python experiments/bench/phases/prepare.py [--before=COMMIT] [--megabytes=48] [--repeats=2]
needs:   the demo's weights (their tokenizer)

The text is this environment's own Python source: files of site-packages in the order of their
paths, a document each, up to --megabytes. Seconds are those of the whole command, its start
included. Writes results/prepare.json beside this file.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]

import timing  # noqa: E402

# The last commit that tokenized in one process, a document at a time.
BEFORE = "4b8763d"


def write_text(target: pathlib.Path, size: int) -> int:
  """Writes the documents as JSON lines; returns their bytes."""
  written = 0
  with target.open("w") as file:
    for path in sorted(pathlib.Path(sysconfig.get_path("purelib")).rglob("*.py")):
      text = path.read_text(errors="ignore")
      if not text.strip():
        continue
      if written + len(text) > size:
        break
      file.write(json.dumps({"text": text}) + "\n")
      written += len(text)
  return written


def prepare(tree: pathlib.Path, text: pathlib.Path, target: pathlib.Path) -> dict:
  """Seconds and tokens of one command in a checkout."""
  shutil.rmtree(target, ignore_errors=True)
  command = [
    sys.executable, "launch.py", "--config=configs/smollm2_cpt.py", "--job=prepare",
    f"--workdir={target}", "--config.data.sources.main.kind=jsonl",
    f"--config.data.sources.main.path={text}", "--config.data.sources.main.field=text",
  ]  # fmt: skip
  start = time.perf_counter()
  done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
  seconds = time.perf_counter() - start
  if done.returncode:
    sys.exit(done.stderr)
  (index,) = json.loads(done.stdout).values()
  tokens = sum(split["tokens"] for split in index["splits"].values())
  return {"seconds": round(seconds, 2), "tokens": tokens}


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--before", default=BEFORE, help="a commit of this repository")
  parser.add_argument("--megabytes", type=float, default=48)
  parser.add_argument("--repeats", type=int, default=2)
  given = parser.parse_args()
  results = {"provenance": timing.provenance(num_devices=1), "before_commit": given.before}
  with tempfile.TemporaryDirectory() as folder:
    text, old = pathlib.Path(folder) / "text.jsonl", pathlib.Path(folder) / "before"
    results["bytes"] = write_text(text, int(given.megabytes * 1e6))
    git = ["git", "-C", str(timing.ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(old), given.before], check=True)
    try:
      (old / "assets").symlink_to(timing.ROOT / "assets")
      arms = {"before": old, "after": timing.ROOT}
      results["runs"] = {arm: [] for arm in arms}
      for _ in range(given.repeats):
        for arm, tree in arms.items():
          found = prepare(tree, text, pathlib.Path(folder) / "out")
          results["runs"][arm].append(found)
          print(arm, json.dumps(found), flush=True)
    finally:
      subprocess.run([*git, "remove", "--force", str(old)], check=True)
  for arm, runs in results["runs"].items():
    best = min(run["seconds"] for run in runs)
    results[arm] = {"seconds": best, "tokens_per_s": round(runs[0]["tokens"] / best)}
  results["times_as_fast"] = round(
    results["after"]["tokens_per_s"] / results["before"]["tokens_per_s"], 2
  )
  timing.write(HERE / "results" / "prepare.json", results)
  print(json.dumps({k: results[k] for k in ("before", "after", "times_as_fast")}, indent=2))


if __name__ == "__main__":
  main()
