"""Every job of the launcher on one short run: what it prints, leaves behind and refuses."""

import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import signal
import string
import struct
import subprocess
import sys
import types

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tensorboardX.proto import event_pb2

from configs import base, debug
from fp8jax import params as params_lib
from fp8jax.config import identity, resolve
from fp8jax.data import loader, tokenize
from fp8jax.errors import UserError
from fp8jax.jobs import dispatch, export
from fp8jax.kernels.choose import Device
from fp8jax.models import presets, transformer
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import export_folder
from fp8jax.models.hf import weights as hf_weights
from fp8jax.run import calibration, checkpoint
from fp8jax.step import run_spec

ROOT = pathlib.Path(__file__).resolve().parents[2]
XLA_FLAGS = "--xla_force_host_platform_device_count=1"
STEPS = 4
CHANGES = {
  "steps": STEPS,
  "global_batch": 2,
  "seq_len": 128,
  "eval.tokens": 512,
  "eval.batch": 2,
  "checkpoint.every": 0,
  "log.every": 2,
  "optim.warmup_steps": 1,
  "optim.decay_steps": 1,
  "log.report": False,
}
FLAGS = tuple(f"--config.{k}={v}" for k, v in CHANGES.items())
PRECISIONS = {"block_128", "bf16"}


@pytest.fixture(scope="module")
def launch():
  """Runs launch.py to its end on one device."""
  env = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": XLA_FLAGS,
  }

  def run(workdir, *flags, code=0, start=("launch.py",)):
    done = subprocess.run(
      [sys.executable, *start, f"--workdir={workdir}", *flags],
      cwd=ROOT, env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done

  return run


@pytest.fixture(scope="module")
def trained(launch, tmp_path_factory):
  """A finished run: workdir, stdout."""
  workdir = tmp_path_factory.mktemp("trained")
  done = launch(workdir, "--config=configs/debug.py", *FLAGS)
  return types.SimpleNamespace(workdir=workdir, stdout=done.stdout)


@pytest.fixture
def run_job(monkeypatch, capsys):
  """A job in this process, on one of its devices: (exit code, stdout, stderr)."""
  monkeypatch.setattr(jax, "device_count", lambda: 1)

  def run(job, c, workdir):
    capsys.readouterr()
    code = dispatch.run(job, c, base.get_config(), "configs/debug.py", str(workdir))
    return code, *capsys.readouterr()

  return run


def _config(arm="", **changes):
  c = debug.get_config(arm)
  c.update_from_flattened_dict(CHANGES | changes)
  return c


def _json(path):
  return json.loads(pathlib.Path(path).read_text())


def _rows(workdir) -> list[dict]:
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def _saved_params(workdir, step, plan):
  saved = checkpoint.Checkpoints(str(workdir))
  abstract = params_lib.abstract(plan.declaration, plan.model.dims, plan.run.layout)
  found = saved.restore_params(step, abstract)
  saved.close()
  return {k: np.asarray(v) for k, v in params_lib.flatten(found).items()}


def _plan(c) -> run_spec.RunSpec:
  return resolve.resolve(c, 1, Device("cpu"))


# --- train ---------------------------------------------------------------------------------------


def test_train_prints_lines_and_a_table(trained):
  text = trained.stdout
  assert all(c == "\n" or c.isprintable() for c in text)
  lines = text.splitlines()
  for step in (2, 4):
    assert any(line.startswith(f"step {step}/{STEPS}  loss ") for line in lines)
  assert not any(line.startswith("step 3/") for line in lines)  # log.every=2
  last = _json(trained.workdir / "summary.json")["evaluations"][str(STEPS)]["main"]
  table = lines[lines.index("held-out loss in nats per token") :]
  for precision in PRECISIONS:
    (row,) = [line for line in table if f"main, {precision} forward" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[3] == f"{last[precision]['loss']:.4f}"
    assert cells[5] == f"{last[precision]['perplexity']:.3f}"
  assert lines[-1] == f"written to {trained.workdir}"


def test_train_prints_and_stores_the_difference_from_base(trained):
  stored = _json(trained.workdir / "config.json")
  changes = CHANGES | {"mesh.fsdp": 1}  # of configs/debug.py
  assert stored["changed"] == changes
  assert stored["resolved"] == identity.flatten(base.get_config()) | changes
  text = trained.stdout[: trained.stdout.index("model llama")]
  printed = re.findall(r"│ (\S+) +│ +(\S+) │ +(\S+) │", text)
  before = identity.flatten(base.get_config())
  assert printed == [(k, str(before[k]), str(changes[k])) for k in sorted(changes)]


def test_train_leaves_metrics_summary_sites_and_checkpoint(trained):
  rows = _rows(trained.workdir)
  steps = {row["step"]: row for row in rows if "loss" in row}
  held = {row["step"]: row for row in rows if "heldout/main/bf16/loss" in row}
  assert list(steps) == [1, 2, 3, 4] and list(held) == [0, 4]
  for row in steps.values():
    assert {"grad_norm", "update_norm", "param_norm", "learning_rate"} <= row.keys()
    assert all(math.isfinite(v) for v in row.values())
  summary = _json(trained.workdir / "summary.json")
  assert (summary["step"], summary["tokens"], summary["skipped_updates"]) == (4, 4 * 2 * 128, 0)
  assert summary["train_loss"] == steps[4]["loss"]
  assert summary["objective"] == held[4]["heldout/main/bf16/loss"]
  for step, by_source in summary["evaluations"].items():
    assert by_source["main"].keys() == PRECISIONS
    for precision, values in by_source["main"].items():
      assert values["loss"] == held[int(step)][f"heldout/main/{precision}/loss"]
      assert values["perplexity"] == math.exp(values["loss"])
  assert held[4]["heldout/main/bf16/loss"] < held[0]["heldout/main/bf16/loss"] - 0.3
  recipes = {row["site"]: row["recipe"] for row in _json(trained.workdir / "sites.json")}
  assert recipes.pop("head") == "bf16"
  assert len(recipes) == 7 and set(recipes.values()) == {"block_128"}
  saved = checkpoint.Checkpoints(str(trained.workdir))
  assert saved.steps() == [STEPS]
  saved.close()


def test_train_leaves_tensorboard_events_of_the_same_values(trained):
  (path,) = (trained.workdir / "tensorboard").iterdir()
  data, found, start = path.read_bytes(), {}, 0
  while start < len(data):  # u64 length, u32 checksum, event, u32 checksum
    (size,) = struct.unpack_from("<Q", data, start)
    event = event_pb2.Event.FromString(data[start + 12 : start + 12 + size])
    found |= {(event.step, v.tag): v.simple_value for v in event.summary.value}
    start += 16 + size
  want = {(r["step"], k): np.float32(v) for r in _rows(trained.workdir) for k, v in r.items()
          if k != "step"}  # fmt: skip
  assert found == want


def test_train_leaves_provenance(trained):
  made = _json(trained.workdir / "provenance.json")
  if (ROOT / ".git").exists():
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert made["commit"] == git.stdout.strip() and made["dirty"] in (True, False)
  else:
    assert made["commit"] is made["dirty"] is None
  assert made["config"] == _json(trained.workdir / "config.json")["resolved"]
  assert made["versions"]["jax"] == jax.__version__ and "optax" in made["versions"]
  assert (made["devices"], made["processes"]) == ("1 x cpu (cpu)", 1)
  assert (made["xla_flags"], made["seed"]) == (XLA_FLAGS, 0)
  assert made["data_fingerprint"] == loader.fingerprint(_plan(_config()).data)
  assert f"data {made['data_fingerprint']}" in trained.stdout
  assert "--config=configs/debug.py" in made["command"]


def test_a_finished_run_is_left_in_its_last_evaluation_and_completed(
  trained, run_job, tmp_path, monkeypatch
):
  workdir = tmp_path / "again"
  shutil.copytree(trained.workdir, workdir)
  before = [_json(workdir / f"{name}.json") for name in ("summary", "provenance")]
  code, stdout, _ = run_job("train", _config(), workdir)
  assert code == 0 and stdout == f"{workdir} is finished: step {STEPS}\n"
  assert _json(workdir / "provenance.json") == before[1]
  (workdir / "summary.json").unlink()
  with monkeypatch.context() as patch:

    def heldout(*args):
      os.kill(os.getpid(), signal.SIGTERM)
      return made(*args)

    made = loader.heldout_batches
    patch.setattr(loader, "heldout_batches", heldout)
    default = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the run does not listen"))
    try:
      code, stdout, _ = run_job("train", _config(), workdir)
    finally:
      signal.signal(signal.SIGTERM, default)
  assert code == 75 and stdout.splitlines()[-1].startswith(f"interrupted: saved step {STEPS};")
  assert not (workdir / "summary.json").exists()
  c = _config(**{"log.every": 1})
  code, stdout, _ = run_job("train", c, workdir)
  assert code == 0 and _json(workdir / "summary.json") == before[0]
  assert f"last train loss {before[0]['train_loss']:.4f}" in stdout
  # Each leg of the run is remembered, with its configuration where that changed.
  made = _json(workdir / "provenance.json")
  first, second = made["earlier"]
  assert first == {k: v for k, v in before[1].items() if k not in ("config", "earlier")}
  assert (first["from_step"], second["from_step"], made["from_step"]) == (0, STEPS, STEPS)
  assert second["config"] == before[1]["config"] and made["config"] == identity.flatten(c)


# --- evaluate and export -------------------------------------------------------------------------


def test_evaluate_prints_json_alone_and_repeats_the_runs_numbers(launch, trained):
  done = launch(trained.workdir, "--config=configs/debug.py", "--job=evaluate", *FLAGS)
  result = json.loads(done.stdout)
  assert (result["workdir"], result["step"]) == (str(trained.workdir), STEPS)
  assert result["device"] == "CPU: FP8 is emulated, exact and slow"
  summary = _json(trained.workdir / "summary.json")
  assert result["heldout"] == summary["evaluations"][str(STEPS)]
  assert result["heldout"]["main"].keys() == PRECISIONS
  assert result["documents_passed_over"] == {"main": {}}


def test_export_in_float32_is_the_checkpoint_and_evaluates_the_same(launch, trained, run_job):
  code, stdout, _ = run_job("export", _config(**{"export.dtype": "float32"}), trained.workdir)
  folder = trained.workdir / "hf"
  assert code == 0
  result = json.loads(stdout)
  gate = result.pop("gate")
  assert result == {
    "folder": str(folder), "step": STEPS, "dtype": "float32", "format": "hf-bf16"
  }  # fmt: skip
  assert gate == {"tokens": 1022, "fp8jax": {"kl": 0.0, "top1": 1.0}}
  assert {p.name for p in folder.iterdir()} == {
    "config.json", "model.safetensors", "README.md", export_folder.MANIFEST
  }  # fmt: skip
  weights, dtype = hf_weights.load_params(str(folder), hf_config.read_config(str(folder)))
  assert dtype == "float32"
  want = _saved_params(trained.workdir, STEPS, _plan(_config()))
  got = params_lib.flatten(weights)
  assert got.keys() == want.keys()
  for name, value in got.items():
    np.testing.assert_array_equal(value, want[name], err_msg=name)
  elsewhere = trained.workdir / "elsewhere"  # the run's own folder is not asked for anything
  done = launch(elsewhere, "--config=configs/debug.py", "--job=evaluate", *FLAGS,
                f"--config.eval.hf={folder}", "--config.data.tokenizer=bytes")  # fmt: skip
  result = json.loads(done.stdout)
  assert result["hf"] == str(folder) and not elsewhere.exists()
  assert result["heldout"] == _json(trained.workdir / "summary.json")["evaluations"][str(STEPS)]


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
    c = _config(**{"export.path": str(path)}, **changes)
    code, stdout, stderr = run_job("export", c, trained.workdir)
    assert (code, stdout) == (1, "") and what in stderr, stderr
  with pytest.raises(UserError, match="is init.hf"):
    export_folder.check_other(str(source), {f"{source}/../source": "init.hf"})
  assert {p: p.read_bytes() for p in trained.workdir.glob("*.json")} == before


def test_export_dtype_auto_is_bfloat16_for_weights_that_were_drawn(trained, run_job, tmp_path):
  code, stdout, _ = run_job("export", _config(**{"export.path": str(tmp_path)}), trained.workdir)
  assert code == 0 and json.loads(stdout)["dtype"] == "bfloat16"
  got = safetensors.numpy.load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
  want = _saved_params(trained.workdir, STEPS, _plan(_config()))["embed"]
  np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))


def test_export_merges_scales_per_channel(trained, run_job, tmp_path):
  """Powers of two moved from up to down, and no further ones where the same text is measured."""
  smooth = {"precision.smooth_swiglu": "channel", "export.fold_smooth_batches": 2}
  to = {"export.dtype": "float32", "export.path": str(tmp_path)}
  assert run_job("export", _config(**smooth, **to), trained.workdir)[0] == 0
  plan = _plan(_config(**smooth))
  merged, _ = hf_weights.load_params(str(tmp_path), plan.model)
  saved = _saved_params(trained.workdir, STEPS, plan)
  got = {k: np.asarray(v) for k, v in params_lib.flatten(merged).items()}
  s_NF = saved["layers/mlp/up"][:, 0] / got["layers/mlp/up"][:, 0]
  assert np.all(np.frexp(s_NF)[0] == 0.5) and len(np.unique(s_NF)) > 1
  saved["layers/mlp/up"] = saved["layers/mlp/up"] / s_NF[:, None]
  saved["layers/mlp/down"] = saved["layers/mlp/down"] * s_NF[:, :, None]
  for name, value in got.items():
    np.testing.assert_array_equal(value, saved[name], err_msg=name)
  again = export._fold_smooth(plan, merged)  # nothing is left to divide by
  np.testing.assert_array_equal(again["layers"]["mlp"]["up"], got["layers/mlp/up"])


def test_evaluate_refuses_a_checkpoint_of_another_model(trained, run_job):
  code, stdout, stderr = run_job("evaluate", _config(**{"model.num_layers": 1}), trained.workdir)
  assert (code, stdout) == (1, "")
  assert "model.num_layers is 1 here and 2 in the checkpoint" in stderr


def test_evaluate_and_calibrate_count_what_they_pass_over(trained, run_job, tmp_path, monkeypatch):
  path = tmp_path / "corpus.jsonl"
  changes = _write_corpus(path, [str(i) * 50 for i in range(40)]) | {"data.on_malformed": "skip"}
  path.write_text(path.read_text() + "{broken}\n" * 3)
  code, stdout, _ = run_job("evaluate", _config(**changes), trained.workdir)
  assert code == 0 and json.loads(stdout)["documents_passed_over"] == {"main": {"malformed": 3}}

  def read_all(plan, params, placed, **known):
    return {"rows": [], "batches": len(list(placed)), **known}

  monkeypatch.setattr(calibration, "run", read_all)
  table = str(tmp_path / "table.json")  # to be written, so that no job but training asks for it
  changes |= {"calibrate.path": table, "precision.calibration": table}
  changes |= {"data.prefetch": 0, "data.shuffle_windows": 0}  # which read ahead, and count
  # 40 documents of 51 or 101 tokens, fewer than 16 batches of 2 x 129.
  changes["calibrate.batches"] = 16
  code, stdout, _ = run_job("calibrate", _config(**changes), trained.workdir)
  assert code == 0 and 3 <= json.loads(stdout)["documents_passed_over"]["malformed"] <= 6


def test_evaluate_refuses_a_table_that_a_checkpoint_was_not_trained_with(
  trained, run_job, tmp_path
):
  (tmp_path / "table.json").write_text("{}")
  changed = _config(**{"precision.calibration": str(tmp_path / "table.json")})
  code, stdout, stderr = run_job("evaluate", changed, trained.workdir)
  assert (code, stdout) == (1, "")
  assert "table.json' is not the table that the checkpoint of step 4" in stderr


@pytest.mark.parametrize("job", ["evaluate", "export"])
def test_jobs_without_a_checkpoint_say_so(job, run_job, tmp_path):
  for workdir, message in (
    (tmp_path / "missing", f"{tmp_path / 'missing'} does not exist; train first"),
    (tmp_path, f"{tmp_path / 'checkpoints'} holds no checkpoint; train first"),
  ):
    code, stdout, stderr = run_job(job, _config(), workdir)
    assert (code, stdout) == (1, "")
    assert stderr.startswith(f"error: {message}")
  assert not (tmp_path / "missing").exists()


def test_a_missing_step_is_answered_with_those_there_are(trained, run_job):
  code, _, stderr = run_job("evaluate", _config(**{"eval.step": 3}), trained.workdir)
  assert (code, stderr) == (1, "error: no checkpoint of step 3; there are [4]\n")


def test_launcher_reports_errors_without_a_traceback(launch, tmp_path):
  done = launch(tmp_path / "x", "--config=configs/debug.py", "--job=diagnose", code=1)
  assert done.stdout == "" and done.stderr.startswith("error: ")
  assert f"no run in {tmp_path / 'x'} stopped at a non-finite value" in done.stderr


# --- prepare -------------------------------------------------------------------------------------


def _write_corpus(path, documents):
  path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
  return {"data.sources.main.kind": "jsonl", "data.sources.main.path": str(path)}


def _take(c, n):
  iterator = loader.train_batches(resolve.resolve_data(c), 2)
  found = [next(iterator) for _ in range(n)]
  iterator.close()
  return found


@pytest.mark.parametrize("heldout", [0.0, 0.3])
def test_prepare_keeps_batches_or_at_least_documents(run_job, tmp_path, rng, heldout):
  """Bit for bit where nothing is held out; else each split is shuffled on its own, and only the
  documents of an epoch agree: here, where each fills a window, its rows.
  """
  documents = [rng.bytes(64).hex() for _ in range(24)]
  raw = _write_corpus(tmp_path / "corpus.jsonl", documents) | {"data.heldout_fraction": heldout}
  raw |= {"prepare.shard_tokens": 129 * 5, "data.shuffle_windows": 0}
  code, stdout, stderr = run_job("prepare", _config(**raw), tmp_path)
  index = json.loads(stdout)["main"]
  folder = tmp_path / "prepared" / "main"
  assert code == 0 and _json(folder / "index.json") == index
  train_split = index["splits"]["train"]
  count = sum(not tokenize.is_held_out({"text": d}, heldout) for d in documents)
  assert (train_split["documents"], train_split["tokens"]) == (count, count * 129)
  assert len(train_split["files"]) == math.ceil(count / 5)
  assert {p.name for p in folder.iterdir()} == {
    "index.json",
    *(name for s in index["splits"].values() for name in (*s["files"], s["lengths"])),
  }  # fmt: skip
  assert f"train: {count} documents" in stderr

  prepared = {"data.sources.main.kind": "prepared", "data.sources.main.path": str(folder)}
  a, b = (_take(_config(**changes), count // 2) for changes in (raw, raw | prepared))
  if heldout:
    rows = [sorted(row.tobytes() for batch in x for row in batch["tokens_BL"]) for x in (a, b)]
    assert count % 2 or rows[0] == rows[1]
    held = [
      sorted(
        batch["tokens_BL"].tobytes()
        for batch in loader.heldout_batches(
          resolve.resolve_data(_config(**changes)), "main", 1, 24 - count
        )
      )
      for changes in (raw, raw | prepared)
    ]
    assert held[0] == held[1] and len(set(held[0])) == 24 - count > 0
  else:
    for x, y in zip(a, b, strict=True):
      assert x.keys() == y.keys()
      for key in x:
        np.testing.assert_array_equal(x[key], y[key])


def test_prepared_data_refuse_another_tokenizer_or_split(run_job, tmp_path):
  raw = _write_corpus(tmp_path / "corpus.jsonl", [str(i) * 50 for i in range(20)])
  assert run_job("prepare", _config(**raw), tmp_path)[0] == 0
  other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"1": 0, "<end>": 1}, unk_token="1"))
  other.save(str(tmp_path / "tokenizer.json"))
  folder = str(tmp_path / "prepared" / "main")
  prepared = {"data.sources.main.kind": "prepared", "data.sources.main.path": folder}
  tokenizer = {"data.tokenizer": str(tmp_path / "tokenizer.json"), "data.eos": "<end>"}
  for job, changes, message in (
    ("train", tokenizer, f"{folder} was prepared with another tokenizer"),
    (
      "evaluate",
      {"data.heldout_fraction": 0.2},
      f"{folder} was prepared with data.heldout_fraction=0.1",
    ),
    ("prepare", {}, "data.sources.main is prepared already"),
  ):
    code, stdout, stderr = run_job(job, _config(**prepared, **changes), tmp_path / "run")
    assert (code, stdout) == (1, "")
    assert stderr.startswith("error: ") and message in stderr
  assert not (tmp_path / "run").exists()


# --- non-finite ----------------------------------------------------------------------------------

BAD_STEP = 3
# The launcher without import's check for NaN: these tests need a NaN in the first weights.
UNCHECKED = (
  "-c",
  "import runpy; from fp8jax.models.hf import weights as hf; hf._check_finite = lambda *_: None; "
  "runpy.run_path('launch.py', run_name='__main__')",
)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
  """Flags of a run whose loss is NaN at step BAD_STEP alone, and that step's batch.

  The embedding of one letter is NaN, and one document has that letter.
  """
  folder = tmp_path_factory.mktemp("poisoned")
  rng = np.random.default_rng(0)
  documents = [x + "".join(map(str, rng.integers(0, 10, 80))) for x in string.ascii_letters]
  changes = _write_corpus(folder / "corpus.jsonl", documents) | {
    "init.hf": str(folder / "hf"), "model.preset": "hf", "data.tokenizer": "bytes", "steps": 5,
    "checkpoint.keep": 5, "log.every": 1, "log.tensorboard": False,
    "precision.rules": (("layers/.*/mlp/up", "block_128"), (".*", "bf16")),
  }  # fmt: skip
  sizes = dict(tie_embeddings=False, hidden_size=128, intermediate_size=128)
  cfg = dataclasses.replace(presets.DEBUG, **sizes)
  weights = params_lib.init(jax.random.key(0), transformer.params(cfg), cfg.dims)
  hf_weights.save_params(str(folder / "hf"), weights, cfg, "float32")
  seen = [set(batch["tokens_BL"].ravel()) for batch in _take(_config(**changes), 5)]
  letters = seen[BAD_STEP - 1] & set(string.ascii_letters.encode())
  letter = min(letters.difference(*(s for i, s in enumerate(seen) if i != BAD_STEP - 1)))
  weights["embed"] = weights["embed"].at[letter].set(np.nan)
  hf_weights.save_params(str(folder / "hf"), weights, cfg, "float32")
  flags = [f"--config.{k}={v}" for k, v in (CHANGES | changes).items()]
  batch = _take(_config(**changes), BAD_STEP)[-1]
  assert letter in batch["tokens_BL"]
  return types.SimpleNamespace(
    flags=("--config=configs/debug.py", *flags), changes=changes, batch=batch
  )


@pytest.fixture(scope="module")
def stopped(launch, poisoned, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("stopped")
  done = launch(workdir, *poisoned.flags, code=3, start=UNCHECKED)
  return types.SimpleNamespace(workdir=workdir, stderr=done.stderr)


SITE = "layers/0/attn/q: its input is not finite (forward)"


def test_a_non_finite_loss_stops_the_run_and_names_step_and_site(stopped, poisoned):
  assert f"error: step {BAD_STEP}: loss nan" in stopped.stderr and SITE in stopped.stderr
  folder = stopped.workdir / "nonfinite"
  assert str(folder) in stopped.stderr and "--job=diagnose" in stopped.stderr
  with np.load(folder / "batch_0.npz") as saved:
    assert saved.keys() == poisoned.batch.keys()
    for key in saved:
      np.testing.assert_array_equal(saved[key], poisoned.batch[key])
  report = _json(folder / "report.json")
  assert (report["step"], report["first_bad_site"]) == (BAD_STEP, SITE)
  assert [r["step"] for r in _rows(stopped.workdir) if "loss" in r] == [1, 2]
  assert not (stopped.workdir / "summary.json").exists()


@pytest.mark.slow
def test_skipping_counts_and_equals_going_on_after_a_stop(launch, stopped, poisoned, tmp_path):
  skip = "--config.optim.on_nonfinite=skip"
  done = launch(tmp_path, *poisoned.flags, skip, start=UNCHECKED)
  assert f"step {BAD_STEP}: loss or gradient not finite; update skipped" in done.stdout
  assert "updates skipped for non-finite values: 1" in done.stdout
  resumed = launch(stopped.workdir, *poisoned.flags, skip).stdout
  assert f"step {BAD_STEP} met a non-finite value; going on with the batch after it" in resumed
  for workdir in (tmp_path, stopped.workdir):
    assert _json(workdir / "summary.json")["skipped_updates"] == 1
  a, b = ([r["loss"] for r in _rows(w) if "loss" in r] for w in (tmp_path, stopped.workdir))
  assert a.pop(BAD_STEP - 1) == "nan"  # strict JSON has no number for it
  assert a == b and np.all(np.isfinite(b))
  plan = _plan(_config(**poisoned.changes))
  one, two, before = (_saved_params(w, s, plan) for w, s in (
    (tmp_path, 5), (stopped.workdir, 5), (stopped.workdir, BAD_STEP)))  # fmt: skip
  for name in one:
    np.testing.assert_array_equal(one[name], two[name], err_msg=name)
  assert np.any(one["norm"] != before["norm"])


def test_diagnose_reproduces_it_also_when_the_run_has_gone_on(launch, stopped, poisoned):
  done = launch(stopped.workdir, *poisoned.flags, "--job=diagnose")
  result, report = json.loads(done.stdout), _json(stopped.workdir / "nonfinite" / "report.json")
  assert (result["step"], result["first_bad_site"]) == (BAD_STEP, SITE)
  assert result["amax_x_w_g"] == report["amax_x_w_g"]


def test_export_dtype_auto_is_that_of_the_folder_the_run_began_with(
  stopped, poisoned, run_job, tmp_path, monkeypatch
):
  monkeypatch.setattr(hf_weights, "_check_finite", lambda *_: None)  # the weights have a NaN
  (tmp_path / "digits.txt").write_text("0123456789")
  text = {"export.gate_text": str(tmp_path / "digits.txt"), "export.gate_tokens": 8}
  changes = poisoned.changes | {"eval.step": BAD_STEP} | text
  code, stdout, _ = run_job("export", _config(**changes), stopped.workdir)
  assert code == 0 and json.loads(stdout)["dtype"] == "float32"
  # That folder is an export itself, and is not replaced; also where init.hf no longer names it.
  source = pathlib.Path(poisoned.changes["init.hf"])
  before = {p: p.read_bytes() for p in source.iterdir()}
  shutil.copytree(source, tmp_path / "copy")
  for init, what in (
    (source, "the folder of init.hf"),
    (tmp_path / "copy", "the folder that training started from"),
  ):
    to = {"init.hf": str(init), "export.path": str(source)}
    code, _, stderr = run_job("export", _config(**changes | to), stopped.workdir)
    assert code == 1 and what in stderr, stderr
  assert {p: p.read_bytes() for p in source.iterdir()} == before
