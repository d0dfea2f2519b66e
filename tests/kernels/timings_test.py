"""The benchmarks' file of results: a second call goes on where the first one stopped."""

import json
import subprocess

import pytest

from fp8jax.kernels.gemm import tile_config
from fp8jax.run import metrics_writer, provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch):
  """A repository of a package and a benchmark, all committed, that provenance takes for its own."""
  for name in ("fp8jax/run/metrics_writer.py", "configs/base.py", "experiments/bench/timing.py",
               "experiments/bench/step/run.py"):  # fmt: skip
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(f"{name!r}\n")
  commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]
  for command in (["init", "-q"], ["add", "."], commit):
    subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
  monkeypatch.setattr(metrics_writer, "__file__", str(tmp_path / "fp8jax" / "writers.py"))
  return tmp_path


def test_a_benchmark_resumes_until_its_sources_change(checkout, monkeypatch, repository):
  monkeypatch.syspath_prepend(str(repository / "experiments" / "bench"))
  import timing

  folder, measured = checkout / "experiments" / "bench" / "step", []

  def run():
    bench = timing.Bench.open(folder, is_dry=False)
    return bench.line("a", lambda: measured.append(1) or {"ms": len(measured)})["ms"]

  assert run() == 1
  # What the first run wrote is no change of the program, nor are tiles.
  tuned = checkout / "fp8jax" / "kernels" / "tuned"
  tuned.mkdir(parents=True)
  (tuned / "a.json").write_text("{}")
  assert run() == 1
  assert [p.name for p in (folder / "results").iterdir()] == [f"{tile_config.device_name()}.json"]
  (checkout / "fp8jax" / "kernels" / "new.py").write_text("")  # not even known to git
  assert run() == 2 and run() == 2
  path = folder / "results" / f"{tile_config.device_name()}.json"
  kept = json.loads(path.read_text())
  path.write_text(json.dumps(kept | {"provenance": kept["provenance"] | {"commit": "other"}}))
  assert run() == 3


@pytest.mark.parametrize(
  "text, version",
  [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 24 22:22:53 UTC 2024\n"
     "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1)\n", "535.161.08"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
     "570.86.15"),
    (None, None),
  ],
)  # fmt: skip
def test_provenance_names_the_driver(tmp_path, text, version):
  path = tmp_path / "version"
  if text:
    path.write_text(text)
  assert provenance._driver(str(path)) == version
  assert "driver" in provenance.provenance({}, "", 0)
