"""Writes step.json: products of fixed operands and masters (recipe/golden_products_test.py), one
step of the small model of step/invariance_test.py, and attention (ops/quantized_attention_test.py).

command: PYTHONPATH=.:tests:tests/recipe:tests/step:tests/ops python tests/golden/write_step.py
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
import quantized_attention_test as attention  # noqa: E402

from fp8jax.recipe import library  # noqa: E402

PATH = golden_products_test.PATH
# The rows of a part, and what makes one.
PARTS = {
  "products": (golden_products_test.NAMES, golden_products_test.products),
  "steps": ((*library.RECIPES, small.UNIT), small.summary),
  "attention": (attention.GOLDEN, attention.summary),
  "masters": (golden_products_test.MASTERS, golden_products_test.master),
}


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
    found, (names, make) = golden.get(part, {}).get("recipes", {}), PARTS[part]
    for recipe in [name for name in names if wanted.recipe in (None, name)]:
      found[recipe] = make(recipe)
      print(part, recipe, flush=True)
    if wanted.recipe and part in golden:  # the header is of the others
      header = golden[part]["header"]
    golden[part] = {"header": header, "recipes": {r: found[r] for r in names if r in found}}
  PATH.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
  main()
