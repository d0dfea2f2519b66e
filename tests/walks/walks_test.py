"""The cost of an extension, as patches: each applies to this checkout and touches few source files.

A patch is what a newcomer would write: source, its tests, and the tables that scripts generate. Its
tests run in a copy of the checkout (slow).
"""

import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Patch -> (most hand-written source files, its tests).
WALKS = {
  "format": (2, ["tests/quantization", "tests/recipe", "tests/ops/linear_test.py",
                 "tests/kernels/scaled_matmul_test.py", "tests/guide_test.py",
                 "-k", "e3m3 or readme or table"]),
  "optimizer": (1, ["tests/optim/signum_test.py"]),
  "key": (1, ["tests/optim/decay_norms_test.py", "tests/guide_test.py",
              "tests/config/registry_test.py"]),
}  # fmt: skip


def _touched(name: str) -> list[str]:
  return re.findall(r"^diff --git a/(\S+) b/", (HERE / f"{name}.patch").read_text(), re.M)


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_applies_and_touches_few_source_files(name):
  patch = str(HERE / f"{name}.patch")
  done = subprocess.run(
    ["git", "apply", "--check", patch], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, f"{done.stderr}\nmake the patch again for this tree"
  source = [f for f in _touched(name) if f.startswith(("fp8jax/", "configs/", "launch.py"))]
  assert 0 < len(source) <= WALKS[name][0], source


def test_every_patch_is_a_walk():
  assert {path.stem for path in HERE.glob("*.patch")} == set(WALKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_tests_of_a_walk_pass_in_a_copy(name, tmp_path):
  listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
  for file in listed.stdout.decode().split("\0"):
    if file and (ROOT / file).is_file():
      (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
      (tmp_path / file).write_bytes((ROOT / file).read_bytes())
  patch = str(HERE / f"{name}.patch")
  subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
  command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *WALKS[name][1]]
  done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout[-3000:]
