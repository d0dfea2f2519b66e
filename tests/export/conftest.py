"""--job=export of a small folder, in this process."""

import types

import harness
import jax
import pytest

from configs import base, debug
from fp8jax.config import resolve
from fp8jax.jobs import dispatch, table
from fp8jax.kernels.choose import Device


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  return harness.folder_of_blocks(tmp_path_factory.mktemp("source"))


@pytest.fixture
def export(source, tmp_path, monkeypatch, capsys):
  """--job=export of the folder in this process: (exit code, stdout, stderr, target)."""
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  target = tmp_path / "target"

  def run(job="export", workdir=tmp_path / "run", out=target, **changes):
    c = debug.get_config()
    hf = {"model.preset": "hf", "init.hf": str(source), "weights.hf": str(source)}
    small = {
      "data.tokenizer": "bytes",
      "seq_len": 128,
      "eval.batch": 2,
      "global_batch": 2,
      "export.gate_tokens": 64,
    }
    c.update_from_flattened_dict(hf | small | changes)
    capsys.readouterr()
    options = {"out": str(out)} if job != "train" else {}
    code = dispatch.run(job, c, base.get_config(), "configs/debug.py", str(workdir), **options)
    out, err = capsys.readouterr()
    spec = None if code else resolve.resolve(c, 1, Device("cpu"), needs=table.JOBS["export"].needs)
    return types.SimpleNamespace(code=code, target=target, stdout=out, stderr=err, spec=spec)

  return run
