"""Writes step.json: one step of the small model of invariance_test.py under every recipe.

command: PYTHONPATH=.:tests python tests/golden/write_step.py [--recipe NAME]; read the numbers
before committing them. A change of these numbers belongs under "Numerics" in CHANGELOG.md.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import invariance_test as small  # noqa: E402
import jax  # noqa: E402

PATH = pathlib.Path(__file__).with_name("step.json")


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--recipe", help="only this one; the others stay as they are")
  wanted = parser.parse_args().recipe
  golden = json.loads(PATH.read_text()) if PATH.exists() else {"steps": {}}
  commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
  golden["header"] = {
    "script": "tests/golden/write_step.py",
    "commit": commit.strip(),
    "jax": jax.__version__,
    "machine": platform.machine(),
  }
  for recipe in [wanted] if wanted else ["bf16", *small.NARROW]:
    golden["steps"][recipe] = small.summary(recipe)
    print(recipe, golden["steps"][recipe]["loss"], flush=True)
  PATH.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
  main()
