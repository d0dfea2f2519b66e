"""Compares the programs that XLA compiles for a CPU here with those of another commit.

  python tests/golden/optimized_hlo.py COMMIT [RECIPE ...]

Of configs/debug.py in each recipe that both commits have, optimized HLO without places in the
source. Exit 1, with the recipes, where one differs. tests/guards.py holds the StableHLO of every
commit; what XLA makes of it depends on the machine, so that both are compiled here.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Runs in either tree: {recipe: digest}.
_DIGESTS = """
import hashlib, json, re, sys
import jax
from configs import debug
from fp8jax.compiled import aot
from fp8jax.config import resolve
from fp8jax.kernels.choose import Device
from fp8jax.recipe import library

def digest(recipe):
  spec = resolve.resolve(debug.get_config(recipe), 1, Device("cpu"))
  text = aot.lower(spec, jax.devices("cpu")[:1]).compile().as_text()
  text = re.sub(r", metadata={[^}]*}", "", text)
  # Places in the source.
  text = re.sub(r"(?m)^(?:File|Function|Stack)[A-Z]\\w+\\n(?:\\d+ .*\\n)*", "", text)
  return hashlib.sha256(text.encode()).hexdigest()[:16]

wanted = sys.argv[1:] or list(library.RECIPES)
print(json.dumps({r: digest(r) for r in wanted if r in library.RECIPES}))
"""


def digests(tree: pathlib.Path, recipes: list[str]) -> dict[str, str]:
  """{recipe: digest of its program}, by the library that lies in `tree`."""
  variables = {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, "-c", _DIGESTS, *recipes], cwd=tree, env=os.environ | variables, check=True,
    stdout=subprocess.PIPE, text=True,
  )  # fmt: skip
  return json.loads(done.stdout.splitlines()[-1])


def main(commit: str, *recipes: str) -> int:
  with tempfile.TemporaryDirectory() as folder:
    archive = subprocess.run(
      ["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    before = digests(pathlib.Path(folder), list(recipes))
  now = digests(ROOT, list(before))
  moved = [name for name, digest in before.items() if now.get(name) != digest]
  for name, digest in before.items():
    print(f"{name:24} {digest} {'differs' if name in moved else 'equal'}")
  print(f"{len(before) - len(moved)} of {len(before)} programs are those of {commit}")
  return bool(moved)


if __name__ == "__main__":
  if len(sys.argv) < 2:
    sys.exit(__doc__)
  sys.exit(main(*sys.argv[1:]))
