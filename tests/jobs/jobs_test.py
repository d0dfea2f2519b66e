"""Training, evaluation and export on one short run: printed lines, files, refusals."""

import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import types

import debug_runs
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tensorboardX.proto import event_pb2

from configs import base
from fp8jax import params as params_lib
from fp8jax.config import identity
from fp8jax.data import loader
from fp8jax.errors import UserError
from fp8jax.export import build
from fp8jax.export import folder as export_folder
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import weights as hf_weights
from fp8jax.run import calibration, checkpoint

XLA_FLAGS = "--xla_force_host_platform_device_count=1"  # of the fixture launch
PRECISIONS = {"block_128", "bf16"}
LAUNCHED = {"precision.verify_fp8_gemms": True}  # of the run that launch.py makes


@pytest.fixture(scope="module")
def trained(launch, tmp_path_factory):
  """A finished run: workdir, stdout."""
  workdir = tmp_path_factory.mktemp("trained")
  done = launch(workdir, "--config=configs/debug.py", *debug_runs.FLAGS)
  return types.SimpleNamespace(workdir=workdir, stdout=done.stdout)


# --- train ---------------------------------------------------------------------------------------


def test_train_prints_lines_and_a_table(trained):
  text = trained.stdout
  assert all(c == "\n" or c.isprintable() for c in text)
  lines = text.splitlines()
  for step in (2, 4):
    assert any(line.startswith(f"step {step}/{debug_runs.STEPS}  loss ") for line in lines)
  assert not any(line.startswith("step 3/") for line in lines)  # log.every=2
  last = debug_runs.read_json(trained.workdir / "summary.json")["evaluations"][
    str(debug_runs.STEPS)
  ]["main"]
  table = lines[lines.index("held-out loss in nats per token") :]
  for precision in PRECISIONS:
    (row,) = [line for line in table if f"main, {precision} forward" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[3] == f"{last[precision]['loss']:.4f}"
    assert cells[5] == f"{last[precision]['perplexity']:.3f}"
  assert lines[-1] == f"written to {trained.workdir}"


def test_train_prints_and_stores_the_difference_from_base(trained):
  stored = debug_runs.read_json(trained.workdir / "config.json")
  changes = debug_runs.CHANGES | {"mesh.fsdp": 1}  # of configs/debug.py
  assert stored["changed"] == changes
  assert stored["resolved"] == identity.flatten(base.get_config()) | changes
  text = trained.stdout[: trained.stdout.index("model llama")]
  printed = re.findall(r"│ (\S+) +│ +(\S+) │ +(\S+) │", text)
  before = identity.flatten(base.get_config())
  assert printed == [(k, str(before[k]), str(changes[k])) for k in sorted(changes)]


def test_train_leaves_metrics_summary_sites_and_checkpoint(trained):
  rows = debug_runs.rows(trained.workdir)
  steps = {row["step"]: row for row in rows if "loss" in row}
  held = {row["step"]: row for row in rows if "heldout/main/bf16/loss" in row}
  assert list(steps) == [1, 2, 3, 4] and list(held) == [0, 4]
  for row in steps.values():
    assert {"grad_norm", "update_norm", "param_norm", "learning_rate"} <= row.keys()
    assert all(math.isfinite(v) for v in row.values())
  summary = debug_runs.read_json(trained.workdir / "summary.json")
  assert (summary["step"], summary["tokens"], summary["skipped_updates"]) == (4, 4 * 2 * 128, 0)
  assert summary["train_loss"] == steps[4]["loss"]
  assert summary["objective"] == held[4]["heldout/main/bf16/loss"]
  for step, by_source in summary["evaluations"].items():
    assert by_source["main"].keys() == PRECISIONS
    for precision, values in by_source["main"].items():
      assert values["loss"] == held[int(step)][f"heldout/main/{precision}/loss"]
      assert values["perplexity"] == math.exp(values["loss"])
  assert held[4]["heldout/main/bf16/loss"] < held[0]["heldout/main/bf16/loss"] - 0.3
  recipes = {
    row["site"]: row["recipe"] for row in debug_runs.read_json(trained.workdir / "sites.json")
  }
  assert recipes.pop("head") == "bf16"
  assert len(recipes) == 7 and set(recipes.values()) == {"block_128"}
  saved = checkpoint.Checkpoints(str(trained.workdir))
  assert saved.steps() == [debug_runs.STEPS]
  saved.close()


def test_train_leaves_tensorboard_events_of_the_same_values(trained):
  (path,) = (trained.workdir / "tensorboard").iterdir()
  data, found, start = path.read_bytes(), {}, 0
  while start < len(data):  # u64 length, u32 checksum, event, u32 checksum
    (size,) = struct.unpack_from("<Q", data, start)
    event = event_pb2.Event.FromString(data[start + 12 : start + 12 + size])
    found |= {(event.step, v.tag): v.simple_value for v in event.summary.value}
    start += 16 + size
  rows = debug_runs.rows(trained.workdir)
  want = {(r["step"], k): np.float32(v) for r in rows for k, v in r.items() if k != "step"}
  assert found == want


def test_train_leaves_provenance(trained, repository):
  made = debug_runs.read_json(trained.workdir / "provenance.json")
  assert made["shares"] == made["processes"] == 1
  if (repository / ".git").exists():
    git = subprocess.run(
      ["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True
    )
    assert made["commit"] == git.stdout.strip() and made["dirty"] in (True, False)
  else:
    assert made["commit"] is made["dirty"] is None
  assert made["config"] == debug_runs.read_json(trained.workdir / "config.json")["resolved"]
  assert made["versions"]["jax"] == jax.__version__ and "optax" in made["versions"]
  assert (made["devices"], made["processes"]) == ("1 x cpu (cpu)", 1)
  assert (made["xla_flags"], made["seed"]) == (XLA_FLAGS, 0)
  assert made["data_fingerprint"] == loader.fingerprint(debug_runs.spec(debug_runs.config()).data)
  assert f"data {made['data_fingerprint']}" in trained.stdout
  assert "--config=configs/debug.py" in made["command"]


def test_a_finished_run_is_left_in_its_last_evaluation_and_completed(
  trained, run_job, tmp_path, monkeypatch
):
  workdir = tmp_path / "again"
  shutil.copytree(trained.workdir, workdir)
  before = [debug_runs.read_json(workdir / f"{name}.json") for name in ("summary", "provenance")]
  code, stdout, _ = run_job("train", debug_runs.config(**LAUNCHED), workdir)
  assert code == 0 and stdout == f"{workdir} is finished: step {debug_runs.STEPS}\n"
  assert debug_runs.read_json(workdir / "provenance.json") == before[1]
  (workdir / "summary.json").unlink()
  with monkeypatch.context() as patch:

    def heldout(*args):
      os.kill(os.getpid(), signal.SIGTERM)
      return made(*args)

    made = loader.heldout_batches
    patch.setattr(loader, "heldout_batches", heldout)
    default = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the run does not listen"))
    try:
      code, stdout, _ = run_job("train", debug_runs.config(**LAUNCHED), workdir)
    finally:
      signal.signal(signal.SIGTERM, default)
  assert code == 75 and stdout.splitlines()[-1].startswith(
    f"interrupted: saved step {debug_runs.STEPS};"
  )
  assert not (workdir / "summary.json").exists()
  c = debug_runs.config(**LAUNCHED, **{"log.every": 1})
  code, stdout, _ = run_job("train", c, workdir)
  times = {"seconds": None, "goodput": None}  # of all processes
  assert code == 0
  assert debug_runs.read_json(workdir / "summary.json") | times == before[0] | times
  assert f"last train loss {before[0]['train_loss']:.4f}" in stdout
  # Each leg of the run is remembered, with its configuration where that changed.
  made = debug_runs.read_json(workdir / "provenance.json")
  first, second = made["earlier"]
  assert first == {k: v for k, v in before[1].items() if k not in ("config", "earlier")}
  assert (first["from_step"], second["from_step"], made["from_step"]) == (
    0,
    debug_runs.STEPS,
    debug_runs.STEPS,
  )
  assert second["config"] == before[1]["config"] and made["config"] == identity.flatten(c)


def test_restart_with_other_values_names_them_and_refuses(trained, run_job):
  changes = LAUNCHED | {"optim.peak_lr": 5e-4, "log.every": 3}
  code, stdout, stderr = run_job("train", debug_runs.config(**changes), trained.workdir)
  output = stdout + stderr
  assert code == 1
  assert "optim.peak_lr was 0.001 at step 4 and is 0.0005 now" in output
  assert "log.every: 2 -> 3" in output and "log.every was" not in output


# --- evaluate and export -------------------------------------------------------------------------


def test_evaluate_prints_json_alone_and_repeats_the_runs_numbers(run_job, trained):
  code, stdout, stderr = run_job("evaluate", debug_runs.config(), trained.workdir)
  assert code == 0, stderr
  result = json.loads(stdout)
  assert (result["workdir"], result["step"]) == (str(trained.workdir), debug_runs.STEPS)
  idle = "mesh.data, mesh.fsdp and mesh.tensor are 1, the other 7 are idle"
  assert result["device"] == f"1 of 8 × CPU: FP8 is emulated, exact and slow; {idle}"
  summary = debug_runs.read_json(trained.workdir / "summary.json")
  assert result["heldout"] == summary["evaluations"][str(debug_runs.STEPS)]
  assert result["heldout"]["main"].keys() == PRECISIONS
  assert result["documents_passed_over"] == {"main": {}}


def test_export_in_float32_is_the_checkpoint_and_evaluates_the_same(trained, run_job):
  code, stdout, _ = run_job(
    "export", debug_runs.config(**{"export.dtype": "float32"}), trained.workdir
  )
  folder = trained.workdir / "hf"
  assert code == 0
  result = json.loads(stdout)
  gate = result.pop("gate")
  assert result == {
    "folder": str(folder), "step": debug_runs.STEPS, "dtype": "float32", "format": "hf-bf16",
    "tensor_parallel": [1, 2, 4],
  }  # fmt: skip
  floor = gate.pop("noise_floor")  # of the checkpoint against itself one ulp away
  assert 0 <= floor["kl"] < 1e-6 and floor["top1"] > 0.99
  assert gate == {
    "tokens": 1278,
    "fp8jax": dict.fromkeys(("kl", "low", "high", "dlogp"), 0.0) | {"top1": 1.0},
  }
  assert {p.name for p in folder.iterdir()} == {
    "config.json", "model.safetensors", "README.md", export_folder.MANIFEST
  }  # fmt: skip
  weights, dtype = hf_weights.load_params(str(folder), hf_config.read_config(str(folder)))
  assert dtype == "float32"
  want = debug_runs.saved_params(
    trained.workdir, debug_runs.STEPS, debug_runs.spec(debug_runs.config())
  )
  got = params_lib.flatten(weights)
  assert got.keys() == want.keys()
  for name, value in got.items():
    np.testing.assert_array_equal(value, want[name], err_msg=name)
  elsewhere = trained.workdir / "elsewhere"  # the run's own folder is not asked for anything
  c = debug_runs.config(**{"weights.hf": str(folder), "data.tokenizer": "bytes"})
  code, stdout, stderr = run_job("evaluate", c, elsewhere)
  assert code == 0, stderr
  result = json.loads(stdout)
  assert result["hf"] == str(folder) and not elsewhere.exists()
  assert (
    result["heldout"]
    == debug_runs.read_json(trained.workdir / "summary.json")["evaluations"][str(debug_runs.STEPS)]
  )


def test_export_writes_into_no_folder_of_the_run(trained, run_job, tmp_path):
  before = {p: p.read_bytes() for p in trained.workdir.glob("*.json")}
  link = tmp_path / "link"
  link.symlink_to(trained.workdir)
  source = tmp_path / "source"
  source.mkdir()
  for path, changes, what in (
    (trained.workdir, {}, "the run's own folder"),
    (link, {}, "the run's own folder"),
    (trained.workdir / "checkpoints", {}, "not written by --job=export"),
  ):
    c = debug_runs.config(**changes)
    code, stdout, stderr = run_job("export", c, trained.workdir, out=str(path))
    assert (code, stdout) == (1, "") and what in stderr, stderr
  with pytest.raises(UserError, match="is init.hf"):
    export_folder.check_other(str(source), {f"{source}/../source": "init.hf"})
  assert {p: p.read_bytes() for p in trained.workdir.glob("*.json")} == before


def test_export_dtype_auto_is_bfloat16_for_weights_that_were_drawn(trained, run_job, tmp_path):
  code, stdout, _ = run_job("export", debug_runs.config(), trained.workdir, out=str(tmp_path))
  assert code == 0 and json.loads(stdout)["dtype"] == "bfloat16"
  got = safetensors.numpy.load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
  want = debug_runs.saved_params(
    trained.workdir, debug_runs.STEPS, debug_runs.spec(debug_runs.config())
  )["embed"]
  np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))


def test_export_merges_scales_per_channel(trained, run_job, tmp_path):
  """Powers of two moved from up to down, and no further ones where the same text is measured."""
  smooth = {"precision.smooth_swiglu": "channel", "export.fold_smooth_batches": 2}
  c = debug_runs.config(**smooth, **{"export.dtype": "float32"})
  assert run_job("export", c, trained.workdir, out=str(tmp_path))[0] == 0
  spec = debug_runs.spec(debug_runs.config(**smooth), "export")
  merged, _ = hf_weights.load_params(str(tmp_path), spec.model)
  saved = debug_runs.saved_params(trained.workdir, debug_runs.STEPS, spec)
  got = {k: np.asarray(v) for k, v in params_lib.flatten(merged).items()}
  s_NF = saved["layers/mlp/up"][:, 0] / got["layers/mlp/up"][:, 0]
  assert np.all(np.frexp(s_NF)[0] == 0.5) and len(np.unique(s_NF)) > 1
  saved["layers/mlp/up"] = saved["layers/mlp/up"] / s_NF[:, None]
  saved["layers/mlp/down"] = saved["layers/mlp/down"] * s_NF[:, :, None]
  for name, value in got.items():
    np.testing.assert_array_equal(value, saved[name], err_msg=name)
  again = build.fold_smooth(spec, merged)  # nothing is left to divide by
  np.testing.assert_array_equal(again["layers"]["mlp"]["up"], got["layers/mlp/up"])


def test_evaluate_refuses_a_checkpoint_of_another_model(trained, run_job):
  code, stdout, stderr = run_job(
    "evaluate", debug_runs.config(**{"model.num_layers": 1}), trained.workdir
  )
  assert (code, stdout) == (1, "")
  assert "model.num_layers is 1 here and 2 in the checkpoint" in stderr


def test_evaluate_and_calibrate_count_what_they_pass_over(trained, run_job, tmp_path, monkeypatch):
  path = tmp_path / "corpus.jsonl"
  changes = debug_runs.write_corpus(path, [str(i) * 50 for i in range(40)]) | {
    "data.on_malformed": "skip"
  }
  path.write_text(path.read_text() + "{broken}\n" * 3)
  code, stdout, _ = run_job("evaluate", debug_runs.config(**changes), trained.workdir)
  assert code == 0 and json.loads(stdout)["documents_passed_over"] == {"main": {"malformed": 3}}

  def read_all(spec, params, placed, **known):
    return {"rows": [], "batches": len(list(placed)), **known}

  monkeypatch.setattr(calibration, "run", read_all)
  table = str(tmp_path / "table.json")  # to be written, so that no job but training asks for it
  changes |= {"precision.calibration": table}
  changes |= {"data.prefetch": 0, "data.shuffle_windows": 0}  # which read ahead, and count
  # 40 documents of 51 or 101 tokens, fewer than 16 batches of 2 x 129.
  changes["calibrate.batches"] = 16
  code, stdout, _ = run_job("calibrate", debug_runs.config(**changes), trained.workdir, out=table)
  assert code == 0 and 3 <= json.loads(stdout)["documents_passed_over"]["malformed"] <= 6


def test_evaluate_refuses_a_table_that_a_checkpoint_was_not_trained_with(
  trained, run_job, tmp_path
):
  (tmp_path / "table.json").write_text("{}")
  changed = debug_runs.config(**{"precision.calibration": str(tmp_path / "table.json")})
  code, stdout, stderr = run_job("evaluate", changed, trained.workdir)
  assert (code, stdout) == (1, "")
  assert "table.json' is not the table that the checkpoint of step 4" in stderr


@pytest.mark.parametrize("job", ["evaluate", "export"])
def test_jobs_without_a_checkpoint_say_so(job, run_job, tmp_path):
  for workdir, message in (
    (tmp_path / "missing", f"{tmp_path / 'missing'} does not exist; train first"),
    (tmp_path, f"{tmp_path / 'checkpoints'} holds no checkpoint; train first"),
  ):
    code, stdout, stderr = run_job(job, debug_runs.config(), workdir)
    assert (code, stdout) == (1, "")
    assert stderr.startswith(f"error: {message}")
  assert not (tmp_path / "missing").exists()


def test_a_missing_step_is_answered_with_those_there_are(trained, run_job):
  code, _, stderr = run_job("evaluate", debug_runs.config(**{"weights.step": 3}), trained.workdir)
  assert (code, stderr) == (1, "error: no checkpoint of step 3; there are [4]\n")


def test_a_job_reports_errors_without_a_traceback(run_job, tmp_path):
  code, stdout, stderr = run_job("diagnose", debug_runs.config(), tmp_path / "x")
  assert (code, stdout) == (1, "") and stderr.startswith("error: ") and "Traceback" not in stderr
  assert f"no run in {tmp_path / 'x'} stopped at a non-finite value" in stderr
