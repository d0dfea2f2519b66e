"""What a run does to the folders around it: the lock of its workdir, the compilation cache."""

import subprocess
import sys

import jax
import pytest

from fp8jax.errors import UserError
from fp8jax.run import compilation_cache, workdir


def test_a_workdir_is_one_runs_alone_until_that_ends(tmp_path):
  code = "import sys; from fp8jax.run import workdir\nwith workdir.locked(sys.argv[1]):\n"
  code += "  print('in', flush=True); sys.stdin.read()"
  other = subprocess.Popen(
    [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  )
  assert other.stdout.readline() == "in\n"
  with pytest.raises(UserError, match=f"in use by another run .process {other.pid} on "):
    with workdir.locked(str(tmp_path)):
      pass
  other.kill()  # kill -9 releases it
  other.wait()
  with workdir.locked(str(tmp_path)):
    pass
  with workdir.locked(str(tmp_path)):  # released on leaving, too
    pass


def test_a_file_is_no_workdir(tmp_path):
  (tmp_path / "file").write_text("")
  for path in ("file", "file/run"):
    with pytest.raises(UserError, match="cannot be a folder"), workdir.locked(str(tmp_path / path)):
      pass


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
  """As `launch.py | head -1`: what follows is still done, and stderr says what happened."""
  code = (
    "import sys, time; from fp8jax.console import console; out = console()\n"
    "out.print('first')\n"
    "for i in range(20): time.sleep(0.02); out.print('x' * 10000)\n"
    "open(sys.argv[1], 'w').write('done')"
  )
  done = subprocess.run(
    f'"{sys.executable}" -c "{code}" {tmp_path}/after | head -1; exit "${{PIPESTATUS[0]}}"',
    shell=True, executable="/bin/bash", capture_output=True, text=True,
  )  # fmt: skip
  assert (done.stdout, done.returncode) == ("first\n", 0), done
  assert (tmp_path / "after").read_text() == "done"
  assert done.stderr.splitlines() == ["nobody reads the output any more; the run goes on"]


@pytest.fixture
def no_cache():
  """As in a process whose user has chosen no folder."""
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  yield
  jax.config.update("jax_compilation_cache_dir", before)


def test_compiled_programs_are_cached_by_default(tmp_path, no_cache):
  assert compilation_cache.enable(str(tmp_path / "cache")) is None
  folder = jax.config.jax_compilation_cache_dir
  assert folder.startswith(str(tmp_path / "cache"))
  # A choice that has been made stays.
  assert compilation_cache.enable(str(tmp_path / "other")) is None
  assert jax.config.jax_compilation_cache_dir == folder


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path, no_cache):
  (tmp_path / "file").write_text("")
  note = compilation_cache.enable(str(tmp_path / "file"))
  assert "cannot be written" in note and "JAX_COMPILATION_CACHE_DIR" in note
  assert jax.config.jax_compilation_cache_dir is None
