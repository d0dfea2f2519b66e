"""Ctrl-C while a command still imports: one line, exit code 130."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest


def _maps(pid: int) -> str:
  try:
    return pathlib.Path(f"/proc/{pid}/maps").read_text()
  except OSError:  # it has ended
    return ""


def _child(pid: int) -> int:
  return int((pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or [0])[0])


@pytest.mark.parametrize("library", ["/numpy/", "libjax_common"])
@pytest.mark.parametrize("who", ["launch", "recipe", "recipe's child"])
def test_ctrl_c_during_imports_ends_in_one_line(tmp_path, repository, who, library):
  """It reaches the whole process group, as from a terminal, once a library is mapped."""
  script = "launch.py"
  if who != "launch":
    folder = tmp_path / "experiments" / "2025_infir2"
    folder.mkdir(parents=True)
    script = folder / "recipe.py"
    script.write_text((repository / "experiments/2025_infir2/recipe.py").read_text())
    for name in ("launch.py", "fp8jax"):
      (tmp_path / name).symlink_to(repository / name)
    (tmp_path / "assets" / "reasoning_mini").mkdir(parents=True)
    (tmp_path / "assets" / "reasoning_mini" / "counts.json").write_text("{}")
  process = subprocess.Popen(
    [sys.executable, script, "--config=none.py"][: 2 + (who == "launch")],
    cwd=repository if who == "launch" else tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
  )  # fmt: skip
  deadline = time.time() + 120
  while process.poll() is None and time.time() < deadline:
    if library in _maps(_child(process.pid) if who == "recipe's child" else process.pid):
      break
    time.sleep(0.01)
  os.killpg(process.pid, signal.SIGINT)
  output = process.communicate(timeout=60)[0]
  lines = [line for line in output.splitlines() if not line.startswith("$ python launch.py")]
  assert process.returncode == 130, output
  assert len(lines) == 1 and lines[0].startswith("interrupted"), output
