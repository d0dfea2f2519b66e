"""A loss that is not finite: the run stops, names step and site, and can be diagnosed."""

import dataclasses
import json
import pathlib
import shutil
import string
import types
from unittest import mock

import debug_runs
import harness
import jax
import numpy as np
import pytest

from fp8jax.export import write
from fp8jax.models import presets
from fp8jax.models.hf import weights as hf_weights

BAD_STEP = 3


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
  """Changes of a run whose loss is NaN at step BAD_STEP alone, and that step's batch.

  The embedding of one letter is NaN, and one document has that letter.
  """
  folder = tmp_path_factory.mktemp("poisoned")
  rng = np.random.default_rng(0)
  documents = [x + "".join(map(str, rng.integers(0, 10, 80))) for x in string.ascii_letters]
  changes = debug_runs.write_corpus(folder / "corpus.jsonl", documents) | {
    "init.hf": str(folder / "hf"), "model.preset": "hf", "data.tokenizer": "bytes", "steps": 5,
    "checkpoint.keep": 5, "log.every": 1, "log.tensorboard": False, "eval.tokens": 0,
    "precision.rules": (
      ("layers/.*/mlp/up", "block_128"), ("layers/.*/attn/q", "w4a16"), (".*", "bf16"),
    ),
  }  # fmt: skip
  sizes = dict(tie_embeddings=False, hidden_size=128, intermediate_size=128, num_layers=1)
  cfg = dataclasses.replace(presets.DEBUG, **sizes)
  weights = jax.device_get(harness.init_params(cfg))
  write.save(str(folder / "hf"), write.model(weights, cfg, "float32"))
  seen = [
    set(batch["tokens_BL"].ravel()) for batch in debug_runs.take(debug_runs.config(**changes), 5)
  ]
  letters = seen[BAD_STEP - 1] & set(string.ascii_letters.encode())
  letter = min(letters.difference(*(s for i, s in enumerate(seen) if i != BAD_STEP - 1)))
  weights["embed"] = weights["embed"].copy()  # what JAX gives is read-only
  weights["embed"][letter] = np.nan
  write.save(str(folder / "hf"), write.model(weights, cfg, "float32"))
  batch = debug_runs.take(debug_runs.config(**changes), BAD_STEP)[-1]
  assert letter in batch["tokens_BL"]
  return types.SimpleNamespace(changes=changes, batch=batch)


@pytest.fixture(scope="module")
def stopped(poisoned, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("stopped")
  with mock.patch.object(hf_weights, "_check_finite"):
    c = debug_runs.config(**poisoned.changes)
    code, _, stderr = debug_runs.run_job("train", c, workdir)
  assert code == 3, stderr
  return types.SimpleNamespace(workdir=workdir, stderr=stderr)


SITE = "layers/0/attn/q: its input is not finite (forward)"


def test_a_non_finite_loss_stops_the_run_and_names_step_and_site(stopped, poisoned):
  assert f"error: step {BAD_STEP}: loss nan" in stopped.stderr and SITE in stopped.stderr
  folder = stopped.workdir / "nonfinite"
  assert str(folder) in stopped.stderr and "--job=diagnose" in stopped.stderr
  with np.load(folder / "batch_0.npz") as saved:
    assert saved.keys() == poisoned.batch.keys()
    for key in saved:
      np.testing.assert_array_equal(saved[key], poisoned.batch[key])
  report = debug_runs.read_json(folder / "report.json")
  assert (report["step"], report["first_bad_site"]) == (BAD_STEP, SITE)
  assert [r["step"] for r in debug_runs.rows(stopped.workdir) if "loss" in r] == [1, 2]
  assert not (stopped.workdir / "summary.json").exists()


@pytest.mark.slow
def test_skipping_counts_and_equals_going_on_after_a_stop(
  run_job, stopped, poisoned, tmp_path, monkeypatch
):
  monkeypatch.setattr(hf_weights, "_check_finite", lambda *_: None)
  c = debug_runs.config(**poisoned.changes, **{"optim.on_nonfinite": "skip"})
  code, stdout, stderr = run_job("train", c, tmp_path)
  assert code == 0, stderr
  said = f"step {BAD_STEP}: loss, gradient or a GEMM's operand not finite; update skipped"
  assert said in stdout
  assert "updates skipped for non-finite values: 1" in stdout
  code, stdout, stderr = run_job("train", c, stopped.workdir)
  assert code == 0, stderr
  assert f"step {BAD_STEP} met a non-finite value; going on with the batch after it" in stdout
  for workdir in (tmp_path, stopped.workdir):
    assert debug_runs.read_json(workdir / "summary.json")["skipped_updates"] == 1
  a, b = (
    [r["loss"] for r in debug_runs.rows(w) if "loss" in r] for w in (tmp_path, stopped.workdir)
  )
  assert a.pop(BAD_STEP - 1) == "nan"  # strict JSON has no number for it
  assert a == b and np.all(np.isfinite(b))
  spec = debug_runs.spec(debug_runs.config(**poisoned.changes))
  one, two, before = (debug_runs.saved_params(w, s, spec) for w, s in (
    (tmp_path, 5), (stopped.workdir, 5), (stopped.workdir, BAD_STEP)))  # fmt: skip
  for name in one:
    np.testing.assert_array_equal(one[name], two[name], err_msg=name)
  assert np.any(one["norm"] != before["norm"])


def test_diagnose_reproduces_it_also_when_the_run_has_gone_on(run_job, stopped, poisoned):
  c = debug_runs.config(**poisoned.changes)
  with open(stopped.workdir / "metrics.jsonl", "a") as f:
    for step in range(1, 9):  # an amax doubles from snapshot to snapshot
      snapshot = {"layers/0/mlp/up": {t: {"amax": 2.0**step} for t in "xwg"}}
      f.write(json.dumps({"step": step, "numerics": snapshot}) + "\n")
  code, stdout, stderr = run_job("diagnose", c, stopped.workdir)
  assert code == 0, stderr
  result = json.loads(stdout)
  report = debug_runs.read_json(stopped.workdir / "nonfinite" / "report.json")
  assert (result["step"], result["first_bad_site"]) == (BAD_STEP, SITE)
  assert result["amax_x_w_g"] == report["amax_x_w_g"]
  rows = result["recommended"]
  assert [(r["site"], r["tensor"], r["margin, delayed"], r["margin, static"]) for r in rows] == [
    ("mlp/up", t, 1, 7) for t in "xwg"
  ]
  assert result["recommended_rules"] == ""  # no exponents were counted


def test_export_dtype_auto_is_that_of_the_folder_the_run_began_with(
  stopped, poisoned, run_job, tmp_path, monkeypatch
):
  monkeypatch.setattr(hf_weights, "_check_finite", lambda *_: None)  # the weights have a NaN
  (tmp_path / "digits.txt").write_text("0123456789")
  text = {"export.gate_text": str(tmp_path / "digits.txt"), "export.gate_tokens": 8}
  changes = poisoned.changes | {"weights.step": BAD_STEP} | text
  code, stdout, _ = run_job("export", debug_runs.config(**changes), stopped.workdir)
  assert code == 0 and json.loads(stdout)["dtype"] == "float32"
  # That folder is an export itself, and is not replaced; also where init.hf no longer names it.
  source = pathlib.Path(poisoned.changes["init.hf"])
  before = {p: p.read_bytes() for p in source.iterdir()}
  shutil.copytree(source, tmp_path / "copy")
  for init, what in (
    (source, "the folder of init.hf"),
    (tmp_path / "copy", "the folder that training started from"),
  ):
    c = debug_runs.config(**changes | {"init.hf": str(init)})
    code, _, stderr = run_job("export", c, stopped.workdir, out=str(source))
    assert code == 1 and what in stderr, stderr
  assert {p: p.read_bytes() for p in source.iterdir()} == before
