"""Writes lm_eval_scores.json: lm_eval's own Hugging Face backend on SmolLM2-135M in float32.

Runs in an environment of its own, which fp8jax never imports:
  python3.11 -m venv oracle
  oracle/bin/pip install torch==2.13.0 transformers==5.23.0 accelerate lm_eval==0.4.13
  oracle/bin/python tests/golden/write_lm_eval_scores.py FOLDER OF SMOLLM2-135M

The tasks and their data lie in lm_eval/: a choice, whole texts, continuations.
"""

import json
import pathlib
import platform
import sys
import tempfile

import lm_eval
import lm_eval.tasks
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent


def main(folder: str):
  with tempfile.TemporaryDirectory() as where:
    for path in (HERE / "lm_eval").glob("*.yaml"):
      text = path.read_text().replace("DATA", str(HERE / "lm_eval"))
      (pathlib.Path(where) / path.name).write_text(text)
    manager = lm_eval.tasks.TaskManager(include_path=where, include_defaults=False)
    found = lm_eval.simple_evaluate(
      model="hf", model_args={"pretrained": folder, "dtype": "float32", "device": "cpu"},
      tasks=["golden_choice", "golden_text", "golden_continue"], task_manager=manager,
      batch_size=1, log_samples=True, bootstrap_iters=0,
    )  # fmt: skip
  versions = {m.__name__: m.__version__ for m in (torch, transformers, lm_eval)}
  golden = {
    "versions": {**versions, "python": platform.python_version()},
    "results": {
      task: {k: v for k, v in values.items() if isinstance(v, float)}
      for task, values in found["results"].items()
    },
    "responses": {
      task: [sample["resps"] for sample in sorted(samples, key=lambda s: s["doc_id"])]
      for task, samples in found["samples"].items()
    },
  }
  (HERE / "lm_eval_scores.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
  main(sys.argv[1])
