"""What a run does to the folders around it: the lock of its workdir, the compilation cache."""

import subprocess
import sys

import jax
import pytest

from fp8jax import compilation_cache, workdir
from fp8jax.errors import UserError


def test_a_workdir_is_one_runs_alone_until_that_ends(tmp_path):
  code = "import sys; from fp8jax import workdir\nwith workdir.locked(sys.argv[1]):\n"
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
