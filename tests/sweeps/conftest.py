import pytest
import sweep_runs


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A root with a stand-in for launch.py, a configuration, and a place for the sweep."""
  (tmp_path / "launch.py").write_text(sweep_runs.LAUNCH)
  (tmp_path / "c.py").write_text(sweep_runs.CONFIG)
  monkeypatch.chdir(tmp_path)
  return tmp_path
