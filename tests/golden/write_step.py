"""Writes step.json: products of fixed operands (recipe/golden_products_test.py) and one step of the
small model of step/invariance_test.py, under every recipe.

command: PYTHONPATH=.:tests:tests/recipe:tests/step python tests/golden/write_step.py
[--recipe NAME] [--only PART]; read the numbers before committing them. A change of these numbers
belongs under "Numerics" in CHANGELOG.md.
"""

import argparse
import json
import os
import platform
import subprocess

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import golden_products_test  # noqa: E402
import invariance_test as small  # noqa: E402
import jax  # noqa: E402

from fp8jax.recipe import library  # noqa: E402

PATH = golden_products_test.PATH
PARTS = {"products": golden_products_test.products, "steps": small.summary}


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--recipe", help="only this one; the others stay as they are")
  parser.add_argument("--only", choices=PARTS, help="this part; the other stays as it is")
  wanted = parser.parse_args()
  golden = json.loads(PATH.read_text()) if PATH.exists() else {}
  commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
  header = {
    "script": "tests/golden/write_step.py",
    "commit": commit.strip(),
    "jax": jax.__version__,
    "machine": platform.machine(),
  }
  for part in [wanted.only] if wanted.only else PARTS:
    found = golden.get(part, {}).get("recipes", {})
    for recipe in [wanted.recipe] if wanted.recipe else library.RECIPES:
      found[recipe] = PARTS[part](recipe)
      print(part, recipe, flush=True)
    if wanted.recipe:  # the header is of the others
      header = golden[part]["header"]
    golden[part] = {"header": header, "recipes": {r: found[r] for r in library.RECIPES}}
  PATH.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
  main()
