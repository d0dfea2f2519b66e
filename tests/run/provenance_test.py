"""Of which commit a number is."""

import pathlib
import shutil
import subprocess

import pytest
import run_files

from fp8jax.run import provenance


@pytest.mark.parametrize(
  ("written", "is_dirty"),
  [
    ("README.md", False), ("experiments/a/results/b.json", False), ("experiments/a.svg", False),
    ("fp8jax/run/provenance.py", True), ("experiments/2025_x/arms.py", True),
    ("configs/rules.json", True), ("requirements.txt", True), ("experiments/a/tasks/b.json", True),
  ],
)  # fmt: skip
@pytest.mark.parametrize("is_tracked", [False, True])
def test_results_do_not_make_the_sources_dirty(tmp_path, written, is_dirty, is_tracked):
  """Tables that are made one after the other are all of the commit."""

  def git(*words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
      ["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()

  def write(name, text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

  ours = tmp_path / "fp8jax/run/provenance.py"
  ours.parent.mkdir(parents=True)
  shutil.copy(pathlib.Path(provenance.__file__), ours)
  write(".gitignore", "__pycache__/\n")  # of the module, which is imported from here
  if is_tracked and written != "fp8jax/run/provenance.py":
    write(written, "before\n")
  git("init", "-q")
  git("add", ".")
  git("commit", "-qm", "first")
  module = run_files.script(ours)
  assert module.sources() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
  write(written, ours.read_text() + "# after\n")
  assert module.sources()["dirty"] == is_dirty
